"""The story of a pass: settle what was left open, observe, decide, act, verify, record. One place at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpukeeper.engine import outlook
from gpukeeper.engine.act import take, warn
from gpukeeper.engine.clean import ReleasedGpus, held, newly_ended, prove_clean
from gpukeeper.engine.keeper import STOPPING, Keeper, behind_the_ledger
from gpukeeper.engine.observe import Survey, changed_decisions, survey
from gpukeeper.engine.ports import Platform, key_of, pass_stopped, place_name
from gpukeeper.engine.verify import settle
from gpukeeper.lifecycle.budget import TREES, duplicate_sentences, hourly_budget, make_plan
from gpukeeper.lifecycle.settings import Narrow, Rulebook
from gpukeeper.model.decision import Action, Decision, PlaceHead, Plan, Result, Step, Unseen
from gpukeeper.model.errors import KeeperError, PlatformError
from gpukeeper.model.event import Closed, Complaint, GpuChecked, Passed, Vanished, WarningSent
from gpukeeper.model.subject import Ref

HOUR = timedelta(hours=1)
IN_BULK = 2_000  # steps whose objects a platform may read together
UNSEEN_WRITTEN, UNSEEN_LONGEST = 20, 300  # entries in the line of a pass, and characters of each

Confirm = Callable[[Plan], Awaitable[bool]]
Progress = Callable[[Closed | WarningSent | GpuChecked], None]
UnderWay = Callable[["PassReport"], None]


@dataclass(repr=False)
class PassReport:
    """What one pass at one place saw, planned and did."""

    pass_id: int
    survey: Survey
    plan: Plan
    settled: list[Closed] = field(default_factory=list)
    outcomes: list[Closed] = field(default_factory=list)
    warnings: list[WarningSent] = field(default_factory=list)
    given_back: list[ReleasedGpus] = field(default_factory=list)  # work that ended, with the GPUs it had
    checks: list[GpuChecked] = field(default_factory=list)  # of those GPUs; a daemon's come later, in the journal
    relieved: Counter[str] = field(default_factory=Counter)  # by disk: steps left out once it was not too full any more
    beside_work: Counter[tuple[str, str]] = field(default_factory=Counter)  # by directory and reason
    paused: str | None = None
    acted: bool = True
    under_way: UnderWay = lambda report: None  # called after observing, and after each step
    stopped: str | None = None  # why it did not get to its end: a platform that failed midway, or a bug
    leased: str | None = None  # the holder of the lease; then nothing was read or touched

    @property
    def head(self) -> PlaceHead:
        return self.survey.head(self.plan.breaker)

    @property
    def reclaimed(self) -> list[Closed]:
        return [o for o in self.outcomes if o.result is Result.RECLAIMED]

    @property
    def failed(self) -> list[Closed]:
        return [o for o in self.outcomes if o.result not in (Result.RECLAIMED, Result.CHANGED, Result.DEFERRED)]

    @property
    def deferred(self) -> int:
        return len(self.plan.deferred) + sum(o.result is Result.DEFERRED for o in self.outcomes)

    @property
    def relief(self) -> list[str]:
        """A sentence for each disk that came below its low mark, and each directory beside which work began, before the
        plan was done."""
        return [
            f"{where}: {why}. {count} more tree{'s' if count > 1 else ''} there {'were' if count > 1 else 'was'} "
            "skipped; the next pass decides again."
            for (where, why), count in self.beside_work.items()
        ] + [
            f"Enough of {disk} was freed: {count} more tree{'s' if count > 1 else ''}, due only while it was too full,"
            f" {'were' if count > 1 else 'was'} skipped."
            for disk, count in self.relieved.items()
        ]


async def look_and_plan(keeper: Keeper, platform: Platform, book: Rulebook, narrow: Narrow | None = None) -> PassReport:
    """What a pass would do now. Changes nothing, writes nothing."""
    report = empty_report(keeper, platform, book, acted=False)
    try:
        await keeper.clock_watch.recall(keeper)
        report.survey = await survey(keeper, platform, book, narrow)
        doubt = keeper.clock_watch.doubt(keeper.clock.now()) or await _behind(keeper)
        report.plan = await _plan(keeper, report.survey, book, 0, None, doubt)
        report.paused = await keeper.ledger.paused()
    except Exception as problem:
        _concerns_this_place(problem)
        report = empty_report(keeper, platform, book, acted=False)  # an incomplete observation does not count
        report.stopped = pass_stopped(place_name(platform), problem)
    return report


async def reclaim(
    keeper: Keeper,
    platform: Platform,
    book: Rulebook,
    *,
    narrow: Narrow | None = None,
    allow: int | None = None,
    act: bool = True,
    only: Sequence[Ref] | None = None,
    confirm: Confirm | None = None,
    progress: Progress | None = None,
    under_way: UnderWay | None = None,
) -> PassReport:
    """One pass. `act=False` (mode plan) observes, decides and records, and touches nothing. `only`: what changed or
    is due; everything else there was read a moment ago.

    An error that concerns this place alone, a bug in its adapter included, stops this pass: nothing more is touched,
    a step in progress stays open and the next pass reads it first. The report has the reason; nothing is raised.
    """
    report = empty_report(keeper, platform, book, acted=act)
    report.under_way = under_way or report.under_way
    try:
        async with keeper.ledger.lease(platform.name, platform.place):
            await _pass(keeper, platform, book, report, narrow, allow, only, confirm, progress)
        # Without the lease: it may take minutes, and it ends no work.
        report.checks += await prove_clean(keeper, book, report.given_back, progress)
    except Exception as problem:
        _concerns_this_place(problem)
        report.stopped = pass_stopped(place_name(platform), problem)
    await _record_failure(keeper, platform, report)
    return report


async def _pass(
    keeper: Keeper,
    platform: Platform,
    book: Rulebook,
    report: PassReport,
    narrow: Narrow | None,
    allow: int | None,
    only: Sequence[Ref] | None,
    confirm: Confirm | None,
    progress: Progress | None,
) -> None:
    """With the lease. What is done is in the report as soon as it is done."""
    await keeper.clock_watch.recall(keeper)
    began, doubt = keeper.clock.now(), await _clock_doubt(keeper) or await _behind(keeper)
    keeper.back_off.forget(began)
    report.pass_id = await keeper.ledger.next_pass()
    report.settled += await settle(keeper, platform)
    pending = outlook.begin(keeper, platform, began, whole=only is None)

    async def record(found: Survey, made: Sequence[Decision], trees: Collection[str]) -> None:
        outlook.add(pending, made, trees)
        lines = found.to_write.take()
        await keeper.ledger.append([*lines, *await changed_decisions(keeper, found.to_write, made, found.at, trees)])
        report.given_back.extend(await newly_ended(keeper, platform, lines))

    scarce = keeper.pressure.gpus_are_scarce(key_of(platform))
    found = report.survey = await survey(keeper, platform, book, narrow, only, record)
    doubt = doubt or await _clock_doubt(keeper)
    plan = await _plan(keeper, found, book, report.pass_id, allow, doubt)
    report.plan = plan
    if plan.duplicates:
        await keeper.ledger.append([Complaint(at=plan.at, what=words) for words in duplicate_sentences(plan)])
    outlook.show(keeper, found, plan, pending)
    report.under_way(report)
    if only is None and narrow is None and allow is None:
        keeper.last_passes.set_breaker(key_of(platform), plan.breaker)
    await _record_absences(keeper, platform, found, believe=plan.breaker is None)
    if report.acted and plan.steps and (confirm is None or await confirm(plan)):
        await _take_steps(keeper, platform, book, report, progress, allowed=allow is not None)
        outlook.forget(pending, report.outcomes)
    await keeper.ledger.append([_passed(report, began, keeper.clock.now(), scarce=scarce)])


async def _record_absences(keeper: Keeper, platform: Platform, found: Survey, *, believe: bool) -> None:
    """A narrow pass proves absence for each object that it read; a whole one only finds what was not listed."""
    if found.whole:
        await keeper.absences.record(keeper, platform, found.missing, found.gone, believe=believe)
    elif found.gone:
        await keeper.ledger.append([Vanished(at=keeper.clock.now(), ref=one.ref) for one in found.gone])


def empty_report(keeper: Keeper, platform: Platform, book: Rulebook, *, acted: bool) -> PassReport:
    now = keeper.clock.now()
    return PassReport(0, Survey(platform, now), Plan(book.policy.digest, now, ()), acted=acted)


def _concerns_this_place(problem: Exception) -> None:
    """Raises what does not: a ledger that cannot be written, a lease that another holds, a mistake of the user."""
    if isinstance(problem, KeeperError) and not isinstance(problem, PlatformError):
        raise problem


async def _record_failure(keeper: Keeper, platform: Platform, report: PassReport) -> None:
    """When it begins or is another, not every pass."""
    is_new = keeper.last_passes.set_failure(key_of(platform), report.stopped)
    if is_new and report.stopped is not None:
        await keeper.ledger.append([Complaint(at=keeper.clock.now(), what=report.stopped)])


async def _clock_doubt(keeper: Keeper) -> str | None:
    """Recorded before anything else happens: the next process must know it."""
    doubt = keeper.clock_watch.doubt(keeper.clock.now())
    await keeper.clock_watch.record(keeper)
    return doubt


async def _behind(keeper: Keeper) -> str | None:
    return behind_the_ledger(keeper.clock.now(), await keeper.ledger.last_line_at())


async def _plan(
    keeper: Keeper, found: Survey, book: Rulebook, pass_id: int, allow: int | None, clock: str | None
) -> Plan:
    now = keeper.clock.now()
    acts = await keeper.ledger.acts_since(now - HOUR, TREES, but=True)
    trees = await keeper.ledger.acts_since(now - HOUR, TREES)
    broken = None if found.whole else keeper.last_passes.breaker(key_of(found.platform))
    return make_plan(
        found.due, book.policy, found.budget_facts(acts, trees, clock, broken), now, pass_id=pass_id, allow=allow
    )


async def _take_steps(
    keeper: Keeper,
    platform: Platform,
    book: Rulebook,
    report: PassReport,
    progress: Progress | None,
    *,
    allowed: bool,
) -> None:
    """In the order of the plan, each after a check whether we still may. What ends work or sends a message is done
    alone, one after the other; of what is over several go at once. An error stops all of them: nothing more is
    touched."""

    async def one(step: Step) -> None:
        hourly = None if allowed else hourly_budget(step.decision, book.policy, report.survey.counts.seen)
        line = await _take_step(keeper, platform, book, report, step, hourly)
        report.under_way(report)
        if progress is not None and line is not None:
            progress(line)

    keeper.beside.forget(key_of(platform))
    for first in range(0, len(report.plan.steps), IN_BULK):
        steps = report.plan.steps[first : first + IN_BULK]
        async with platform.batch([one.decision.seen.ref for one in steps if _ends_nobody(one)]):
            await _take_some(keeper, platform, report, steps, one)
        if report.paused is not None:
            break


async def _take_some(
    keeper: Keeper,
    platform: Platform,
    report: PassReport,
    steps: Sequence[Step],
    one: Callable[[Step], Coroutine[None, None, None]],
) -> None:
    under_way: set[asyncio.Task[None]] = set()
    try:
        for step in steps:
            most = platform.at_once(step.decision.seen.ref.kind) if _ends_nobody(step) else 1
            await _until_at_most(under_way, most - 1)
            work = keeper.beside.found(step)
            if work is not None:  # no line for this one: there may be hundreds
                report.beside_work[work] += 1
                continue
            if _is_relieved(keeper, platform, step):
                report.relieved[step.decision.disk] += 1
                continue
            report.paused = await _why_not_now(keeper)
            if report.paused is not None:
                break
            if most > 1:
                under_way.add(asyncio.create_task(one(step)))
            else:
                await one(step)
        await _until_at_most(under_way, 0)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def _is_relieved(keeper: Keeper, platform: Platform, step: Step) -> bool:
    """It was due only because a disk was too full, and a step before it saw that it is not so any more. No line: there
    may be hundreds, and the next pass decides about each of them again."""
    disk = step.decision.disk
    return bool(disk) and not keeper.pressure.is_full(key_of(platform), disk)


def _ends_nobody(step: Step) -> bool:
    """It is over, and what is left of it goes. Not where it is due only by a full disk: whether that is still so is
    seen after each of them."""
    decision = step.decision
    return decision.action is Action.REMOVE and not decision.running and not decision.disk


async def _until_at_most(under_way: set[asyncio.Task[None]], number: int) -> None:
    """What went wrong in one of them is raised here."""
    while len(under_way) > number:
        done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        under_way -= done
        for failed in [task for task in done if task.exception() is not None]:
            failed.result()


async def _take_step(
    keeper: Keeper, platform: Platform, book: Rulebook, report: PassReport, step: Step, hourly: int | None
) -> Closed | WarningSent | None:
    if step.decision.action is Action.WARN:
        warned = await warn(keeper, platform, step, book)
        if warned is not None:
            report.warnings.append(warned)
        return warned
    had = await held(keeper, platform, step.decision.seen.ref) if step.decision.running else None
    line = await take(keeper, platform, step, book, report.pass_id, hourly)
    report.outcomes.append(line)
    if had is not None and line.result is Result.RECLAIMED:
        report.given_back.append(had)
    keeper.back_off.note(line)
    return line


async def _why_not_now(keeper: Keeper) -> str | None:
    """Checked before each step."""
    if keeper.permission.stopping:
        return STOPPING
    why_not = keeper.permission.why_not() or await keeper.ledger.paused()
    return why_not or await _clock_doubt(keeper)


def _passed(report: PassReport, began: datetime, now: datetime, *, scarce: bool) -> Passed:
    found = report.survey
    return Passed(
        at=now,
        pass_id=report.pass_id,
        platform=found.platform.name,
        place=found.platform.place,
        seen=found.counts.seen,
        due=len(found.due),
        reclaimed=len(report.reclaimed),
        deferred=report.deferred,
        failed=len(report.failed),
        unseen=_in_few_words(found.unseen),
        breaker=report.plan.breaker,
        seconds=max((now - began).total_seconds(), 0.0),
        unwritten=found.to_write.left_out,
        running=found.counts.running,
        scarce=scarce,
    )


def _in_few_words(unseen: Sequence[Unseen]) -> tuple[str, ...]:
    """Written with every pass, so it must not follow how many there are, nor how long their names."""
    first = [f"{one.what}: {one.why}"[:UNSEEN_LONGEST] for one in unseen[:UNSEEN_WRITTEN]]
    more = len(unseen) - len(first)
    return (*first, f"and {more} more") if more else tuple(first)
