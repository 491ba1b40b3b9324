"""A forecast comes true: passes over work that stays idle do what was forecast, each step in the pass that it named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec
from hypothesis import Phase, given, note, reject, settings
from hypothesis import strategies as st

from gpukeeper.engine.schedule import opening
from gpukeeper.engine.view import read_subject
from gpukeeper.lifecycle.forecast import UpcomingAction, ahead
from gpukeeper.lifecycle.rules import idle
from gpukeeper.model.decision import Action
from gpukeeper.model.event import Closed, Held, WarningSent
from gpukeeper.model.policy import ClassSettings, Schedule
from gpukeeper.model.series import Sample
from gpukeeper.model.subject import Hold, State, Subject
from tests.unit.engine.harness import DAY, HERE, HOUR, MINUTE, Harness, virtual
from tests.unit.engine.test_loop import Quiet, serve

NONE = timedelta()
SPAN = 5 * HOUR


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """`asked`: when the forecast is made. Before it: use for `used`, a failed meter for some minutes from `fails` on, a
    hold that ends `held` after it begins. From then on it is idle."""

    idle: timedelta
    max_runtime: timedelta | None
    grace: timedelta
    ran: timedelta
    used: timedelta
    fails: timedelta | None
    held: timedelta | None
    asked: timedelta


minutes = st.integers(0, 60).map(lambda n: n * MINUTE)
stories = st.builds(
    Story,
    idle=st.sampled_from([10 * MINUTE, 30 * MINUTE, HOUR]),
    max_runtime=st.sampled_from([None, 90 * MINUTE, 3 * HOUR]),
    grace=st.sampled_from([NONE, 15 * MINUTE, HOUR]),
    ran=st.sampled_from([NONE, 8 * MINUTE, HOUR]),
    used=minutes,
    fails=st.none() | minutes,
    held=st.none() | st.sampled_from([20 * MINUTE, 2 * HOUR]),
    asked=st.integers(130, 3600).map(lambda n: timedelta(seconds=n)),
)


async def fails(subjects: Sequence[Subject]) -> list[Sample]:
    return []


@settings(phases=(Phase.explicit, Phase.generate))  # a failure is short enough, and shrinking takes minutes
@given(stories)
def test_a_forecast_comes_true(one: Story) -> None:
    note(str(one))
    virtual(lambda b: told_and_done(b, one))()


async def told_and_done(b: Harness, one: Story) -> None:
    begin, every = b.now(), MINUTE
    b.platform = Quiet(b.world, HERE)
    limits = ClassSettings(idle=one.idle, max_runtime=one.max_runtime, start_grace=one.grace, hold=DAY)
    b.set_policy(schedule=Schedule(every=every), classes={"docker": limits})
    thing = b.running("notebook", one.ran)
    thing.busy_until = begin + min(one.used, one.asked)
    if one.held is not None:
        held = Hold("ann", begin, begin + one.held)
        await b.ledger.append([Held(at=begin, ref=thing.ref, hold=held, by="ann")])
    if one.fails is not None and one.fails < one.asked - 5 * MINUTE:
        read = b.meter.read
        b.loop.call_later(one.fails.total_seconds(), setattr, b.meter, "read", fails)
        b.loop.call_later(one.asked.total_seconds() - 130, setattr, b.meter, "read", read)
    told: list[UpcomingAction] = []

    async def ask() -> None:
        await asyncio.sleep(one.asked.total_seconds())
        found = await read_subject(b.keeper, b.book, thing.ref)
        if found is None or found.view.subject.state is not State.RUNNING:
            reject()  # its end came before the question
        told.extend(ahead(found.view, b.book, b.now(), b.platform.guards, opening(b.policy.schedule)))

    asking = asyncio.create_task(ask())
    await serve(b, SPAN)
    await asking
    done = _done(b, begin + one.asked)
    expected = {f"{step.action} {step.stage} {step.rule}": step.at for step in told}
    # Each step has a pass of its own: of two that are due at once the second comes one later. What a warning announces
    # is counted from its pass.
    assert expected.keys() == done.keys()
    for number, (words, at) in enumerate(done.items(), 1):
        assert timedelta() <= at - expected[words] <= number * every, (words, at)


def _done(b: Harness, since: datetime) -> dict[str, datetime]:
    """Up to the stop; of what was idle with its removal, which its class wants."""
    found: dict[str, datetime] = {}
    for line in b.ledger.lines:
        if isinstance(line, WarningSent) and line.at >= since:
            found[f"warn {line.stage} {line.rule}"] = line.at
        elif isinstance(line, Closed) and line.at >= since:
            found[f"{line.action} 0 {line.rule}"] = line.at
            if line.rule != idle.NAME or line.action is Action.REMOVE:
                return found
    return found
