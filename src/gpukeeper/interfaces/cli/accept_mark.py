"""`gpukeeper accept mark`: the results of a run as label, condition and taint of the nodes. A plan unless --apply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpukeeper.acceptance.fleet.consequences import NodeResult, plan, result_of
from gpukeeper.acceptance.fleet.node_marks import LABEL, TAINT, Change, MarkPlan, NodeMarks
from gpukeeper.acceptance.launchers.archive import RunArchive
from gpukeeper.acceptance.launchers.marks import Marked
from gpukeeper.acceptance.reports.store import ReportFolder
from gpukeeper.interfaces.cli.marking import (
    MarkOptions,
    document,
    exit_code,
    planned_or_applied,
    print_marks,
    refuse_engine,
)
from gpukeeper.interfaces.cli.node_records import cause
from gpukeeper.interfaces.terminal import completion
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.ledger.paths import ledger_path, reports_folder
from gpukeeper.model.errors import UsageError
from gpukeeper.wiring.clock import SystemClock


@dataclass(frozen=True, kw_only=True)
class RunMarkOptions:
    taint: Annotated[
        bool | None,
        typer.Option("--taint/--no-taint", help="Taint failed nodes, or only label them. Default: the policy."),
    ] = None
    report_dir: Annotated[
        Path | None,
        typer.Option("--report-dir", metavar="DIR", help="Report directory. Default: reports/ in the state directory."),
    ] = None


@o.with_options
def mark(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run from `accept list`.", autocompletion=completion.runs)],
    options: MarkOptions,
    of_run: RunMarkOptions,
) -> None:
    """Mark nodes with the results of a run: label, condition, taint. Without --apply: only the plan.

    Exit code 3: some nodes were kept, deferred or not marked, 12: the breaker is open."""
    refuse_engine(options.on)
    results = _results(run, of_run)
    settings = options.settings()
    if of_run.taint is not None:
        settings = msgspec.structs.replace(settings, taint=of_run.taint)
    now = SystemClock().now()

    def replan(nodes: Sequence[NodeMarks]) -> MarkPlan:
        return plan(results, nodes, settings, now)

    why = msgspec.structs.replace(cause(), run=run, gpus={one.node: one.gpus for one in results})
    found = planned_or_applied(options, replan, settings, why)
    if options.json:
        shown.as_json("accept-mark", {"run": run, **document(found, options)})
    else:
        print_marks(found, options, _planned, _written, ("acceptance", "node", "taint", "reason"))
    raise typer.Exit(exit_code(found))


def _planned(one: Change) -> tuple[str, ...]:
    word = "-" if TAINT not in one.taints else "add taint" if one.takes_out else "remove taint"
    reason = "; ".join(filter(None, (one.deferred or one.condition.message, one.note)))
    return (one.labels[LABEL] or "-", one.node, word, reason)


def _written(one: Marked) -> tuple[str, ...]:
    reason = "; ".join(filter(None, (one.problem or one.deferred, one.note)))
    return (one.acceptance or "-", one.node, "tainted" if one.tainted else "-", reason)


def _results(run: str, options: RunMarkOptions) -> list[NodeResult]:
    """Of all nodes with a report of this run."""
    folder = ReportFolder(options.report_dir or reports_folder(ledger_path()))
    # RUN/nodes/ is what was collected; RUN.NODE is what a node wrote itself, and another run can be named so too.
    written = [one for one in folder.list() if one.run == run or one.run.startswith(f"{run}.")]
    collected = RunArchive(folder.path, run).nodes
    found = [*((folder, one) for one in written), *((collected, one) for one in collected.list())]
    broken = [f"{one.path}: {one.problem}" for _, one in found if one.problem]
    if broken:
        raise UsageError("\n".join([*broken, "Nothing was marked."]))
    reports = [where.load(one.path, samples=False) for where, one in found]
    results = [result_of(one) for one in reports if one.run == run]
    if not results:
        raise UsageError(f"No report of run {run} in {folder.path}. To list the runs: gpukeeper accept list")
    twice = [node for node, times in Counter(one.node for one in results).items() if times > 1]
    if twice:
        raise UsageError(f"{folder.path} has two reports of run {run} for {twice[0]}. Keep one. Nothing was marked.")
    return results
