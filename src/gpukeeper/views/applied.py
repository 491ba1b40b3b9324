"""What a pass did, place by place. Behind `apply`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from gpukeeper.engine.outlook import PolicyHead
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.model.decision import Decision, Result, Unseen
from gpukeeper.model.event import Closed, GpuChecked, WarningSent
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.nodes import NodeChange, SubjectChange, node_change


class PlaceApplied(msgspec.Struct, frozen=True, kw_only=True):
    """`leased`: which other pass was running there, so that nothing was done.
    `settled`: steps left open by an interruption."""

    pass_id: int = msgspec.field(name="pass")
    platform: str
    place: str
    breaker: str | None
    paused: str | None
    stopped: str | None
    leased: str | None
    settled: tuple[Closed, ...]
    outcomes: tuple[Closed, ...]
    warnings: tuple[WarningSent, ...]
    checks: tuple[GpuChecked, ...]
    deferred: tuple[Decision, ...]
    unseen: tuple[Unseen, ...]
    nodes: tuple[NodeChange, ...]
    bytes_back: int


class AppliedView(msgspec.Struct, frozen=True):
    policy: PolicyHead
    places: tuple[PlaceApplied, ...]


def applied_view(done: Iterable[tuple[PassReport, Sequence[SubjectChange]]], policy: PolicyHead) -> AppliedView:
    return AppliedView(policy, tuple(_place(report, nodes) for report, nodes in done))


def _place(report: PassReport, nodes: Sequence[SubjectChange]) -> PlaceApplied:
    return PlaceApplied(
        pass_id=report.pass_id,
        platform=report.survey.platform.name,
        place=report.survey.platform.place,
        breaker=report.plan.breaker,
        paused=report.paused,
        stopped=report.stopped,
        leased=report.leased,
        settled=tuple(report.settled),
        outcomes=tuple(report.outcomes),
        warnings=tuple(report.warnings),
        checks=tuple(report.checks),
        deferred=report.plan.deferred,
        unseen=tuple(report.survey.unseen),
        nodes=tuple(node_change(one) for one in nodes),
        bytes_back=bytes_back(report.outcomes)[0],
    )


def bytes_back(lines: Iterable[Closed]) -> tuple[int, int]:
    """The sum, and for how many reclaimed objects it was not measured."""
    sizes = [line.bytes_back for line in lines if line.result is Result.RECLAIMED]
    return sum(one for one in sizes if not isinstance(one, Unknown)), sum(isinstance(one, Unknown) for one in sizes)


def applied_summary(reports: Sequence[PassReport]) -> str:
    """ "3 of 5 due reclaimed, 1 warned. …"."""
    if not any((r.settled, r.outcomes, r.warnings, r.checks) != ([], [], [], []) for r in reports):
        return "Nothing was done."
    reclaimed = sum(len(r.reclaimed) for r in reports)
    due = sum(len(r.plan.steps) + len(r.plan.deferred) for r in reports)
    warned = sum(len(r.warnings) for r in reports)
    return f"{reclaimed} of {due} due reclaimed, {warned} warned. To see the record: gpukeeper ledger list"
