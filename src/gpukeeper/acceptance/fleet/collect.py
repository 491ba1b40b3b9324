"""The report of a run over many nodes, from what its nodes sent and what the engine knows of them. Pure.

Only a report counts. A node without one is INCONCLUSIVE, with the reason that the engine gives; a verdict that only its
termination message has is quoted and does not accept it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec

from gpukeeper.acceptance.fleet.delivery import read_message
from gpukeeper.acceptance.fleet.spec import RunSpec, Target
from gpukeeper.acceptance.fleet.status import LOST, NodeStatus, Phase
from gpukeeper.acceptance.recompute import recomputed
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports.document import decode_report
from gpukeeper.acceptance.reports.merge import FleetReport, merge
from gpukeeper.acceptance.reports.wording import gpus_of
from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.grade import Grade, rank

RUN_SCHEMA = "gpukeeper/acceptance-run/v1"
FAILED, INCONCLUSIVE, INTERRUPTED = 4, 5, 130
EXCLUDED, LAUNCH, DEADLINE, PENDING, LOG_LOST, NO_REPORT, VANISHED, REFUSED, STOPPED = (
    *("excluded", "launch-failed", "deadline", "pending", "log-lost", "no-report", "vanished", "report-refused"),
    "interrupted",
)


class MissingNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node without a report. `claimed`: the verdict of its termination message, which does not count."""

    node: str
    code: str  # of the engine, or one of this module
    reason: str
    exit_code: int | None = None
    claimed: Grade | None = None


class GpuOfRun(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    gpu: int  # index
    identity: str
    verdict: Grade
    reason: str


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run over many nodes. `fleet`: the verdict, and the nodes; `missing`: those without a report."""

    run: str
    owner: str
    engine: str
    form: str
    started: datetime
    ended: datetime
    deadline_s: float
    arguments: tuple[str, ...] = ()
    interrupted: bool = False
    fleet: FleetReport
    gpus: tuple[GpuOfRun, ...] = ()  # failing first
    missing: tuple[MissingNode, ...] = ()
    notes: tuple[str, ...] = ()  # sentences: what was odd about what nodes sent
    schema: str = RUN_SCHEMA

    @property
    def verdict(self) -> Grade:
        return self.fleet.verdict


@dataclass
class Collected:
    """What is known so far. `reports`: of a node that started again there may be several."""

    spec: RunSpec
    targets: tuple[Target, ...]
    statuses: dict[str, NodeStatus] = field(default_factory=dict)
    reports: dict[str, list[Report]] = field(default_factory=dict)
    problems: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of what a node sent
    unread: dict[str, str] = field(default_factory=dict)  # nodes whose output could not be read, and why
    failed: str = ""  # why the run could not be launched


def read_sent(text: bytes, run: str, node: str) -> Report:
    """The report that a node sent. KeeperError: it is none of this run and node. Its verdict is computed again."""
    report = decode_report(text, f"the report of {node}")
    if (report.run, report.node) != (run, node):
        raise KeeperError(f"the report of {node} is one of run {report.run} and node {report.node}. It was not used.")
    return recomputed(report)


def run_report(found: Collected, ended: datetime, *, interrupted: bool = False) -> RunReport:
    spec = found.spec
    counted = {node: _worst(reports) for node, reports in found.reports.items() if reports}
    expected = [one.node for one in found.targets]
    missing = tuple(_missing(one, found, interrupted=interrupted) for one in found.targets if one.node not in counted)
    fleet = merge(counted.values(), expected, {one.node: one.reason for one in missing})
    return RunReport(
        run=spec.run,
        owner=spec.owner,
        engine=spec.engine,
        form=spec.form,
        started=spec.created,
        ended=ended,
        deadline_s=spec.deadline_s,
        arguments=spec.arguments,
        interrupted=interrupted,
        fleet=fleet,
        gpus=tuple(sorted(_gpus(counted), key=lambda one: (-rank(one.verdict), one.node, one.gpu))),
        missing=missing,
        notes=tuple(_notes(found, counted)),
    )


def exit_code(report: RunReport, *, strict: bool = False) -> int:
    if report.interrupted:
        return INTERRUPTED
    codes = {Grade.PASS: 0, Grade.WARN: FAILED if strict else 0, Grade.FAIL: FAILED}
    return codes.get(report.verdict, INCONCLUSIVE)


def _worst(reports: Sequence[Report]) -> Report:
    """Two of one run and node differ only if the node started again, or if one is forged: the worse counts."""
    return max(reports, key=lambda one: rank(one.verdict))


def _missing(target: Target, found: Collected, *, interrupted: bool) -> MissingNode:
    """The first that applies: what was decided before the start, what the node sent, what the engine knows."""
    status, node = found.statuses.get(target.node), target.node
    if target.excluded:
        return MissingNode(node=node, code=EXCLUDED, reason=_sentence(target.excluded))
    if found.failed and (status is None or status.phase is Phase.GONE):
        return MissingNode(node=node, code=LAUNCH, reason=f"The run could not be launched: {found.failed}")
    if node in found.problems:
        words = "; ".join(found.problems[node])
        return _lost(node, status, REFUSED, f"What it sent was refused: {words}.")
    if node in found.unread:
        return _lost(node, status, LOG_LOST, f"Its output could not be read: {found.unread[node]}")
    if status is None:
        return MissingNode(node=node, code=VANISHED, reason="The engine has nothing of it.")
    if interrupted and status.phase in (Phase.WAITING, Phase.RUNNING):
        why = f" It was {status.phase}{f': {status.reason}' if status.reason else '.'}"
        return MissingNode(node=node, code=STOPPED, reason=f"The run was interrupted before it reported.{why}")
    return _by_phase(node, status, found.spec)


def _by_phase(node: str, status: NodeStatus, spec: RunSpec) -> MissingNode:
    why = f" {_sentence(status.reason)}" if status.reason else ""
    span = in_words(timedelta(seconds=spec.deadline_s))
    if status.code in LOST and status.phase in (Phase.WAITING, Phase.RUNNING):
        return _lost(node, status, status.code, f"Its node was lost before it reported.{why}")
    match status.phase:
        case Phase.WAITING:
            return _lost(node, status, status.code or PENDING, f"It did not start within {span}.{why}")
        case Phase.RUNNING:
            return _lost(node, status, status.code or DEADLINE, f"It did not report within {span}.{why}")
        case Phase.ENDED:
            ended = "Its program ended" if status.exit_code is None else f"Its program ended with {status.exit_code}"
            return _lost(node, status, status.code or NO_REPORT, f"{ended} and its log has no report.{why}")
        case Phase.GONE:
            return _lost(node, status, status.code or VANISHED, f"It is gone without a report.{why}")


def _lost(node: str, status: NodeStatus | None, code: str, reason: str) -> MissingNode:
    message = read_message(status.message) if status is not None and status.message else None
    exit_code = None if status is None else status.exit_code
    if message is None or message.node != node:
        return MissingNode(node=node, code=code, reason=reason, exit_code=exit_code)
    words = (
        f"{reason} Its termination message says {message.verdict} ({message.reason.rstrip('.')}), which does not count."
    )
    code = LOG_LOST if code == NO_REPORT else code
    return MissingNode(node=node, code=code, reason=words, exit_code=exit_code, claimed=message.verdict)


def _sentence(words: str) -> str:
    text = words.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def _gpus(counted: Mapping[str, Report]) -> Iterator[GpuOfRun]:
    for node, report in counted.items():
        known = {gpu.uuid: gpu for gpu in gpus_of(report.machine)}
        for one in report.tallies:
            gpu = known.get(one.gpu)
            yield GpuOfRun(
                node=node,
                gpu=-1 if gpu is None else gpu.index,
                identity=one.gpu if gpu is None else gpu.identity,
                verdict=one.verdict,
                reason=one.reason,
            )


def _notes(found: Collected, counted: Mapping[str, Report]) -> Iterator[str]:
    for node, reports in found.reports.items():
        if len(reports) > 1:
            grades = ", ".join(str(one.verdict) for one in reports)
            yield f"{node} sent {len(reports)} different reports ({grades}); the worst counts."
    for node, problems in found.problems.items():
        if node in counted:
            yield f"{node}: {'; '.join(problems)}."
