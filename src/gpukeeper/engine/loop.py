"""The loop of `serve`: wake hints, timers at due times, meter ticks; one pass at a time on each place. Long work goes
in slices: passes, measurements and requests run in between.

A hint or a timer only makes the next pass come sooner. What is done follows from what that pass itself reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpukeeper.blocking import real_seconds
from gpukeeper.engine.clean import finish, learn_baselines
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.ports import LogThrottle, Platform, bug_words, key_of, place_name
from gpukeeper.engine.reclaim import PassReport, reclaim
from gpukeeper.engine.schedule import may_act_now
from gpukeeper.engine.usage import EVERY as USAGE_EVERY
from gpukeeper.engine.usage import record_usage
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Verdict
from gpukeeper.model.errors import KeeperError, LeaseHeld, LedgerError, PlatformError
from gpukeeper.model.event import Complaint
from gpukeeper.model.policy import Mode
from gpukeeper.model.ports import Meter
from gpukeeper.model.series import BRIDGED_MAX
from gpukeeper.model.subject import Ref, Subject
from gpukeeper.model.words import in_words

SLICE = 0.01  # seconds


async def in_slices(work: Iterator[None], most: float = float("inf")) -> float:
    """Until it ends, or has taken so many seconds. Returns the seconds that it took, without those of others."""
    clock, spent = asyncio.get_running_loop().time, 0.0
    slice_, most = real_seconds(SLICE), real_seconds(most)
    begun = clock()
    for _ in work:
        now = clock()
        if now - begun >= slice_:
            spent += now - begun
            if spent >= most:
                return spent
            await asyncio.sleep(0)
            begun = clock()
    return spent + clock() - begun


GAP = timedelta(seconds=5)  # least time between two passes, however many hints come
SHORT_GAP = timedelta(milliseconds=200)  # the same for narrow passes
BLIND = timedelta(seconds=15)  # what could not be read is read again after this
MANY = 500  # hints; with more of them a full pass is cheaper
MISSING_FOR = timedelta(minutes=15)  # before a daemon accepts that half of a place vanished
TOO_SLOW = (
    f"measuring is too slow: two measurements were more than {in_words(BRIDGED_MAX)} apart. What was not measured is "
    "not idle, so idle times began anew and idle work is kept. The load of this machine may be too high"
)
STOOD_STILL = timedelta(minutes=1)  # a tick that comes so much too late was no tick
MISSED = 3  # a pass is missed after this many intervals


@dataclass
class Watch:
    """What one `serve` keeps while it runs. Nothing here is needed after a restart."""

    keeper: Keeper
    book: Callable[[], Rulebook]  # called before every pass, so that a changed policy applies at once
    stop: asyncio.Event
    on_report: Callable[[PassReport], None] = lambda report: None
    on_complaint: Callable[[str], None] = lambda what: None
    refresh: Callable[[], Awaitable[None]] | None = None  # awaited before `book` is called: reading a file may block
    under_way: Callable[[PassReport], None] = lambda report: None
    live: dict[str, list[Subject]] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)  # steady time of the last finished pass
    wall: dict[str, datetime] = field(default_factory=dict)
    missed: set[str] = field(default_factory=set)
    tick: timedelta = timedelta(seconds=30)  # as configured in the last pass
    every: timedelta = timedelta(minutes=5)  # the same
    throttle: LogThrottle = field(default_factory=LogThrottle)
    measured_at: float | None = None  # steady time of the last measurement; None: nothing was to be measured since
    bells: list[asyncio.Event] = field(default_factory=list)  # rung when `stop` is set

    def bell(self) -> asyncio.Event:
        self.bells.append(asyncio.Event())
        return self.bells[-1]


async def watch(w: Watch) -> None:
    """Runs until `stop` is set. A bug stops the pass at one place, and is reported; everything else continues."""
    begun = asyncio.get_running_loop().time()
    w.keeper.permission.stopping = False
    w.keeper.uptime.begin(begun)
    w.keeper.absences.patience = MISSING_FOR
    await w.keeper.clock_watch.settle_in(w.keeper)
    async with asyncio.TaskGroup() as group:
        for platform in w.keeper.platforms:
            w.finished[place_name(platform)] = begun
            group.create_task(_watch_place(w, platform))
        group.create_task(_tick(w))
        group.create_task(_report_missed_passes(w))
        group.create_task(_learn_baselines(w))
        if w.keeper.usage is not None:
            w.keeper.usage_tracker.enabled = True
            group.create_task(_record_usage(w))
        await w.stop.wait()
        w.keeper.permission.stopping = True
        for bell in w.bells:
            bell.set()
    await finish(w.keeper)


@dataclass
class Agenda:
    """What the next pass at a place reads: everything, or only what changed or becomes due."""

    everything: bool = True
    whole_at: float = 0.0  # steady time of the next full pass, whatever happens
    hinted: dict[str, Ref] = field(default_factory=dict)  # by key
    due: dict[str, tuple[datetime, Ref]] = field(default_factory=dict)  # by key

    def hint(self, ref: Ref | None, *, precise: bool) -> None:
        if ref is None or not precise or len(self.hinted) >= MANY:
            self.everything, self.hinted = True, {}
        elif not self.everything:
            self.hinted[ref.key] = ref

    def take(self, now: datetime, steady: float, *, precise: bool) -> list[Ref] | None:
        """What to read now; None: everything."""
        ripe = {key: ref for key, (due, ref) in self.due.items() if due <= now}
        if not precise or self.everything or steady >= self.whole_at:
            self.everything, self.hinted, self.due = False, {}, {}
            return None
        only, self.hinted = {**ripe, **self.hinted}, {}
        for key in only:
            self.due.pop(key, None)
        return list(only.values())

    def retry(self, steady: float, after: timedelta) -> None:
        """A pass did not happen or could not see: everything again, before long."""
        self.everything = True
        self.whole_at = min(self.whole_at, steady + after.total_seconds())

    def plan(self, report: PassReport) -> None:
        """Timers for what this pass decided to wait for, and for what it reports that will be due."""
        for one in report.survey.decisions:
            if one.verdict in (Verdict.WAIT, Verdict.REPORT) and one.due is not None:
                self.due[one.seen.ref.key] = (one.due, one.seen.ref)


async def _watch_place(w: Watch, platform: Platform) -> None:
    woken, ended = w.bell(), w.bell()
    agenda, steady = Agenda(), asyncio.get_running_loop().time
    listener = asyncio.create_task(_listen(platform, agenda, woken))
    try:
        while not w.stop.is_set():
            woken.clear()
            only = agenda.take(w.keeper.clock.now(), steady(), precise=platform.precise)
            pause = await _pass(w, platform, agenda, only) if only != [] else timedelta()
            if only is None and listener.done():
                listener = await _listen_again(w, platform, agenda, woken, listener)
            gap = GAP if only is None else SHORT_GAP
            await _wait(ended, gap)
            if only is None:
                agenda.whole_at = steady() + pause.total_seconds() - gap.total_seconds()
            await _wait(woken, _until_next(agenda, w.keeper.clock.now(), steady()))
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)


def _until_next(agenda: Agenda, now: datetime, steady: float) -> timedelta:
    whole = timedelta(seconds=max(agenda.whole_at - steady, 0.0))
    return min([whole, *(due - now for due, _ in agenda.due.values())])


async def _pass(w: Watch, platform: Platform, agenda: Agenda, only: Sequence[Ref] | None) -> timedelta:
    """One pass; returns how long to wait for the next full pass. Raises nothing but what ends the program."""
    place = place_name(platform)
    try:
        return await _try_pass(w, platform, agenda, only)
    except LeaseHeld:
        w.keeper.request_state.turned_away.add(key_of(platform))
        agenda.retry(asyncio.get_running_loop().time(), GAP)
        return GAP  # another process acts there now: a request, or `apply` by hand
    except KeeperError as problem:
        await _complain(w, f"the pass on {place} was not run: {problem}")
    except Exception as bug:  # of the engine itself, or of a reader of its reports
        await _complain(w, f"the pass on {place} failed: {bug_words(bug)}")
    agenda.retry(asyncio.get_running_loop().time(), w.every)
    return w.every


async def _try_pass(w: Watch, platform: Platform, agenda: Agenda, only: Sequence[Ref] | None) -> timedelta:
    if w.refresh is not None:
        await w.refresh()
    book, place = w.book(), place_name(platform)
    w.tick = book.policy.activity.tick
    every = w.every = book.policy.schedule.every
    now, last = w.keeper.clock.now(), w.wall.get(place)
    act = book.policy.mode is Mode.ENFORCE and may_act_now(book.policy.schedule, last, now)
    report = await reclaim(w.keeper, platform, book, act=act, only=only, under_way=w.under_way)
    if report.stopped is not None:
        _throttled(w, report.stopped)  # the pass wrote it down
        w.on_report(report)
        agenda.retry(asyncio.get_running_loop().time(), every)
        return every
    w.keeper.request_state.turned_away.discard(key_of(platform))
    if only is None:
        w.wall[place] = now  # only a completed full pass uses up the moment of a schedule
    w.finished[place] = asyncio.get_running_loop().time()
    w.missed.discard(place)
    if only is None:
        w.live[place] = report.survey.live
    w.on_report(report)
    if platform.precise:
        agenda.plan(report)
        if only is not None and report.survey.unseen:
            agenda.retry(w.finished[place], BLIND)
        return every
    return next_pass_in(report, w.keeper.clock.now(), every)


def next_pass_in(report: PassReport, now: datetime, every: timedelta) -> timedelta:
    """Until the next step is due, within the policy's interval."""
    due = [d.due for d in report.survey.decisions if d.verdict is Verdict.WAIT and d.due is not None]
    soonest = min(due, default=now + every) - now
    return max(GAP, min(soonest, every))


async def _listen(platform: Platform, agenda: Agenda, woken: asyncio.Event) -> None:
    """Hints may end or fail; the timers go on without them."""
    with suppress(PlatformError):
        async for ref in platform.wake():
            agenda.hint(ref, precise=platform.precise)
            woken.set()


async def _listen_again(
    w: Watch, platform: Platform, agenda: Agenda, woken: asyncio.Event, ended: asyncio.Task[None]
) -> asyncio.Task[None]:
    """Hints that ended have ended. A bug in them is reported, and they are requested again after a full pass."""
    problem = ended.exception()
    if not isinstance(problem, Exception):
        return ended
    await _complain(
        w, f"the hints of {place_name(platform)} ended: {bug_words(problem)}. Its passes continue by timer."
    )
    return asyncio.create_task(_listen(platform, agenda, woken))


async def _tick(w: Watch) -> None:
    ended = w.bell()
    while not w.stop.is_set():
        begun = w.keeper.clock.now()
        await _wait(ended, w.tick)
        _note_stand_still(w, begun)
        live = {place: subjects for place, subjects in w.live.items() if subjects}
        if w.keeper.meter is not None and live:
            await _measure(w, w.keeper.meter, live)
        else:
            w.measured_at = w.keeper.uptime.measured_apart = None


async def _measure(w: Watch, meter: Meter, live: Mapping[str, list[Subject]]) -> None:
    """Everything at once; after a bug one place at a time, so that only one stays unmeasured."""
    with suppress(PlatformError, LedgerError):  # not measured is not idle: the minutes stay empty
        try:
            together = [subject for subjects in live.values() for subject in subjects]
            samples = await meter.read(together)
            await w.keeper.signals.add(samples)
            w.keeper.live.measured(samples)
            before, w.measured_at = w.measured_at, asyncio.get_running_loop().time()
            apart = w.keeper.uptime.measured_apart = None if before is None else w.measured_at - before
            if apart is not None and apart > BRIDGED_MAX.total_seconds():
                await _complain(w, TOO_SLOW)
        except (PlatformError, LedgerError):
            raise
        except Exception as bug:
            if len(live) == 1:
                await _complain(w, f"{next(iter(live))} was not measured: {bug_words(bug)}")
                return
            for place, subjects in live.items():
                await _measure(w, meter, {place: subjects})


def _note_stand_still(w: Watch, begun: datetime) -> None:
    """The process was stopped, or the machine slept: warnings sent before that have expired, as after a restart."""
    if w.keeper.clock.now() - begun > w.tick + STOOD_STILL:
        w.keeper.uptime.watched_from = asyncio.get_running_loop().time()


async def _learn_baselines(w: Watch) -> None:
    try:
        await learn_baselines(w.keeper)
    except LedgerError:
        return  # the checks of GPUs learn them, too
    except Exception as bug:
        await _complain(w, f"the memory baselines of the GPUs were not measured: {bug_words(bug)}")


async def _record_usage(w: Watch) -> None:
    """Every five minutes, and once more at the end. Nothing that is decided depends on it."""
    ended = w.bell()
    while not w.stop.is_set():
        await _wait(ended, USAGE_EVERY)
        now = w.keeper.clock.now()
        if w.keeper.clock_watch.doubt(now) is not None:
            w.keeper.usage_tracker.reset()  # what was not seen at a time that is certain was not measured
            continue
        try:
            await record_usage(w.keeper, w.keeper.usage_tracker, w.book(), now)
        except LedgerError as problem:
            await _complain(w, f"how the GPUs were used could not be recorded: {problem}")
        except Exception as bug:
            await _complain(w, f"how the GPUs were used could not be recorded: {bug_words(bug)}")


async def _report_missed_passes(w: Watch) -> None:
    ended = w.bell()
    while not w.stop.is_set():
        every = w.every
        await _wait(ended, every)
        steady = asyncio.get_running_loop().time()
        for platform in w.keeper.platforms:
            place = place_name(platform)
            silent = timedelta(seconds=steady - w.finished[place])
            if silent > MISSED * every and place not in w.missed:
                w.missed.add(place)
                await _complain(w, f"no pass finished on {place} for {in_words(silent)}; due work is not reclaimed")


async def _complain(w: Watch, what: str) -> None:
    """Log and record it, unless that was a moment ago. If the ledger cannot be written (a full disk), go on."""
    text = _throttled(w, what)
    if text is not None:
        with suppress(LedgerError):
            await w.keeper.ledger.append([Complaint(at=w.keeper.clock.now(), what=text)])


def _throttled(w: Watch, what: str) -> str | None:
    text = w.throttle.admit(what, asyncio.get_running_loop().time())
    if text is not None:
        w.on_complaint(text)
    return text


async def _wait(bell: asyncio.Event, span: timedelta) -> None:
    """Until the span is over or the bell rings."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max(span.total_seconds(), 0.0)):
            await bell.wait()
