"""`gpukeeper workload`: list, show, hold, release, stop, remove and restore workloads."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated

import typer

from gpukeeper.interfaces.cli.explain import explain
from gpukeeper.interfaces.cli.plan import plans, print_daemon_notes, read_daemon_plan
from gpukeeper.interfaces.cli.submit import restore as restore_workload
from gpukeeper.interfaces.cli.submit import submit
from gpukeeper.interfaces.terminal import completion
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.terminal.session import confirmed, narrowed, opened, print_unreachable, span
from gpukeeper.lifecycle.forecast import NOT_UNATTENDED
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.decision import Decision
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Mode
from gpukeeper.views.plan import unseen_notes, workloads_view

app = typer.Typer(
    no_args_is_help=True,
    help="List, hold, release, stop, remove or restore your workloads. Admins: those of all users.",
)


@app.command("list")
def list_(
    policy: o.PolicyFile = None,
    platform: o.OnPlatform = None,
    owner: o.Owner = None,
    image: o.Image = None,
    class_: o.Class = None,
    json: o.Json = False,
) -> None:
    """List all workloads with their next action."""
    narrow = narrowed(Narrow(owner=owner, image=image, class_=class_))
    by_daemon = read_daemon_plan(policy, platform, narrow)
    if by_daemon is not None:
        decisions = [d for place in by_daemon.places for d in place.decisions]
        _print_list(decisions, by_daemon.policy.mode, by_daemon.now, json=json)
        print_daemon_notes(by_daemon, quiet=json)
        return
    with opened(policy, write=False, only=platform) as session:
        reports = asyncio.run(plans(session, narrow))
        decisions = [d for r in reports for d in r.survey.decisions]
        if not _print_list(decisions, session.book.policy.mode, session.keeper.clock.now(), json=json):
            print_unreachable(session, platform)
        for words in (words for report in reports for words in unseen_notes(report) if not json):
            print_message(words)


def _print_list(decisions: Iterable[Decision], mode: Mode, now: datetime, *, json: bool) -> bool:
    """Whether there was something to print."""
    view = workloads_view(decisions, mode)
    if json:
        shown.as_json("workload-list", view)
        return True
    rows = [_row(d, now) for d in view.decisions]
    shown.table(rows, head=("next", "workload", "owner", "class", "holds", "due", "reason"))
    if not rows:
        print_message("No workloads found in the scope of the policy.")
    elif mode is Mode.PLAN:
        print_message(NOT_UNATTENDED)
    return bool(rows)


def _row(d: Decision, now: datetime) -> tuple[str, ...]:
    holds, due = shown.holds(d), shown.when(d.due, now)
    return (d.word, d.seen.ref.path, d.owner or "-", d.class_ or "-", holds, due, d.reason)


@app.command()
def show(workload: o.Workload, policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """Show everything known about one workload, and each rule's verdict."""
    explain(workload, policy, json=json)


@app.command()
def hold(
    workload: o.Workload,
    for_: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="2h, 1d, … Default: the maximum that is allowed.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason, shown to all users.")] = "",
    suspends: Annotated[
        list[str] | None,
        typer.Option(
            "--suspends",
            metavar="RULE",
            help="Admins: a rule to suspend; may be repeated.",
            autocompletion=completion.rules,
        ),
    ] = None,
    policy: o.PolicyFile = None,
    json: o.Json = False,
) -> None:
    """Hold a workload for a limited time. Suspends the idle rule and removals, never the maximum runtime."""
    length = span(for_, "--for")
    seconds = length.total_seconds() if length is not None else None
    submit(
        "hold",
        policy=policy,
        json=json,
        workload=workload,
        seconds=seconds,
        reason=reason,
        suspends=tuple(suspends or ()),
    )


@app.command()
def release(workload: o.Workload, policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """End the holds on a workload. Ends those that you are allowed to end, and shows the others."""
    submit("release", policy=policy, json=json, workload=workload)


@app.command()
def stop(workload: o.Workload, policy: o.PolicyFile = None, yes: o.Yes = False, json: o.Json = False) -> None:
    """Stop one workload now, with the same checks as in a pass."""
    _act("stop", workload, policy, yes, json)


@app.command()
def remove(workload: o.Workload, policy: o.PolicyFile = None, yes: o.Yes = False, json: o.Json = False) -> None:
    """Remove one workload now. Saves evidence first and verifies the result."""
    _act("remove", workload, policy, yes, json)


@app.command()
def restore(workload: o.Workload, policy: o.PolicyFile = None, json: o.Json = False) -> None:
    """Restore what gpukeeper stopped, or removed after capturing it. The same as `gpukeeper restore`."""
    restore_workload(workload, policy, json)


def _act(verb: str, workload: str, policy: o.PolicyFile, yes: bool, json: bool) -> None:
    if not yes and not sys.stdin.isatty():
        raise UsageError(
            f"{verb} needs a confirmation, and stdin is not a terminal. Nothing was done. For scripts: --yes"
        )

    def confirm_action(words: str) -> bool:
        shown.progress_line("")
        print_message(f"Will {words}.")
        return confirmed(f"{verb.capitalize()} it now?")

    submit(verb, policy=policy, json=json, confirm_action=None if yes else confirm_action, workload=workload)
