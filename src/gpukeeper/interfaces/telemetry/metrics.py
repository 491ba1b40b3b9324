"""Prometheus metrics: what exists, what is overdue, what was done, whether passes run; nodes and disks; and the
same as a file, for the textfile collector of a node_exporter.

Series follow kinds, rules, nodes and disks, never single workloads. Standby instances export no series that only a
leader has. Of a GPU whose use is unknown there is no series, and of a value that could not be read neither.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gpukeeper import __version__
from gpukeeper.devices.busy import GpuUse
from gpukeeper.engine.observe import TreeCount
from gpukeeper.engine.ports import EvidenceStore, Platform
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.telemetry.machine import LARGEST, REST, MachineFacts, of_machine
from gpukeeper.interfaces.telemetry.series import COUNTED_BY, COUNTERS, counter, gauge
from gpukeeper.interfaces.terminal.watching import UnreportedLines
from gpukeeper.lifecycle.rules import idle
from gpukeeper.model.decision import Action, Decision, Evidence, Result, Verdict
from gpukeeper.model.errors import UsageError
from gpukeeper.model.event import Closed
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Gone, Ref, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import plain
from gpukeeper.platforms.kubernetes.node_use import PROCESS_RESULTS, PodName, PodUse
from gpukeeper.views.fleet import DISK, bytes_of
from gpukeeper.wiring.session import Session

OF_A_NODE, OF_A_DISK = ("platform", "place", "node"), ("platform", "place", "node", "disk")
FACTS = ("temporary bytes", "busy", "disk", "held open", "tree size")
Numbers = dict[tuple[str, ...], float]
Piles = Mapping[tuple[str, bool], TreeCount]  # by category, and whether they are due


def of_nodes(subjects: Iterable[Subject], trees: Iterable[Piles]) -> Iterator[GaugeMetricFamily]:
    found = _Found()
    for subject in subjects:
        found.add(subject)
    number, size = Tally[tuple[str, ...]](), Tally[tuple[str, ...]]()
    for piles in trees:
        for (category, _), pile in piles.items():
            number[(category,)] += pile.number
            if pile.sized:
                size[(category,)] += pile.bytes
            found.missing["tree size"] += pile.unsized
    yield gauge("gpukeeper_trees", number, "category")
    yield gauge("gpukeeper_tree_bytes", size, "category")
    yield gauge("gpukeeper_node_temporary_bytes", found.temporary, *OF_A_NODE)
    yield gauge("gpukeeper_node_busy", found.busy, *OF_A_NODE)
    for name, values in found.disks.items():
        yield gauge(name, values, *OF_A_DISK)
    yield gauge("gpukeeper_not_measured", {(fact,): found.missing[fact] for fact in FACTS}, "what")


class _Found:
    def __init__(self) -> None:
        self.temporary: Numbers = {}
        self.busy: Numbers = {}
        self.missing: Tally[str] = Tally()
        self.disks: dict[str, Numbers] = {
            "gpukeeper_disk_size_bytes": {},
            "gpukeeper_disk_free_bytes": {},
            "gpukeeper_disk_used_ratio": {},
            "gpukeeper_disk_inodes_used_ratio": {},
            "gpukeeper_held_open_bytes": {},
        }

    def add(self, subject: Subject) -> None:
        ref = subject.ref
        node = ref.namespace if ref.kind == DISK else ref.name  # a disk of the machine itself belongs to no node
        if ref.kind != DISK:
            self._add_node((ref.platform, ref.place, node), subject)
        self._add_disk((ref.platform, ref.place, node), subject)

    def _add_node(self, key: tuple[str, ...], subject: Subject) -> None:
        if isinstance(subject.size, Unknown):
            self.missing["temporary bytes"] += 1
        else:
            self.temporary[key] = subject.size
        if isinstance(subject.busy, Unknown):
            self.missing["busy"] += 1
        else:
            self.busy[key] = subject.busy is not None

    def _add_disk(self, node: tuple[str, ...], subject: Subject) -> None:
        disk = subject.disk
        if disk is None:
            self.missing["disk"] += 1
            return
        facts = bytes_of(subject)
        self.missing["held open"] += facts.held_open is None and subject.ref.kind == DISK
        values = {
            "gpukeeper_disk_size_bytes": facts.size,
            "gpukeeper_disk_free_bytes": facts.free,
            "gpukeeper_disk_used_ratio": disk.used,
            "gpukeeper_disk_inodes_used_ratio": disk.inodes,
            "gpukeeper_held_open_bytes": facts.held_open,
        }
        for name, value in values.items():
            if value is not None:
                self.disks[name][*node, disk.name] = value


ENGINE, ENERGY = "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
USED_MEMORY = "DCGM_FI_DEV_FB_USED"
USE_LABELS = ("UUID", "GPU_I_ID", "namespace", "pod", "pod_uid", "vgpu")


def of_node_use(seen: PodUse) -> Iterator[Metric]:
    if isinstance(seen.uses, Unknown):
        yield gauge("gpukeeper_pod_gpu_not_measured", {("driver",): 1}, "what")
        return
    engine, energy, memory = _use_values(seen, seen.uses)
    yield _use_family(
        GaugeMetricFamily(ENGINE, "Share of time with work on the GPU, by gpukeeper.", labels=USE_LABELS), engine
    )
    # A counter, but prometheus_client would give it another name.
    yield _use_family(
        UnknownMetricFamily(ENERGY, "Energy in mJ since the driver was loaded.", labels=USE_LABELS), energy
    )
    yield _use_family(GaugeMetricFamily(USED_MEMORY, "GPU memory in use, in MiB.", labels=USE_LABELS), memory)
    results: Numbers = {(result,): seen.pods.processes.get(result, 0) for result in PROCESS_RESULTS}
    yield gauge("gpukeeper_pod_gpu_processes", results, "result")
    yield gauge("gpukeeper_pod_gpu_not_measured", _missing(seen, seen.uses), "what")
    yield gauge("gpukeeper_pod_log_bytes", _largest_logs(seen.logs), "namespace", "pod", "pod_uid")


def _largest_logs(logs: Mapping[PodName, int]) -> Numbers:
    """The largest one by one, and the sum of all others."""
    ranked = sorted(logs.items(), key=lambda pair: pair[1], reverse=True)
    found: Numbers = {(name.namespace, name.name, name.uid): size for name, size in ranked[:LARGEST]}
    if len(ranked) > LARGEST:
        found["", REST, ""] = sum(size for _, size in ranked[LARGEST:])
    return found


def _use_values(seen: PodUse, uses: Mapping[str, GpuUse]) -> tuple[Numbers, Numbers, Numbers]:
    engine: Numbers = {}
    energy: Numbers = {}
    memory: Numbers = {}
    for parent in sorted(_cut(uses)):
        # Slices have no counter of their own: the operator takes that of the whole GPU.
        _add_use(energy, _use_labels(parent), uses[parent].energy_mj)
    for one in seen.pods.found:
        use, busy = uses[one.uuid], seen.busiest.get(one.uuid)
        instance = use.gpu_instance if use.slice else ""
        if busy is None or isinstance(instance, Unknown):
            continue
        holder = (one.pod.namespace, one.pod.name, one.pod.uid, one.replica)
        labels = _use_labels(use.parent or use.uuid, str(instance), *holder)
        _add_use(engine, labels, busy / 100)
        _add_use(memory, labels, use.memory_used_mib)
        if not use.slice:
            _add_use(energy, labels, use.energy_mj)
    return engine, energy, memory


def _missing(seen: PodUse, uses: Mapping[str, GpuUse]) -> Numbers:
    cut = _cut(uses)
    named = {uuid for uuid, one in uses.items() if not (one.slice and isinstance(one.gpu_instance, Unknown))}
    return {
        ("driver",): 0,
        ("use",): len(set(uses) - cut - (named & set(seen.busiest))),
        ("processes",): sum(isinstance(one.pids, Unknown) for one in uses.values()),
        ("assignments",): seen.assigned is not None,
        ("names",): seen.named is not None,
        ("devices",): seen.pods.nameless,
    }


def _cut(uses: Mapping[str, GpuUse]) -> set[str]:
    """GPUs that are split into slices: they have no use of their own."""
    return {one.parent for one in uses.values() if one.parent is not None} & set(uses)


def _use_labels(
    uuid: str, instance: str = "", namespace: str = "", name: str = "", uid: str = "", replica: str = ""
) -> tuple[str, ...]:
    return uuid, instance, namespace, name, uid, replica


def _add_use(values: Numbers, labels: tuple[str, ...], value: float | Unknown) -> None:
    """Two slices may be in one GPU instance: the larger value counts."""
    if not isinstance(value, Unknown):
        values[labels] = max(value, values.get(labels, value))


def _use_family(family: GaugeMetricFamily | UnknownMetricFamily, values: Numbers) -> Metric:
    for labels, value in values.items():
        family.add_metric([plain(word) for word in labels], float(value))
    return family


CONTENT_TYPE = CONTENT_TYPE_LATEST
NO_FAILURE = (Result.RECLAIMED, Result.CHANGED, Result.DEFERRED)


class LastPass(NamedTuple):
    """The last full pass at one place."""

    report: PassReport
    finished: datetime


class Metrics(Collector):
    """`places`: a pass is late until each of them had one. `elects`: with leader election. `process`: with the
    usual series of this process, which a textfile does not have."""

    def __init__(
        self, clock: Clock, places: Iterable[Platform] = (), *, elects: bool = True, process: bool = True
    ) -> None:
        self._clock, self._elects = clock, elects
        self._expected = {(one.name, one.place) for one in places}
        self.leads = self.denied = False
        self._last: dict[tuple[str, str], LastPass] = {}
        self._overdue: dict[str, datetime] = {}  # by key: due since
        self._counted: dict[str, dict[tuple[str, ...], float]] = {
            name: {} if COUNTED_BY[name] else {(): 0.0} for name in COUNTERS
        }
        self._unreported = UnreportedLines()
        self.machine: MachineFacts | None = None  # as of this scrape
        self.measured_apart: float | None = None  # seconds, the same
        self.node_use: PodUse | None = None  # the same; None: not measured here
        self.registry = CollectorRegistry()
        if process:
            ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def lead(self, leads: bool) -> None:
        """What was observed as a leader is outdated later, so a standby instance does not export it."""
        self.leads = leads
        if not leads:
            self._last, self._overdue, self.machine = {}, {}, None

    def in_progress(self, report: PassReport) -> None:
        """After a pass has observed, and after each of its steps."""
        self._count_new(report, over=False)
        found = report.survey
        place = found.platform.name, found.platform.place
        if found.whole and (place not in self._last or self._last[place].report is not report):
            self._last[place] = LastPass(report, self._clock.now())

    def passed(self, report: PassReport) -> None:
        self._count_new(report, over=True)
        found = report.survey
        if report.stopped is not None:  # what it saw of the place is not the whole of it
            self.add("gpukeeper_passes_failed_total", found.platform.name, found.platform.place)
            return
        here = f"{found.platform.name}/{found.platform.place}/"
        elsewhere = {key: due for key, due in self._overdue.items() if not key.startswith(here)}
        self._overdue = overdue(report, elsewhere if found.whole else self._overdue, self._overdue)
        if found.whole:
            self._last[found.platform.name, found.platform.place] = LastPass(report, self._clock.now())
            for labels, number in found.counts.idle.items():
                self.add("gpukeeper_idle_checks_total", *labels, by=number)

    def _count_new(self, report: PassReport, *, over: bool) -> None:
        outcomes, warnings = self._unreported.new(report, over=over)
        for line in outcomes:
            self._count(line)
        for warning in warnings:
            self.add("gpukeeper_warnings_total", str(warning.delivered).lower())
            if warning.rule == idle.NAME:
                self.add("gpukeeper_idle_warned_total")

    def captured(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            self.add("gpukeeper_captured_bytes_total", "logs" if _is_log(name) else "rest", by=len(content))

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        values = self._counted[name]
        values[labels] = values.get(labels, 0.0) + by

    def collect(self) -> Iterator[Metric]:
        yield gauge("gpukeeper_info", {(__version__,): 1}, "version")
        if self._elects:
            yield gauge("gpukeeper_leader", {(): self.leads})
            yield gauge("gpukeeper_lease_denied", {(): self.denied})
        for name, values in self._counted.items():
            yield counter(name, values)
        if self.node_use is not None:
            yield from of_node_use(self.node_use)
        if self._last:
            yield from self._of_workloads(self._clock.now())
            yield from self._of_passes()
            surveys = [one.report.survey for one in self._last.values()]
            yield from of_nodes((node for one in surveys for node in one.nodes), (one.counts.trees for one in surveys))
            if self.machine is not None:
                yield from of_machine(self.machine, self._clock.now())

    def _of_workloads(self, now: datetime) -> Iterator[Metric]:
        counts: Tally[tuple[str, str, str, str]] = Tally()
        unused: Tally[tuple[str, ...]] = Tally()
        watched: Tally[tuple[str, ...]] = Tally()
        decided: Tally[tuple[str, ...]] = Tally()
        oldest: dict[str, datetime] = {}
        for one in self._last.values():
            counts += one.report.survey.counts.kinds
            watched.update(one.report.survey.counts.idle)
            decided.update(one.report.survey.counts.decided)
            for found in one.report.survey.wasted:
                unused["" if isinstance(found.class_, Unknown) else found.class_,] += len(found.devices)
            for kind, end in one.report.survey.counts.oldest.items():
                oldest[kind] = min(end, oldest.get(kind, end))
        yield gauge("gpukeeper_workloads", _by(counts, 0, 1, 2), "kind", "state", "outcome")
        over = {key: n for key, n in counts.items() if key[3]}
        yield gauge("gpukeeper_finished", _by(over, 0, 3), "kind", "age")
        ages: dict[tuple[str, ...], float] = {(kind,): (now - end).total_seconds() for kind, end in oldest.items()}
        yield gauge("gpukeeper_finished_age_seconds", ages, "kind")
        yield gauge("gpukeeper_wasted_gpus", {key: float(number) for key, number in unused.items()}, "class")
        by_rule = {key: float(number) for key, number in watched.items()}
        yield gauge("gpukeeper_idle_workloads", by_rule, "result", "class")
        yield gauge("gpukeeper_decisions", decided, "class", "action", "verdict", "rule")
        yield gauge("gpukeeper_overdue", {(): len(self._overdue)})
        longest = max(((now - due).total_seconds() for due in self._overdue.values()), default=0.0)
        yield gauge("gpukeeper_oldest_overdue_seconds", {(): max(longest, 0.0)})

    def _of_passes(self) -> Iterator[Metric]:
        passes = self._last.values()
        reports = [one.report for one in passes]
        yield gauge("gpukeeper_backlog", {(): sum(one.deferred for one in reports)})
        yield gauge("gpukeeper_unseen", {(): sum(len(one.survey.unseen) for one in reports)})
        yield gauge("gpukeeper_breaker_open", {(): any(one.plan.breaker is not None for one in reports)})
        yield gauge("gpukeeper_acting", {(): all(one.acted and one.paused is None for one in reports)})
        if self._expected <= self._last.keys():  # a place that never had a pass is late, whatever the others do
            oldest = min(one.finished for one in passes)
            yield gauge("gpukeeper_last_pass_timestamp_seconds", {(): oldest.timestamp()})
        if self.measured_apart is not None:
            yield gauge("gpukeeper_measured_apart_seconds", {(): self.measured_apart})
        longest = max((one.finished - one.report.survey.at).total_seconds() for one in passes)
        yield gauge("gpukeeper_pass_seconds", {(): longest})

    def _count(self, line: Closed) -> None:
        kind = line.ref.kind if line.ref is not None else ""
        if line.result is Result.RECLAIMED:
            self.add("gpukeeper_reclaimed_total", kind, line.rule, line.action.value)
            if (line.rule, line.action) == (idle.NAME, Action.STOP):
                self.add("gpukeeper_idle_stopped_total")
            if not isinstance(line.gpu_hours, Unknown):
                self.add("gpukeeper_gpu_hours_returned_total", by=max(line.gpu_hours, 0.0))
            if not isinstance(line.bytes_back, Unknown):
                self.add("gpukeeper_bytes_returned_total", line.rule, by=max(line.bytes_back, 0))
        elif line.result not in NO_FAILURE:
            self.add("gpukeeper_failed_total", kind, line.result.value)


def _is_log(name: str) -> bool:
    """As all platforms name them. A pod may be called `catalog`."""
    return name == "log.txt" or name.startswith("logs/")


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


def overdue(
    report: PassReport, before: Mapping[str, datetime], last: Mapping[str, datetime] | None = None
) -> dict[str, datetime]:
    """By key, since when: what is due and was not seen to go, on top of what was so before this pass and is kept.
    `last`: everything that was so; None: the same."""
    left = dict(before)
    for decision in report.survey.decisions:
        left.pop(decision.seen.ref.key, None)
        known = (before if last is None else last).get(decision.seen.ref.key)
        if _is_overdue(decision, report.survey.at):
            assert decision.due is not None
            left[decision.seen.ref.key] = decision.due
        elif known is not None and decision.verdict is Verdict.REPORT and decision.due is not None:
            left[decision.seen.ref.key] = known  # a step on it came to nothing, and is tried again at `due`
    for key in _went(report.survey.gone, [*report.settled, *report.outcomes]):
        left.pop(key, None)
    return left


def _is_overdue(decision: Decision, now: datetime) -> bool:
    if decision.due is None or decision.due > now or decision.action is Action.WARN:
        return False
    return decision.verdict in (Verdict.DUE, Verdict.REPORT)


def _went(gone: Sequence[Gone], lines: Iterable[Closed]) -> Iterator[str]:
    yield from (one.ref.key for one in gone)
    yield from (line.ref.key for line in lines if line.ref is not None and line.result is Result.RECLAIMED)


def _by(counts: Mapping[tuple[str, str, str, str], int], *fields: int) -> dict[tuple[str, ...], float]:
    """The same counts, by fewer labels."""
    added: Tally[tuple[str, ...]] = Tally()
    for key, number in counts.items():
        added[tuple(key[field] for field in fields)] += number
    return {key: float(number) for key, number in added.items()}


SUFFIX = ".prom"  # a node_exporter reads no other
EVERYBODY_READS = 0o644


def check_textfile(path: Path) -> None:
    """Checked first, so that a wrong path does not fail only after the pass."""
    if path.suffix != SUFFIX:
        raise UsageError(
            f"--textfile {path}: node_exporter reads only files with the suffix {SUFFIX}. Nothing was done."
        )
    if not path.parent.is_dir():
        raise UsageError(f"--textfile {path}: the directory {path.parent} does not exist. Nothing was done.")


def write_textfile(
    path: Path, session: Session, reports: Iterable[PassReport], machine: MachineFacts | None = None
) -> None:
    metrics = Metrics(session.keeper.clock, session.keeper.platforms, elects=False, process=False)
    _go_on_from(path, metrics)
    for report in reports:
        metrics.passed(report)
    metrics.machine = machine
    try:
        _replace(path, metrics.text())
    except OSError as error:
        raise UsageError(f"--textfile {path} could not be written: {error}. The pass itself was completed.") from error


def _go_on_from(path: Path, metrics: Metrics) -> None:
    """If the file cannot be read, counters start at 0, as after a restart."""
    with contextlib.suppress(OSError, ValueError):
        before = list(text_string_to_metric_families(path.read_text()))
        for sample in (one for family in before for one in family.samples):
            labels = COUNTED_BY.get(sample.name)
            if labels is not None and set(sample.labels) == set(labels):
                metrics.add(sample.name, *(sample.labels[label] for label in labels), by=sample.value)


def _replace(path: Path, text: bytes) -> None:
    number, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), EVERYBODY_READS)
        os.replace(made, path)  # noqa: PTH105 - both are names
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(made)  # noqa: PTH108
        raise
