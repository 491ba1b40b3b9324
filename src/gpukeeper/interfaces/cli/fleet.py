"""`gpukeeper fleet`: gpukeeper on many servers, over ssh: deploy, status, upgrade, remove; plan, apply, logs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from gpukeeper.clients.ssh import CONNECT, Settings
from gpukeeper.config.hosts_file import load_hosts
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.server_passes import SOME_FAILED, finish_passes, in_words, print_passes, print_sum
from gpukeeper.interfaces.terminal.session import confirmed, span
from gpukeeper.model.errors import UsageError
from gpukeeper.rollout.execute import AT_ONCE, Outcome, ServerLogs, ServerResult, Servers, read_bundle
from gpukeeper.rollout.plan import Wanted

app = typer.Typer(no_args_is_help=True, help="Deploy gpukeeper to many servers over ssh.")

Hosts = Annotated[Path, typer.Argument(metavar="HOSTS.YAML", help="The servers, and what is wanted on each.")]
Only = Annotated[str, typer.Option("--only", metavar="HOST,…", help="Only these hosts of the file.")]
AtOnce = Annotated[int, typer.Option("--parallel", min=1, max=200, help="How many servers at the same time.")]
First = Annotated[
    int, typer.Option("--first", min=0, help="Change this many servers first; the others only if those are verified.")
]
SshConfig = Annotated[
    str, typer.Option("--ssh-config", metavar="FILE", help="Another file than your own configuration of OpenSSH.")
]
Connect = Annotated[
    str | None, typer.Option("--connect", metavar="DURATION", help="How long to wait for a connection.")
]
Last = Annotated[
    int, typer.Option("--last", min=1, max=1000, metavar="N", help="How many lines of each log of each server.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
PlanOnly = Annotated[
    bool, typer.Option("--plan", help="Show what would be changed on each server, with a diff, and change nothing.")
]
Planned = Callable[[Wanted], Awaitable[ServerResult]]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which of the servers, and how they are reached."""

    only: Only = ""
    parallel: AtOnce = AT_ONCE
    ssh_config: SshConfig = ""
    connect: Connect = None

    def servers(self) -> Servers:
        wait: timedelta = span(self.connect, "--connect") or CONNECT
        return Servers(Settings(config=self.ssh_config, connect=wait), self.parallel)

    def wanted(self, hosts: Path) -> tuple[Wanted, ...]:
        all_ = load_hosts(hosts, read_bundle).wanted
        names = [one.strip() for one in self.only.split(",") if one.strip()]
        missing = sorted(set(names) - {one.name for one in all_})
        if missing:
            raise UsageError(f"--only: {', '.join(missing)} is not in {hosts}. Nothing was done.")
        return tuple(one for one in all_ if not names or one.name in names)


@app.command()
@o.with_options
def plan(
    hosts: Hosts,
    chosen: Chosen,
    json: o.Json = False,
) -> None:
    """Run `gpukeeper plan` on each server: what is due there, and why.

    By the policy that is in force on the server. What a deployment would change: fleet deploy --plan."""
    wanted, servers = chosen.wanted(hosts), chosen.servers()
    finish_passes(asyncio.run(servers.each(wanted, servers.plan_pass)), json=json)


@app.command()
@o.with_options
def apply(
    hosts: Hosts,
    chosen: Chosen,
    first: First = 0,
    yes: Yes = False,
    json: o.Json = False,
) -> None:
    """Run one pass on each server now: reclaim what is due there.

    By the policy that is in force on the server, which must have mode enforce. Shows what is due first and asks."""
    wanted, servers = chosen.wanted(hosts), chosen.servers()
    asyncio.run(_applied(servers, wanted, first=first, yes=yes, json=json))


@app.command()
@o.with_options
def status(
    hosts: Hosts,
    chosen: Chosen,
    json: o.Json = False,
) -> None:
    """Show version, unit, mode, last pass and drift of each server."""
    wanted, servers = chosen.wanted(hosts), chosen.servers()
    _finish(asyncio.run(servers.each(wanted, servers.status)), json=json)


@app.command()
@o.with_options
def logs(
    hosts: Hosts,
    chosen: Chosen,
    last: Last = 10,
    json: o.Json = False,
) -> None:
    """Show the errors and the newest log lines of all servers.

    From the ledger of each server; where systemd runs, also from the journal of its units."""
    wanted, servers = chosen.wanted(hosts), chosen.servers()
    results = asyncio.run(servers.each(wanted, partial(servers.logs, last=last)))
    if json:
        show.as_json("fleet-logs", {"hosts": [_logs_row(one) for one in results]})
    else:
        for one in results:
            _print_logs(one)
        print_sum(results)
    _exit(results)


@app.command()
@o.with_options
def deploy(
    hosts: Hosts,
    chosen: Chosen,
    first: First = 0,
    plan_only: PlanOnly = False,
    yes: Yes = False,
    json: o.Json = False,
) -> None:
    """Install and set up gpukeeper where it is not as wanted, and verify it.

    Shows the plan first and asks. Goes back to the version before where the verification fails."""
    wanted, servers = chosen.wanted(hosts), chosen.servers()
    how = _Change(servers.plan, servers.deploy, first, plan_only=plan_only, yes=yes)
    asyncio.run(_changed(servers, wanted, how, json=json))


@app.command()
@o.with_options
def upgrade(
    hosts: Hosts,
    chosen: Chosen,
    first: First = 1,
    plan_only: PlanOnly = False,
    yes: Yes = False,
    json: o.Json = False,
) -> None:
    """Install the version of the bundle where another one is, and verify it.

    The policy of each server stays as it is. One server is upgraded first, the others only if it is verified."""
    wanted, servers = chosen.wanted(hosts), chosen.servers()
    how = _Change(servers.plan_upgrade, servers.upgrade, first, plan_only=plan_only, yes=yes)
    asyncio.run(_changed(servers, wanted, how, json=json))


@app.command()
@o.with_options
def remove(
    hosts: Hosts,
    chosen: Chosen,
    yes: Yes = False,
    json: o.Json = False,
) -> None:
    """Stop gpukeeper on each server and remove what was installed.

    Ledger, saved evidence and files that were changed since are kept."""
    wanted, servers = chosen.wanted(hosts), chosen.servers()
    _ask(f"Remove gpukeeper from {', '.join(one.name for one in wanted)}?", yes=yes, json=json)
    _finish(asyncio.run(servers.each(wanted, servers.remove)), json=json)


class _Change(NamedTuple):
    planned: Planned
    act: Planned
    first: int
    plan_only: bool
    yes: bool


async def _changed(servers: Servers, wanted: Sequence[Wanted], how: _Change, *, json: bool) -> None:
    """Plan, ask, change. What could not be planned stays as the plan says."""
    found = {one.host: one for one in await servers.each(wanted, how.planned)}
    due = [one for one in wanted if found[one.name].outcome is Outcome.PLANNED]
    if due and not how.plan_only:
        if not json:
            _print(list(found.values()), diff=True)
        _ask(f"Change {in_words(len(due))}?", yes=how.yes, json=json)
        found |= {one.host: one for one in await servers.in_order(due, how.act, how.first)}
    _finish(list(found.values()), json=json, diff=how.plan_only)


async def _applied(servers: Servers, wanted: Sequence[Wanted], *, first: int, yes: bool, json: bool) -> None:
    """With --yes nothing is planned before: each server plans for itself, as in every pass."""
    found: dict[str, ServerResult] = {}
    due = list(wanted)
    if not yes:
        found = {one.host: one for one in await servers.each(wanted, servers.plan_pass)}
        due = [one for one in wanted if (seen := found[one.name].passed) and any(place.steps for place in seen.places)]
        if not json:
            print_passes(list(found.values()))
    if due:
        _ask(f"Run a pass on {in_words(len(due))}?", yes=yes, json=json)
        found |= {one.host: one for one in await servers.in_order(due, servers.apply_pass, first)}
    finish_passes(list(found.values()), json=json)


def _ask(question: str, *, yes: bool, json: bool) -> None:
    if yes:
        return
    if json or not sys.stdin.isatty():
        raise UsageError("This needs a confirmation, and stdin is not a terminal. Nothing was changed. Add --yes.")
    if not confirmed(question):
        raise typer.Exit(1)


def _finish(results: Sequence[ServerResult], *, json: bool, diff: bool = False) -> None:
    if json:
        show.as_json("fleet", {"hosts": [_row(one) for one in results]})
    else:
        _print(results, diff=diff)
    _exit(results)


def _exit(results: Sequence[ServerResult]) -> None:
    if not all(one.good for one in results):
        raise typer.Exit(SOME_FAILED)


def _print_logs(one: ServerResult) -> None:
    show.text(f"== {one.host}: {'; '.join((one.outcome.value, *one.words))}")
    for name, lines in (one.logs or ServerLogs()).parts.items():
        if lines:
            show.text("\n".join((f"-- {name}", *lines)))
    show.text("")


def _logs_row(one: ServerResult) -> dict[str, object]:
    return {
        "host": one.host,
        "outcome": one.outcome,
        "words": one.words,
        **{name: lines if one.logs else None for name, lines in (one.logs or ServerLogs()).parts.items()},
    }


def _print(results: Sequence[ServerResult], *, diff: bool) -> None:
    for one in results if diff else ():
        changes = "\n".join(step.diff for step in one.plan.steps if step.diff)
        if changes:
            show.text(f"{one.host}:\n{changes}\n")
    head = ("OUTCOME", "HOST", "VERSION", "STARTED BY", "MODE", "LAST PASS", "WHY")
    show.table([_cells(one) for one in results], head)
    print_sum(results)


def _cells(one: ServerResult) -> tuple[str, ...]:
    seen, words = one.seen, "; ".join(one.words)
    if seen is None:
        return (one.outcome.value, one.host, "?", "?", "?", "?", words)
    last = seen.about("pass") or "?"
    return (one.outcome.value, one.host, seen.version or "-", seen.active or "-", seen.mode or "-", last, words)


def _row(one: ServerResult) -> dict[str, object]:
    """Of the policy only what a step changes, in its diff: it may have addresses of services."""
    seen = one.seen
    return {
        "host": one.host,
        "outcome": one.outcome,
        "words": one.words,
        "steps": one.plan.steps,
        "drift": one.plan.drift,
        "version": seen.version if seen else None,
        "previous": seen.previous if seen else None,
        "started_by": seen.active if seen else None,
        "mode": seen.mode if seen else None,
        "last_pass": seen.about("pass") if seen else None,
        "python": seen.python if seen else None,
        "free_bytes": seen.free if seen else None,
        "problems": seen.problems if seen else (),
    }
