"""Checks before an acceptance run, on each engine: a Kubernetes cluster, a Docker or Podman engine, hosts over ssh,
a Ray cluster. Read-only, or leaving nothing there.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from collections.abc import Awaitable, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpukeeper import __version__
from gpukeeper.acceptance.fleet.launcher import PORT, RunSpec, Target
from gpukeeper.acceptance.fleet.preflight.engines import (
    EngineFacts,
    HostFacts,
    HostsRequest,
    RayFacts,
    RayNodeFacts,
    judge_engine,
    judge_hosts,
    judge_ray,
)
from gpukeeper.acceptance.fleet.preflight.facts import (
    ClusterFacts,
    Finding,
    in_order,
    passed,
    targets,
    unchecked,
    warning,
)
from gpukeeper.acceptance.fleet.preflight.kubernetes import drivers_of_trials as trial_drivers
from gpukeeper.acceptance.fleet.preflight.kubernetes import judge, judge_trial, network_advice
from gpukeeper.acceptance.launchers.preflight import gather_facts
from gpukeeper.acceptance.launchers.ssh import SshClient, host_facts, unmet
from gpukeeper.acceptance.launchers.trial import TrialRequest, leftovers, tried
from gpukeeper.blocking import SystemClock
from gpukeeper.clients.docker import Engine, EngineError, find
from gpukeeper.clients.kubernetes.api import Api
from gpukeeper.clients.ray import RayNode, named_nodes
from gpukeeper.clients.ssh import Host, HostError, selected_hosts
from gpukeeper.devices.driver.client import gpu_note, inventory
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from gpukeeper.wiring.kubernetes import cluster_api
from gpukeeper.wiring.launch_hosts import PROGRAM, known_hosts, ssh_client
from gpukeeper.wiring.ray import jobs_api, ray_launcher


async def kubernetes(
    wanted: TrialRequest, context: str, environ: Mapping[str, str] = os.environ, *, trial: bool
) -> tuple[Finding, ...]:
    """No namespace: that of the context. `trial`: start one; else only the cluster is checked."""
    try:
        api = cluster_api({"context": context}, environ)
    except UsageError as problem:
        return (unchecked("cluster", str(problem), (), ["kubectl config get-contexts"]),)
    try:
        reached = await _reached(api)
        if reached.verdict is not Grade.PASS:
            return (reached,)
        request = replace(wanted.cluster, namespace=wanted.cluster.namespace or api.namespace)
        facts = await gather_facts(api, request)
        tried = await _trial(api, replace(wanted, cluster=request), facts) if trial else ()
        found = [one for one in judge(facts, request) if not is_proven(one, tried)]
        return in_order((reached, _client(environ), *found, *tried))
    finally:
        await api.close()


def is_proven(one: Finding, tried: tuple[Finding, ...]) -> bool:
    """What could not be checked, and a trial proved: on every node that the finding is about, and nowhere else."""
    if one.verdict is not Grade.INCONCLUSIVE or one.code != "drivers":
        return False
    seen = {
        name for trial in tried if trial.code == "trial-gpu" and trial.verdict is Grade.PASS for name in trial.about
    }
    return bool(one.about) and seen.issuperset(one.about)


async def _trial(api: Api, wanted: TrialRequest, facts: ClusterFacts) -> tuple[Finding, ...]:
    if not wanted.cluster.image:
        raise UsageError("--trial needs the image of the run: --image REGISTRY/NAME:TAG")
    if wanted.nodes == ("all",):
        known = () if isinstance(facts.nodes, Unknown) else targets(facts, wanted.cluster)
        wanted = replace(wanted, nodes=tuple(one.name for one in known))
    before = await leftovers(api, wanted.cluster.namespace, wanted.owner)
    done = await tried(api, wanted)
    found = [finding for one in done for finding in judge_trial(one)]
    return (*before, *found, *trial_drivers(done), *network_advice(done))


async def _reached(api: Api) -> Finding:
    try:
        return passed("cluster", f"{api.place} is reachable: {await api.version()}")
    except PlatformError as problem:
        return unchecked("cluster", str(problem), (), ["kubectl cluster-info"])


def _client(environ: Mapping[str, str]) -> Finding:
    found = shutil.which("kubectl", path=environ.get("PATH"))
    if found is None:
        words = "kubectl is not in PATH. gpukeeper does not need it; the commands below do"
        return warning("client", words, (), ["https://kubernetes.io/docs/tasks/tools/"])
    return passed("client", f"kubectl is at {found}")


NOT_FOUND = 404
PATIENCE = timedelta(seconds=10)


class _Device(msgspec.Struct):
    id: str = msgspec.field(default="", name="ID")


class _Info(msgspec.Struct, rename="pascal"):
    server_version: str = ""
    runtimes: dict[str, object] | None = None
    mem_total: int = 0
    security_options: tuple[str, ...] | None = None
    discovered_devices: tuple[_Device, ...] | None = None


async def docker(image: str, shm: str, environ: Mapping[str, str] = os.environ) -> tuple[Finding, ...]:
    address = find(environ)
    if address is None:
        words = "no socket at /var/run/docker.sock and DOCKER_HOST is not set"
        return (unchecked("engine", words, (), ["sudo systemctl start docker"]),)
    try:
        engine = Engine(address, environ)
        async with engine.opened():
            info = await engine.get("/info", _Info)
            there = await _has(engine, image) if image else False
    except (PlatformError, UsageError) as problem:
        return (unchecked("engine", str(problem), (), ["docker info"]),)
    facts = EngineFacts(
        address=address,
        version=info.server_version,
        runtimes=tuple(info.runtimes or ()),
        devices=tuple(one.id for one in info.discovered_devices or ()),
        memory=info.mem_total,
        rootless=any("rootless" in one for one in info.security_options or ()),
        image=there,
        gpus=_gpus() if engine.local else Unknown("the engine is on another machine"),
    )
    return judge_engine(facts, image, shm)


async def _has(engine: Engine, image: str) -> bool | Unknown:
    try:
        await engine.raw(f"/images/{image}/json")
    except EngineError as error:
        return False if error.status == NOT_FOUND else Unknown(str(error))
    return True


def _gpus() -> int | Unknown:
    if gpu_note() is not None:
        return 0
    found = inventory(PATIENCE)
    return found if isinstance(found, Unknown) else len(found)


async def ssh(
    names: tuple[str, ...], options: Mapping[str, str], gpus_per_node: int | None, shm: str, *, together: bool
) -> tuple[Finding, ...]:
    """No names: all of the list."""
    client, listed = ssh_client(options), known_hosts(options)
    if not (listed or names):
        raise UsageError("no host is named; add --nodes HOST,HOST or --option hosts=FILE")
    hosts = selected_hosts(listed, names)
    program, master = options.get("program", PROGRAM), options.get("master") or hosts[0].address
    try:
        found = await asyncio.gather(*(_host_facts(client, one, program, options) for one in hosts))
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


async def _host_facts(client: SshClient, host: Host, program: str, options: Mapping[str, str]) -> HostFacts:
    found, where = await host_facts(client, host, program), shlex.join(_destination(host, options))
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


T = TypeVar("T")


async def ray(
    names: tuple[str, ...],
    selector: str,
    options: Mapping[str, str],
    gpus_per_node: int | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Finding, ...]:
    engine, api = ray_launcher(options, environ), jobs_api(options, environ)
    cluster = await _known(api.version())
    if isinstance(cluster, Unknown):
        fix = [f"curl -sS {api.address}/api/version", "ray start --head --dashboard-host=ADDRESS"]
        return (unchecked("ray-cluster", cluster, (), fix),)
    # Of a description only what selects nodes counts: nothing is started.
    spec = RunSpec(
        run="preflight",
        owner="",
        created=SystemClock().now(),
        engine="ray",
        nodes=names,
        selector=selector,
        gpus_per_node=gpus_per_node,
    )
    nodes, held = await _known(api.nodes()), await _known(api.held())
    targets = nodes if isinstance(nodes, Unknown) else await _known(engine.targets(spec))
    jobs = await _known(api.jobs())
    facts = RayFacts(
        address=api.address,
        version=cluster,
        own=_own(),
        dead=nodes if isinstance(nodes, Unknown) else _dead(nodes, targets),
        chosen=_chosen(nodes, targets, {} if isinstance(held, Unknown) else held),
        held=held if isinstance(held, Unknown) else None,
        jobs=jobs if isinstance(jobs, Unknown) else len(jobs),
    )
    await api.close()
    return judge_ray(facts, gpus_per_node)


def _chosen(
    nodes: tuple[RayNode, ...] | Unknown, targets: tuple[Target, ...] | Unknown, held: Mapping[str, float]
) -> tuple[RayNodeFacts, ...] | Unknown:
    if isinstance(nodes, Unknown):
        return nodes
    if isinstance(targets, Unknown):
        return targets
    known = named_nodes(nodes)
    return tuple(_facts(one.node, known[one.node], held, one.excluded) for one in targets)


def _dead(nodes: tuple[RayNode, ...], targets: tuple[Target, ...] | Unknown) -> tuple[RayNodeFacts, ...]:
    """Those that nobody named: named ones are reported as left out."""
    chosen = set() if isinstance(targets, Unknown) else {one.node for one in targets}
    return tuple(
        _facts(name, node, {}, "") for name, node in named_nodes(nodes).items() if not node.alive and name not in chosen
    )


def _facts(name: str, node: RayNode, held: Mapping[str, float], excluded: str) -> RayNodeFacts:
    return RayNodeFacts(
        node=name,
        node_id=node.node_id,
        alive=node.alive,
        message=node.message or "",
        gpus=node.gpus,
        held=held.get(node.node_id, 0.0),
        excluded=excluded,
    )


async def _known(asked: Awaitable[T]) -> T | Unknown:
    try:
        return await asked
    except PlatformError as problem:
        return Unknown(str(problem))


def _own() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        return ""
