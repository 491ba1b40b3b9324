"""The demo's week: what it counts as a wrong step is what the simulated world knows, not what gpukeeper believes."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from gpukeeper.model.decision import Action, Decision, Step, Verdict
from gpukeeper.model.event import Event, Held, Intended, Released
from gpukeeper.model.subject import Hold, Outcome, Shape, Subject
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from gpukeeper.platforms.simulated.demo import wrong_steps
from gpukeeper.platforms.simulated.users import SimulatedUsers, places
from gpukeeper.platforms.simulated.world import Thing, VirtualClock, VirtualLoop, World

HOUR = timedelta(hours=1)


class _Acted:
    """One act on one job of a cluster, as it truly was."""

    def __init__(self, action: Action, rule: str, state: str, *lines: type[Event]) -> None:
        loop = VirtualLoop()
        self.world = World(1, VirtualClock(loop), tuple(one for one in places() if one.platform == "kubernetes"))
        users, now = SimulatedUsers(self.world, HOUR), self.world.clock.now()
        thing: Thing = users._root(self.world.places[0], "trainjob")
        thing.needed = "its owner Workflow exists" if state == "needed" else None
        if state != "created":
            thing.start(now, HOUR if state == "busy" else timedelta())
        if state in ("ended", "needed"):
            thing.end(now, Outcome.SUCCEEDED)
        self.lines: list[Event] = []
        hold = Hold("ann", now, now + HOUR)
        for kind in lines:
            self.lines.append(
                Held(at=now, ref=thing.ref, hold=hold) if kind is Held else Released(at=now, ref=thing.ref)
            )
        facts = {"action": action, "rule": rule, "reason": "", "incarnation": thing.incarnation}
        self.lines.append(Intended(at=now, ref=thing.ref, step="1.1", pass_id=1, **facts))  # type: ignore[arg-type]
        platform = SimulatedPlatform(self.world, self.world.places[0])

        async def act() -> None:
            fresh = await platform.read(thing.ref)
            assert isinstance(fresh, Subject)
            assert fresh.shape is Shape.WORKLOAD
            decision = Decision(seen=fresh.seen, action=action, rule=rule, reason="", verdict=Verdict.DUE)
            await platform.act(Step("1.1", decision), fresh)

        loop.run_until_complete(asyncio.wait_for(act(), None))
        loop.close()


@pytest.mark.parametrize(
    ("action", "rule", "state", "wrong"),
    [
        (Action.REMOVE, "retention", "ended", False),
        (Action.REMOVE, "retention", "idle", True),  # it runs
        (Action.REMOVE, "retention", "needed", True),
        (Action.REMOVE, "restart_loop", "busy", False),  # that rule ends what runs
        (Action.STOP, "idle", "idle", False),
        (Action.STOP, "idle", "busy", True),
        (Action.STOP, "max_runtime", "busy", False),
    ],
)
def test_a_wrong_step_is_found_by_what_was_true(action: Action, rule: str, state: str, wrong: bool) -> None:
    acted = _Acted(action, rule, state)
    assert [entry.effect for entry in acted.world.log if entry.kind == "act"] == ["done"]
    assert wrong_steps(acted.world, acted.lines) == (["1.1"] if wrong else [])


@pytest.mark.parametrize(
    ("rule", "lines", "wrong"),
    [
        ("idle", (Held,), True),
        ("idle", (Held, Released), False),
        ("max_runtime", (Held,), False),  # a user's hold does not suspend it
    ],
)
def test_a_step_on_what_its_owner_holds_is_wrong(rule: str, lines: tuple[type[Event], ...], wrong: bool) -> None:
    acted = _Acted(Action.STOP, rule, "idle", *lines)
    assert wrong_steps(acted.world, acted.lines) == (["1.1"] if wrong else [])


def test_what_changed_nothing_is_not_wrong() -> None:
    acted = _Acted(Action.REMOVE, "retention", "idle")
    acted.world.log[-2:] = [entry for entry in acted.world.log[-2:] if entry.kind != "act"]
    acted.world.note("act", step="1.1", action="remove", state="running", effect="refused")
    assert wrong_steps(acted.world, acted.lines) == []
