"""One workload or leftover: what happens to it next, when and why. Behind `plan`, `workload list` and `top`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from gpukeeper.lifecycle.budget import TREES
from gpukeeper.model.decision import Action, Decision, Verdict
from gpukeeper.model.policy import Mode
from gpukeeper.model.unknown import Unknown

DEVICES = ("gpu", "slice")  # kinds that are no workload
_KEPT = {Verdict.REPORT: "report", Verdict.UNKNOWN: "unknown"}


class WorkloadsView(msgspec.Struct, frozen=True):
    mode: Mode
    decisions: tuple[Decision, ...]


class WorkloadRow(msgspec.Struct, frozen=True, kw_only=True):
    """`next`: the action, or how it is kept. `size`: None where it is not measured, nor expected to be."""

    next: str
    path: str
    owner: str | None
    class_: str
    gpus: int | Unknown
    size: int | Unknown | None
    due: datetime | None
    reason: str


def workloads_view(decisions: Iterable[Decision], mode: Mode) -> WorkloadsView:
    return WorkloadsView(mode, tuple(one for one in decisions if one.seen.ref.kind not in DEVICES))


def workload_row(decision: Decision) -> WorkloadRow:
    return WorkloadRow(
        next=next_word(decision),
        path=decision.seen.ref.path,
        owner=decision.owner or None,
        class_=decision.class_,
        gpus=decision.gpus,
        size=_size(decision),
        due=decision.due,
        reason=decision.reason,
    )


def next_word(decision: Decision) -> str:
    return decision.action.value if decision.action is not Action.KEEP else _KEPT.get(decision.verdict, "kept")


def _size(decision: Decision) -> int | Unknown | None:
    """Of a tree its bytes are what matters; of other objects they are seldom measured."""
    size = decision.size
    if isinstance(size, Unknown):
        return size if decision.rule in TREES and not size.by_design else None
    return size or None
