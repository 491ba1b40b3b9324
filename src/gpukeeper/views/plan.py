"""What would be done now and what is kept, and what a pass did, place by place; observed now, or by the daemon in
its last passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gpukeeper.engine.keeper import STOPPING
from gpukeeper.engine.observe import LIVE_TREE, TreeCount
from gpukeeper.engine.outlook import Outlooks, PolicyHead
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.lifecycle.budget import backlog_sentence, duplicate_sentences
from gpukeeper.model.decision import Action, Decision, PlaceHead, Result, Unseen, Verdict, head_fields
from gpukeeper.model.event import Closed, GpuChecked, WarningSent
from gpukeeper.model.policy import Mode, Policy
from gpukeeper.model.subject import Category, Disk, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import when_in_words
from gpukeeper.views.fleet import SubjectChange, bytes_of, unseen_lines, untouched

DEVICES = ("gpu", "slice")  # kinds that are no workload
WHY_KEPT = {
    Verdict.WAIT: "waiting",
    Verdict.PROTECT: "protected",
    Verdict.UNKNOWN: "unknown",
    Verdict.REPORT: "reported only",
    Verdict.SILENT: "no rule applies",
}


class TreeTotals(msgspec.Struct, frozen=True):
    """Trees of one category: all of them, those that are kept, those that are due."""

    category: str
    total: TreeCount
    keep: TreeCount
    remove: TreeCount


class PlacePlan(PlaceHead, frozen=True, kw_only=True):
    """`steps`: what would be acted on now, in that order. `stopped`: why this place could not be planned."""

    paused: str | None
    stopped: str | None
    steps: tuple[Decision, ...]
    deferred: tuple[Decision, ...]
    decisions: tuple[Decision, ...]
    trees: tuple[TreeTotals, ...]


class PlanView(msgspec.Struct, frozen=True):
    policy: PolicyHead
    places: tuple[PlacePlan, ...]

    @property
    def due(self) -> list[Decision]:
        return [d for place in self.places for d in place.decisions if d.action is not Action.KEEP]

    @property
    def kept(self) -> list[Decision]:
        return [d for place in self.places for d in place.decisions if d.action is Action.KEEP]

    def listed(self, *, kept: bool) -> list[Decision]:
        """What is due and what is reported only; with `kept` everything."""
        return [*self.due, *(d for d in self.kept if kept or d.verdict is Verdict.REPORT)]

    @property
    def trees(self) -> tuple[TreeTotals, ...]:
        return _added(one for place in self.places for one in place.trees)


class WorkloadsView(msgspec.Struct, frozen=True):
    mode: Mode
    decisions: tuple[Decision, ...]


def workloads_view(decisions: Iterable[Decision], mode: Mode) -> WorkloadsView:
    return WorkloadsView(mode, tuple(one for one in decisions if one.seen.ref.kind not in DEVICES))


def plan_view(reports: Sequence[PassReport], policy: PolicyHead) -> PlanView:
    return PlanView(policy, tuple(_place(report) for report in reports))


def _place(report: PassReport) -> PlacePlan:
    found = report.survey
    return PlacePlan(
        **head_fields(report.head),
        paused=report.paused,
        stopped=report.stopped,
        steps=tuple(step.decision for step in report.plan.steps),
        deferred=report.plan.deferred,
        decisions=tuple(found.decisions),
        trees=_added(
            TreeTotals(category, pile, TreeCount() if due else pile, pile if due else TreeCount())
            for (category, due), pile in found.counts.trees.items()
        ),
    )


def _added(parts: Iterable[TreeTotals]) -> tuple[TreeTotals, ...]:
    """One for each category that has trees, the cheapest to lose first."""
    sums: dict[str, TreeTotals] = {}
    for one in parts:
        so_far = sums.get(one.category, TreeTotals(one.category, TreeCount(), TreeCount(), TreeCount()))
        sums[one.category] = TreeTotals(
            one.category, so_far.total + one.total, so_far.keep + one.keep, so_far.remove + one.remove
        )
    names = [*(one.value for one in Category), LIVE_TREE]
    return tuple(sums[name] for name in names if name in sums and sums[name].total.number)


def daemon_plan_view(found: Outlooks) -> PlanView:
    """The same from a daemon; what only a full pass has is empty."""
    return PlanView(
        found.policy,
        tuple(
            PlacePlan(
                **head_fields(one),
                paused=found.paused,
                stopped=None,
                steps=tuple(one.due),
                deferred=(),
                decisions=one.decisions,
                trees=(),
            )
            for one in found.places
        ),
    )


def summary(view: PlanView, again: str) -> str:
    """How much is due, how much is kept, and by which policy. `again`: the command that does it."""
    count = f"{len(view.due)} due" if view.due else "Nothing is due"
    if any(place.unseen or place.stopped for place in view.places):
        count += " of what could be read"
    elif not view.due and not view.kept and any(place.seen for place in view.places):
        count = "No objects match the filters (parts of a workload are never listed)"
    acts = ""
    if view.due:
        acts = " Not applied: the policy's mode is plan." if view.policy.mode is Mode.PLAN else ""
        acts += f" To apply: {again}"
    return f"{count}; {kept_summary(view.kept)}.{acts}\n{_policy(view.policy)}"


def daemon_plan_summary(view: PlanView) -> str:
    count = f"{len(view.due)} due" if view.due else "Nothing is due"
    return f"{count}; {kept_summary(view.kept)}.\n{_policy(view.policy)}"


def _policy(policy: PolicyHead) -> str:
    return f"Policy: {policy.source} ({policy.preset}, mode {policy.mode})."


def kept_summary(kept: Iterable[Decision]) -> str:
    """ "14 kept: 9 waiting, 3 protected, 2 unknown"."""
    counts = Counter(WHY_KEPT[one.verdict] for one in kept)
    parts = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    return f"{counts.total()} kept" + (f": {parts}" if parts else "")


def notes(reports: Sequence[PassReport], policy: Policy) -> Iterator[str]:
    """What a reader must know about a plan, or about what was done, besides its lines."""
    for report in reports:
        yield from filter(None, (report.stopped, report.leased))
        yield from unseen_notes(report)
        if report.plan.breaker:
            yield f"{report.plan.breaker} To allow it once: gpukeeper apply --budget {len(report.survey.due)}"
        if report.plan.deferred:
            yield backlog_sentence(report.plan.deferred, policy, report.survey.counts.seen)
        yield from duplicate_sentences(report.plan)
        yield from report.relief
        for path, complaint in sorted({(d.seen.ref.path, c) for d in report.survey.decisions for c in d.complaints}):
            yield f"needs an admin: {path}: {complaint}"
    for reason in sorted({report.paused for report in reports if report.paused}):  # once, not for each place
        if reason == STOPPING:
            yield "Ended by a signal before all steps were done; the next pass continues."
        else:
            yield f"All actions are paused: {reason}. Resume with: gpukeeper resume"


def unseen_notes(report: PassReport) -> list[str]:
    place = report.survey.platform
    return untouched(unseen_lines(place.name, place.place, report.survey.unseen))


def daemon_plan_notes(found: Outlooks) -> Iterator[str]:
    for place in found.places:
        where = f"{place.platform}/{place.place}"
        yield from untouched(unseen_lines(place.platform, place.place, place.unseen))
        if place.breaker:
            yield place.breaker
        if place.left_out:
            yield f"{where}: {place.left_out} more objects are not listed."
        yield f"{where}: from the daemon's pass {when_in_words(place.at, found.now)}."
    if found.paused is not None:
        yield f"All actions are paused: {found.paused}."
    if not found.admin:
        yield f"To see the reasons, for work of {found.who} only: gpukeeper explain WORKLOAD"


class NodeFigures(msgspec.Struct, frozen=True):
    """`bytes`: temporary ones of a node, used ones of a disk."""

    bytes: int | Unknown
    disk: Disk | None
    disk_size: int | None
    disk_free: int | None


class NodeChange(msgspec.Struct, frozen=True):
    kind: str
    name: str
    before: NodeFigures
    after: NodeFigures | Unknown | None


def node_change(change: SubjectChange) -> NodeChange:
    ref, after = change.before.ref, change.after
    return NodeChange(
        ref.kind, ref.name, _figures(change.before), _figures(after) if isinstance(after, Subject) else after
    )


def _figures(subject: Subject) -> NodeFigures:
    disk = bytes_of(subject)
    return NodeFigures(subject.size, subject.disk, disk.size, disk.free)


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
    return AppliedView(policy, tuple(_applied_place(report, nodes) for report, nodes in done))


def _applied_place(report: PassReport, nodes: Sequence[SubjectChange]) -> PlaceApplied:
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
