"""What Prometheus is told: how much is there, how much is overdue, what was done, and whether passes happen at all.

Series follow kinds and rules, never single workloads. What only a leader knows is absent in those that stand by.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from gpukeeper import __version__
from gpukeeper.engine.ports import Clock, EvidenceStore
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.model.decision import Action, Decision, Evidence, Result, Verdict
from gpukeeper.model.errors import UsageError
from gpukeeper.model.event import Closed
from gpukeeper.model.identity import Ref
from gpukeeper.model.unknown import Unknown

try:
    from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
    from prometheus_client.core import GaugeMetricFamily, Metric
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
    from prometheus_client.registry import Collector
except ImportError as error:
    raise UsageError("the operator needs: pip install 'gpukeeper[kubernetes,operator]'") from error

CONTENT_TYPE = CONTENT_TYPE_LATEST
NO_FAILURE = (Result.RECLAIMED, Result.CHANGED, Result.DEFERRED)
# Gauges: all but the first two as of the last look at everything, by whoever leads.
GAUGES = {
    "gpukeeper_info": "Always 1; its labels say which version this is.",
    "gpukeeper_leader": "1 while this one leads.",
    "gpukeeper_workloads": "Workloads by kind, state and outcome.",
    "gpukeeper_finished": "Finished workloads that are still there, by kind and by how long ago they ended.",
    "gpukeeper_finished_age_seconds": "How long ago the oldest finished workload of a kind ended.",
    "gpukeeper_overdue": "Due and still there: not acted on, deferred, refused, or in mode plan.",
    "gpukeeper_oldest_overdue_seconds": "For how long the oldest of them has been due.",
    "gpukeeper_backlog": "Of those, deferred to a later pass by the budget.",
    "gpukeeper_unseen": "What could not be looked at. Its workloads are unknown, not absent.",
    "gpukeeper_breaker_open": "1 when the last pass refused every step because the world looked broken.",
    "gpukeeper_acting": "1 when the last pass was allowed to act: mode enforce, within its schedule, not paused.",
    "gpukeeper_last_pass_timestamp_seconds": "When the last look at everything was finished.",
    "gpukeeper_pass_seconds": "How long it took, steps included.",
}
COUNTERS = {
    "gpukeeper_reclaimed_total": "Reclaimed and seen to be so, by kind, rule and action.",
    "gpukeeper_failed_total": "Steps that came to nothing, by kind and result.",
    "gpukeeper_warnings_total": "Warnings to owners, by whether they were delivered.",
    "gpukeeper_gpu_hours_returned_total": "GPU-hours given back. What was not measured is not in it.",
    "gpukeeper_captured_bytes_total": "Evidence saved before a removal: logs, and the rest (manifests, events).",
}


class Metrics(Collector):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.leads = False
        self._last: PassReport | None = None  # the last look at everything
        self._finished: datetime | None = None
        self._overdue: dict[str, datetime] = {}  # by key: due since
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._reclaimed = self._counter("gpukeeper_reclaimed_total", "kind", "rule", "action")
        self._failed = self._counter("gpukeeper_failed_total", "kind", "result")
        self._warnings = self._counter("gpukeeper_warnings_total", "delivered")
        self._gpu_hours = self._counter("gpukeeper_gpu_hours_returned_total")
        self._captured = self._counter("gpukeeper_captured_bytes_total", "what")
        self.registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def lead(self, leads: bool) -> None:
        """What was seen while leading is not what is there later: who stands by says nothing of it."""
        self.leads = leads
        if not leads:
            self._last, self._finished, self._overdue = None, None, {}

    def passed(self, report: PassReport) -> None:
        for line in (*report.settled, *report.outcomes):
            self._count(line)
        for warning in report.warnings:
            self._warnings.labels(str(warning.delivered).lower()).inc()
        self._overdue = overdue(report, {} if report.survey.whole else self._overdue)
        if report.survey.whole:
            self._last, self._finished = report, self._clock.now()

    def captured(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            self._captured.labels("logs" if "log" in name.lower() else "rest").inc(len(content))

    def collect(self) -> Iterator[Metric]:
        yield _gauge("gpukeeper_info", {(__version__,): 1}, "version")
        yield _gauge("gpukeeper_leader", {(): self.leads})
        report, finished, now = self._last, self._finished, self._clock.now()
        if report is None or finished is None:
            return
        survey = report.survey
        yield _gauge("gpukeeper_workloads", _by(survey.counts, 0, 1, 2), "kind", "state", "outcome")
        over = {key: n for key, n in survey.counts.items() if key[3]}
        yield _gauge("gpukeeper_finished", _by(over, 0, 3), "kind", "age")
        ages: dict[tuple[str, ...], float] = {
            (kind,): (now - end).total_seconds() for kind, end in survey.oldest.items()
        }
        yield _gauge("gpukeeper_finished_age_seconds", ages, "kind")
        yield _gauge("gpukeeper_overdue", {(): len(self._overdue)})
        longest = max(((now - due).total_seconds() for due in self._overdue.values()), default=0.0)
        yield _gauge("gpukeeper_oldest_overdue_seconds", {(): max(longest, 0.0)})
        yield _gauge("gpukeeper_backlog", {(): report.deferred})
        yield _gauge("gpukeeper_unseen", {(): len(survey.unseen)})
        yield _gauge("gpukeeper_breaker_open", {(): report.plan.breaker is not None})
        yield _gauge("gpukeeper_acting", {(): report.acted and report.paused is None})
        yield _gauge("gpukeeper_last_pass_timestamp_seconds", {(): finished.timestamp()})
        yield _gauge("gpukeeper_pass_seconds", {(): (finished - survey.at).total_seconds()})

    def _count(self, line: Closed) -> None:
        kind = line.ref.kind if line.ref is not None else ""
        if line.result is Result.RECLAIMED:
            self._reclaimed.labels(kind, line.rule, line.action.value).inc()
            if not isinstance(line.gpu_hours, Unknown):
                self._gpu_hours.inc(max(line.gpu_hours, 0.0))
        elif line.result not in NO_FAILURE:
            self._failed.labels(kind, line.result.value).inc()

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(name, COUNTERS[name], labels, registry=self.registry)


class CountedEvidence:
    """The store of evidence, with what goes in counted."""

    def __init__(self, inside: EvidenceStore, metrics: Metrics) -> None:
        self._inside, self._metrics = inside, metrics

    async def save(self, ref: Ref, step: str, at: datetime, evidence: Evidence) -> str | Unknown:
        name = await self._inside.save(ref, step, at, evidence)
        if not isinstance(name, Unknown):
            self._metrics.captured(evidence.files)
        return name

    async def load(self, name: str) -> Evidence | Unknown:
        return await self._inside.load(name)


def overdue(report: PassReport, before: Mapping[str, datetime]) -> dict[str, datetime]:
    """By key, since when: what is due and was not seen to go, on top of what was so before this pass."""
    left = dict(before)
    for decision in report.survey.decisions:
        left.pop(decision.seen.ref.key, None)
        if _is_overdue(decision, report.survey.at):
            assert decision.due is not None
            left[decision.seen.ref.key] = decision.due
    for key in _went(report.survey.gone, [*report.settled, *report.outcomes]):
        left.pop(key, None)
    return left


def _is_overdue(decision: Decision, now: datetime) -> bool:
    """A step that came to nothing a moment ago is reported and not tried again yet: due all the same."""
    if decision.due is None or decision.due > now or decision.action is Action.WARN:
        return False
    return decision.verdict in (Verdict.DUE, Verdict.REPORT)


def _went(gone: Sequence[Ref], lines: Iterable[Closed]) -> Iterator[str]:
    yield from (ref.key for ref in gone)
    yield from (line.ref.key for line in lines if line.ref is not None and line.result is Result.RECLAIMED)


def _by(counts: Mapping[tuple[str, str, str, str], int], *fields: int) -> dict[tuple[str, ...], float]:
    """The same counts, told apart by fewer things."""
    added: Tally[tuple[str, ...]] = Tally()
    for key, number in counts.items():
        added[tuple(key[field] for field in fields)] += number
    return {key: float(number) for key, number in added.items()}


def _gauge(name: str, values: Mapping[tuple[str, ...], float], *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, GAUGES[name], labels=labels)
    for key, value in values.items():
        family.add_metric(key, float(value))
    return family
