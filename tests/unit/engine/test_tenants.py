"""Work that is started again onto a GPU that got a new tenant meanwhile (C9.4)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

from gpukeeper.engine.act import take
from gpukeeper.engine.observe import survey
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.model.decision import Action, Decision, Result
from gpukeeper.model.event import Closed, Complaint, WarningSent
from gpukeeper.model.policy import ClassSettings, GpuSettings
from gpukeeper.model.subject import State
from gpukeeper.platforms.simulated.world import Thing
from tests.unit.engine.harness import HOUR, MINUTE, POLICY, Harness, virtual

RULE = "taken_gpu"


def restarted(b: Harness, stopped: timedelta = 3 * HOUR, ago: timedelta = 10 * MINUTE, **facts: Any) -> Thing:
    """Ann's, stopped so long ago and started again."""
    known = {"previous_end": b.now() - stopped, "busy_until": b.now() + 9 * HOUR, "owner": "ann", "run": 2}
    return b.running("train-ann", ago, **(known | facts))


def tenant(b: Harness, ago: timedelta = HOUR, **facts: Any) -> Thing:
    """Bob's, on the same GPU."""
    return b.running("eval-bob", ago, **({"owner": "bob", "busy_until": b.now() + 9 * HOUR} | facts))


async def decided(b: Harness, thing: Thing) -> Decision:
    found = await survey(b.keeper, b.platform, b.book)
    return next(one for one in found.decisions if one.seen.ref == thing.ref)


@virtual
async def test_the_owner_of_restarted_work_is_warned_once_and_it_is_reported(b: Harness) -> None:
    mine, other = restarted(b), tenant(b)
    for _ in range(3):
        await reclaim(b.keeper, b.platform, b.book, act=True)
    (warning,) = b.lines(WarningSent)
    assert (warning.rule, warning.ref, warning.owner) == (RULE, mine.ref, "ann")
    assert f"{other.ref.path} of bob has held for 1h" in warning.message
    assert "no action is taken" in warning.message
    assert any("restarted on GPU GPU-0" in line.what for line in b.lines(Complaint))
    assert (await decided(b, mine)).rule == RULE
    assert (await decided(b, other)).rule != RULE
    assert (mine.state, other.state) == (State.RUNNING, State.RUNNING)


@virtual
async def test_the_setting_stops_it_one_pass_after_the_warning(b: Harness) -> None:
    b.set_policy(gpu=GpuSettings(stop_on_taken=True))
    mine, other = restarted(b), tenant(b)
    await reclaim(b.keeper, b.platform, b.book, act=True)
    assert mine.state is State.RUNNING
    assert "will be stopped at the next pass" in b.lines(WarningSent)[0].message
    await reclaim(b.keeper, b.platform, b.book, act=True)
    (closed,) = [line for line in b.lines(Closed) if line.rule == RULE]
    assert (closed.result, closed.action, closed.ref) == (Result.RECLAIMED, Action.STOP, mine.ref)
    assert (mine.state, other.state) == (State.ENDED, State.RUNNING)


@virtual
async def test_a_tenant_that_left_meanwhile_is_none(b: Harness) -> None:
    """The list knew it; the look before the step does not find it running any more."""
    b.set_policy(gpu=GpuSettings(stop_on_taken=True))
    mine, other = restarted(b), tenant(b)
    await reclaim(b.keeper, b.platform, b.book, act=True)
    step = await b.step(mine, Action.STOP)
    other.end(b.now(), None)
    assert (await take(b.keeper, b.platform, step, b.book, 1)).result is Result.CHANGED
    assert mine.state is State.RUNNING


@virtual
async def test_who_is_not_in_the_way_is_no_new_tenant(b: Harness) -> None:
    monitor = {"infrastructure": ClassSettings(untouchable=True)}
    b.set_policy(classes={**POLICY.classes, **monitor})
    begins = {"its own other work": {"owner": "ann"}, "a monitor": {"class_": "infrastructure"}}
    begins |= {"on another GPU": {"devices": ("GPU-1",)}, "ended": {"state": State.ENDED}}
    begins |= {"came after the restart": {"ago": 5 * MINUTE}, "came within its stop-hold": {"ago": 170 * MINUTE}}
    for words, facts in begins.items():
        mine, other = restarted(b), tenant(b, **facts)
        assert (await decided(b, mine)).rule != RULE, words
        for one in (mine, other):
            b.world.remove(one)


@virtual
async def test_tenants_are_forgotten_with_the_list_that_showed_them(b: Harness) -> None:
    for number in range(20):
        tenant(b, devices=(f"MIG-{number}",))
        await survey(b.keeper, b.platform, b.book)
        for thing in list(b.world.things[b.platform.name, b.platform.place].values()):
            b.world.remove(thing)
    await survey(b.keeper, b.platform, b.book)
    assert b.keeper.tenants.at((b.platform.name, b.platform.place)) == {}


def test_the_setting_is_off_by_default() -> None:
    assert not msgspec.structs.replace(POLICY).gpu.stop_on_taken
