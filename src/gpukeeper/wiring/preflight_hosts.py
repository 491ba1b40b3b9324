"""Checks before an acceptance run on hosts, over ssh. Leaves nothing there."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence

from gpukeeper import __version__
from gpukeeper.acceptance.fleet.preflight.finding import Finding, unchecked
from gpukeeper.acceptance.fleet.preflight.hosts import HostFacts, HostsRequest, judge_hosts
from gpukeeper.acceptance.fleet.spec import PORT
from gpukeeper.acceptance.launchers.ssh_checks import facts, unmet
from gpukeeper.acceptance.launchers.ssh_client import SshClient
from gpukeeper.model.errors import UsageError
from gpukeeper.ssh.client import HostError
from gpukeeper.ssh.hosts import Host, selected
from gpukeeper.wiring.launch_hosts import PROGRAM, known_hosts, ssh_client


async def ssh(
    names: tuple[str, ...], options: Mapping[str, str], gpus_per_node: int | None, shm: str, *, together: bool
) -> tuple[Finding, ...]:
    """No names: all of the list."""
    client, listed = ssh_client(options), known_hosts(options)
    if not (listed or names):
        raise UsageError("no host is named; add --nodes HOST,HOST or --option hosts=FILE")
    hosts = selected(listed, names)
    program, master = options.get("program", PROGRAM), options.get("master") or hosts[0].address
    try:
        found = await asyncio.gather(*(_facts(client, one, program, options) for one in hosts))
        reached = len(hosts) > 1 and not any(one.silent for one in found)
        apart = await unmet(client, hosts, master, PORT) if together and reached else None
    except UsageError as problem:
        return (unchecked("host-login", str(problem), (), ["ssh -V"]),)
    finally:
        await client.close()
    request = HostsRequest(
        program=program,
        version=f"gpukeeper {__version__}",
        gpus_per_node=gpus_per_node,
        shm=shm,
        together=together,
        master=master,
        port=PORT,
        unmet=apart,
    )
    return judge_hosts(found, request)


async def _facts(client: SshClient, host: Host, program: str, options: Mapping[str, str]) -> HostFacts:
    found, where = await facts(client, host, program), shlex.join(_destination(host, options))
    if isinstance(found, HostError):
        return HostFacts(node=host.node, destination=where, code=found.code, silent=str(found))
    reply, clock_s = found
    return HostFacts(
        node=host.node,
        destination=where,
        python=reply.python,
        gpus=reply.gpus,
        driver=reply.driver,
        program=reply.program,
        version=reply.version,
        broken=reply.broken,
        shm=reply.shm,
        free=reply.free,
        folder=reply.folder,
        refused=reply.refused,
        clock_s=clock_s,
    )


def _destination(host: Host, options: Mapping[str, str]) -> Sequence[str]:
    """As a person types it behind ssh."""
    user = host.user or options.get("user", "")
    return (
        *(("-F", options["config"]) if options.get("config") else ()),
        *(("-i", options["identity"]) if options.get("identity") else ()),
        *(("-p", str(host.port)) if host.port is not None else ()),
        f"{user}@{host.address}" if user else host.address,
    )
