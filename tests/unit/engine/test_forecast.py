"""What is forecast is what passes do: with `schedule.at` a warning or a stop comes when a pass acts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gpukeeper.engine.schedule import opening
from gpukeeper.engine.view import read_subject
from gpukeeper.lifecycle.forecast import ahead
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, View
from gpukeeper.model.event import Closed, WarningSent
from gpukeeper.model.policy import ClassSettings, Schedule
from gpukeeper.model.subject import Hold, Memory
from tests.unit.engine.harness import DAY, HOUR, MINUTE, Harness, virtual
from tests.unit.engine.test_loop import serve
from tests.unit.engine.test_rare_passes import NIGHTLY, notebook
from tests.unit.engine.test_schedule import BERLIN, zone
from tests.unit.lifecycle.examples import POLICY, quiet, subject

EVERY = tuple(Action)


def utc(words: str) -> datetime:
    return datetime.fromisoformat(words).replace(tzinfo=UTC)


def idle_since(now: datetime, *holds: Hold) -> View:
    """Quiet for 90 minutes; its class allows 30."""
    shift = now - quiet()[0].start - 89 * MINUTE
    series = tuple(msgspec.structs.replace(one, start=one.start + shift) for one in quiet())
    return View(subject(class_="managed", started=now - 3 * HOUR), series, Memory(holds=holds))


def forecast(view: View, schedule: Schedule, now: datetime) -> list[tuple[str, str]]:
    classes = {"managed": ClassSettings(idle=30 * MINUTE)}
    book = Rulebook(msgspec.structs.replace(POLICY, schedule=schedule, classes=classes))
    return [(f"{one.at:%d %H:%M}", one.action) for one in ahead(view, book, now, EVERY, opening(schedule))]


def test_every_step_is_forecast_for_the_next_night_on_which_clocks_go_forward() -> None:
    """On the 29th half past two does not exist: the pass acts at three, local time, which is 01:00 UTC."""
    now = utc("2026-03-27 12:00")
    with zone(BERLIN):
        found = forecast(idle_since(now), Schedule(at="30 2 * * *"), now)
    assert found == [("28 01:30", "warn"), ("29 01:00", "warn"), ("30 00:30", "stop"), ("31 00:30", "remove")]


def test_every_step_is_forecast_once_a_night_on_which_clocks_go_back() -> None:
    """On the 25th half past two comes twice, and the first one counts."""
    now = utc("2026-10-23 12:00")
    with zone(BERLIN):
        found = forecast(idle_since(now), Schedule(at="30 2 * * *"), now)
    assert found == [("24 00:30", "warn"), ("25 00:30", "warn"), ("26 01:30", "stop"), ("27 01:30", "remove")]


def test_after_a_hold_the_warnings_come_again_in_the_forecast() -> None:
    now = utc("2026-06-10 12:00")
    held = Hold("ann", now - HOUR, now + 20 * HOUR)
    with zone("UTC0"):
        found = forecast(idle_since(now, held), Schedule(at="0 3 * * *"), now)
    assert found == [("12 03:00", "warn"), ("13 03:00", "warn"), ("14 03:00", "stop"), ("15 03:00", "remove")]


def test_what_a_schedule_puts_off_for_more_than_two_months_is_not_forecast() -> None:
    now = utc("2026-06-10 12:00")
    with zone("UTC0"):
        assert forecast(idle_since(now), Schedule(at="0 3 1 1 *"), now) == []
        assert forecast(idle_since(now), Schedule(), now)[0] == ("10 12:00", "warn")


@pytest.mark.parametrize("schedule", [NIGHTLY, Schedule(every=30 * MINUTE)], ids=["nightly", "always"])
def test_the_passes_do_what_was_forecast(schedule: Schedule) -> None:
    @virtual
    async def story(b: Harness) -> None:
        thing = notebook(b, schedule)
        await serve(b, 2 * HOUR if schedule.at else 26 * MINUTE)
        found = await read_subject(b.keeper, b.book, thing.ref)
        assert found is not None
        expected = ahead(found.view, b.book, b.now(), b.platform.guards, opening(schedule))
        await serve(b, 4 * DAY)
        done = [
            (line.at, Action.WARN if isinstance(line, WarningSent) else line.action)
            for line in b.ledger.lines
            if isinstance(line, WarningSent | Closed)
        ]
        assert [one.action for one in expected] == [action for _, action in done[: len(expected)]]
        assert expected[-1].action is Action.REMOVE
        for number, (one, (at, _)) in enumerate(zip(expected, done, strict=False), 1):
            # Never before, and later only by passes: each step has one of its own.
            assert timedelta() <= at - one.at <= number * schedule.every, (one, at)

    story()
