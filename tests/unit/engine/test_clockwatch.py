"""A clock that jumped: what a process sees of it, and what the next one knows. The clock here jumps by less than a
daemon may have been down, so that only the record in the ledger can show it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from gpukeeper.engine import requests
from gpukeeper.engine.keeper import CLOCK_SETTLE, ClockWatch, behind_the_ledger
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.reclaim import look_and_plan, reclaim
from gpukeeper.engine.requests import Request
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import Passed
from gpukeeper.model.subject import ClockRecord
from gpukeeper.platforms.simulated.world import BEGIN, Thing
from tests.unit.engine.harness import DAY, HERE, HOUR, MINUTE, Harness, virtual
from tests.unit.engine.test_loop import Quiet

JUMPED = "The clock jumped, so ages are not trusted for {} more. Nothing was touched."


async def serve(b: Harness, span: timedelta) -> None:
    stop = asyncio.Event()
    b.loop.call_later(span.total_seconds(), stop.set)
    await watch(Watch(b.keeper, lambda: b.book, stop))


def place(b: Harness) -> Thing:
    """What ended half an hour ago, and is removed after an hour: by a clock that is an hour ahead, now."""
    b.platform = Quiet(b.world, HERE)
    return b.ended("eval", ago=30 * MINUTE)


def is_there(b: Harness, thing: Thing) -> bool:
    return b.world.find(thing.ref) is thing


def breakers(b: Harness) -> list[str | None]:
    return [line.breaker for line in b.lines(Passed)]


@virtual
async def test_a_restart_does_not_forget_that_the_clock_jumped(b: Harness) -> None:
    """An hour ahead, breaker open, killed, started again: what the retention keeps is kept."""
    thing = place(b)
    b.loop.call_later(250, lambda: setattr(b.clock, "skew", HOUR))
    await serve(b, 6 * MINUTE)
    assert breakers(b) == [None, JUMPED.format("15m")]
    b.crash()
    await serve(b, 8 * MINUTE)
    assert is_there(b, thing)
    assert breakers(b)[2:] == [JUMPED.format("14m"), JUMPED.format("9m")], "the same doubt goes on"
    b.crash()
    await serve(b, 12 * MINUTE)
    assert not is_there(b, thing), "it ends; then a wrong time is accepted"
    assert b.ledger.clocks["boot-1"].doubted_until is None


@virtual
async def test_a_crash_before_the_jump_was_noticed_hides_nothing(b: Harness) -> None:
    thing = place(b)
    await serve(b, MINUTE)
    b.crash()
    b.clock.skew = HOUR
    await asyncio.sleep(60)
    await serve(b, 14 * MINUTE)
    assert is_there(b, thing)
    assert breakers(b)[1] == JUMPED.format("15m")


@virtual
async def test_a_clock_that_was_corrected_is_doubted_again(b: Harness) -> None:
    """What was written by the wrong clock is in the ledger, with wrong times."""
    place(b)
    await serve(b, MINUTE)
    b.clock.skew = HOUR
    b.crash()
    await serve(b, MINUTE)
    await asyncio.sleep(8 * 60)
    b.clock.skew = timedelta()
    b.crash()
    await serve(b, MINUTE)
    assert breakers(b)[1:] == [JUMPED.format("15m")] * 2


@virtual
async def test_a_correction_while_nothing_runs_is_doubted_in_every_later_pass(b: Harness) -> None:
    """Behind the ledger it is only in the first pass: then there are new lines."""
    place(b)
    b.clock.skew = HOUR
    await serve(b, MINUTE)
    b.clock.skew = timedelta()
    b.crash()
    await serve(b, 14 * MINUTE)
    assert None not in breakers(b)[1:]


@virtual
async def test_a_small_correction_is_no_jump_and_many_add_up_to_none(b: Harness) -> None:
    place(b)
    await serve(b, MINUTE)
    for _ in range(10):
        b.clock.skew += 40 * timedelta(seconds=1)
        await serve(b, MINUTE)
    b.crash()
    await serve(b, MINUTE)
    assert set(breakers(b)) == {None}


@virtual
async def test_after_a_reboot_a_doubt_that_was_not_over_begins_anew(b: Harness) -> None:
    """The steady clock begins at 0: how much of the time is over is unknown."""
    thing = place(b)
    await serve(b, MINUTE)
    b.clock.skew = HOUR
    b.crash()
    await serve(b, MINUTE)
    await asyncio.sleep(10 * 60)
    b.crash()
    b.boot = "boot-2"
    await serve(b, 14 * MINUTE)
    assert is_there(b, thing)
    assert breakers(b)[2] == JUMPED.format("15m")
    assert b.ledger.clocks["boot-1"].doubted_until is not None
    b.crash()
    b.boot = "boot-3"
    await asyncio.sleep(60)
    await serve(b, MINUTE)
    assert breakers(b)[-1] == JUMPED.format("15m"), "nor was the second one over"


@virtual
async def test_a_reboot_alone_is_no_reason_to_doubt(b: Harness) -> None:
    thing = place(b)
    await serve(b, MINUTE)
    await asyncio.sleep(1200)
    b.crash()
    b.boot = "boot-2"
    b.ledger.clocks = {"boot-1": ClockRecord(zero=BEGIN - 20 * DAY, watched=True)}
    await asyncio.sleep(1200)
    await serve(b, MINUTE)
    assert breakers(b) == [None, None]
    assert not is_there(b, thing)


@pytest.mark.parametrize(("off", "doubted"), [(25 * MINUTE, False), (40 * MINUTE, True)])
def test_a_machine_that_seems_to_have_been_off_for_long_is_doubted_once(off: timedelta, doubted: bool) -> None:
    """Off, or set ahead while it rebooted: nothing can tell. What other processes wrote since the boot proves
    nothing."""

    async def story(b: Harness) -> None:
        place(b)
        b.ledger.clocks = {"boot-0": ClockRecord(zero=BEGIN - 9 * DAY, watched=True)}
        await b.ledger.append([passed(-off)])  # the steady clock is 0 at BEGIN
        await asyncio.sleep(20 * 60)
        await reclaim(b.keeper, b.platform, b.book, act=False)
        b.crash()
        await serve(b, MINUTE)
        assert breakers(b)[1:] == [None, JUMPED.format("15m") if doubted else None]
        await asyncio.sleep(3 * 3600)
        b.crash()
        await serve(b, MINUTE)
        assert breakers(b)[-1] is None, "the same boot: the steady clock proves that nothing jumped"

    virtual(story)()


@virtual
async def test_a_first_start_doubts_nothing(b: Harness) -> None:
    thing = b.ended("eval")
    b.platform = Quiet(b.world, HERE)
    await serve(b, MINUTE)
    assert not is_there(b, thing)
    assert b.ledger.clocks == {"boot-1": ClockRecord(zero=BEGIN, watched=True)}


@virtual
async def test_the_doubt_of_another_machine_counts_once(b: Harness) -> None:
    """Two machines with one ledger: whether the other one is this one before a reboot is unknown. Both end."""
    place(b)
    b.ledger.clocks = {"of-another": ClockRecord(zero=BEGIN - DAY, doubted_until=90_000.0, watched=True)}
    await reclaim(b.keeper, b.platform, b.book)
    assert breakers(b) == [JUMPED.format("15m")]
    for minutes in (5, 5, 5):
        await b.ledger.record_clock("of-another", b.ledger.clocks["of-another"])
        b.crash()
        await asyncio.sleep(minutes * 60)
        await reclaim(b.keeper, b.platform, b.book)
    assert breakers(b)[-1] is None, "its own doubt is over, whatever the other one records"


@virtual
async def test_a_single_apply_knows_it_too_and_many_of_them_see_the_end(b: Harness) -> None:
    """From cron: no process lives as long as the doubt."""
    thing = place(b)
    await reclaim(b.keeper, b.platform, b.book)
    b.clock.skew = HOUR
    for _ in range(4):
        await asyncio.sleep(270)
        b.crash()
        report = await reclaim(b.keeper, b.platform, b.book)
        assert report.reclaimed == []
    await asyncio.sleep(270)
    b.crash()
    await reclaim(b.keeper, b.platform, b.book)
    assert not is_there(b, thing)


@virtual
async def test_a_plan_shows_it_and_writes_nothing(b: Harness) -> None:
    place(b)
    await reclaim(b.keeper, b.platform, b.book)
    records = dict(b.ledger.clocks)
    b.clock.skew = HOUR
    b.crash()
    report = await look_and_plan(b.keeper, b.platform, b.book)
    assert report.plan.breaker == JUMPED.format("15m")
    assert b.ledger.clocks == records


@virtual
async def test_a_request_of_a_user_is_refused_by_a_new_process_as_by_the_old_one(b: Harness) -> None:
    thing = place(b)
    await reclaim(b.keeper, b.platform, b.book)
    b.clock.skew = HOUR
    b.crash()
    reply = await requests.fulfil(b.keeper, b.book, "ann", Request(verb="remove", workload="eval"))
    assert reply.words.endswith(": The clock jumped, so ages are not trusted for 15m more")
    assert is_there(b, thing)


@virtual
async def test_a_doubt_is_never_longer_than_its_time(b: Harness) -> None:
    """A virtual machine that was set back to a snapshot has the same boot and an older steady clock."""
    place(b)
    b.ledger.clocks = {"boot-1": ClockRecord(zero=BEGIN, doubted_until=1e9, watched=True)}
    await serve(b, 21 * MINUTE)
    assert breakers(b) == [JUMPED.format("15m"), JUMPED.format("10m"), JUMPED.format("5m"), None, None]


@virtual
async def test_without_the_name_of_the_boot_nothing_is_recorded(b: Harness) -> None:
    """And a doubt that others recorded counts."""
    b.boot = ""
    place(b)
    b.ledger.clocks = {"boot-1": ClockRecord(zero=BEGIN, doubted_until=300.0)}
    await serve(b, MINUTE)
    assert breakers(b) == [JUMPED.format("15m")]
    assert list(b.ledger.clocks) == ["boot-1"]


@virtual
async def test_nothing_is_acted_on_while_the_doubt_cannot_be_recorded(b: Harness) -> None:
    thing = place(b)
    await serve(b, MINUTE)
    b.clock.skew = HOUR

    async def full(boot: str, record: ClockRecord) -> None:
        raise LedgerError("no space left on device")

    b.ledger.record_clock = full  # type: ignore[method-assign]
    with pytest.raises(LedgerError):
        await reclaim(b.keeper, b.platform, b.book)
    assert is_there(b, thing)


def test_a_clock_behind_the_ledger_has_jumped() -> None:
    assert behind_the_ledger(BEGIN, None) is None
    assert behind_the_ledger(BEGIN, BEGIN + MINUTE) is None
    assert "08:00, but the newest ledger line is of 2026-03-02 09:00" in str(behind_the_ledger(BEGIN, BEGIN + HOUR))


@virtual
async def test_the_clock_is_compared_with_the_steady_one(b: Harness) -> None:
    seen = ClockWatch()
    assert seen.doubt(b.clock.now()) is None
    await asyncio.sleep(7200)
    assert seen.doubt(b.clock.now()) is None, "both moved alike"
    b.clock.skew = timedelta(minutes=1)
    assert seen.doubt(b.clock.now()) is None, "a minute is no jump"
    b.clock.skew = timedelta(minutes=-5)
    assert seen.doubt(b.clock.now()) == "The clock jumped, so ages are not trusted for 15m more"
    await asyncio.sleep(CLOCK_SETTLE.total_seconds())
    assert seen.doubt(b.clock.now()) is None


def passed(ago: timedelta) -> Passed:
    return Passed(
        at=BEGIN + ago,
        pass_id=1,
        platform="docker",
        place="node-3",
        seen=0,
        due=0,
        reclaimed=0,
        deferred=0,
        failed=0,
    )


@virtual
async def test_a_question_before_the_record_was_read_hides_no_jump(b: Harness) -> None:
    """A plan asks about the clock when a lease begins."""
    place(b)
    await serve(b, MINUTE)
    b.crash()
    b.clock.skew = HOUR
    clock_watch = b.keeper.clock_watch
    assert clock_watch.doubt(b.clock.now()) is None
    await clock_watch.recall(b.keeper)
    assert clock_watch.doubt(b.clock.now()) is not None
