"""How much a pass writes: changes, not states, and within a bound for what anybody may make by the thousand."""

from __future__ import annotations

from datetime import timedelta

import msgspec

from gpukeeper.engine.observe import TREE_LINES
from gpukeeper.engine.reclaim import UNSEEN_WRITTEN, reclaim
from gpukeeper.model.decision import Unseen
from gpukeeper.model.event import Closed, Complaint, Decided, Intended, Passed
from gpukeeper.model.policy import Budget, Mode, PlaceScope, Temporary
from gpukeeper.model.subject import Category, Shape, State
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from gpukeeper.platforms.simulated.world import Thing
from tests.unit.engine.harness import HERE, HOUR, MINUTE, Harness, virtual

MANY = 2000


def a_tree(b: Harness, number: int, *, age: timedelta, in_use: bool = False) -> Thing:
    tree = b.add(f"/tmp/tmp{number}", kind="tree", shape=Shape.TREE, state=State.ENDED, category=Category.TEMPORARY)
    tree.last_used, tree.size, tree.in_use = b.now() - age, 10_000, in_use
    return tree


def bench_of_trees(b: Harness, older_than: timedelta = HOUR) -> None:
    entry = Temporary(root="/tmp", names=("tmp*",), above=1, older_than=older_than, platform="docker")
    b.set_policy(scope={"docker": PlaceScope()}, temporary=(entry,), budget=Budget(trees=50))


def written(b: Harness, before: int) -> tuple[int, int]:
    lines = b.ledger.lines[before:]
    return len(lines), sum(len(msgspec.json.encode(line)) for line in lines)


@virtual
async def test_trees_that_stay_cost_nothing_from_the_first_pass_on(b: Harness) -> None:
    bench_of_trees(b)
    trees = [a_tree(b, number, age=MINUTE) for number in range(MANY)]
    for number in range(3):
        before = len(b.ledger.lines)
        trees[number].in_use = True  # of some the verdict changes from pass to pass
        await reclaim(b.keeper, b.platform, b.book)
        rows, size = written(b, before)
        assert rows == 1, b.ledger.lines[before : before + 5]
        assert size < 1000


@virtual
async def test_trees_that_are_due_are_written_once_and_no_more_than_a_bound_in_one_pass(b: Harness) -> None:
    """In mode plan they stay due for ever."""
    bench_of_trees(b)
    for number in range(3 * TREE_LINES):
        a_tree(b, number, age=2 * HOUR)
    counts, left = [], []
    for _ in range(5):
        before = len(b.ledger.lines)
        await reclaim(b.keeper, b.platform, b.book, act=False)
        counts.append(len([line for line in b.ledger.lines[before:] if isinstance(line, Decided)]))
        left.append(b.lines(Passed)[-1].unwritten)
    assert counts == [TREE_LINES, TREE_LINES, TREE_LINES, 0, 0]
    assert left == [2 * TREE_LINES, TREE_LINES, 0, 0, 0]


@virtual
async def test_a_user_who_makes_others_every_pass_stays_within_the_bound(b: Harness) -> None:
    bench_of_trees(b)
    workload = b.ended("eval")
    here = b.world.things[HERE.key]
    for turn in range(4):
        for uid in [uid for uid, thing in here.items() if thing.shape is Shape.TREE]:
            del here[uid]
        for number in range(MANY):
            a_tree(b, turn * MANY + number, age=2 * HOUR)
        before = len(b.ledger.lines)
        report = await reclaim(b.keeper, b.platform, b.book)
        lines = b.ledger.lines[before:]
        decided = [line for line in lines if isinstance(line, Decided) and line.ref and line.ref.kind == "tree"]
        assert len(decided) <= TREE_LINES
        assert len(lines) <= TREE_LINES + 4 * len(report.plan.steps) + 10
        # What promises rest on is written, whatever else is left out.
        intents = [line for line in lines if isinstance(line, Intended)]
        assert len(intents) == len([line for line in lines if isinstance(line, Closed)]) == len(report.outcomes)
    assert any(line.ref == workload.ref for line in b.lines(Intended))
    assert any(line.ref == workload.ref for line in b.lines(Decided))


@virtual
async def test_a_tree_that_was_due_and_is_used_again_is_written(b: Harness) -> None:
    bench_of_trees(b)
    b.set_policy(mode=Mode.PLAN)
    tree = a_tree(b, 1, age=2 * HOUR)
    await reclaim(b.keeper, b.platform, b.book, act=False)
    tree.in_use = True
    await reclaim(b.keeper, b.platform, b.book, act=False)
    assert [line.action.value for line in b.lines(Decided) if line.ref == tree.ref] == ["remove", "keep"]
    assert b.lines(Complaint) == []


class Unreadable(SimulatedPlatform):
    number = MANY

    async def observe(self, scope: object) -> object:  # type: ignore[override]
        async for page in super().observe(scope):  # type: ignore[arg-type]
            unseen = tuple(Unseen(f"/tmp/tmp{n}", "its name has 4000 characters: " + "x" * 4000) for n in range(MANY))
            yield msgspec.structs.replace(page, unseen=unseen)


@virtual
async def test_a_line_of_a_pass_is_short_however_much_was_not_seen(b: Harness) -> None:
    b.platform = Unreadable(b.world, HERE)
    report = await reclaim(b.keeper, b.platform, b.book)
    assert len(report.survey.unseen) == MANY
    (line,) = b.lines(Passed)
    assert len(line.unseen) == UNSEEN_WRITTEN + 1
    assert line.unseen[-1] == f"and {MANY - UNSEEN_WRITTEN} more"
    assert len(msgspec.json.encode(line)) < 10_000
