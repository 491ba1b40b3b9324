"""`gpukeeper serve`: the daemon. Watches, measures, reclaims (mode enforce), answers on its socket."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from gpukeeper.interfaces.daemon.metrics import LOOPBACK, pass_hooks
from gpukeeper.interfaces.daemon.serve import serve_until_stopped
from gpukeeper.interfaces.telemetry.pages import read_endpoint
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal.log import log
from gpukeeper.interfaces.terminal.session import opened
from gpukeeper.interfaces.terminal.watching import PassPrinter


def serve(
    policy: o.PolicyFile = None,
    platform: o.OnPlatform = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            help="Serve Prometheus metrics at /metrics on this port (default: off; default address: 127.0.0.1).",
            metavar="[ADDRESS:]PORT",
        ),
    ] = None,
    web: Annotated[
        str | None,
        typer.Option(
            "--web",
            help="Serve the web dashboard on this port (default: off; default address: 127.0.0.1).",
            metavar="[ADDRESS:]PORT",
        ),
    ] = None,
    json: o.JsonLines = False,
    quiet: o.Quiet = False,
) -> None:
    """Run the daemon: watch, measure and, in mode enforce, reclaim. Prints one line for every outcome and warning."""
    with opened(policy, write=True, only=platform, quiet=quiet, tell=log) as session:
        session.record_hours(log)
        printer = PassPrinter(log, json=json, quiet=quiet)
        hooks = pass_hooks(metrics, session, printer, (lambda words: None) if quiet else log, web=web is not None)
        where = None if web is None else read_endpoint(web, "--web", LOOPBACK)
        asyncio.run(serve_until_stopped(session, policy, hooks, log, web=where, quiet=quiet))
