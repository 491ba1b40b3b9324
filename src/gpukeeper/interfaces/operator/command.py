"""`gpukeeper operator`: the same as `serve`, inside Kubernetes.
One of several instances is the leader; the others are on standby."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal.log import log
from gpukeeper.interfaces.terminal.session import opened
from gpukeeper.interfaces.terminal.watching import PassPrinter

LEASE = "gpukeeper"
HEALTH_PORT = 8080


def operator(
    policy: o.PolicyFile = None,
    lease_namespace: Annotated[
        str,
        typer.Option(
            "--lease-namespace", help="Namespace of the Lease. Default: the operator's own namespace.", metavar="NAME"
        ),
    ] = "",
    lease_name: Annotated[
        str,
        typer.Option(
            "--lease-name",
            help="Name of the Lease. Its holder is the leader. Use one name per operator deployment.",
            metavar="NAME",
        ),
    ] = LEASE,
    no_leader_election: Annotated[
        bool, typer.Option("--no-leader-election", help="Act without a Lease. Use only if no second instance can run.")
    ] = False,
    health: Annotated[
        int, typer.Option("--health", help="Port of /healthz, /readyz and /metrics, on all addresses.", metavar="PORT")
    ] = HEALTH_PORT,
    json: o.JsonLines = False,
    quiet: o.Quiet = False,
) -> None:
    """Run the daemon inside a Kubernetes cluster. In mode enforce the leader reclaims; the others are on standby."""
    from gpukeeper.interfaces.operator.run import Election, operate_until_stopped  # needs an extra, prometheus_client

    with opened(policy, write=True, only="kubernetes", quiet=quiet, tell=log) as session:
        session.record_hours(log)
        finished = PassPrinter(log, json=json, quiet=quiet).finished
        held = None if no_leader_election else Election(lease_namespace, lease_name)
        asyncio.run(operate_until_stopped(session, policy, held, health, finished, log))
