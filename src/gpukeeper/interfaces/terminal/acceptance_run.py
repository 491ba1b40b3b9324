"""A run over many nodes on a terminal: a line for each node whose state changes, a bar, and the report at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from gpukeeper.acceptance.fleet.collect import RunReport
from gpukeeper.acceptance.fleet.spec import RunSpec, Target
from gpukeeper.acceptance.fleet.status import NodeStatus, Phase
from gpukeeper.acceptance.launchers.story import Ended, Notice, Reported
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.acceptance import reader_may_leave
from gpukeeper.interfaces.terminal.colours import overwrites
from gpukeeper.model.grade import Grade
from gpukeeper.model.printable import plain
from gpukeeper.views.acceptance import fleet_notes, run_rows

BAR = 24  # characters
MOST_GPUS = 40  # lines


class RunPrinter:
    """Called by the story with every step."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._err = to_stderr
        self._nodes: dict[str, str] = {}
        self._moving = overwrites(sys.stderr)

    def begin(self, spec: RunSpec, targets: Sequence[Target]) -> None:
        self._nodes = {one.node: "excluded" if one.excluded else "waiting" for one in targets}
        form = f" as {spec.form}" if spec.form else ""
        count = f"{len(targets)} node{'' if len(targets) == 1 else 's'}"
        self._print(f"Run {spec.run}: {count} on {spec.engine}{form}.")
        for one in targets:
            if one.excluded:
                self._print(f"{one.node}: excluded: {one.excluded}")

    def __call__(self, step: Notice | Reported | NodeStatus) -> None:
        match step:
            case Notice():
                self._print(step.words)
            case Reported():
                self._nodes[step.report.node] = "reported"
                self._print(f"{step.report.node}: {step.report.verdict} ({step.done} of {step.of} reported)")
            case NodeStatus():
                self._nodes[step.node] = step.phase.value
                self._print(f"{step.node}: {_words(step)}")

    def close(self) -> None:
        show.progress_line("")

    def _print(self, words: str) -> None:
        if self._moving:
            show.progress_line("")
        with reader_may_leave():
            typer.echo(plain(words), err=self._err)
        self._draw()

    def _draw(self) -> None:
        if self._moving and self._nodes:
            states = list(self._nodes.values())
            over = sum(state in ("reported", "excluded", "ended", "gone") for state in states)
            filled = BAR * over // len(states)
            counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
            show.progress_line(f"[{'#' * filled}{'.' * (BAR - filled)}] {counts}")


def _words(status: NodeStatus) -> str:
    code = f" with {status.exit_code}" if status.phase is Phase.ENDED and status.exit_code else ""
    return f"{status.phase}{code}" + (f": {status.reason}" if status.reason else "")


def print_ended(ended: Ended, folder: Path) -> None:
    with reader_may_leave():
        print_run(ended.report)
        typer.echo(f"Report: {folder}")
        if ended.removal is not None and not ended.problems:
            count = len(ended.removal.removed)
            typer.echo(f"Removed {count} object{'' if count == 1 else 's'}; nothing of the run is left.")


def print_run(report: RunReport) -> None:
    typer.echo("")
    show.table(run_rows(report), head=("verdict", "node", "gpus", "reason"))
    bad = [one for one in report.gpus if one.verdict not in (Grade.PASS, Grade.SKIPPED)]
    if bad:
        typer.echo("")
        rows = [(one.verdict.value, f"{one.node} GPU {one.gpu}", one.identity, one.reason) for one in bad[:MOST_GPUS]]
        show.table(rows, head=("verdict", "gpu", "identity", "reason"))
        if len(bad) > MOST_GPUS:
            typer.echo(f"… and {len(bad) - MOST_GPUS} more in gpus.csv")
    for words in (*fleet_notes(report.fleet), *report.notes):
        typer.echo(plain(words))
    typer.echo("")
    typer.echo(plain(f"{report.verdict}  {report.fleet.reason}"))
