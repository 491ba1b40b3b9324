"""What the results of a run change on the nodes of a cluster: label, annotation, condition, taint. Opt-in. Pure.

Only the taint takes a node out; a node is never cordoned. How many may be out at the same time is limited, and when
most tested nodes fail, a common cause is likely and none is taken out. An older run changes nothing; only a newer pass
ends the consequences of a failure. A run on a CPU, a simulated one, a self-test and an interrupted run change nothing
at all, whatever their verdict. A date in the future proves no order: such a result changes nothing, and such a mark
does not stop a later run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.acceptance.fleet.node_marks import (
    AT,
    DETAILS,
    LABEL,
    RUN,
    TAINT,
    Change,
    Kept,
    MarkPlan,
    NodeCondition,
    NodeMarks,
    counted,
    cut,
    label_value,
)
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.recording import line_of
from gpukeeper.model import reading
from gpukeeper.model.grade import Grade
from gpukeeper.model.policy import MarkSettings

CONDITION = "GPUAcceptance"
TOLERANCE = timedelta(minutes=5)  # between the clocks of two machines
PASSED, FAILED, INCONCLUSIVE = "passed", "failed", "inconclusive"
WORDS = {
    Grade.PASS: PASSED,
    Grade.WARN: PASSED,
    Grade.FAIL: FAILED,
    Grade.INCONCLUSIVE: INCONCLUSIVE,
    Grade.SKIPPED: INCONCLUSIVE,
}
STATUS = {PASSED: "True", FAILED: "False", INCONCLUSIVE: "Unknown"}


class NodeResult(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    run: str
    at: datetime
    verdict: Grade
    code: str
    message: str
    void: str = ""  # why it says nothing about the GPUs of the node: it changes nothing
    gpus: tuple[str, ...] = ()  # serial numbers of those that failed


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says about its last run: the annotation."""

    run: str
    at: datetime
    verdict: str
    code: str

    @property
    def words(self) -> str:
        return f"run {self.run}, {self.at:%Y-%m-%d %H:%M}Z, {self.code}"


def result_of(report: Report) -> NodeResult:
    """Only a complete run on real GPUs counts."""
    return NodeResult(
        node=report.node,
        run=report.run,
        at=report.ended,
        verdict=report.verdict,
        code=_code(report),
        message=report.reason,
        void=_void(report),
        gpus=_failed_gpus(report),
    )


def _failed_gpus(report: Report) -> tuple[str, ...]:
    graded = line_of(report, "").gpus.items()
    return tuple(sorted(who for who, grade in graded if grade is Grade.FAIL and who != report.node))


def _void(report: Report) -> str:
    if report.self_test:
        return "a self-test says nothing about the GPUs"
    if report.device != "cuda":
        return f"a run on {report.device} says nothing about the GPUs"
    return "the run was interrupted: it says nothing about the GPUs" if report.interrupted else ""


def _code(report: Report) -> str:
    return next((one.code for one in report.findings if one.verdict is report.verdict), report.verdict.value)


def plan(
    results: Iterable[NodeResult],
    nodes: Sequence[NodeMarks],
    settings: MarkSettings,
    now: datetime,
) -> MarkPlan:
    """`nodes`: all of the cluster, because the budget is a share of those with GPUs."""
    known = {one.node: one for one in nodes}
    given = sorted(results, key=lambda one: one.node)
    breaker = _breaker(given, settings)
    found = counted(nodes, {one.node for one in given}, settings)
    taken = found.out
    changes, kept = list[Change](), list[Kept]()
    for result in given:
        marks = known.get(result.node)
        why = "the cluster has no node of this name" if marks is None else _void_or_older(result, marks, now)
        if marks is None or why:
            kept.append(Kept(node=result.node, why=why))
            continue
        change = _change(result, marks, settings, now)
        if change.takes_out and not marks.out:
            if breaker or taken >= found.allowed:
                why = (
                    breaker
                    or (found if taken == found.out else msgspec.structs.replace(found, out=taken, why="")).words
                )
                change = msgspec.structs.replace(change, taints={}, undone=None, deferred=why)
            else:
                taken += 1
        elif change.takes_out and breaker:
            change = msgspec.structs.replace(change, taints={}, undone=None, deferred=breaker)
        changes.append(change)
    return MarkPlan(
        changes=tuple(changes),
        kept=tuple(kept),
        out=found.out,
        allowed=found.allowed,
        nodes=found.nodes,
        breaker=breaker,
    )


def _breaker(results: Sequence[NodeResult], settings: MarkSettings) -> str:
    tested = [one for one in results if not one.void]
    failed = sum(one.verdict is Grade.FAIL for one in tested)
    if failed <= 1 or failed <= settings.breaker * len(tested):
        return ""
    return f"{failed} of {len(tested)} tested nodes failed: a common cause is likely, no node is taken out"


def _void_or_older(result: NodeResult, marks: NodeMarks, now: datetime) -> str:
    """Why a result does not count; empty: it counts. A run may be marked again."""
    if result.void:
        return result.void
    if result.at > now + TOLERANCE:
        ahead = f"the report is dated {result.at:%Y-%m-%d %H:%M}Z, in the future: when the run ended is unknown"
        return f"{ahead}. Set the clock of the node, then test it again"
    last = acceptance_of(marks)
    if marks.annotations.get(DETAILS) is not None and last is None:
        return f"the annotation {DETAILS} cannot be read; remove it, then mark again"
    if last is None or last.at > now + TOLERANCE:
        return ""
    if last.at > result.at or (last.at == result.at and last.run != result.run):
        return f"run {last.run} is newer ({last.at:%Y-%m-%d %H:%M}Z)"
    return ""


def acceptance_of(marks: NodeMarks) -> Acceptance | None:
    """None: it was not marked, or the annotation cannot be read."""
    text = marks.annotations.get(DETAILS)
    if text is None:
        return None
    try:
        details = reading.decode(text.encode(), Acceptance)
    except msgspec.DecodeError:
        return None
    return details if details.at.tzinfo is not None else None


def _change(result: NodeResult, marks: NodeMarks, settings: MarkSettings, now: datetime) -> Change:
    word = WORDS[result.verdict]
    details = Acceptance(run=result.run, at=result.at, verdict=result.verdict.value, code=result.code)
    taints: dict[str, str | None] = {}
    if word == FAILED and settings.taint and TAINT not in marks.taints:
        taints = {TAINT: label_value(result.run)}
    if word == PASSED and TAINT in marks.taints:
        taints = {TAINT: None}
    change = Change(
        node=marks.node,
        uid=marks.uid,
        version=marks.version,
        labels={LABEL: word, RUN: label_value(result.run), AT: f"{result.at:%Y-%m-%d}"},
        annotations={DETAILS: msgspec.json.encode(details).decode()},
        taints=taints,
        condition=NodeCondition(
            type=CONDITION,
            status=STATUS[word],
            reason=condition_reason(result.code),
            message=cut(f"run {result.run}: {result.message}"),
        ),
        note=_note(marks, now),
    )
    undone = msgspec.structs.replace(change, taints={TAINT: None}) if change.takes_out else None
    return msgspec.structs.replace(change, undone=undone)


def _note(marks: NodeMarks, now: datetime) -> str:
    last = acceptance_of(marks)
    if last is None or last.at <= now + TOLERANCE:
        return ""
    return f"its mark of run {last.run} is dated {last.at:%Y-%m-%d %H:%M}Z, in the future, and does not count"


def condition_reason(code: str) -> str:
    """A code as CamelCase: gemm-below-floor is GemmBelowFloor."""
    words = "".join(one if one.isascii() and one.isalnum() else " " for one in code).split()
    found = "".join(word[:1].upper() + word[1:] for word in words)
    return found if found[:1].isalpha() else f"Code{found}"
