"""`gpukeeper plan`: observe and decide, change nothing.

Users who may not read the ledger of another user's daemon get its plan, from its last passes; `workload list` too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from gpukeeper.engine.observe import Survey, TreeCount
from gpukeeper.engine.outlook import Outlooks, PlaceOutlook, PolicyHead
from gpukeeper.engine.reclaim import PassReport, look_and_plan
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.daemon import query_daemon
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.pass_options import OnRay, ShortTimes
from gpukeeper.interfaces.terminal.session import opened, some_unreachable
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.decision import Unseen
from gpukeeper.model.errors import UsageError
from gpukeeper.model.words import size_in_words
from gpukeeper.views.plan import (
    PlanView,
    daemon_plan_notes,
    daemon_plan_summary,
    daemon_plan_view,
    notes,
    plan_view,
    summary,
)

if TYPE_CHECKING:
    from gpukeeper.interfaces.telemetry.machine import MachineReader
    from gpukeeper.wiring.session import Session


NOT_HERE = {"label": "--label", "outcome": "--outcome", "older_than": "--older-than", "image": "--image"}


def read_daemon_plan(policy: Path | None, platform: str | None, narrow: Narrow) -> Outlooks | None:
    """None: no daemon of another user is running here."""
    found = query_daemon(Outlooks, "plan", policy)
    if found is None:
        return None
    for name, flag in NOT_HERE.items():
        if getattr(narrow, name) is not None:
            raise UsageError(f"the daemon does not support {flag}; remove it, or ask an admin")
    places = [one for one in found.places if platform in (None, one.platform, f"{one.platform}/{one.place}")]
    return msgspec.structs.replace(found, places=tuple(_narrowed(one, narrow) for one in places))


def _narrowed(place: PlaceOutlook, narrow: Narrow) -> PlaceOutlook:
    fits = [narrow.fits_ref(one.seen.ref, one.owner) and narrow.fits_class(one.class_) for one in place.decisions]
    fitting = tuple(one for one, fit in zip(place.decisions, fits, strict=True) if fit)
    return msgspec.structs.replace(place, decisions=fitting)


def show_plan(found: Outlooks, *, json: bool, verbose: bool, quiet: bool) -> None:
    view = daemon_plan_view(found)
    if json:
        show.as_json("plan", view)
        return
    show.table([show.plan_row(d, verbose=verbose) for d in view.listed(kept=verbose)])
    print_daemon_notes(found, quiet=quiet)
    if not quiet:
        print_message(daemon_plan_summary(view))


def print_daemon_notes(found: Outlooks, *, quiet: bool) -> None:
    for words in () if quiet else daemon_plan_notes(found):
        print_message(words)


@o.with_options
def plan(
    selection: o.SelectionByClass,
    short: ShortTimes,
    remote: OnRay,
    exit_code: Annotated[
        bool,
        typer.Option("--exit-code", help="Exit with 4 if something is due, with 3 if not everything could be read."),
    ] = False,
    textfile: o.Textfile = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Show what would be done now, and why. Changes nothing."""
    short.check()
    if remote.asked:
        remote.check_narrow(selection.narrow, short, textfile)
        remote.plan(selection.policy, json=json)
        return
    policy, platform, narrow = selection.policy, selection.platform, short.narrow(selection.narrow)
    check_textfile(textfile, narrow)
    by_daemon = read_daemon_plan(policy, platform, narrow) if textfile is None and not short.asked else None
    if by_daemon is not None:
        show_plan(by_daemon, json=json, verbose=verbose, quiet=quiet)
        places = by_daemon.places
        unread = any(_is_unread(f"{one.platform}/{one.place}", one.unseen) for one in places)
        _exit(
            due=exit_code and any(place.due for place in places),
            unread=unread or (exit_code and any(place.unseen for place in places)),
        )
        return
    with opened(policy, write=False, only=platform, quiet=quiet or json) as session:
        session.book = short.book(session.book)
        machine = None if textfile is None else read_gpus_for(session)
        reports = asyncio.run(plans(session, narrow))
        short.name_missing(one.seen.ref.path for report in reports for one in report.survey.decisions)
        write_textfile(textfile, session, reports, machine)
        view = plan_view(reports, policy_head(session))
        if json:
            show.as_json("plan", view)
        else:
            print_plan(view, verbose=verbose)
        if not json and not quiet:
            print_notes(session, reports)
            print_message(summary(view, _again(policy, platform, narrow)))
        unseen = any(report.survey.unseen for report in reports) or (platform is None and some_unreachable(session))
    covered = [one.survey for one in reports if one.survey.platform.name in session.book.policy.scope]
    silent = [_is_unread(f"{one.platform.name}/{one.platform.place}", one.unseen) for one in covered]
    if any(report.stopped for report in reports) or (covered and all(silent)):
        raise typer.Exit(1)
    nothing = bool(covered) and all(map(_saw_nothing, covered))
    _exit(
        due=exit_code and any(report.survey.due for report in reports),
        unread=any(silent) or nothing or (exit_code and unseen),
    )


def _exit(*, due: bool, unread: bool) -> None:
    if due or unread:
        raise typer.Exit(4 if due else 3)


def _is_unread(place: str, unseen: Sequence[Unseen]) -> bool:
    """The place itself, not only a part of it."""
    return any(one.what == place for one in unseen)


def _saw_nothing(found: Survey) -> bool:
    """Trees, nodes and disks count, too, although they are not workloads."""
    return bool(found.unseen) and not (found.counts.seen or found.decisions or found.counts.trees or found.nodes)


async def plans(session: Session, narrow: Narrow) -> list[PassReport]:
    return [await look_and_plan(session.keeper, p, session.book, narrow) for p in session.keeper.platforms]


def check_textfile(textfile: Path | None, narrow: Narrow) -> None:
    """Checked first. Metrics of a part of the objects would look like metrics of all."""
    if textfile is None:
        return
    from gpukeeper.interfaces.telemetry.metrics import check_textfile  # prometheus_client is an extra

    if narrow != Narrow():
        raise UsageError("--textfile cannot be combined with filters. Nothing was done.")
    check_textfile(textfile)


def read_gpus_for(session: Session) -> MachineReader:
    """Before the passes, which then keep what they find about GPUs."""
    from gpukeeper.interfaces.telemetry.machine import MachineReader  # prometheus_client is an extra

    return MachineReader(session)


def write_textfile(
    textfile: Path | None, session: Session, reports: list[PassReport], machine: MachineReader | None
) -> None:
    if textfile is not None and machine is not None:
        from gpukeeper.interfaces.telemetry.metrics import write_textfile  # prometheus_client is an extra

        write_textfile(textfile, session, reports, asyncio.run(machine.read()))


def _again(policy: Path | None, platform: str | None, narrow: Narrow) -> str:
    """The command that applies this plan. Without the same options `apply` would make another plan."""
    plain = policy is None and platform is None and narrow == Narrow()
    return "gpukeeper apply" if plain else "gpukeeper apply, with the same options"


def print_plan(view: PlanView, *, verbose: bool) -> None:
    show.table([show.plan_row(d, verbose=verbose) for d in view.listed(kept=verbose)])
    rows = [(one.category, *map(_pile_in_words, (one.total, one.keep, one.remove))) for one in view.trees]
    if rows:  # how much there is, and how much would be removed
        typer.echo("")
        show.table(rows, head=("trees", "total", "keep", "remove"))


def _pile_in_words(pile: TreeCount) -> str:
    if not pile.number:
        return "-"
    parts = [size_in_words(pile.bytes)] if pile.sized else []
    parts += [f"{pile.unsized} not measured"] if pile.unsized else []
    return f"{pile.number} ({', '.join(parts)})" if parts else str(pile.number)


def print_notes(session: Session, reports: list[PassReport]) -> None:
    for words in notes(reports, session.book.policy):
        print_message(words)


def policy_head(session: Session) -> PolicyHead:
    policy = session.loaded.policy
    return PolicyHead(session.loaded.source, policy.digest, policy.preset, policy.mode)
