"""`gpukeeper serve`: the daemon. Watches, measures, reclaims (mode enforce), answers on its socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gpukeeper.interfaces.daemon.metrics import LOOPBACK, pass_hooks
from gpukeeper.interfaces.daemon.serve import serve_until_stopped
from gpukeeper.interfaces.daemon.serve_fleet import fleet_access, serve_fleet_until_stopped
from gpukeeper.interfaces.http_pages import read_endpoint
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal.log import log
from gpukeeper.interfaces.terminal.session import opened
from gpukeeper.interfaces.terminal.watching import PassPrinter
from gpukeeper.model.errors import UsageError
from gpukeeper.wiring.session import read_policy


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
    node_use: Annotated[
        bool,
        typer.Option("--pods", help="With --metrics: GPU use of the pods of this Kubernetes node, as a DCGM exporter."),
    ] = False,
    web: Annotated[
        str | None,
        typer.Option(
            "--web",
            help="Serve the web dashboard on this port (default: off; default address: 127.0.0.1).",
            metavar="[ADDRESS:]PORT",
        ),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="With --web: show all machines of this fleet database. No passes are made.",
            metavar="POSTGRESQL_ADDRESS",
        ),
    ] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(
            "--password-file", help="With --from: file with the database password (default: as in the policy)."
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file", help="With --from: file with the key that signs requests (default: as in the policy)."
        ),
    ] = None,
    json: o.JsonLines = False,
    quiet: o.Quiet = False,
) -> None:
    """Run the daemon: watch, measure and, in mode enforce, reclaim. Prints one line for every outcome and warning."""
    if node_use and metrics is None:
        raise UsageError("--pods needs --metrics. Nothing was started.")
    if from_ is not None:
        if web is None or platform is not None or metrics is not None or json:
            raise UsageError("--from needs --web, and excludes --platform, --metrics and --json. Nothing was started.")
        _serve_fleet(policy, from_, password_file, key_file, web, quiet=quiet)
        return
    if password_file is not None or key_file is not None:
        raise UsageError("--password-file and --key-file need --from. Nothing was started.")
    with opened(policy, write=True, only=platform, quiet=quiet, tell=log) as session:
        session.record_hours(log)
        printer = PassPrinter(log, json=json, quiet=quiet)
        tell = (lambda words: None) if quiet else log
        hooks = pass_hooks(metrics, session, printer, tell, web=web is not None, node_use=node_use)
        where = None if web is None else read_endpoint(web, "--web", LOOPBACK)
        asyncio.run(serve_until_stopped(session, policy, hooks, log, web=where, quiet=quiet))


def _serve_fleet(
    policy: Path | None, address: str, password_file: Path | None, key_file: Path | None, web: str, *, quiet: bool
) -> None:
    loaded = read_policy(policy, needs_scope=False).loaded  # it makes no passes
    for warning in loaded.warnings:
        log(f"policy: {warning}")
    access = fleet_access(address, password_file, key_file, loaded.policy)
    where = read_endpoint(web, "--web", LOOPBACK)
    asyncio.run(serve_fleet_until_stopped(access, loaded.policy, where, log, quiet=quiet))
