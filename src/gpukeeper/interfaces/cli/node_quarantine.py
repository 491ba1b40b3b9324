"""`gpukeeper node quarantine|return`: a GPU of this machine; with --on, a node of a cluster: a plan unless --apply."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, TypeAlias

import msgspec
import typer

from gpukeeper.acceptance.fleet.node_marks import Change, MarkPlan, NodeMarks
from gpukeeper.acceptance.fleet.quarantine import Quarantine, plan_quarantine, plan_return
from gpukeeper.acceptance.launchers.marks import Marked
from gpukeeper.config.units import read_span
from gpukeeper.interfaces.cli.marking import (
    MarkOptions,
    document,
    exit_code,
    planned_or_applied,
    print_marks,
    refuse_engine,
)
from gpukeeper.interfaces.cli.node import change_gpu
from gpukeeper.interfaces.cli.node_records import cause
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.session import confirmed
from gpukeeper.model.errors import UsageError
from gpukeeper.wiring.clock import SystemClock

HEAD = ("change", "node", "reason")
Reason: TypeAlias = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason, shown to all users.")]
_GPU = "A GPU of this machine: UUID or a unique prefix, index, or gpu-0 as printed by observe. With --on: a node."


@o.with_options
def quarantine(
    name: Annotated[str, typer.Argument(metavar="GPU|NODE", help=_GPU)],
    options: MarkOptions,
    reason: Reason = "",
    for_: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="With --on: until when, for `return --expired`.")
    ] = None,
) -> None:
    """Take a GPU of this machine, or a node of a cluster, out of use. Does not stop work that runs on it.

    A GPU: admins only, at once. A node (--on): a plan unless --apply. Exit code 3: not done, 12: breaker is open."""
    if not options.on:
        _refuse_cluster_options(options, {"--for": for_ is not None})
        change_gpu("quarantine", name, reason, options.policy, options.json)
        return
    refuse_engine(options.on)
    settings, now = options.settings(), SystemClock().now()
    length = _length(for_)
    until = now + length if length is not None else None
    wanted = Quarantine(by=getpass.getuser(), at=now.replace(microsecond=0), reason=reason, until=until)

    def replan(nodes: Sequence[NodeMarks]) -> MarkPlan:
        return plan_quarantine(name, wanted, nodes, settings, now)

    why = msgspec.structs.replace(cause(), reason=reason, until=until)
    found = planned_or_applied(options, replan, settings, why)
    if options.json:
        shown.as_json("node-quarantine", document(found, options))
    else:
        print_marks(found, options, _quarantine_planned, _written, HEAD)
    raise typer.Exit(exit_code(found))


@o.with_options
def return_(
    options: MarkOptions,
    name: Annotated[str, typer.Argument(metavar="GPU|NODE", help=_GPU)] = "",
    reason: Reason = "",
    expired: Annotated[
        bool, typer.Option("--expired", help="With --on: all nodes whose quarantine is over (--for).")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --on: also a node whose last acceptance failed. Asks first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --force: do not ask for confirmation.")] = False,
) -> None:
    """End the quarantine of a GPU, or of a node of a cluster. A GPU's current state then counts as clean.

    A GPU: admins only, at once. A node (--on): a plan unless --apply; exit code 3: some nodes were kept."""
    if not options.on:
        _refuse_cluster_options(options, {"--expired": expired, "--force": force, "--yes": yes})
        change_gpu("return", name, reason, options.policy, options.json)
        return
    refuse_engine(options.on)
    if expired == bool(name):
        raise UsageError("Name one node, or use --expired. Nothing was changed.")
    settings, now = options.settings(), SystemClock().now()

    def replan(nodes: Sequence[NodeMarks]) -> MarkPlan:
        return plan_return(None if expired else [name], nodes, settings, now, force=force)

    if force and options.apply and not yes:
        _confirm(name or "all nodes whose quarantine is over", json=options.json)
    why = msgspec.structs.replace(cause(), reason=reason)
    found = planned_or_applied(options, replan, settings, why)
    if options.json:
        shown.as_json("node-return", document(found, options))
    else:
        print_marks(found, options, _return_planned, _written, HEAD)
    raise typer.Exit(exit_code(found))


def _refuse_cluster_options(options: MarkOptions, more: dict[str, bool]) -> None:
    given = {
        "--apply": options.apply,
        "--share": options.share is not None,
        "--most": options.most is not None,
        "--context": bool(options.context),
        **more,
    }
    flags = [flag for flag, value in given.items() if value]
    if flags:
        raise UsageError(f"{', '.join(flags)}: only with --on ENGINE, for nodes of a cluster. Nothing was changed.")


def _length(words: str | None) -> timedelta | None:
    if words is None:
        return None
    try:
        length = read_span(words)
    except ValueError as problem:
        raise UsageError(f"--for: {problem} Nothing was changed.") from None
    if length <= timedelta():
        raise UsageError(f"--for {words} is too short. Use for example --for 7d. Nothing was changed.")
    return length


def _confirm(what: str, *, json: bool) -> None:
    if json or not sys.stdin.isatty():
        raise UsageError(
            "--force needs a confirmation, and stdin is not a terminal. Nothing was changed. For scripts: --yes"
        )
    if not confirmed(f"Put {what} back into service although the last acceptance failed?"):
        raise typer.Exit(1)


def _quarantine_planned(one: Change) -> tuple[str, ...]:
    return ("quarantine" if one.takes_out else "update", one.node, one.condition.message)


def _return_planned(one: Change) -> tuple[str, ...]:
    return ("return", one.node, f"removes the taint {' and '.join(one.taints)}")


def _written(one: Marked) -> tuple[str, ...]:
    word = "quarantined" if one.quarantined else "tainted" if one.tainted else "in service"
    return (word, one.node, one.problem or one.deferred)
