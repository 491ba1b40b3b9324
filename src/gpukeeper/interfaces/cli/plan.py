"""`gpukeeper plan`: observe and decide, change nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from gpukeeper.interfaces.terminal import options as o

if TYPE_CHECKING:
    from pathlib import Path

    from gpukeeper.engine.counts import Pile
    from gpukeeper.engine.observe import Survey
    from gpukeeper.engine.reclaim import PassReport
    from gpukeeper.lifecycle.narrow import Narrow
    from gpukeeper.model.decision import Decision
    from gpukeeper.wiring import Session


def plan(
    policy: o.PolicyFile = None,
    platform: o.OnPlatform = None,
    namespace: o.Namespace = None,
    label: o.Label = None,
    kind: o.Kind = None,
    owner: o.Owner = None,
    outcome: o.OutcomeIs = None,
    older_than: o.OlderThan = None,
    name: o.Name = None,
    image: o.Image = None,
    class_: o.Class = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 4 when something is due, with 3 when not all was seen.")
    ] = False,
    textfile: o.Textfile = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Show what would be done now, and why. Changes nothing."""
    from gpukeeper.interfaces.cli import outlook
    from gpukeeper.interfaces.terminal.session import blind, narrowed, opened

    narrow = narrowed(None, namespace, label, kind, owner, outcome, older_than, name, image, class_)
    check_textfile(textfile, narrow)
    told = outlook.told(policy, platform, narrow) if textfile is None else None
    if told is not None:
        outlook.show_plan(told, json=json, verbose=verbose, quiet=quiet)
        if exit_code and any(place.due for place in told.places):
            raise typer.Exit(4)
        if exit_code and any(place.unseen for place in told.places):
            raise typer.Exit(3)
        return
    with opened(policy, write=False, only=platform, quiet=quiet or json) as session:
        reports = asyncio.run(plans(session, narrow))
        write_textfile(textfile, session, reports)
        if json:
            print_json(session, reports)
        else:
            print_plans(session, reports, verbose=verbose, quiet=quiet, again=_again(policy, platform, narrow))
        unseen = any(report.survey.unseen for report in reports) or (platform is None and blind(session))
    covered = [one for one in reports if one.survey.platform.name in session.book.policy.scope]
    if any(report.stopped for report in reports) or _nothing_answered(covered):
        raise typer.Exit(1)
    if covered and all(_saw_nothing(report.survey) for report in covered):
        raise typer.Exit(3)
    if exit_code and any(report.survey.due for report in reports):
        raise typer.Exit(4)
    if exit_code and unseen:
        raise typer.Exit(3)


def _saw_nothing(found: Survey) -> bool:
    """Trees, nodes and disks are seen, too, though they are no workloads."""
    return bool(found.unseen) and not (found.counts.seen or found.decisions or found.counts.trees or found.nodes)


def _nothing_answered(reports: list[PassReport]) -> bool:
    """No place at all could be looked at."""
    places = [(f"{r.survey.platform.name}/{r.survey.platform.place}", r.survey.unseen) for r in reports]
    return bool(places) and all(any(one.what == place for one in unseen) for place, unseen in places)


async def plans(session: Session, narrow: Narrow) -> list[PassReport]:
    from gpukeeper.engine.reclaim import look_and_plan

    return [await look_and_plan(session.keeper, p, session.book, narrow) for p in session.keeper.platforms]


def check_textfile(textfile: Path | None, narrow: Narrow) -> None:
    """Before anything is done. Half of what is there, told as if it were all, would be a lie in every graph."""
    from gpukeeper.lifecycle.narrow import Narrow
    from gpukeeper.model.errors import UsageError

    if textfile is None:
        return
    from gpukeeper.interfaces.telemetry.textfile import check

    if narrow != Narrow():
        raise UsageError("--textfile tells of everything: leave out what narrows the look. Nothing was done.")
    check(textfile)


def write_textfile(textfile: Path | None, session: Session, reports: list[PassReport]) -> None:
    if textfile is not None:
        from gpukeeper.interfaces.telemetry.textfile import write

        write(textfile, session, reports)


def _again(policy: Path | None, platform: str | None, narrow: Narrow) -> str:
    """How to do what this plan shows. Without its options, `apply` would do something else."""
    from gpukeeper.lifecycle.narrow import Narrow

    plain = policy is None and platform is None and narrow == Narrow()
    return "gpukeeper apply" if plain else "gpukeeper apply, with the same options"


def print_plans(session: Session, reports: list[PassReport], *, verbose: bool, quiet: bool, again: str) -> None:
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.interfaces.terminal.session import say

    due = [d for report in reports for d in report.survey.due]
    others = [d for report in reports for d in report.survey.decisions if d.action.value == "keep"]
    told = [d for d in others if verbose or d.verdict.value == "report"]
    show.table([show.plan_row(d, verbose=verbose) for d in [*due, *told]])
    _print_trees(reports)
    if not quiet:
        say_the_rest(session, reports)
        say(_sentence(session, reports, due, others, again))


def _print_trees(reports: list[PassReport]) -> None:
    """How much lies around, by category, and how much of it would go."""
    from gpukeeper.interfaces.terminal import show

    rows = [
        (category, *map(_pile_in_words, (both, keep, remove))) for category, both, keep, remove in tree_totals(reports)
    ]
    if rows:
        typer.echo("")
        show.table(rows, head=("trees", "total", "keep", "remove"))


def tree_totals(reports: list[PassReport]) -> list[tuple[str, Pile, Pile, Pile]]:
    """By category, the cheapest first: all, what is kept, what is due."""
    from gpukeeper.engine.counts import LIVE, Pile
    from gpukeeper.model.subject import Category

    def piled(category: str, *, due: bool) -> Pile:
        return sum((report.survey.counts.trees.get((category, due), Pile()) for report in reports), Pile())

    names = [*(one.value for one in Category), LIVE]
    totals = [(name, piled(name, due=False), piled(name, due=True)) for name in names]
    return [(category, keep + remove, keep, remove) for category, keep, remove in totals if (keep + remove).number]


def _pile_in_words(pile: Pile) -> str:
    from gpukeeper.model.durations import size_in_words

    if not pile.number:
        return "-"
    told = [size_in_words(pile.bytes)] if pile.sized else []
    told += [f"{pile.unsized} not measured"] if pile.unsized else []
    return f"{pile.number} ({', '.join(told)})" if told else str(pile.number)


def say_the_rest(session: Session, reports: list[PassReport]) -> None:
    """What a reader must know about a plan besides its lines."""
    from gpukeeper.engine.permission import STOPPING
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.interfaces.terminal.session import say
    from gpukeeper.lifecycle.budget import backlog_sentence

    for report in reports:
        for words in filter(None, (report.stopped, report.leased)):
            say(words)
        for words in show.unseen_lines(report):
            say(words)
        if report.plan.breaker:
            say(f"{report.plan.breaker} Allow it once: gpukeeper apply --budget {len(report.survey.due)}")
        if report.plan.deferred:
            say(backlog_sentence(report.plan.deferred, session.book.policy, report.survey.counts.seen))
        for words in report.relief:
            say(words)
        for path, complaint in sorted({(d.seen.ref.path, c) for d in report.survey.decisions for c in d.complaints}):
            say(f"needs an admin: {path}: {complaint}")
    for reason in sorted({report.paused for report in reports if report.paused}):  # said once, not for each place
        if reason == STOPPING:
            say("Ended by a signal before everything was done; the next pass goes on.")
        else:
            say(f"Everything is paused: {reason}. Go on with: gpukeeper resume")


def _sentence(
    session: Session, reports: list[PassReport], due: list[Decision], others: list[Decision], again: str
) -> str:
    from gpukeeper.interfaces.terminal import show

    policy = session.loaded.policy
    count = f"{len(due)} due" if due else "Nothing is due"
    if any(report.survey.unseen or report.stopped for report in reports):
        count += " of what could be seen"
    elif not due and not others and any(report.survey.counts.seen for report in reports):
        count = "Nothing fits what you narrowed it to (parts of a workload are never listed)"
    tail = f"Policy: {session.loaded.source} ({policy.preset}, mode {policy.mode})."
    acts = ""
    if due:
        acts = " Nobody acts on it in mode plan." if policy.mode.value == "plan" else ""
        acts += f" Do it: {again}"
    return f"{count}; {show.kept_summary(others)}.{acts}\n{tail}"


def print_json(session: Session, reports: list[PassReport]) -> None:
    from gpukeeper.interfaces.terminal import show

    show.as_json("plan", {"policy": policy_head(session), "places": [_place(report) for report in reports]})


def policy_head(session: Session) -> dict[str, object]:
    policy = session.loaded.policy
    return {"source": session.loaded.source, "digest": policy.digest, "preset": policy.preset, "mode": policy.mode}


def _place(report: PassReport) -> dict[str, object]:
    found = report.survey
    return {
        "platform": found.platform.name,
        "place": found.platform.place,
        "at": found.at,
        "seen": found.counts.seen,
        "running": found.counts.running,
        "unseen": found.unseen,
        "breaker": report.plan.breaker,
        "paused": report.paused,
        "stopped": report.stopped,
        "steps": [s.decision for s in report.plan.steps],
        "deferred": report.plan.deferred,
        "decisions": found.decisions,
        "trees": [
            {"category": category, "total": both, "keep": keep, "remove": remove}
            for category, both, keep, remove in tree_totals([report])
        ],
    }
