"""A node of a cluster taken out by hand, and put back: which marks are set, and which are taken back. Pure.

A quarantine is a label, an annotation, a condition and a taint of its own; the node is never cordoned, and work on it
is not stopped. The same limit counts as for failed nodes. Nothing of others is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from gpukeeper.acceptance.fleet.consequences import FAILED, acceptance_of
from gpukeeper.acceptance.fleet.node_marks import (
    LABEL,
    QUARANTINE,
    QUARANTINE_DETAILS,
    TAINT,
    Change,
    Counted,
    Kept,
    MarkPlan,
    NodeCondition,
    NodeMarks,
    condition_of,
    counted,
    cut,
    done,
)
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import MarkSettings

CONDITION = "GPUQuarantined"
LIST = "To list them: gpukeeper node list --on kubernetes"


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
        or bool(condition_of(marks, CONDITION).status)
    )


def plan_quarantine(
    node: str, wanted: Quarantine, nodes: Sequence[NodeMarks], settings: MarkSettings, now: datetime
) -> MarkPlan:
    """Again with a reason or a time: these are changed. An interrupted quarantine is completed as it was wanted."""
    marks = _named(node, nodes)
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
    breaker = _breaker(found, settings) if change.takes_out and not marks.out else ""
    why = breaker or (found.words if change.takes_out and not marks.out and found.out >= found.allowed else "")
    if why:
        return _plan(found, kept=Kept(node=node, why=why), breaker=breaker)
    return _plan(found, change)


def _named(node: str, nodes: Sequence[NodeMarks]) -> NodeMarks:
    found = next((one for one in nodes if one.node == node), None)
    if found is None:
        raise UsageError(f'the cluster has no node "{node}". {LIST}')
    return found


def _breaker(found: Counted, settings: MarkSettings) -> str:
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
        condition=NodeCondition(type=CONDITION, status="True", reason="Quarantined", message=cut(wanted.words)),
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
        condition=NodeCondition(type=CONDITION),
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
        chosen = [_named(name, nodes) for name in names]
    changes, kept = list[Change](), list[Kept]()
    for marks in chosen:
        failed = last_failed(marks)
        if not is_quarantined(marks) and TAINT not in marks.taints:
            raise UsageError(f"{marks.node} is not quarantined; nothing was changed. {LIST}")
        if failed and not force:
            advice = "Repair it, test it again and mark that run, or use --force"
            kept.append(Kept(node=marks.node, why=f"its last acceptance failed ({failed}). {advice}"))
            continue
        change = _returned(marks)
        if TAINT in marks.taints:
            change = msgspec.structs.replace(change, taints={QUARANTINE: None, TAINT: None})
        changes.append(change)
    return _plan(counted(nodes, names or (), settings), *changes, kept=kept)


def last_failed(marks: NodeMarks) -> str:
    """What failed, in words; empty: its last acceptance did not fail, or it was never marked."""
    if marks.labels.get(LABEL) != FAILED and TAINT not in marks.taints:
        return ""
    last = acceptance_of(marks)
    return last.words if last is not None else "the run is unknown"


def _plan(found: Counted, *changes: Change, kept: Kept | Sequence[Kept] = (), breaker: str = "") -> MarkPlan:
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
