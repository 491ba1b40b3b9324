"""`gpukeeper accept list|show|logs|fetch|remove … --on ENGINE`: runs that an engine has, found by their run id.

From any machine: the engine knows the run, its description and its nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import typer

from gpukeeper.acceptance.fleet.frames import MARK
from gpukeeper.acceptance.fleet.ports import Launcher
from gpukeeper.acceptance.fleet.spec import flags
from gpukeeper.acceptance.fleet.status import RunSummary
from gpukeeper.acceptance.launchers import story
from gpukeeper.acceptance.launchers.archive import LOG, RunArchive
from gpukeeper.acceptance.reports.store import read
from gpukeeper.interfaces.cli.accept_launch import conclude, engine_options, made_reports, reports, setting_of
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.acceptance import reader_may_leave
from gpukeeper.interfaces.terminal.acceptance_run import RunPrinter
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.printable import plain
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.acceptance import RunsOnEngine, RunStatusView, run_on_engine
from gpukeeper.wiring.clock import SystemClock
from gpukeeper.wiring.launchers import open_launcher

T = TypeVar("T")
On: TypeAlias = Annotated[
    str | None,
    typer.Option("--on", metavar="ENGINE", help="Runs that this engine has: docker, kubernetes, ray, ssh, simulated."),
]
Needed: TypeAlias = Annotated[
    str, typer.Option("--on", metavar="ENGINE", help="Engine: docker, kubernetes, ray, ssh, …")
]
RunId: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="Run id, as in `accept list --on ENGINE`.")]
Namespace: TypeAlias = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="With --on kubernetes: its namespace.")
]
Options: TypeAlias = Annotated[
    list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="With --on: an option of the engine.")
]
Into: TypeAlias = Annotated[
    Path | None,
    typer.Option("--report-dir", metavar="DIR", help="Report directory. Default: reports/ in the state directory."),
]


def logs(
    run: RunId,
    on: Needed,
    node: Annotated[
        str | None, typer.Option("--node", metavar="NODE", help="Only this node, completely. Default: all nodes.")
    ] = None,
    tail: Annotated[int, typer.Option("--tail", min=1, metavar="N", help="Last lines of each node.")] = 20,
    report_dir: Into = None,
    namespace: Namespace = None,
    option: Options = None,
) -> None:
    """Print what the nodes of a run have written. From the engine; of nodes that are gone, what was collected."""

    async def printed(launcher: Launcher) -> None:
        summary = await _the_run(launcher, run)
        names = [one.node for one in summary.nodes]
        if node is not None and node not in names:
            raise UsageError(f"--node {node}: not a node of run {run}. Nodes: {', '.join(names)}")
        for name in [node] if node is not None else names:
            output = await launcher.output(summary.spec, name)
            text = _collected(reports(report_dir) / run, name) if isinstance(output, Unknown) else output
            if text is None:
                assert isinstance(output, Unknown), "only what is unknown is searched for elsewhere"
                typer.echo(f"{name}: the log could not be read: {plain(output.why)}")
                continue
            lines = [line for line in text.decode("utf-8", "replace").splitlines() if MARK not in line]
            for line in lines if node is not None else lines[-tail:]:
                typer.echo(plain(line) if node is not None else f"{name}: {plain(line)}")

    with reader_may_leave():
        _with(on, engine_options(option, namespace), printed)


def _collected(folder: Path, node: str) -> bytes | None:
    path = folder / "nodes" / node / LOG
    return read(path) if path.is_file() else None


@dataclass(frozen=True, kw_only=True)
class CollectOptions:
    """Which run, of which engine, and where its reports go."""

    run: RunId
    on: Needed
    report_dir: Into = None
    namespace: Namespace = None
    option: Options = None
    json: o.Json = False


@o.with_options
def fetch(wanted: CollectOptions) -> None:
    """Collect the reports of a run and write its report. Removes nothing. Exit code 0, 4 or 5."""
    _ended(wanted, story.rescue)


@o.with_options
def remove(wanted: CollectOptions) -> None:
    """Remove every object of a run, running or not. Reports that are there are collected first. Exit code 0, 4 or 5."""
    _ended(wanted, story.remove_run)


def _ended(wanted: CollectOptions, act: Callable[[story.Setting, RunSummary], Awaitable[story.Ended]]) -> None:
    options = engine_options(wanted.option, wanted.namespace)
    archive = RunArchive(reports(wanted.report_dir), wanted.run)

    async def acted(launcher: Launcher) -> story.Ended:
        summary = await _the_run(launcher, wanted.run)
        made_reports(wanted.report_dir)
        printer = RunPrinter(to_stderr=True)
        return await act(setting_of(launcher, archive, printer), summary)

    raise typer.Exit(conclude(_with(wanted.on, options, acted), archive.path, json=wanted.json, strict=False))


def list_runs(engine: str, options: Mapping[str, str], *, json: bool) -> None:
    async def listed(launcher: Launcher) -> tuple[RunSummary, ...]:
        found = await launcher.runs()
        if isinstance(found, Unknown):
            raise PlatformError(f"The runs on {engine} could not be read: {found.why}")
        return found

    now = SystemClock().now()
    found = _with(engine, options, listed)
    runs = tuple(
        run_on_engine(one, over=story.is_over(one, now)) for one in sorted(found, key=lambda one: one.spec.run)
    )
    if json:
        shown.as_json("accept-runs", RunsOnEngine(engine, runs))
        return
    rows = [
        (
            one.run,
            one.owner,
            f"{one.created:%Y-%m-%d %H:%M}Z",
            ", ".join(f"{count} {phase}" for phase, count in one.nodes.items()),
            str(one.objects),
            "past its deadline" if one.over else "-",
        )
        for one in runs
    ]
    shown.table(rows, head=("run", "owner", "created", "nodes", "objects", "note"))
    if not runs:
        where = "the namespace (others: --namespace NAME)" if engine == "kubernetes" else engine
        print_message(f"{where} has no runs. Reports of earlier runs: gpukeeper accept list")


def show_run(run: str, engine: str, options: Mapping[str, str], *, json: bool) -> None:
    summary = _with(engine, options, lambda launcher: _the_run(launcher, run))
    if json:
        shown.as_json("accept-run-status", RunStatusView(summary))
        return
    rows = [
        (one.phase.value, one.node, "-" if one.exit_code is None else str(one.exit_code), one.reason or "-")
        for one in summary.nodes
    ]
    shown.table(rows, head=("phase", "node", "exit", "reason"))
    for name in summary.objects[:20]:
        typer.echo(plain(f"object {name}"))
    if len(summary.objects) > 20:
        typer.echo(f"… and {len(summary.objects) - 20} more objects")
    print_message(f"Collect its reports: gpukeeper accept fetch {run} {flags(summary.spec)}")


async def _the_run(launcher: Launcher, run: str) -> RunSummary:
    found = await launcher.run(run)
    if found is not None:
        return found
    known = await launcher.runs()
    names = [] if isinstance(known, Unknown) else [one.spec.run for one in known]
    where = "the namespace" if launcher.engine == "kubernetes" else launcher.engine
    other = "Another namespace: --namespace NAME. " if launcher.engine == "kubernetes" else ""
    raise UsageError(
        f"{where} has nothing of run {run}. Runs there: {', '.join(sorted(names)[-5:]) or 'none'}. {other}"
        f"A report that was collected: gpukeeper accept show {run}"
    )


def _with(engine: str, options: Mapping[str, str], act: Callable[[Launcher], Awaitable[T]]) -> T:
    async def acted() -> T:
        launcher = open_launcher(engine, options)
        try:
            return await act(launcher)
        finally:
            await launcher.close()

    return asyncio.run(acted())
