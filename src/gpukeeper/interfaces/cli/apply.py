"""`gpukeeper apply`: plan anew, show it, ask, then act, verify and record; lines while it runs, and what was done
when it is interrupted.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.ports import Platform, bug_words, place_name
from gpukeeper.engine.reclaim import PassReport, empty_report, look_and_plan, reclaim
from gpukeeper.interfaces.cli.observe import change_in_words
from gpukeeper.interfaces.cli.plan import check_textfile, policy_head, print_notes, read_gpus_for, write_textfile
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.pass_options import OnRay, ShortTimes
from gpukeeper.interfaces.terminal.session import opened, own_only, some_unreachable
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.decision import Plan
from gpukeeper.model.errors import LeaseHeld, PlatformError, UsageError
from gpukeeper.model.event import Closed, GpuChecked, WarningSent
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import plain, size_in_words
from gpukeeper.views.fleet import SubjectChange
from gpukeeper.views.plan import applied_summary, applied_view, bytes_back

if TYPE_CHECKING:
    from gpukeeper.interfaces.telemetry.machine import MachineReader
    from gpukeeper.wiring.session import Session


INTERRUPTED = 130  # exit code
EVERY = 15.0  # seconds between two lines where no terminal shows each step
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Progress:
    def __init__(self, keeper: Keeper, *, quiet: bool) -> None:
        self._keeper, self._quiet = keeper, quiet
        self._steps = 0
        self._acting = False
        self._said = 0.0  # loop time
        self._results: Counter[str] = Counter()
        self.interrupted = False

    def begin(self, plan: Plan) -> bool:
        """From now on something is changed."""
        self._steps += len(plan.steps)
        self._acting, self._said = True, asyncio.get_running_loop().time()
        return True

    def add(self, line: Closed | WarningSent | GpuChecked) -> None:
        self._results[str(getattr(line, "result", "warned"))] += 1
        if self._quiet or line.ref is None:
            return
        show.progress_line(f"{self._results.total()} done: {line.ref.path}")
        now = asyncio.get_running_loop().time()
        if now - self._said >= EVERY:
            self._said = now
            print_message(f"So far: {self.words}")

    @property
    def words(self) -> str:
        parts = ", ".join(f"{count} {result}" for result, count in sorted(self._results.items()))
        return f"{self._results.total()} of {self._steps} steps{f' ({parts})' if parts else ''}"

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The first signal ends it after the steps in progress, the second at once; before the first step, one does."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end() -> None:
            if self._acting and not self.interrupted:
                self.interrupted = self._keeper.permission.stopping = True
                print_message("Stopping after the steps in progress. Press Ctrl-C again to exit at once.")
                return
            self.interrupted = True
            task.cancel()

        def at_once(number: int, frame: object) -> None:
            """The next step may begin before the event loop has a turn to call `end`."""
            self._keeper.permission.stopping = self._keeper.permission.stopping or self._acting

        for one in SIGNALS:
            loop.add_signal_handler(one, end)
            signal.signal(one, at_once)  # in place of one that does nothing; the loop is woken as before
        try:
            yield
        except asyncio.CancelledError:
            if not self.interrupted:
                raise
            if self._acting:
                print_message(f"Ended after {self.words}. To see the record: gpukeeper ledger list")
            raise KeyboardInterrupt from None
        finally:
            for one in SIGNALS:
                loop.remove_signal_handler(one)


@o.with_options
def apply(
    selection: o.SelectionByClass,
    short: ShortTimes,
    remote: OnRay,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget",
            min=1,
            metavar="N",
            help="Allow this many steps once, ignoring budget and breaker. Check the plan first.",
        ),
    ] = None,
    yes: o.Yes = False,
    textfile: o.Textfile = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Reclaim what is due now. Asks for confirmation. Exit code 3: some steps were deferred or failed, or another pass
    was running at some places; 11: at all places; 12: the breaker is open."""
    short.check()
    if remote.asked:
        remote.check_narrow(selection.narrow, short, textfile, budget)
        remote.apply(selection.policy, yes=yes, json=json)
        return
    with opened(selection.policy, write=True, only=selection.platform, quiet=quiet or json) as session:
        _may_act(session, yes=yes, json=json)
        session.book = short.book(session.book)
        selection = replace(selection, owner=_whose(session, selection.owner))
        narrow = own_only(session, short.narrow(selection.narrow))
        check_textfile(textfile, narrow)
        machine = None if textfile is None else read_gpus_for(session)
        run = Progress(session.keeper, quiet=quiet)
        done = asyncio.run(_apply(session, narrow, budget, run, ask=not yes, again=textfile is not None))
        reports = [one.report for one in done]
        short.name_missing(one.seen.ref.path for report in reports for one in report.survey.decisions)
        _print(session, done, json=json, quiet=quiet)
        if run.interrupted:
            raise typer.Exit(INTERRUPTED)
        _write_textfile(textfile, session, [one.after for one in done], machine)
        out_of_reach = selection.platform is None and some_unreachable(session)
    raise typer.Exit(_exit_code(reports, out_of_reach=out_of_reach))


class AppliedPass(NamedTuple):
    """A pass at one place, and what became of its nodes and disks."""

    report: PassReport
    nodes: list[SubjectChange]
    after: PassReport  # with what exists now, if that was requested


def _may_act(session: Session, *, yes: bool, json: bool) -> None:
    if yes and session.book.policy.mode is Mode.PLAN:
        raise UsageError(
            f"{session.loaded.source}: mode is plan, and only mode: enforce acts unattended. Nothing was done.\n"
            "Set mode: enforce in the policy, or run apply on a terminal without --yes and confirm."
        )
    if not yes and (json or not sys.stdin.isatty()):
        raise UsageError(
            "apply needs a confirmation, and stdin is not a terminal. Nothing was done. For scripts: --yes"
        )


async def _not_paused(session: Session) -> None:
    """Do not ask for confirmation of a plan that would be refused anyway. A pass with --yes observes and records."""
    paused = await session.keeper.ledger.paused()
    if paused is not None:
        raise UsageError(f"all actions are paused: {paused}. Nothing was done. Resume with: gpukeeper resume")


def _whose(session: Session, owner: str | None) -> str | None:
    """Admins may reclaim the work of all users, other users only their own."""
    me = session.user
    if is_admin(session.book, me):
        return owner
    if owner not in (None, me):
        raise UsageError(f"{me} is not an admin of this policy and may not reclaim work of {owner}")
    print_message(f"{me} is not an admin of this policy: only work of {me} is reclaimed.")
    return me


async def _apply(
    session: Session, narrow: Narrow, allow: int | None, run: Progress, *, ask: bool, again: bool
) -> list[AppliedPass]:
    """`again`: observe everything once more afterwards."""

    async def confirm(plan: Plan) -> bool:
        return run.begin(plan) if not ask or await _confirm(plan) else False

    if ask:
        await _not_paused(session)
    how = partial(_reclaim, session, narrow=narrow, allow=allow, confirm=confirm, progress=run.add)
    async with session.owners_notified():
        with run.interruptible():
            reports = [await how(platform) for platform in session.keeper.platforms if not run.interrupted]
    if reports and all(report.leased for report in reports):
        raise LeaseHeld("\n".join(str(report.leased) for report in reports))
    # After the last of them: what went at one place may have freed a disk that another shows.
    acted = any(report.outcomes for report in reports)
    return [
        AppliedPass(
            report,
            await _changes(report, read=acted),
            await _afterwards(session, report) if acted and again else report,
        )
        for report in reports
    ]


async def _afterwards(session: Session, report: PassReport) -> PassReport:
    """The same pass with the current state, so that gauges do not show what was just removed."""
    found = await look_and_plan(session.keeper, report.survey.platform, session.book)
    if found.stopped is not None or report.stopped is not None:
        return report
    return replace(report, survey=replace(found.survey, at=report.survey.at))


async def _reclaim(session: Session, platform: Platform, **how: Any) -> PassReport:
    """Another pass at one place is no reason to hide what was done at the others."""
    try:
        return await reclaim(session.keeper, platform, session.book, **how)
    except LeaseHeld as held:
        report = empty_report(session.keeper, platform, session.book, acted=False)
        report.leased = str(held)
        return report


async def _changes(report: PassReport, *, read: bool) -> list[SubjectChange]:
    async def again(before: Subject) -> Subject | Unknown | None:
        if not read:
            return None
        try:
            found = await report.survey.platform.read(before.ref)
        except PlatformError as problem:
            return Unknown(str(problem))
        except Exception as bug:  # everything was done; a figure is missing
            return Unknown(bug_words(bug))
        return found if isinstance(found, Subject | Unknown) else Unknown("it no longer exists")

    return [SubjectChange(before, await again(before)) for before in report.survey.nodes]


async def _confirm(plan: Plan) -> bool:
    show.table([show.decision_row(step.decision) for step in plan.steps])
    if plan.deferred:
        typer.echo(f"{len(plan.deferred)} more steps are deferred by the budget.", err=True)
    # While the event loop runs, Ctrl-C would only cancel it after the answer; here it must end the question.
    question = "Apply this step?" if len(plan.steps) == 1 else f"Apply these {len(plan.steps)} steps?"
    # Nor may the loop hear of it afterwards: it would cancel what tidies up after the question.
    loop_hears = signal.set_wakeup_fd(-1)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, previous)
        signal.signal(signal.SIGTERM, ended)
        signal.set_wakeup_fd(loop_hears)


def _print(session: Session, done: list[AppliedPass], *, json: bool, quiet: bool) -> None:
    if json:
        show.as_json("apply", applied_view([(one.report, one.nodes) for one in done], policy_head(session)))
        return
    reports = [one.report for one in done]
    outcomes = [show.outcome_row(o) for r in reports for o in [*r.settled, *r.outcomes]]
    warnings = [show.warning_row(w) for r in reports for w in r.warnings]
    show.progress_line("")
    show.table([*outcomes, *warnings, *(_check_row(c) for r in reports for c in r.checks)])
    for one in done:
        _print_nodes(one.report, one.nodes)
    if not quiet:
        print_notes(session, reports)
        print_message(applied_summary(reports))


def _print_nodes(report: PassReport, nodes: list[SubjectChange]) -> None:
    """Each node and disk before and after, and the total that was freed."""
    for change in nodes:
        if change.after is not None:
            ours = [line for line in report.outcomes if line.ref and line.ref.namespace == change.before.ref.name]
            typer.echo(plain(change_in_words(change, bytes_back(ours)[0])))
    back, unmeasured = bytes_back(report.outcomes)
    if back or (unmeasured and nodes):
        where = place_name(report.survey.platform)
        unknown = f"; size of {unmeasured} not measured" if unmeasured else ""
        typer.echo(f"{where}: {size_in_words(back)} freed{unknown}")


def _check_row(line: GpuChecked) -> tuple[str, ...]:
    assert line.ref is not None
    return (line.result.value, line.ref.path, "check", "-", line.reason)


def _write_textfile(
    textfile: Path | None, session: Session, reports: list[PassReport], machine: MachineReader | None
) -> None:
    """Not without a place: its gauges would be missing, as if nothing were there."""
    if textfile is not None and any(report.leased for report in reports):
        print_message(f"--textfile {textfile} was not written: not every place could be read.")
        return
    write_textfile(textfile, session, reports, machine)


def _exit_code(reports: list[PassReport], *, out_of_reach: bool) -> int:
    if any(report.stopped for report in reports):
        return 1
    if any(report.plan.breaker for report in reports):
        return 12
    partly = out_of_reach or any(r.failed or r.deferred or r.paused or r.leased or r.survey.unseen for r in reports)
    return 3 if partly else 0
