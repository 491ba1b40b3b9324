"""Idle work where passes act rarely: a warning counts as long as the idle period that it was about goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from gpukeeper.engine.reclaim import reclaim
from gpukeeper.model.decision import Action, Verdict
from gpukeeper.model.event import Closed, Event, Held, Released, WarningSent
from gpukeeper.model.policy import ClassSettings, Schedule
from gpukeeper.model.subject import Hold, State, Subject
from gpukeeper.platforms.simulated.world import BEGIN
from tests.unit.engine.harness import DAY, HERE, HOUR, MINUTE, Harness, virtual
from tests.unit.engine.test_loop import Quiet, serve

FIRST = 19 * HOUR  # after the first pass: the moment of the schedule
MOMENT = (BEGIN + FIRST).astimezone()
NIGHTLY = Schedule(every=30 * MINUTE, at=f"{MOMENT.minute} {MOMENT.hour} * * *")
AFTERWARDS = (FIRST + DAY + 2 * HOUR).total_seconds()  # two hours after the second night's pass


def notebook(b: Harness, schedule: Schedule) -> Any:
    b.platform = Quiet(b.world, HERE)
    b.set_policy(schedule=schedule, classes={"docker": ClassSettings(idle=30 * MINUTE)})
    return b.running("notebook", HOUR)


def steps(b: Harness) -> list[tuple[int, str]]:
    """The night of each warning, stop and removal, counted from 1."""
    lines = [line for line in b.ledger.lines if isinstance(line, WarningSent | Closed)]
    return [
        ((line.at - BEGIN - FIRST) // DAY + 1, f"warn {line.stage}" if isinstance(line, WarningSent) else line.action)
        for line in lines
    ]


@virtual
async def test_one_acting_pass_a_night_warns_twice_and_stops_in_the_third(b: Harness) -> None:
    notebook(b, NIGHTLY)
    await serve(b, 4 * DAY)
    assert steps(b) == [(1, "warn 1"), (2, "warn 2"), (3, Action.STOP), (4, Action.REMOVE)]


@virtual
async def test_use_between_two_nights_ends_the_period_that_was_warned_about(b: Harness) -> None:
    thing = notebook(b, NIGHTLY)

    def use() -> None:
        thing.busy_until = b.now() + HOUR

    b.loop.call_later(AFTERWARDS, use)
    await serve(b, 4 * DAY)
    assert steps(b) == [(1, "warn 1"), (2, "warn 2"), (3, "warn 1"), (4, "warn 2")]


@virtual
async def test_after_a_gap_between_two_nights_the_new_time_is_announced_a_night_before_the_stop(b: Harness) -> None:
    """Whether it was used in that hour is unknown, so what was announced is void and the new time is announced."""
    notebook(b, NIGHTLY)
    read = b.meter.read

    async def fails(subjects: Sequence[Subject]) -> Any:
        return []

    b.loop.call_later(AFTERWARDS, setattr, b.meter, "read", fails)
    b.loop.call_later(AFTERWARDS + HOUR.total_seconds(), setattr, b.meter, "read", read)
    await serve(b, 4 * DAY)
    assert steps(b) == [(1, "warn 1"), (2, "warn 2"), (3, "warn 2"), (4, Action.STOP)]


@virtual
async def test_passes_two_hours_apart_warn_twice_and_stop(b: Harness) -> None:
    notebook(b, Schedule(every=2 * HOUR))
    await serve(b, 7 * HOUR)
    assert [what for _, what in steps(b)] == ["warn 1", "warn 2", Action.STOP]


@virtual
async def test_a_schedule_with_several_moments_a_night_takes_one_step_at_each(b: Harness) -> None:
    notebook(b, Schedule(at=f"*/10 {MOMENT.hour} * * *"))
    await serve(b, DAY)
    lines = [line.at - BEGIN - FIRST for line in b.ledger.lines if isinstance(line, WarningSent | Closed)]
    assert steps(b) == [(1, "warn 1"), (1, "warn 2"), (1, Action.STOP), (1, Action.REMOVE)]
    assert lines == [0 * MINUTE, 10 * MINUTE, 20 * MINUTE, 30 * MINUTE]


@virtual
async def test_acting_passes_a_week_apart_warn_and_never_stop(b: Harness) -> None:
    """Nobody expects a stop that was announced for last week. `policy check` warns about such a schedule."""
    thing = notebook(b, Schedule(every=HOUR, at=f"{MOMENT.minute} {MOMENT.hour} * * {MOMENT.isoweekday() % 7}"))
    await serve(b, 9 * DAY)
    assert steps(b) == [(1, "warn 1"), (8, "warn 1")]
    assert thing.state is State.RUNNING


@virtual
async def test_without_serve_nothing_is_measured_and_nobody_is_warned(b: Harness) -> None:
    thing = notebook(b, NIGHTLY)
    for _ in range(4):
        await reclaim(b.keeper, b.platform, b.book)
        await asyncio.sleep(DAY.total_seconds())
    assert (await b.decide())["notebook"].verdict is Verdict.UNKNOWN
    assert (steps(b), thing.state) == ([], State.RUNNING)


@virtual
async def test_warnings_before_a_hold_do_not_stop_it_in_the_night_after(b: Harness) -> None:
    """The hold outlasts the time that was announced, and ends before the next acting pass."""
    thing = notebook(b, NIGHTLY)

    def hold() -> None:
        one = Hold("ann", b.now(), b.now() + 20 * HOUR)
        b.loop.create_task(b.ledger.append([Held(at=b.now(), ref=thing.ref, owner="ann", hold=one)]))

    b.loop.call_later(AFTERWARDS, hold)
    await serve(b, 5 * DAY)
    assert steps(b) == [(1, "warn 1"), (2, "warn 2"), (3, "warn 1"), (4, "warn 2"), (5, Action.STOP)]


@virtual
async def test_a_release_in_the_daytime_begins_the_warnings_again(b: Harness) -> None:
    thing = notebook(b, NIGHTLY)

    def append(*lines: Event) -> None:
        b.loop.create_task(b.ledger.append(lines))

    def hold() -> None:
        one = Hold("ann", b.now(), b.now() + 3 * DAY)
        append(Held(at=b.now(), ref=thing.ref, owner="ann", hold=one))

    def release() -> None:
        append(Released(at=b.now(), ref=thing.ref, owner="ann", by="ann"))

    b.set_policy(classes={"docker": ClassSettings(idle=30 * MINUTE, hold=3 * DAY)})
    b.loop.call_later(AFTERWARDS, hold)
    b.loop.call_later(AFTERWARDS + HOUR.total_seconds(), release)
    await serve(b, 4 * DAY)
    assert steps(b) == [(1, "warn 1"), (2, "warn 2"), (3, "warn 1"), (4, "warn 2")]


@virtual
async def test_a_day_of_minutes_is_read_only_for_what_was_not_used(b: Harness) -> None:
    b.set_policy(schedule=NIGHTLY, classes={"docker": ClassSettings(idle=30 * MINUTE)})
    quiet, busy = b.running("quiet", HOUR), b.running("busy", HOUR)
    busy.busy_until = b.now() + 3 * DAY
    reads: list[tuple[Sequence[str], timedelta]] = []
    series = b.keeper.signals.series

    async def noted(keys: Sequence[str], since: datetime, until: datetime) -> Any:
        reads.append((tuple(keys), until - since))
        return await series(keys, since, until)

    await serve(b, 3 * HOUR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(b.keeper.signals, "series", noted)
        await serve(b, HOUR)
    far = {key for keys, span in reads if span > DAY for key in keys}
    near = {key for keys, span in reads if span < DAY for key in keys}
    assert (far, near) == ({quiet.ref.key}, {quiet.ref.key, busy.ref.key})
