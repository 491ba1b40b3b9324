"""`gpukeeper demo`: a simulated fleet, a week in ten seconds, to see gpukeeper at work before trusting it.

What --web needs is imported when it is used: it is an extra.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter, deque
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.messages import overwrites
from gpukeeper.model.errors import UsageError
from gpukeeper.model.words import in_words, size_in_words
from gpukeeper.platforms.simulated.demo import Week
from gpukeeper.wiring.demo import play

NEWEST = 14
PORT = 8088  # of the dashboard
REFRESH = 0.1  # seconds
COLUMNS = {"time": 9, "result": 9, "name": 40, "action": 11, "owner": 5, "reason": 0}  # widths; the last takes the rest
NARROW = {"result": 9, "name": 24, "reason": 0}  # below this many columns, the why comes first
WIDE = 110


def demo(
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, metavar="N", help="Seed of the simulation; the same seed gives the same result."),
    ] = 7,
    days: Annotated[int, typer.Option("--days", min=1, max=31, metavar="N", help="Number of days to simulate.")] = 7,
    once: Annotated[bool, typer.Option("--once", help="Print only the result, without the live view.")] = False,
    web: Annotated[
        bool, typer.Option("--web", help="Serve the dashboard of a simulated fleet, in compressed time.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Argument(min=0, max=65535, metavar="PORT", help="Port of the dashboard.", show_default="8088"),
    ] = None,
    json: o.Json = False,
) -> None:
    """Simulate a week on a fleet and show what was reclaimed and why. Changes nothing on this machine.

    With --web: serve its dashboard on this machine until Ctrl-C; a minute passes in each second.
    """
    if web:
        if json or once:
            raise UsageError("--web shows the fleet in a browser: it cannot be combined with --json or --once.")
        from gpukeeper.interfaces.demo_web import serve_demo

        serve_demo(PORT if port is None else port, seed, partial(typer.echo, err=False))
        return
    if port is not None:
        raise UsageError(f"{port} is the port of a dashboard. To serve one: gpukeeper demo --web {port}")
    live = not once and not json and overwrites(sys.stdout)
    week = _play_live(seed, days) if live else play(seed, timedelta(days=days), _Days(days, silent=json))
    if json:
        show.as_json("demo", week.as_dict())
    else:
        _print(week)


def _play_live(seed: int, days: int) -> Week:
    newest: deque[tuple[str, ...]] = deque(maxlen=NEWEST)
    counts: Counter[str] = Counter()
    drawn = 0.0
    with Live(refresh_per_second=10) as view:

        def on_report(report: PassReport) -> None:
            nonlocal drawn
            _collect(report, newest, counts)
            if time.monotonic() - drawn > REFRESH:
                drawn = time.monotonic()
                view.update(_picture(newest, counts, report.survey.at))

        return play(seed, timedelta(days=days), on_report)


class _Days:
    """Progress where the screen cannot be overwritten: one line for each simulated day."""

    def __init__(self, days: int, *, silent: bool) -> None:
        self._days, self._silent = days, silent
        self._begun: datetime | None = None
        self._ended = 0

    def __call__(self, report: PassReport) -> None:
        self._begun = self._begun or report.survey.at
        ended = (report.survey.at - self._begun) // timedelta(days=1)
        if ended > self._ended and not self._silent:
            self._ended = ended
            typer.echo(f"simulated: {ended} of {self._days} days", err=True)


def _collect(report: PassReport, newest: deque[tuple[str, ...]], counts: Counter[str]) -> None:
    for line in report.outcomes:
        newest.append((f"{line.at:%a %H:%M}", *show.outcome_row(line)))
        counts[line.result.value] += 1
    for warning in report.warnings:
        newest.append((f"{warning.at:%a %H:%M}", *show.warning_row(warning)))
        counts["warned"] += 1


def _picture(newest: deque[tuple[str, ...]], counts: Counter[str], at: datetime) -> Table:
    head = ", ".join(f"{count} {word}" for word, count in counts.most_common()) or "nothing yet"
    picture = Table(title=f"simulated fleet · {at:%A %H:%M} · {head}", title_justify="left", box=None, expand=True)
    shown = COLUMNS if shutil.get_terminal_size().columns >= WIDE else NARROW
    for name, width in shown.items():
        picture.add_column(name, no_wrap=True, overflow="ellipsis", min_width=width, ratio=None if width else 1)
    for row in newest:
        picture.add_row(*(cell for name, cell in zip(COLUMNS, row, strict=True) if name in shown))
    return picture


def _print(week: Week) -> None:
    head = f"{in_words(week.length)} of a simulated fleet of {week.gpus} GPUs (seed {week.seed})"
    show.text(f"{head}, {week.passes} passes over {week.places} places:")
    show.text(f"  {week.gpu_hours:.0f} GPU-hours given back")
    show.text(f"  {size_in_words(week.bytes)} of disk freed")
    show.text(f"  {week.wrong} wrong removals, by what was really in use, needed or held in the simulation\n")
    show.table(
        [(rule, str(n), f"{hours:.0f}", size_in_words(size)) for rule, n, hours, size in week.by_rule],
        head=("rule", "reclaimed", "GPU-hours", "bytes"),
    )
    typer.echo("")
    show.table(
        [(owner, str(n), f"{hours:.0f}", size_in_words(size)) for owner, n, hours, size in week.by_owner],
        head=("owner", "reclaimed", "GPU-hours", "bytes"),
    )
    show.text("\nGPU-hours: GPUs multiplied by the hours they were held while idle, over the limit or left behind.")
    typer.echo("\nThe last outcomes:")
    show.table([show.outcome_row(line) for line in week.last])
    show.text(
        f"\n{week.reclaimed} reclaimed, {week.warned} warnings sent before, {week.kept_by_hold} kept by a hold, "
        f"{week.changed} skipped because they changed at the last moment."
    )
    typer.echo("Nothing was changed on this machine. Next: gpukeeper plan")
