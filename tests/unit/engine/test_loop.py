"""The loop of `serve`, in virtual time: hints, timers, ticks, missed passes, wrong clocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.engine.loop import MANY, TOO_SLOW, Watch, watch
from gpukeeper.engine.reclaim import PassReport, reclaim
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.event import Complaint, Intended, Passed, WarningSent
from gpukeeper.model.policy import ClassSettings, Mode, Schedule
from gpukeeper.model.series import BRIDGED_MAX, Sample
from gpukeeper.model.subject import Ref, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.adapter import SimulatedMeter, SimulatedPlatform
from gpukeeper.platforms.simulated.world import BEGIN
from tests.unit.engine.harness import HERE, HOUR, MINUTE, Harness, virtual


class Quiet(SimulatedPlatform):
    """Gives the hints it is told to, at the seconds it is told to."""

    hints: tuple[float, ...] = ()
    breaks = False

    async def wake(self) -> AsyncIterator[Ref | None]:
        for seconds in self.hints:
            await asyncio.sleep(seconds)
            yield None
        if self.breaks:
            raise PlatformError("the stream of hints broke")


class Exact(Quiet):
    """Names what changed, at the seconds it is told to. Counts how it was asked."""

    precise = True  # type: ignore[assignment]
    named: tuple[tuple[float, Ref], ...] = ()
    whole = 0
    blind = False

    async def wake(self) -> AsyncIterator[Ref | None]:
        for seconds, ref in self.named:
            await asyncio.sleep(seconds)
            yield ref

    async def observe(self, scope: Any) -> Any:
        self.whole += 1
        async for page in super().observe(scope):
            yield page

    async def read(self, ref: Ref) -> Any:
        return Unknown("the platform did not answer") if self.blind else await super().read(ref)


class Stuck(Quiet):
    async def observe(self, scope: Any) -> Any:
        await asyncio.sleep(10**6)
        yield


async def serve(b: Harness, span: timedelta) -> list[float]:
    """Runs the loop for a while; the seconds at which passes ended."""
    stop, ends = asyncio.Event(), list[float]()

    def on_report(report: PassReport) -> None:
        ends.append(b.loop.time())

    b.loop.call_later(span.total_seconds(), stop.set)
    await watch(Watch(b.keeper, lambda: b.book, stop, on_report))
    return ends


@virtual
async def test_a_pass_comes_at_every_interval(b: Harness) -> None:
    b.platform = Quiet(b.world, HERE)
    assert await serve(b, 16 * MINUTE) == [0, 300, 600, 900]


@virtual
async def test_stopping_does_not_wait_for_the_interval(b: Harness) -> None:
    b.platform = Quiet(b.world, HERE)
    await serve(b, MINUTE)
    assert b.loop.time() == 60


@virtual
async def test_a_hint_brings_the_next_pass_forward(b: Harness) -> None:
    b.platform = Quiet(b.world, HERE)
    b.platform.hints = (100.0,)
    assert await serve(b, 8 * MINUTE) == [0, 100, 400]


@virtual
async def test_many_hints_make_no_storm_of_passes(b: Harness) -> None:
    b.platform = Quiet(b.world, HERE)
    b.platform.hints = (0.1,) * 200
    ends = await serve(b, timedelta(seconds=19))
    assert [round(end) for end in ends] == [0, 5, 10, 15]


@virtual
async def test_broken_hints_leave_the_timers(b: Harness) -> None:
    b.platform = Quiet(b.world, HERE)
    b.platform.breaks = True
    assert await serve(b, 6 * MINUTE) == [0, 300]


@virtual
async def test_a_thing_that_will_be_due_has_a_pass_of_its_own(b: Harness) -> None:
    """It is due in 90 s, and that is when it is reclaimed."""
    b.platform = Quiet(b.world, HERE)
    thing = b.ended("eval", ago=HOUR - timedelta(seconds=90))
    assert (await serve(b, 2 * MINUTE))[:2] == [0, 90]
    assert b.world.find(thing.ref) is None


@virtual
async def test_an_exact_hint_looks_at_just_what_changed(b: Harness) -> None:
    due, other = b.ended("eval", ago=HOUR / 2), b.running("train")
    b.platform = Exact(b.world, HERE)
    b.platform.named = ((100.0, due.ref),)
    assert await serve(b, 4 * MINUTE) == [0, 100]
    assert b.platform.whole == 1
    assert b.world.find(other.ref) is not None


@virtual
async def test_what_falls_due_is_reclaimed_without_a_read_of_everything(b: Harness) -> None:
    thing = b.ended("eval", ago=HOUR - timedelta(seconds=90))
    b.platform = Exact(b.world, HERE)
    assert await serve(b, 2 * MINUTE) == [0, 90]
    assert b.world.find(thing.ref) is None
    assert b.platform.whole == 1


@virtual
async def test_exact_hints_do_not_replace_the_regular_look(b: Harness) -> None:
    b.platform = Exact(b.world, HERE)
    b.platform.named = tuple((50.0, b.running("train").ref) for _ in range(10))
    await serve(b, 11 * MINUTE)
    assert b.platform.whole == 3


@virtual
async def test_what_a_narrow_look_could_not_see_brings_the_regular_one_forward(b: Harness) -> None:
    thing = b.ended("eval", ago=HOUR - timedelta(seconds=90))
    b.platform = Exact(b.world, HERE)
    b.loop.call_later(80, lambda: setattr(b.platform, "blind", True))
    b.loop.call_later(100, lambda: setattr(b.platform, "blind", False))
    await serve(b, 2 * MINUTE)
    assert b.platform.whole == 2
    assert b.world.find(thing.ref) is None


@virtual
async def test_a_flood_of_exact_hints_is_one_read_of_everything(b: Harness) -> None:
    b.platform = Exact(b.world, HERE)
    refs = [msgspec.structs.replace(b.running("train").ref, uid=f"uid-{n}") for n in range(2 * MANY)]
    b.platform.named = ((20.0, refs[0]), *((0.0, ref) for ref in refs[1:]))
    await serve(b, MINUTE)
    assert b.platform.whole == 2


@virtual
async def test_a_part_that_an_exact_hint_names_is_not_taken_for_a_workload(b: Harness) -> None:
    part = b.running("worker")
    part.root = b.running("train").ref
    b.platform = Exact(b.world, HERE)
    await watch_once(b, part.ref)
    assert part.ref.key not in await b.ledger.present("docker", "node-3")


async def watch_once(b: Harness, ref: Ref) -> None:
    await reclaim(b.keeper, b.platform, b.book, only=[ref])


@virtual
async def test_mode_plan_never_acts_unattended(b: Harness) -> None:
    thing = b.ended("eval")
    b.set_policy(mode=Mode.PLAN)
    await serve(b, 11 * MINUTE)
    assert b.world.find(thing.ref) is thing
    assert len(b.lines(Passed)) >= 2


@virtual
async def test_a_changed_policy_counts_at_the_next_pass(b: Harness) -> None:
    thing = b.ended("eval")
    b.platform = Quiet(b.world, HERE)
    b.set_policy(mode=Mode.PLAN)
    b.loop.call_later(400, lambda: b.set_policy(mode=Mode.ENFORCE))
    await serve(b, 9 * MINUTE)
    assert b.world.find(thing.ref) is thing
    await serve(b, 5 * MINUTE)
    assert b.world.find(thing.ref) is None


@virtual
async def test_idle_work_is_warned_twice_and_stopped_then_removed(b: Harness) -> None:
    """The whole way, with nothing but the meter's ticks: measured, warned, warned, stopped, removed."""
    thing = b.running("train", timedelta())
    states: list[State] = []
    b.loop.call_later(59 * 60, lambda: states.append(thing.state))
    await serve(b, 89 * MINUTE)
    assert states == [State.RUNNING]
    rules = [type(line).__name__ for line in b.ledger.lines if type(line).__name__ in ("WarningSent", "Intended")]
    assert rules == ["WarningSent", "WarningSent", "Intended", "Intended"]
    assert thing.gone


@virtual
async def test_after_a_restart_idle_time_and_warnings_begin_again(b: Harness) -> None:
    """It was used while no daemon ran. What was measured and announced before that counts no more."""
    thing = b.running("train", timedelta())
    await serve(b, 59 * MINUTE)
    before = len(b.lines(WarningSent))
    assert before
    await asyncio.sleep(80)
    b.change_ports(meter=SimulatedMeter(b.world))  # what was kept in memory is gone
    begun, states = b.now(), list[State]()
    b.loop.call_later(30 * 60, lambda: states.append(thing.state))
    await serve(b, 40 * MINUTE)
    assert states == [State.RUNNING]
    again = [line.at for line in b.lines(WarningSent)[before:] if line.rule == "idle"]
    stop = next(line.at for line in b.lines(Intended))
    assert len(again) == 2
    assert min(again) >= begun + 24 * MINUTE, "80 % of the idle time, counted from the first reading after the gap"
    assert stop - min(again) >= b.policy.warnings.lead


class SlowMeter(SimulatedMeter):
    """Of a machine under load."""

    takes = 0.0

    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]:
        await asyncio.sleep(self.takes)
        return await super().read(subjects)


async def complaints_of_a_meter_that_takes(b: Harness, seconds: float) -> list[str]:
    b.running("train", timedelta())
    meter = SlowMeter(b.world)
    meter.takes = seconds
    b.change_ports(meter=meter)
    await serve(b, 60 * MINUTE)
    return [line.what for line in b.lines(Complaint) if line.what.startswith(TOO_SLOW)]


@virtual
async def test_that_measuring_is_too_slow_is_reported_to_admins_and_not_each_time(b: Harness) -> None:
    """Otherwise idle work is kept for ever, and only the explanation of each workload shows why."""
    assert 1 <= len(await complaints_of_a_meter_that_takes(b, 150)) <= 4
    assert b.keeper.uptime.measured_apart is not None
    assert b.keeper.uptime.measured_apart > BRIDGED_MAX.total_seconds(), "for the metrics"


@virtual
async def test_a_meter_that_takes_its_time_is_not_too_slow(b: Harness) -> None:
    assert await complaints_of_a_meter_that_takes(b, 60) == []


@virtual
async def test_after_a_restart_whoever_ran_too_long_has_the_whole_lead_again(b: Harness) -> None:
    thing = await b.overdue("train")
    begun, states = b.now(), list[State]()
    b.loop.call_later(9.5 * 60, lambda: states.append(thing.state))
    await serve(b, 20 * MINUTE)
    assert states == [State.RUNNING]
    stop = next(line.at for line in b.lines(Intended))
    assert stop >= begun + b.policy.warnings.lead
    assert thing.state is State.ENDED


@virtual
async def test_a_daemon_that_stood_still_begins_its_lead_again(b: Harness) -> None:
    await b.overdue("train")
    b.loop.call_later(5 * 60, lambda: b.loop.skip(20 * 60))  # the process was stopped, or the machine slept
    await serve(b, 26 * MINUTE)
    assert b.lines(Intended) == []
    assert b.keeper.uptime.watched_from is not None
    assert b.keeper.uptime.watched_from >= 25 * 60


@virtual
async def test_a_wrong_clock_at_the_start_makes_no_old_warning_valid(b: Harness) -> None:
    """It is put right between two ticks; what was sent before this daemon ran stays expired."""
    thing = await b.overdue("train")
    b.clock.skew = -5 * HOUR
    b.loop.call_later(65, lambda: setattr(b.clock, "skew", timedelta()))
    await serve(b, 9 * MINUTE)
    assert thing.state is State.RUNNING


@virtual
async def test_a_clock_that_was_ahead_for_a_while_does_not_expire_the_warnings_of_hours(b: Harness) -> None:
    def set_clock(hours: int) -> None:
        b.clock.skew = hours * HOUR

    b.loop.call_later(5 * 60, set_clock, 3)
    b.loop.call_later(10 * 60, set_clock, 0)
    await serve(b, 20 * MINUTE)
    since = b.keeper.uptime.watched_since(b.now())
    assert since is not None
    assert since <= BEGIN + 13 * MINUTE


@virtual
async def test_without_a_daemon_a_warning_of_an_earlier_look_counts(b: Harness) -> None:
    """`apply` from a timer warns in one run and stops in the next."""
    thing = await b.overdue("train")
    await reclaim(b.keeper, b.platform, b.book, act=True)
    assert thing.state is State.ENDED


@virtual
async def test_busy_work_is_left_alone(b: Harness) -> None:
    thing = b.running("train", timedelta(), busy_until=b.now() + 5 * HOUR)
    await serve(b, 80 * MINUTE)
    assert thing.state is State.RUNNING
    assert b.terminal.told == []


@virtual
async def test_a_pass_that_does_not_finish_is_missed_once(b: Harness) -> None:
    """Promise 7: a pass that did not happen raises an alert."""
    b.platform = Stuck(b.world, HERE)
    stop = asyncio.Event()
    loop = asyncio.create_task(watch(Watch(b.keeper, lambda: b.book, stop)))
    await asyncio.sleep(3600)
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop
    assert [line.what for line in b.lines(Complaint)] == [
        "no pass finished on docker/node-3 for 20m; due work is not reclaimed"
    ]


@virtual
async def test_a_pass_that_another_one_prevents_is_tried_again_soon_and_is_no_complaint(b: Harness) -> None:
    """Somebody's own request or `apply` holds the place for a moment."""
    b.platform = Quiet(b.world, HERE)
    async with b.ledger.lease("docker", "node-3"):
        assert await serve(b, 4 * MINUTE) == []
    assert b.lines(Complaint) == []
    assert len(await serve(b, MINUTE)) == 1


@virtual
async def test_a_pass_that_another_one_prevents_for_long_is_missed(b: Harness) -> None:
    """Promise 7."""
    b.platform = Quiet(b.world, HERE)
    async with b.ledger.lease("docker", "node-3"):
        await serve(b, 30 * MINUTE)
    assert "no pass finished on docker/node-3" in b.lines(Complaint)[0].what


@virtual
async def test_a_clock_that_jumped_is_not_trusted_for_a_quarter_of_an_hour(b: Harness) -> None:
    b.platform = Quiet(b.world, HERE)
    thing = b.ended("eval", ago=timedelta())
    b.loop.call_later(250, lambda: setattr(b.clock, "skew", 5 * HOUR))
    await serve(b, 16 * MINUTE)
    assert b.world.find(thing.ref) is thing
    assert [line.breaker is None for line in b.lines(Passed)] == [True, False, False, False]
    b.clock.skew = timedelta()


@virtual
async def test_after_a_long_silence_nothing_is_acted_on_at_first(b: Harness) -> None:
    """Was it away, or is the clock wrong? Nothing can tell on a machine that does not report its boot."""
    b.boot = ""
    b.platform = Quiet(b.world, HERE)
    await serve(b, MINUTE)
    await asyncio.sleep(2 * 3600)
    b.crash()
    thing = b.ended("eval")
    await serve(b, 14 * MINUTE)
    assert b.world.find(thing.ref) is thing
    assert "The clock jumped" in str(b.lines(Passed)[-1].breaker)


@virtual
async def test_a_schedule_looks_at_every_pass_and_acts_at_its_moment(b: Harness) -> None:
    b.platform = Quiet(b.world, HERE)
    thing = b.ended("eval")
    moment = (b.now() + 20 * MINUTE).astimezone()
    b.set_policy(schedule=msgspec.structs.replace(Schedule(), at=f"{moment.minute} {moment.hour} * * *"))
    await serve(b, 19 * MINUTE)
    assert b.world.find(thing.ref) is thing


@virtual
async def test_the_moment_of_a_schedule_acts(b: Harness) -> None:
    b.platform = Quiet(b.world, HERE)
    thing = b.ended("eval")
    moment = (b.now() + 20 * MINUTE).astimezone()
    b.set_policy(schedule=Schedule(at=f"{moment.minute} {moment.hour} * * *"))
    await serve(b, 26 * MINUTE)
    assert b.world.find(thing.ref) is None


@virtual
async def test_a_moment_that_another_pass_took_is_not_lost(b: Harness) -> None:
    """The pass at 02:00 found the place leased; the next one makes up for it instead of waiting a day."""
    b.platform = Quiet(b.world, HERE)
    thing = b.ended("eval")
    moment = (b.now() + 20 * MINUTE).astimezone()
    b.set_policy(schedule=Schedule(at=f"{moment.minute} {moment.hour} * * *"))
    lease = b.ledger.lease("docker", "node-3")
    b.loop.call_later(1150, lambda: asyncio.ensure_future(lease.__aenter__()))
    b.loop.call_later(1450, lambda: asyncio.ensure_future(lease.__aexit__(None, None, None)))
    await serve(b, 31 * MINUTE)
    assert b.world.find(thing.ref) is None


@virtual
async def test_without_a_meter_nothing_is_measured(b: Harness) -> None:
    b.platform, b.meter = Quiet(b.world, HERE), None  # type: ignore[assignment]
    b.running("train")
    await serve(b, 11 * MINUTE)
    assert b.world.samples == {}


@virtual
async def test_waste_is_reported_every_five_minutes_and_nothing_follows(b: Harness) -> None:
    """C8.11: of work whose class has no idle time; whoever works beside it is not in the report."""
    b.set_policy(classes={"managed": ClassSettings(idle=None, max_runtime=None)})
    b.platform = Quiet(b.world, HERE)
    idle = b.running("forgotten", timedelta())
    busy = b.running("train", timedelta(), devices=("GPU-1",), busy_until=b.now() + 5 * HOUR)
    told: list[tuple[float, list[str]]] = []
    stop = asyncio.Event()
    b.loop.call_later(51 * 60, stop.set)

    def on_report(report: PassReport) -> None:
        told.append((b.loop.time(), [one.ref.name for one in report.survey.wasted]))

    await watch(Watch(b.keeper, lambda: b.book, stop, on_report))
    assert [at for at, _ in told] == [300.0 * number for number in range(11)]
    assert [names for at, names in told if at < 30 * 60] == [[]] * 6
    assert [names for at, names in told if at >= 35 * 60] == [["forgotten"]] * 4
    assert (idle.state, busy.state) == (State.RUNNING, State.RUNNING)
    assert [line for line in b.ledger.lines if isinstance(line, (WarningSent, Intended))] == []
