"""What a daemon remembers between passes: how long, how much, and that each part forgets by itself."""

from __future__ import annotations

import asyncio
from dataclasses import FrozenInstanceError
from datetime import timedelta

import msgspec
import pytest

from gpukeeper.engine.memory import (
    BACK_OFF,
    RECENT_END,
    BackOff,
    Followed,
    FollowedRemoval,
    GpuCheck,
    GpuChecks,
    LastPasses,
    WorkBeside,
)
from gpukeeper.model.decision import Action, Decision, Result, Step
from gpukeeper.model.event import Closed
from gpukeeper.model.subject import Gone, Ref, Seen, Shape
from tests.unit.engine.harness import Harness, virtual
from tests.unit.lifecycle.examples import NOW, subject

HERE, THERE = ("docker", "node-3"), ("docker", "node-4")
MINUTE = timedelta(minutes=1)


def ref(name: str, place: tuple[str, str] = HERE) -> Ref:
    return Ref(*place, "container", name, f"u-{name}")


def closed(name: str, result: Result, ago: timedelta = timedelta()) -> Closed:
    return Closed(at=NOW - ago, ref=ref(name), step="1.1", action=Action.REMOVE, rule="idle", result=result, reason="")


@virtual
async def test_the_ports_of_a_keeper_do_not_change(b: Harness) -> None:
    with pytest.raises(FrozenInstanceError):
        b.keeper.ledger = None  # type: ignore[misc,assignment]


@virtual
async def test_other_ports_share_what_is_remembered(b: Harness) -> None:
    before = b.keeper
    b.change_ports(gpus=None)
    assert b.keeper is not before
    assert b.keeper.back_off is before.back_off


def test_a_step_without_effect_is_remembered_until_it_may_be_tried_again() -> None:
    seen = BackOff()
    for result in Result:
        seen.note(closed(result.name, result))
    in_vain = {Result.REFUSED, Result.STILL_THERE, Result.NOT_CAPTURED}
    assert set(seen.keys()) == {ref(one.name).key for one in in_vain}
    seen.note(closed("REFUSED", Result.RECLAIMED))
    assert seen.failed(ref("REFUSED").key, NOW) is None
    key = ref("STILL_THERE").key
    assert seen.failed(key, NOW + BACK_OFF - MINUTE) == (NOW, BACK_OFF, "")
    assert seen.failed(key, NOW + BACK_OFF) is None
    assert seen.failed(key, NOW - MINUTE) is None, "the clock was turned back"
    seen.forget(NOW + BACK_OFF)
    assert list(seen.keys()) == []


def test_what_is_refused_again_for_the_same_reason_waits_twice_as_long_up_to_a_day() -> None:
    seen, at, waits = BackOff(), NOW, []
    for _ in range(10):
        seen.forget(at)
        seen.note(msgspec.structs.replace(closed("base", Result.REFUSED), at=at, reason="it has several names"))
        failed = seen.failed(ref("base").key, at)
        assert failed is not None
        waits.append(failed.wait)
        at += failed.wait + 5 * MINUTE
    assert waits == [min(BACK_OFF * 2**number, 1440 * MINUTE) for number in range(10)]
    seen.note(msgspec.structs.replace(closed("base", Result.REFUSED), at=at, reason="another reason"))
    assert seen.failed(ref("base").key, at) == (at, BACK_OFF, "another reason")
    at += 2 * BACK_OFF
    seen.note(msgspec.structs.replace(closed("base", Result.REFUSED), at=at, reason="another reason"))
    assert seen.failed(ref("base").key, at) == (at, BACK_OFF, "another reason"), "also if nothing was forgotten since"
    for _ in range(3):
        seen.note(msgspec.structs.replace(closed("late", Result.STILL_THERE), at=at))
    assert seen.failed(ref("late").key, at) == (at, BACK_OFF, ""), "what takes long may be over soon"
    seen.forget(at + 2 * BACK_OFF)
    assert list(seen.keys()) == []


def tree_step(name: str, place: tuple[str, str] = HERE, rule: str = "temporary_tree") -> Step:
    return Step(
        "1.1",
        Decision(seen=Seen(Ref(*place, "tree", name, name), "i", "v", NOW), action=Action.REMOVE, rule=rule, reason=""),
    )


def test_work_beside_a_tree_counts_for_its_directory_and_until_the_next_pass() -> None:
    seen, busy = WorkBeside(), subject(shape=Shape.TREE, busy="a job")
    assert seen.note(tree_step("/tmp/a", rule="leftover_tree"), busy) is None
    assert seen.note(tree_step("/tmp/a"), subject(shape=Shape.TREE)) is None
    assert seen.note(tree_step("/tmp/a"), busy) == "work runs beside it: a job"
    assert seen.note(tree_step("/tmp/a", THERE), busy) == "work runs beside it: a job"
    assert seen.found(tree_step("/tmp/b")) == ("docker/node-3/tmp", "work runs beside it: a job")
    assert seen.found(tree_step("/scratch/b")) is None
    assert seen.found(tree_step("/tmp/b", rule="leftover_tree")) is None
    seen.forget(HERE)
    assert (seen.found(tree_step("/tmp/b")), seen.found(tree_step("/tmp/b", THERE)) is None) == (None, False)


def test_only_removals_with_an_open_intent_are_followed() -> None:
    seen = Followed()
    for number in range(20):
        seen.note(f"1.{number}", FollowedRemoval(ref(f"n{number}"), 1, 0))
    seen.note("2.1", FollowedRemoval(ref("there", THERE), 2, 0))
    seen.keep_only(HERE, {"1.7"})
    assert sorted(seen.keys()) == [ref("n7").key, ref("there", THERE).key]
    assert seen.take("2.1") == FollowedRemoval(ref("there", THERE), 2, 0)
    assert (seen.take("2.1"), seen.take("1.3")) == (None, None)


def test_of_each_place_the_last_pass_is_remembered() -> None:
    seen = LastPasses()
    assert (seen.counted(HERE), seen.breaker(HERE)) == (None, None)
    seen.count(HERE, 7, 3)
    seen.set_breaker(HERE, "too much")
    assert (seen.counted(HERE), seen.breaker(HERE), seen.breaker(THERE)) == ((7, 3), "too much", None)
    seen.set_breaker(HERE, None)
    assert seen.breaker(HERE) is None


def test_a_failure_is_new_once() -> None:
    seen = LastPasses()
    said = [seen.set_failure(HERE, why) for why in (None, "a", "a", "b", None, "b")]
    assert said == [False, True, False, True, False, True]
    assert seen.failures == {HERE: "b"}


def test_a_checked_end_is_remembered_as_long_as_it_could_be_checked_again() -> None:
    checks = GpuChecks()
    checks.prove("key", "run-1", NOW)
    assert (checks.is_proven("key", "run-1"), checks.is_proven("key", "run-2")) == (True, False)
    checks.forget(NOW + RECENT_END - MINUTE)
    assert list(checks.keys()) == ["key"]
    checks.forget(NOW + RECENT_END)
    assert list(checks.keys()) == []


@virtual
async def test_a_finished_check_is_taken_once(b: Harness) -> None:
    async def over() -> None: ...

    checks = GpuChecks()
    for uuid in ("GPU-0", "GPU-1", "GPU-2"):
        checks.under_way[uuid] = GpuCheck(uuid, NOW)
    checks.under_way["GPU-0"].task = asyncio.create_task(over())  # type: ignore[assignment]
    checks.under_way["GPU-1"].task = asyncio.create_task(asyncio.sleep(60))  # type: ignore[arg-type]
    await asyncio.sleep(1)
    assert [check.uuid for check in checks.take_finished()] == ["GPU-0"]
    assert [check.uuid for check in checks.take_finished()] == []
    assert sorted(checks.under_way) == ["GPU-1", "GPU-2"]
    await asyncio.sleep(60)


@virtual
async def test_what_is_listed_again_or_believed_to_be_gone_is_not_missing(b: Harness) -> None:
    absences = b.keeper.absences
    absences.patience = 10 * MINUTE
    lost = [ref(f"n{number}") for number in range(20)]
    await absences.record(b.keeper, b.platform, lost, [], believe=False)
    await absences.record(b.keeper, b.platform, lost[:3], [Gone(lost[0], b.now(), announced=True)], believe=False)
    assert sorted(absences.keys()) == [lost[1].key, lost[2].key]
    await asyncio.sleep(11 * 60)
    await absences.record(b.keeper, b.platform, lost[1:3], [Gone(lost[1], b.now())], believe=False)
    assert list(absences.keys()) == [lost[2].key]
