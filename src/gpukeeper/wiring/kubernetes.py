"""The cluster that acceptance runs use: the launcher, and marks of nodes: plan them, or write them; one program at a
time takes nodes out.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from gpukeeper.acceptance.fleet.marks import MarkPlan, NodeMarks
from gpukeeper.acceptance.launchers.marks import Applied, Replan, Turn, Work, marks_of, nodes_of, planned
from gpukeeper.blocking import SystemClock
from gpukeeper.clients.kubernetes.api import Api
from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.model.policy import MarkSettings
from gpukeeper.platforms.kubernetes.lease import Leadership

if TYPE_CHECKING:
    from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher


REQUESTS, BURST = 100.0, 200  # per second; a run over 512 nodes creates as many objects


def cluster_api(options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> Api:
    """`options`: context."""
    return Api(Cluster.from_environment(environ, options.get("context") or None, REQUESTS, BURST))


def kubernetes_launcher(options: Mapping[str, str]) -> KubernetesLauncher:
    # Marks of nodes do not need it.
    from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher

    return KubernetesLauncher(cluster_api(options), options)


NAMESPACE, LEASE = "kube-system", "gpukeeper-node-marks"
PATIENCE = timedelta(seconds=45)  # a program that was killed holds the lease for 15 seconds


async def read_nodes(options: Mapping[str, str], settings: MarkSettings) -> tuple[str, Sequence[NodeMarks]]:
    """`options`: context. With the name of the cluster."""
    api = cluster_api(options)
    try:
        return api.place, [marks_of(one, settings) for one in await nodes_of(api)]
    finally:
        await api.close()


async def plan_marks(options: Mapping[str, str], replan: Replan, settings: MarkSettings) -> MarkPlan:
    api = cluster_api(options)
    try:
        return await planned(api, replan, settings)
    finally:
        await api.close()


def work_on(options: Mapping[str, str], replan: Replan, settings: MarkSettings, now: datetime) -> Work:
    """Not begun. See `applied`."""
    api = cluster_api(options)
    return Work(api=api, replan=replan, settings=settings, now=now, turn=lambda: lease_turn(api))


async def applied(work: Work) -> Applied:
    try:
        return await work.apply()
    finally:
        await work.api.close()


@asynccontextmanager
async def lease_turn(api: Api) -> AsyncIterator[Turn]:
    """Waits for the lease; without it, `why_not` says why, and no node is taken out."""
    await api.open()
    identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    lead = Leadership(api.cluster, NAMESPACE, LEASE, identity, SystemClock())
    await lead.attempt()
    if lead.denied:
        yield lead
        return
    stop = asyncio.Event()
    campaign = asyncio.create_task(lead.campaign(stop))
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE.total_seconds()):
                await lead.won.wait()
        yield lead
    finally:
        stop.set()
        await campaign
