"""`gpukeeper apply`: plan anew, show it, ask, then act, verify and record."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal.interrupts import INTERRUPTED, Progress

if TYPE_CHECKING:
    from gpukeeper.engine.reclaim import PassReport
    from gpukeeper.interfaces.terminal.nodes import Change
    from gpukeeper.lifecycle.narrow import Narrow
    from gpukeeper.model.decision import Plan
    from gpukeeper.model.event import Closed, GpuChecked
    from gpukeeper.wiring import Session


def apply(
    policy: o.PolicyFile = None,
    platform: o.OnPlatform = None,
    namespace: o.Namespace = None,
    label: o.Label = None,
    kind: o.Kind = None,
    owner: o.Owner = None,
    outcome: o.OutcomeIs = None,
    older_than: o.OlderThan = None,
    name: o.Name = None,
    budget: Annotated[
        int | None,
        typer.Option("--budget", min=1, help="Allow this many once, past budget and breaker. Read the plan."),
    ] = None,
    yes: o.Yes = False,
    textfile: o.Textfile = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Reclaim what is due now. Asks on a terminal. Exit 3: some was deferred or failed; 12: the breaker refuses."""
    from gpukeeper.interfaces.cli.plan import check_textfile, write_textfile
    from gpukeeper.interfaces.terminal.session import blind, narrowed, opened

    with opened(policy, write=True, only=platform, quiet=quiet or json) as session:
        _may_act(session, yes=yes, json=json)
        owner = _whose(session, owner)
        narrow = narrowed(None, namespace, label, kind, owner, outcome, older_than, name)
        check_textfile(textfile, narrow)
        run = Progress(session.keeper, quiet=quiet)
        done = asyncio.run(_apply(session, narrow, budget, run, ask=not yes))
        reports = [one.report for one in done]
        _print(session, done, json=json, quiet=quiet)
        if run.interrupted:
            raise typer.Exit(INTERRUPTED)
        write_textfile(textfile, session, reports)
        out_of_reach = platform is None and blind(session)
    raise typer.Exit(_exit_code(reports, out_of_reach=out_of_reach))


class Done(NamedTuple):
    """A pass at one place, and what became of its nodes and disks."""

    report: PassReport
    nodes: list[Change]


def _may_act(session: Session, *, yes: bool, json: bool) -> None:
    from gpukeeper.model.errors import UsageError
    from gpukeeper.model.policy import Mode

    if yes and session.book.policy.mode is Mode.PLAN:
        raise UsageError(
            f"{session.loaded.source}: mode is plan, and only mode: enforce acts unattended. Nothing was done.\n"
            "Write mode: enforce into the policy, or run apply on a terminal without --yes and confirm."
        )
    if not yes and (json or not sys.stdin.isatty()):
        raise UsageError("apply asks before it acts, and nobody can answer here. Nothing was done. For scripts: --yes")


def _whose(session: Session, owner: str | None) -> str | None:
    """An admin reclaims for everybody, anybody else only what is their own."""
    from gpukeeper.interfaces.terminal.session import say
    from gpukeeper.lifecycle.holds import is_admin
    from gpukeeper.model.errors import UsageError

    me = session.user
    if is_admin(session.book, me):
        return owner
    if owner not in (None, me):
        raise UsageError(f"{me} is not an admin of this policy and may not reclaim what belongs to {owner}")
    say(f"{me} is not an admin of this policy: only what belongs to {me} is reclaimed.")
    return me


async def _apply(session: Session, narrow: Narrow, allow: int | None, run: Progress, *, ask: bool) -> list[Done]:
    from gpukeeper.engine.reclaim import reclaim

    async def confirm(plan: Plan) -> bool:
        return run.begin(plan) if not ask or await _confirm(plan) else False

    reports: list[PassReport] = []
    with run.interruptible():
        for place in session.keeper.platforms:
            if not run.interrupted:
                how = {"narrow": narrow, "allow": allow, "confirm": confirm, "progress": run.add}
                reports.append(await reclaim(session.keeper, place, session.book, **how))  # type: ignore[arg-type]
    # After the last of them: what went at one place may have freed a disk that another shows.
    acted = any(report.outcomes for report in reports)
    return [Done(report, await _changes(report, look=acted)) for report in reports]


async def _changes(report: PassReport, *, look: bool) -> list[Change]:
    from gpukeeper.engine.failures import bug_words
    from gpukeeper.interfaces.terminal.nodes import Change
    from gpukeeper.model.errors import PlatformError
    from gpukeeper.model.subject import Subject
    from gpukeeper.model.unknown import Unknown

    async def again(before: Subject) -> Subject | Unknown | None:
        if not look:
            return None
        try:
            found = await report.survey.platform.look(before.ref)
        except PlatformError as problem:
            return Unknown(str(problem))
        except Exception as bug:  # everything was done; a figure is missing
            return Unknown(bug_words(bug))
        return found if isinstance(found, Subject | Unknown) else Unknown("it is not there any more")

    return [Change(before, await again(before)) for before in report.survey.nodes]


async def _confirm(plan: Plan) -> bool:
    from gpukeeper.interfaces.terminal import show

    show.table([show.decision_row(step.decision) for step in plan.steps])
    if plan.deferred:
        typer.echo(f"{len(plan.deferred)} more are deferred by the budget.", err=True)
    # While the event loop runs, Ctrl-C would only cancel it after the answer; here it must end the question.
    question = "Do this step?" if len(plan.steps) == 1 else f"Do these {len(plan.steps)} steps?"
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


def _print(session: Session, done: list[Done], *, json: bool, quiet: bool) -> None:
    from gpukeeper.interfaces.cli.plan import policy_head, say_the_rest
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.interfaces.terminal.session import say

    if json:
        show.as_json("apply", {"policy": policy_head(session), "places": [_place(*one) for one in done]})
        return
    reports = [one.report for one in done]
    outcomes = [o for r in reports for o in [*r.settled, *r.outcomes]]
    warnings = [w for r in reports for w in r.warnings]
    show.progress_line("")
    checks = [_check_row(c) for r in reports for c in r.checks]
    show.table([*(show.outcome_row(x) for x in outcomes), *(show.warning_row(x) for x in warnings), *checks])
    for one in done:
        _print_nodes(*one)
    if not quiet:
        say_the_rest(session, reports)
        reclaimed = sum(len(r.reclaimed) for r in reports)
        due = sum(len(r.plan.steps) + len(r.plan.deferred) for r in reports)
        if not outcomes and not warnings and not checks:
            say("Nothing was done.")
            return
        say(f"{reclaimed} of {due} due reclaimed, {len(warnings)} warned. The record: gpukeeper ledger list")


def _print_nodes(report: PassReport, nodes: list[Change]) -> None:
    """Before and after, of each node and disk; and what came back in all."""
    from gpukeeper.interfaces.terminal.nodes import change_in_words
    from gpukeeper.model.durations import size_in_words
    from gpukeeper.notify.terminals import plain

    for change in nodes:
        if change.after is not None:
            ours = [line for line in report.outcomes if line.ref and line.ref.namespace == change.before.ref.name]
            typer.echo(plain(change_in_words(change, _bytes_back(ours)[0])))
    back, unmeasured = _bytes_back(report.outcomes)
    if back or (unmeasured and nodes):
        where = f"{report.survey.platform.name}/{report.survey.platform.place}"
        unknown = f"; of {unmeasured} it was not measured" if unmeasured else ""
        typer.echo(f"{where}: {size_in_words(back)} came back{unknown}")


def _bytes_back(lines: list[Closed]) -> tuple[int, int]:
    """In all, and of how many that were reclaimed it was not measured."""
    from gpukeeper.model.decision import Result
    from gpukeeper.model.unknown import Unknown

    told = [line.bytes_back for line in lines if line.result is Result.RECLAIMED]
    return sum(one for one in told if not isinstance(one, Unknown)), sum(isinstance(one, Unknown) for one in told)


def _check_row(line: GpuChecked) -> tuple[str, ...]:
    assert line.ref is not None
    return (line.result.value, line.ref.path, "check", "-", line.reason)


def _place(report: PassReport, nodes: list[Change]) -> dict[str, object]:
    from gpukeeper.interfaces.terminal.nodes import change_in_numbers

    return {
        "pass": report.pass_id,
        "platform": report.survey.platform.name,
        "place": report.survey.platform.place,
        "breaker": report.plan.breaker,
        "paused": report.paused,
        "stopped": report.stopped,
        "settled": report.settled,
        "outcomes": report.outcomes,
        "warnings": report.warnings,
        "checks": report.checks,
        "deferred": report.plan.deferred,
        "unseen": report.survey.unseen,
        "nodes": [change_in_numbers(one) for one in nodes],
        "bytes_back": _bytes_back(report.outcomes)[0],
    }


def _exit_code(reports: list[PassReport], *, out_of_reach: bool) -> int:
    if any(report.stopped for report in reports):
        return 1
    if any(report.plan.breaker for report in reports):
        return 12
    partly = out_of_reach or any(r.failed or r.deferred or r.paused or r.survey.unseen for r in reports)
    return 3 if partly else 0
