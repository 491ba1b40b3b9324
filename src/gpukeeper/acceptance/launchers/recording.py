"""Marks on nodes as lines of the ledger: before they are written, and after. Pure.

Lines are written about nodes that are taken out or put back, about quarantines, and about runs that failed. A node that
passed, and was in service, has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

import msgspec

from gpukeeper.acceptance.fleet.consequences import FAILED
from gpukeeper.acceptance.fleet.node_marks import LABEL, QUARANTINE, Change
from gpukeeper.acceptance.launchers.marks import Marked
from gpukeeper.model.event import NodeMarked
from gpukeeper.model.identity import Ref


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Who changes marks, and why. `gpus`: by node, serial numbers of those that failed in the run."""

    by: str
    step: str
    run: str = ""
    reason: str = ""
    until: datetime | None = None
    gpus: Mapping[str, tuple[str, ...]] = {}


def lines_before(changes: Iterable[Change], place: str, cause: Cause, at: datetime) -> Iterator[NodeMarked]:
    for change in changes:
        action = action_of(change)
        if action:
            yield NodeMarked(
                at=at,
                ref=Ref("kubernetes", place, "node", change.node, change.uid),
                by=cause.by,
                step=cause.step,
                action=action,
                result="begun",
                reason=_reason(change, cause),
                run=cause.run,
                failed=change.labels.get(LABEL) == FAILED,
                until=cause.until if action in ("quarantine", "update") else None,
                gpus=cause.gpus.get(change.node, ()),
            )


def lines_after(begun: Iterable[NodeMarked], nodes: Iterable[Marked], at: datetime) -> Iterator[NodeMarked]:
    """What became of those."""
    found = {one.node: one for one in nodes}
    for line in begun:
        node = found.get(line.ref.name) if line.ref is not None else None
        if node is not None:
            yield msgspec.structs.replace(
                line,
                at=at,
                result=_result(node),
                reason="; ".join(filter(None, (line.reason, node.deferred, node.problem))),
                out={"quarantine": node.quarantined, "taint": node.tainted}.get(line.action, False),
                machine=node.machine,
            )


def action_of(change: Change) -> str:
    """Empty: no line is written about it."""
    if change.takes_out:
        return "quarantine" if QUARANTINE in change.taints else "taint"
    if change.taints:
        return "return"
    if QUARANTINE in change.labels:
        return "update"
    return "label" if change.labels.get(LABEL) == FAILED else ""


def _reason(change: Change, cause: Cause) -> str:
    return cause.reason or (change.condition.message if cause.run else "")


def _result(node: Marked) -> str:
    if node.problem:
        return "failed"
    if node.deferred:
        return "deferred"
    return "done" if node.changed else "unchanged"
