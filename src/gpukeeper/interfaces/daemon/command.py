"""`gpukeeper serve`: the daemon. Watches, measures, reclaims (mode enforce), answers on its socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import typer

from gpukeeper.interfaces.terminal import options as o

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpukeeper.engine.reclaim import PassReport


def serve(
    policy: o.PolicyFile = None, platform: o.OnPlatform = None, json: o.Json = False, quiet: o.Quiet = False
) -> None:
    """Run the daemon: watch, measure and, in mode enforce, reclaim. One line for every outcome and warning."""
    from gpukeeper.interfaces.daemon.serve import serve_until_stopped
    from gpukeeper.interfaces.terminal.session import opened, say

    unseen: dict[str, list[str]] = {}

    def tell(report: PassReport) -> None:
        _print(report, json=json)
        if not quiet:
            _say_unseen(report, unseen, say)

    with opened(policy, write=True, only=platform, quiet=quiet) as session:
        asyncio.run(serve_until_stopped(session, policy, tell, say, quiet=quiet))


def _print(report: PassReport, *, json: bool) -> None:
    import msgspec

    from gpukeeper.interfaces.terminal import show

    if json:
        for line in (*report.settled, *report.outcomes, *report.warnings):
            typer.echo(msgspec.json.encode(line))
        return
    show.table([*map(show.outcome_row, [*report.settled, *report.outcomes]), *map(show.warning_row, report.warnings)])
    if report.plan.breaker:
        typer.echo(f"breaker: {report.plan.breaker}")


def _say_unseen(report: PassReport, before: dict[str, list[str]], say: Callable[[str], None]) -> None:
    """When it begins and when it is over: whoever reads these lines must not take silence for rest."""
    from gpukeeper.interfaces.terminal import show

    place = f"{report.survey.platform.name}/{report.survey.platform.place}"
    now = show.unseen_lines(report)
    if now != before.get(place, []):
        say("\n".join(now) if now else f"{place}: everything is seen again")
    before[place] = now
