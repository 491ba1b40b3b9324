"""What is changed on the nodes of a cluster: the results of a run, a quarantine by hand, and its end. Opt-in. Pure.

Only taints take a node out; a node is never cordoned, work on it is not stopped. How many may be out at the same time
is limited, counted over the GPU nodes. When most tested nodes fail, a common cause is likely and none is taken out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.acceptance.record import Report, line_of
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade
from gpukeeper.model.policy import MarkSettings

PREFIX = "gpukeeper.io/"
LABEL, RUN, AT = f"{PREFIX}acceptance", f"{PREFIX}acceptance-run", f"{PREFIX}acceptance-at"
DETAILS = f"{PREFIX}acceptance-result"  # annotation
TAINT = f"{PREFIX}acceptance-failed"
QUARANTINE = f"{PREFIX}quarantine"  # label, and the key of the taint
QUARANTINE_DETAILS = f"{PREFIX}quarantine-details"  # annotation
TAINTS = (TAINT, QUARANTINE)
MESSAGE_MAX = 1024  # bytes of a condition


class NodeCondition(msgspec.Struct, frozen=True, kw_only=True):
    """`status` empty: the node does not have it."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""


class NodeMarks(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it is. `taints`: ours, by key with their value. `out`: why it takes no new work; empty: it does."""

    node: str
    uid: str
    version: str
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    taints: Mapping[str, str] = {}
    conditions: tuple[NodeCondition, ...] = ()
    gpu: bool = True
    out: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """None as a value removes it. `taints`: by key; only those named here are changed. `deferred`: why a taint is not
    added. `undone`: what is left of it if the limit turns out to be exceeded. `whole`: without its taint nothing else
    is written. `note`: what a reader should know."""

    node: str
    uid: str
    version: str
    labels: Mapping[str, str | None] = {}
    annotations: Mapping[str, str | None] = {}
    taints: Mapping[str, str | None] = {}
    condition: NodeCondition
    deferred: str = ""
    note: str = ""
    undone: Change | None = None
    whole: bool = False

    @property
    def takes_out(self) -> bool:
        return any(value is not None for value in self.taints.values())


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    why: str


class MarkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`out` of `nodes` GPU nodes are out now."""

    changes: tuple[Change, ...] = ()
    kept: tuple[Kept, ...] = ()
    out: int = 0
    allowed: int = 0
    nodes: int = 0
    breaker: str = ""


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """GPU nodes: `out` of `nodes` are out, `allowed` may be. `why`: what takes them out, the most frequent first."""

    nodes: int
    out: int
    allowed: int
    why: str = ""

    @property
    def words(self) -> str:
        because = f" ({self.why})" if self.why else ""
        return f"{self.out} of {self.nodes} GPU nodes are out{because}; at most {self.allowed} may be"


def counted(nodes: Sequence[NodeMarks], named: Collection[str], settings: MarkSettings) -> Counted:
    """`named`: nodes that count even if they announce no GPU: a broken one may not."""
    gpu_nodes = [one for one in nodes if one.gpu or one.node in named]
    reasons = [one.out for one in gpu_nodes if one.out]
    by_count = sorted(set(reasons), key=lambda one: (-reasons.count(one), one))
    return Counted(
        nodes=len(gpu_nodes),
        out=len(reasons),
        allowed=settings.max_out.of(len(gpu_nodes)),
        why=", ".join(f"{reasons.count(one)} {one}" for one in by_count[:3]),
    )


def done(change: Change, node: NodeMarks) -> str:
    """What is not as the change wants it; empty: everything is."""
    if any(node.labels.get(key) != value for key, value in change.labels.items()):
        return "its labels"
    if any(node.annotations.get(key) != value for key, value in change.annotations.items()):
        return "its annotations"
    if any(node.taints.get(key) != value for key, value in change.taints.items()):
        return "its taints"
    return "" if condition_of(node, change.condition.type) == change.condition else "its condition"


def condition_of(node: NodeMarks, type_: str) -> NodeCondition:
    return next((one for one in node.conditions if one.type == type_), NodeCondition(type=type_))


def cut(text: str) -> str:
    return text.encode()[:MESSAGE_MAX].decode(errors="ignore")


def label_value(text: str) -> str:
    """At most 63 characters, as the API server wants it."""
    allowed = "".join(one if one.isascii() and (one.isalnum() or one in "-_.") else "-" for one in text)
    return allowed[:63].strip("-_.")


ACCEPTANCE_CONDITION = "GPUAcceptance"
CLOCKS_APART = timedelta(minutes=5)  # between the clocks of two machines
PASSED, FAILED, INCONCLUSIVE = "passed", "failed", "inconclusive"
LABEL_VALUES = {
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


# An older run changes nothing; only a newer pass ends the consequences of a failure. A run on a CPU, a simulated one,
# a self-test and an interrupted run change nothing at all, whatever their verdict. A date in the future proves no
# order: such a result changes nothing, and such a mark does not stop a later run.
def plan_marks(
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
    if result.at > now + CLOCKS_APART:
        ahead = f"the report is dated {result.at:%Y-%m-%d %H:%M}Z, in the future: when the run ended is unknown"
        return f"{ahead}. Set the clock of the node, then test it again"
    last = acceptance_of(marks)
    if marks.annotations.get(DETAILS) is not None and last is None:
        return f"the annotation {DETAILS} cannot be read; remove it, then mark again"
    if last is None or last.at > now + CLOCKS_APART:
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
    word = LABEL_VALUES[result.verdict]
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
            type=ACCEPTANCE_CONDITION,
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
    if last is None or last.at <= now + CLOCKS_APART:
        return ""
    return f"its mark of run {last.run} is dated {last.at:%Y-%m-%d %H:%M}Z, in the future, and does not count"


def condition_reason(code: str) -> str:
    """A code as CamelCase: gemm-below-floor is GemmBelowFloor."""
    words = "".join(one if one.isascii() and one.isalnum() else " " for one in code).split()
    found = "".join(word[:1].upper() + word[1:] for word in words)
    return found if found[:1].isalpha() else f"Code{found}"


QUARANTINE_CONDITION = "GPUQuarantined"
TO_LIST = "To list them: gpukeeper node list --on kubernetes"


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """The annotation. `until`: nothing ends it by itself then; `node return --expired` does."""

    by: str
    at: datetime
    reason: str = ""
    until: datetime | None = None

    @property
    def words(self) -> str:
        end = f" until {self.until:%Y-%m-%d %H:%M}Z" if self.until is not None else ""
        return f"by {self.by} since {self.at:%Y-%m-%d %H:%M}Z{end}" + (f": {self.reason}" if self.reason else "")

    def is_over(self, now: datetime) -> bool:
        return self.until is not None and self.until <= now


def quarantine_of(marks: NodeMarks) -> Quarantine | None:
    """None: it is not quarantined, or the annotation cannot be read."""
    text = marks.annotations.get(QUARANTINE_DETAILS)
    if text is None:
        return None
    try:
        found = reading.decode(text.encode(), Quarantine)
    except msgspec.DecodeError:
        return None
    aware = found.at.tzinfo is not None and (found.until is None or found.until.tzinfo is not None)
    return found if aware else None


def is_quarantined(marks: NodeMarks) -> bool:
    """One mark is sufficient: the others may be missing after an interruption."""
    return (
        QUARANTINE in marks.labels
        or QUARANTINE in marks.taints
        or QUARANTINE_DETAILS in marks.annotations
        or bool(condition_of(marks, QUARANTINE_CONDITION).status)
    )


def plan_quarantine(
    node: str, wanted: Quarantine, nodes: Sequence[NodeMarks], settings: MarkSettings, now: datetime
) -> MarkPlan:
    """Again with a reason or a time: these are changed. An interrupted quarantine is completed as it was wanted."""
    marks = _node_named(node, nodes)
    found = counted(nodes, {node}, settings)
    before = quarantine_of(marks)
    if before is not None and not wanted.reason and wanted.until is None:
        wanted = before
    elif before is not None:
        wanted = msgspec.structs.replace(
            wanted, reason=wanted.reason or before.reason, until=wanted.until or before.until
        )
    change = _quarantined(marks, wanted, now)
    if before == wanted and not done(change, marks):
        raise UsageError(
            f"{node} is quarantined already, {wanted.words}; nothing was changed. "
            "With --reason or --for these are changed"
        )
    breaker = _quarantine_breaker(found, settings) if change.takes_out and not marks.out else ""
    why = breaker or (found.words if change.takes_out and not marks.out and found.out >= found.allowed else "")
    if why:
        return _mark_plan(found, kept=Kept(node=node, why=why), breaker=breaker)
    return _mark_plan(found, change)


def _node_named(node: str, nodes: Sequence[NodeMarks]) -> NodeMarks:
    found = next((one for one in nodes if one.node == node), None)
    if found is None:
        raise UsageError(f'the cluster has no node "{node}". {TO_LIST}')
    return found


def _quarantine_breaker(found: Counted, settings: MarkSettings) -> str:
    if found.out <= max(1, settings.breaker * found.nodes):
        return ""
    because = f" ({found.why})" if found.why else ""
    out = f"{found.out} of {found.nodes} GPU nodes are out{because}"
    return f"{out}: a common cause is likely, no node is taken out"


def _quarantined(marks: NodeMarks, wanted: Quarantine, now: datetime) -> Change:
    taints = {} if QUARANTINE in marks.taints else {QUARANTINE: f"{now:%Y%m%d-%H%M%S}"}
    change = Change(
        node=marks.node,
        uid=marks.uid,
        version=marks.version,
        labels={QUARANTINE: "yes"},
        annotations={QUARANTINE_DETAILS: msgspec.json.encode(wanted).decode()},
        taints=dict(taints),
        condition=NodeCondition(
            type=QUARANTINE_CONDITION, status="True", reason="Quarantined", message=cut(wanted.words)
        ),
        whole=True,
    )
    return msgspec.structs.replace(change, undone=_returned(marks) if change.takes_out else None)


def _returned(marks: NodeMarks) -> Change:
    return Change(
        node=marks.node,
        uid=marks.uid,
        version=marks.version,
        labels={QUARANTINE: None},
        annotations={QUARANTINE_DETAILS: None},
        taints={QUARANTINE: None},
        condition=NodeCondition(type=QUARANTINE_CONDITION),
    )


def plan_return(
    names: Sequence[str] | None, nodes: Sequence[NodeMarks], settings: MarkSettings, now: datetime, *, force: bool
) -> MarkPlan:
    """None: all whose time is over. `force`: also a node whose last acceptance failed; the taint of that run goes too,
    its label and condition stay, because they say what was measured."""
    if names is None:
        expired = (one for one in nodes if (found := quarantine_of(one)) is not None and found.is_over(now))
        chosen = sorted(expired, key=lambda one: one.node)
    else:
        chosen = [_node_named(name, nodes) for name in names]
    changes, kept = list[Change](), list[Kept]()
    for marks in chosen:
        failed = last_failed(marks)
        if not is_quarantined(marks) and TAINT not in marks.taints:
            raise UsageError(f"{marks.node} is not quarantined; nothing was changed. {TO_LIST}")
        if failed and not force:
            advice = "Repair it, test it again and mark that run, or use --force"
            kept.append(Kept(node=marks.node, why=f"its last acceptance failed ({failed}). {advice}"))
            continue
        change = _returned(marks)
        if TAINT in marks.taints:
            change = msgspec.structs.replace(change, taints={QUARANTINE: None, TAINT: None})
        changes.append(change)
    return _mark_plan(counted(nodes, names or (), settings), *changes, kept=kept)


def last_failed(marks: NodeMarks) -> str:
    """What failed, in words; empty: its last acceptance did not fail, or it was never marked."""
    if marks.labels.get(LABEL) != FAILED and TAINT not in marks.taints:
        return ""
    last = acceptance_of(marks)
    return last.words if last is not None else "the run is unknown"


def _mark_plan(found: Counted, *changes: Change, kept: Kept | Sequence[Kept] = (), breaker: str = "") -> MarkPlan:
    return MarkPlan(
        changes=changes,
        kept=(kept,) if isinstance(kept, Kept) else tuple(kept),
        out=found.out,
        allowed=found.allowed,
        nodes=found.nodes,
        breaker=breaker,
    )


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A node for people. `quarantine`: by whom, since when, why. `out`: why it takes no new work."""

    node: str
    quarantined: bool
    quarantine: str = ""
    until: datetime | None = None
    expired: bool = False
    acceptance: str = ""
    run: str = ""
    accepted_at: datetime | None = None
    out: str = ""


def state_of(marks: NodeMarks, now: datetime) -> NodeState:
    details, last = quarantine_of(marks), acceptance_of(marks)
    unreadable = is_quarantined(marks) and details is None
    return NodeState(
        node=marks.node,
        quarantined=is_quarantined(marks),
        quarantine=f"{QUARANTINE_DETAILS} cannot be read" if unreadable else details.words if details else "",
        until=details.until if details else None,
        expired=details is not None and details.is_over(now),
        acceptance=marks.labels.get(LABEL, ""),
        run=last.run if last else "",
        accepted_at=last.at if last else None,
        out=marks.out,
    )
