"""Trees of files in a pass: their own budget, full disks, and what happens between the plan and the act."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.engine.memory import Pressure
from gpukeeper.engine.reclaim import look_and_plan, reclaim
from gpukeeper.model.decision import Plan, Result, Verdict
from gpukeeper.model.event import Closed, Decided, Intended
from gpukeeper.model.policy import Amount, Budget, DiskMarks, Kept, PlaceScope, Temporary
from gpukeeper.model.subject import Category, Disk, Ref, Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from gpukeeper.platforms.simulated.world import CALM, Crashed, Faults, SimulatedPlace, Thing, World, subject_of
from tests.unit.engine.harness import DAY, HOUR, MINUTE, Harness, virtual
from tests.unit.lifecycle.examples import subject

GIB = 1024**3
NODES = SimulatedPlace("ray", "lab", (), ("ann",), nodes=("worker-1", "worker-2"))
SCOPE = {"docker": PlaceScope(), "ray": PlaceScope()}
TEMPORARY = (Temporary(root="/tmp", names=("tmp*",), above=5 * GIB, platform="ray"),)
KEPT = {
    "unfinished": Kept(older_than=timedelta()),
    "dead-session": Kept(older_than=DAY, under_pressure=HOUR),
    "report": Kept(older_than=7 * DAY),
}


class Lab:
    """A harness whose place has two nodes with disks of 200 GiB."""

    def __init__(self, b: Harness) -> None:
        self.b = b
        b.world = World(1, b.clock, (NODES,))
        b.platform = SimulatedPlatform(b.world, NODES)
        b.set_policy(scope=SCOPE, temporary=TEMPORARY, kept=KEPT)
        self.first, self.second = b.world.nodes[NODES.key]

    def tree(self, name: str, unused: timedelta = 2 * HOUR, gib: int = 20, **facts: Any) -> Thing:
        node, kind = facts.pop("node", self.first), facts.pop("kind", "tree")
        ref = Ref("ray", "lab", kind, f"/tmp/{name}", self.b.world.new_uid(), node.name)
        thing = Thing(ref, self.b.now() - DAY, Shape.TREE, state=State.ENDED, class_="api", size=gib * GIB, node=node)
        thing.last_used = self.b.now() - unused
        for fact, value in facts.items():
            setattr(thing, fact, value)
        return self.b.world.add(thing)

    async def pass_(self, **more: Any) -> Any:
        return await reclaim(self.b.keeper, self.b.platform, self.b.book, **more)

    def there(self, *things: Thing) -> list[bool]:
        return [self.b.world.find(thing.ref) is not None for thing in things]


# A disk that is too full.


def lying_on(used: float, inodes: float | None = None, name: str = "/tmp", node: str = "worker-1") -> Any:
    ref = Ref("ray", "lab", "tree", "/tmp/tmp1", "8:1", node)
    return subject(ref=ref, shape=Shape.TREE, disk=Disk(name, used, inodes))


@virtual
async def test_a_disk_is_too_full_from_the_high_mark_until_it_is_below_the_low_one(b: Harness) -> None:
    b.set_policy(disk=DiskMarks(high=0.8, low=0.7))
    seen = [
        (used, b.keeper.pressure.is_too_full(lying_on(used), b.book.policy.disk))
        for used in (0.79, 0.8, 0.75, 0.7, 0.69, 0.75, 0.79)
    ]
    assert [full for _, full in seen] == [False, True, True, True, False, False, False]


@virtual
async def test_inodes_count_like_bytes(b: Harness) -> None:
    """C10.1: a disk without inodes is as full as one without bytes."""
    assert b.keeper.pressure.is_too_full(lying_on(0.1, inodes=0.81), b.book.policy.disk)
    assert b.keeper.pressure.is_too_full(lying_on(0.1, inodes=0.71), b.book.policy.disk)
    assert not b.keeper.pressure.is_too_full(lying_on(0.1, inodes=0.1), b.book.policy.disk)


@virtual
async def test_each_disk_of_each_node_has_its_own_marks(b: Harness) -> None:
    assert b.keeper.pressure.is_too_full(lying_on(0.9), b.book.policy.disk)
    assert not b.keeper.pressure.is_too_full(lying_on(0.75, node="worker-2"), b.book.policy.disk)
    assert not b.keeper.pressure.is_too_full(lying_on(0.75, name="/scratch"), b.book.policy.disk)
    assert b.keeper.pressure.is_too_full(lying_on(0.75), b.book.policy.disk)


@virtual
async def test_a_disk_that_nobody_read_is_not_too_full(b: Harness) -> None:
    assert not b.keeper.pressure.is_too_full(subject(shape=Shape.TREE), b.book.policy.disk)
    assert b.keeper.pressure == Pressure()


def crowded(lab: Lab, number: int = 6) -> list[Thing]:
    """A disk at 85 %, and trees that are due only because of that."""
    lab.first.others = (170 - 20 * number) * GIB
    return [lab.tree(f"tmp{n}", unused=(30 - n) * MINUTE) for n in range(number)]


@virtual
async def test_what_only_a_full_disk_makes_due_stays_once_enough_came_back(b: Harness) -> None:
    """C10.1: two removals bring it from 85 % to 65 %; one step sees that, and the rest is not even begun."""
    lab = Lab(b)
    trees = crowded(lab)
    report = await lab.pass_()
    assert len(report.plan.steps) == 6
    assert lab.there(*trees) == [False, False, True, True, True, True]
    assert [line.result for line in b.lines(Closed)] == [Result.RECLAIMED, Result.RECLAIMED, Result.CHANGED]
    assert b.lines(Closed)[-1].reason == (
        "changed since the plan was made: /tmp is 65% full, below 70%, "
        "and it was due only because the disk was too full"
    )
    assert len(b.lines(Intended)) == 2
    assert report.relief == [
        "Enough of worker-1 /tmp was freed: 3 more trees, due only while it was too full, were skipped."
    ]
    looked_at = {entry.uid for entry in b.world.log if entry.kind in ("look", "capture")}
    assert looked_at == {tree.ref.uid for tree in trees[:3]}
    assert (report.deferred, report.failed) == (0, [])


@virtual
async def test_what_only_a_full_disk_makes_due_is_not_removed_in_bulk(b: Harness) -> None:
    lab = Lab(b)
    crowded(lab)
    lab.tree("tmp-old", unused=9 * HOUR)
    assert await b.pass_in_bulk() == ["/tmp/tmp-old"]


async def work_begins(b: Harness, busy: Any, why: str) -> None:
    """After the first step. One more sees it; those after it on the same node are not even begun, others go on."""
    lab = Lab(b)
    trees = [lab.tree(f"tmp{n}", unused=(20 - n) * HOUR) for n in range(6)]
    elsewhere = lab.tree("tmp9", node=lab.second, unused=2 * HOUR)

    def progress(line: object) -> None:
        lab.first.busy = busy

    report = await lab.pass_(progress=progress)
    assert report.stopped is None
    assert lab.there(*trees) == [False, True, True, True, True, True]
    assert lab.there(elsewhere) == [False]
    assert [line.result for line in b.lines(Closed)] == [Result.RECLAIMED, Result.CHANGED, Result.RECLAIMED]
    assert b.lines(Closed)[1].reason == f"changed since the plan was made: {why}"
    assert len(b.lines(Intended)) == 2
    assert report.relief == [
        f"ray/lab/worker-1/tmp: {why}. 4 more trees there were skipped; the next pass decides again."
    ]
    assert (report.deferred, report.failed) == (0, [])


@virtual
async def test_work_that_begins_ends_the_steps_on_trees_beside_it(b: Harness) -> None:
    await work_begins(b, "task train runs", "work runs beside it: task train runs")


@virtual
async def test_when_the_work_is_over_the_next_pass_removes_the_trees_beside_it(b: Harness) -> None:
    lab = Lab(b)
    trees, free = [lab.tree(f"tmp{n}", unused=(20 - n) * HOUR) for n in range(3)], lab.first.busy
    await lab.pass_(progress=lambda line: setattr(lab.first, "busy", "task train runs"))
    assert lab.there(*trees) == [False, True, True]
    lab.first.busy = free
    await lab.pass_()
    assert lab.there(*trees) == [False, False, False]


@virtual
async def test_a_node_that_cannot_be_queried_any_more_ends_them_too(b: Harness) -> None:
    why = "whether work runs beside it is unknown (Ray did not answer)"
    await work_begins(b, Unknown("Ray did not answer"), why)


@virtual
async def test_what_is_old_enough_anyway_goes_on_after_the_disk_is_empty_enough(b: Harness) -> None:
    lab = Lab(b)
    young, old = crowded(lab, 4), [lab.tree(f"tmp-old{n}", unused=(9 - n) * HOUR, gib=30) for n in range(3)]
    lab.first.others = 0
    assert lab.first.disk.full == pytest.approx(0.85)
    report = await lab.pass_()
    assert lab.there(*old) == [False] * 3
    assert lab.there(*young) == [True] * 4
    assert report.relieved == {"worker-1 /tmp": 4}


@virtual
async def test_an_empty_disk_of_one_node_does_not_spare_the_trees_of_another(b: Harness) -> None:
    lab = Lab(b)
    trees = crowded(lab)
    lab.second.others = 160 * GIB
    others = [lab.tree(f"tmp-b{n}", unused=20 * MINUTE, gib=10, node=lab.second) for n in range(3)]
    await lab.pass_()
    assert lab.there(*trees).count(False) == 2
    assert lab.there(*others) == [False] * 3


@virtual
async def test_between_the_marks_ages_stay_short_over_passes(b: Harness) -> None:
    lab = Lab(b)
    lab.first.others = 170 * GIB
    await lab.pass_()
    first = lab.tree("tmp1", unused=20 * MINUTE, gib=6)
    await lab.pass_()
    lab.first.others = 150 * GIB
    second = lab.tree("tmp2", unused=20 * MINUTE, gib=6)
    await lab.pass_()
    lab.first.others = 100 * GIB
    third = lab.tree("tmp3", unused=20 * MINUTE, gib=6)
    await lab.pass_()
    assert lab.there(first, second, third) == [False, False, True]


@virtual
async def test_scarce_gpus_shorten_no_age_of_a_tree(b: Harness) -> None:
    lab = Lab(b)
    tree = lab.tree("tmp1", unused=20 * MINUTE)
    for n in range(2):
        b.world.add(Thing(Ref("ray", "lab", "gpu", f"GPU-{n}", f"GPU-{n}"), b.now(), Shape.DEVICE, state=State.RUNNING))
    await lab.pass_()
    b.keeper.pressure.set_scarce(("ray", "lab"))
    await lab.pass_()
    assert lab.there(tree) == [True]


# The budget.


def budget(**given: Any) -> Budget:
    return Budget(**({"per_pass": Amount(count=20), "per_hour": Amount(count=100), "trees": 1000} | given))


def over(lab: Lab, name: str) -> Thing:
    """Ended work, due to be removed."""
    ref = Ref("ray", "lab", "job", name, lab.b.world.new_uid())
    ended = Thing(ref, lab.b.now() - DAY, state=State.ENDED, class_="api", ended=lab.b.now() - 9 * HOUR)
    return lab.b.world.add(ended)


@virtual
async def test_trees_use_up_no_budget_of_work(b: Harness) -> None:
    """A thousand trees must not keep a GPU from coming back."""
    lab = Lab(b)
    b.set_policy(budget=budget(per_pass=Amount(count=1), per_hour=Amount(count=1)))
    trees, work = [lab.tree(f"tmp{n}") for n in range(5)], over(lab, "job-1")
    report = await lab.pass_()
    assert lab.there(*trees, work) == [False] * 6
    assert report.deferred == 0
    assert report.plan.steps[0].decision.seen.ref.name == "job-1"


@virtual
async def test_work_uses_up_no_budget_of_trees(b: Harness) -> None:
    lab = Lab(b)
    b.set_policy(budget=budget(per_hour=Amount(count=2), trees=2))
    work, trees = [over(lab, f"job-{n}") for n in range(3)], [lab.tree(f"tmp{n}") for n in range(3)]
    report = await lab.pass_()
    assert lab.there(*work).count(False) == 2
    assert lab.there(*trees).count(False) == 2
    assert len(report.plan.deferred) == 2


@virtual
async def test_the_hour_of_trees_counts_over_passes(b: Harness) -> None:
    lab = Lab(b)
    b.set_policy(budget=budget(trees=3))
    trees = [lab.tree(f"tmp{n}", unused=(20 - n) * HOUR) for n in range(5)]
    for _ in range(3):
        await lab.pass_()
        await asyncio.sleep(5 * 60)
    assert lab.there(*trees) == [False, False, False, True, True]
    assert len(b.lines(Intended)) == 3
    await asyncio.sleep(60 * 60)
    await lab.pass_()
    assert lab.there(*trees) == [False] * 5


@virtual
async def test_places_share_the_hour_of_trees(b: Harness) -> None:
    """Another place used it up after this plan was made: what is left waits, and the outcome says so."""
    lab = Lab(b)
    b.set_policy(budget=budget(trees=2))
    trees = [lab.tree(f"tmp{n}", unused=(20 - n) * HOUR) for n in range(2)]

    async def meanwhile(plan: Plan) -> bool:
        step = plan.steps[0].decision
        elsewhere = Intended(
            at=b.now(),
            ref=Ref("ray", "other", "tree", "/tmp/tmp9", "8:9"),
            step="9.1",
            pass_id=9,
            action=step.action,
            rule=step.rule,
            reason=step.reason,
            incarnation="v1",
        )
        await b.ledger.append([elsewhere])
        return True

    report = await lab.pass_(confirm=meanwhile)
    assert lab.there(*trees) == [False, True]
    assert [line.result for line in report.outcomes] == [Result.RECLAIMED, Result.DEFERRED]


@virtual
async def test_a_person_may_allow_more_trees_than_an_hour_has(b: Harness) -> None:
    lab = Lab(b)
    b.set_policy(budget=budget(trees=1))
    trees = [lab.tree(f"tmp{n}", unused=(20 - n) * HOUR) for n in range(5)]
    await lab.pass_(allow=4)
    assert lab.there(*trees) == [False, False, False, False, True]


@virtual
async def test_the_cheapest_category_goes_first_and_then_the_oldest(b: Harness) -> None:
    """C10.1: what an interruption left, dead sessions, temporary trees, reports."""
    lab = Lab(b)
    lab.tree("report", unused=90 * DAY, kind="report", category=Category.REPORT)
    lab.tree("tmp-young", unused=2 * HOUR)
    lab.tree("tmp-old", unused=20 * DAY)
    lab.tree("session", unused=2 * DAY, kind="session", category=Category.DEAD_SESSION)
    lab.tree("half", unused=timedelta(), category=Category.UNFINISHED)
    made = (await look_and_plan(b.keeper, b.platform, b.book)).plan
    names = [step.decision.seen.ref.name.removeprefix("/tmp/") for step in made.steps]
    assert names == ["half", "session", "tmp-old", "tmp-young", "report"]


# Between the plan and the act.


class Hasty(SimulatedPlatform):
    """Something happens between our last look and the act."""

    before: Any = staticmethod(lambda: None)

    async def act(self, step: Any, fresh: Any) -> Any:
        self.before()
        return await super().act(step, fresh)


@virtual
async def test_files_opened_between_the_last_read_and_the_act_keep_it(b: Harness) -> None:
    lab = Lab(b)
    tree = lab.tree("tmp1")
    b.platform = hasty = Hasty(b.world, NODES)
    hasty.before = lambda: setattr(tree, "in_use", True)
    report = await lab.pass_()
    assert lab.there(tree) == [True]
    assert [line.result for line in report.outcomes] == [Result.CHANGED]


@virtual
async def test_a_node_that_gets_busy_after_the_plan_keeps_its_trees(b: Harness) -> None:
    lab = Lab(b)
    tree, other = lab.tree("tmp1"), lab.tree("tmp2", node=lab.second)

    async def meanwhile(plan: Plan) -> bool:
        lab.first.busy = "a task runs on it"
        return True

    await lab.pass_(confirm=meanwhile)
    assert lab.there(tree, other) == [True, False]
    kept = next(line for line in b.lines(Closed) if line.ref == tree.ref)
    assert kept.reason == "changed since the plan was made: work runs beside it: a task runs on it"


@virtual
async def test_a_session_that_lives_again_is_left_alone(b: Harness) -> None:
    lab = Lab(b)
    session = lab.tree("ray/session_1", unused=2 * DAY, kind="session", category=Category.DEAD_SESSION)

    async def meanwhile(plan: Plan) -> bool:
        session.in_use, session.state = True, State.RUNNING
        session.touch()
        return True

    report = await lab.pass_(confirm=meanwhile)
    assert lab.there(session) == [True]
    assert "it was restarted" in report.outcomes[0].reason


@virtual
async def test_an_interrupted_removal_is_closed_as_found_and_finished_by_the_next_pass(b: Harness) -> None:
    """The same uid, found in the trash; nothing half-visible stays."""
    lab = Lab(b)
    tree, name = lab.tree("tmp1"), "/tmp/tmp1"
    b.world.faults = Faults(halfway=1)
    with suppress(Crashed):
        await lab.pass_()
    assert tree.ref.name.startswith("/tmp/.gpukeeper-trash-")
    b.world.faults = CALM
    del b._keeper  # what was in memory is gone with us
    await lab.pass_()
    assert lab.there(tree) == [False]
    first, second = b.lines(Closed)
    assert (first.ref and first.ref.name, first.result) == (name, Result.STILL_THERE)
    assert second.result is Result.RECLAIMED
    assert "left by an interrupted removal of gpukeeper" in second.reason


@pytest.mark.parametrize("category", ["dead-session", "report"])
def test_a_category_without_an_age_is_only_reported(category: str) -> None:
    @virtual
    async def story(b: Harness) -> None:
        lab = Lab(b)
        b.set_policy(kept={category: Kept(older_than=None, under_pressure=HOUR)})
        lab.first.others = 190 * GIB
        tree = lab.tree("x", unused=400 * DAY, kind="session", category=Category(category))
        report = await lab.pass_()
        assert (report.plan.steps, lab.there(tree)) == ((), [True])
        assert [one.verdict for one in report.survey.decisions] == [Verdict.REPORT]
        assert b.lines(Decided) == [], "a tree that is kept makes no line"

    story()


@virtual
async def test_a_tree_tells_which_disk_it_is_on(b: Harness) -> None:
    lab = Lab(b)
    told = subject_of(lab.tree("tmp1"), b.now())
    assert told.disk_name == "worker-1 /tmp"
    assert msgspec.structs.replace(told, disk=None).disk_name == ""
