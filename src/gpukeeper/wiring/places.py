"""Which platforms are here, and how what runs on them is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gpukeeper.blocking import SystemClock
from gpukeeper.clients import docker
from gpukeeper.clients.kubernetes import connect as kubernetes
from gpukeeper.clients.prometheus import Prometheus
from gpukeeper.config.load import Loaded
from gpukeeper.config.machine import FLEET
from gpukeeper.devices.counters import Counters
from gpukeeper.devices.gpus import LocalGpus
from gpukeeper.devices.meter import CounterMeter, GpuMeter, GpuUsage, Meters
from gpukeeper.engine.ports import Platform
from gpukeeper.ledger.files import evidence_folder, ledger_path
from gpukeeper.model.errors import UsageError
from gpukeeper.model.ports import Meter, StorageReader
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.adapter import DockerPlatform
from gpukeeper.platforms.docker.host_facts import count_container
from gpukeeper.platforms.host.adapter import Busy, HostPlatform, count_process, nothing_known
from gpukeeper.platforms.host.connect import Needed, hostname, nothing_needed
from gpukeeper.platforms.kubernetes.adapter import KubernetesPlatform
from gpukeeper.platforms.kubernetes.meter import ClusterMeter
from gpukeeper.platforms.kubernetes.settings import settings_of as cluster_settings
from gpukeeper.platforms.ray.adapter import RayPlatform
from gpukeeper.platforms.ray.settings import NodeContainer, no_containers
from gpukeeper.platforms.ray.survey import names_here


@dataclass(frozen=True)
class Reach:
    """Whether a platform can be read from here, in a sentence."""

    platform: str
    place: str
    reachable: bool
    why: str


def discover(environ: Mapping[str, str] = os.environ) -> list[Reach]:
    """What is here. The machine itself always is."""
    found = [Reach("host", hostname(), True, "this machine")]
    engine = docker.find(environ)
    found.append(
        Reach("docker", "", False, _NOT_FOUND["docker"])
        if engine is None
        else Reach("docker", hostname() if engine.startswith("unix://") else engine, True, f"at {engine}")
    )
    config = kubernetes.find(environ)
    found.append(
        Reach("kubernetes", "", False, _NOT_FOUND["kubernetes"])
        if config is None
        else Reach("kubernetes", config, True, f"by {config}")
    )
    found.append(_ray_here(environ))
    return found


_NOT_FOUND = {
    "docker": "no socket at /var/run/docker.sock and DOCKER_HOST is not set",
    "kubernetes": "no kubeconfig and not inside a cluster",
    "ray": "no Ray session and no raylet found",
}


def _ray_here(environ: Mapping[str, str]) -> Reach:
    """Without a container engine: containers that the policy calls nodes are found by querying it."""
    place, address = hostname(), environ.get("RAY_ADDRESS")
    try:
        names = names_here(place, environ)
    except OSError as error:
        return Reach("ray", place, False, f"the processes of this machine could not be listed: {error.strerror}")
    if names:
        words = ", ".join("this machine" if name == place else name for name in names)
        return Reach("ray", place, True, f"{len(names)} node{'s' if len(names) > 1 else ''}: {words}")
    if address:
        return Reach("ray", "", False, f"no node of {address} is on this machine; run gpukeeper on its nodes")
    return Reach("ray", "", False, _NOT_FOUND["ray"])


@dataclass
class FoundPlatforms:
    """The platforms that are here, and how what runs on them is measured."""

    reaches: list[Reach]
    platforms: list[Platform] = field(default_factory=list)
    # By platform: of what runs on this machine.
    counters: dict[str, Callable[[Subject], Counters | None]] = field(default_factory=dict)
    measured: list[Meter] = field(default_factory=list)  # by others, elsewhere
    storage: list[StorageReader] = field(default_factory=list)


def _cluster_meter(cluster: KubernetesPlatform, loaded: Loaded, clock: SystemClock) -> list[Meter]:
    """What others measure on a cluster; without a source idleness is not known there, and so kept."""
    settings = cluster_settings(loaded.policy)
    if settings.prometheus is None and not settings.exporters:
        return []
    source = None if settings.prometheus is None else Prometheus(settings.prometheus, os.environ)
    meter = ClusterMeter(
        clock,
        prometheus=source,
        exporters=settings.exporters,
        pods=cluster.running_pods,
        only=dict(settings.prometheus_labels),
    )
    return [meter]


def find_platforms(loaded: Loaded, clock: SystemClock, environ: Mapping[str, str], gpus: LocalGpus) -> FoundPlatforms:
    fleet = environ.get(FLEET)
    if fleet:
        return _fleet_of_files(fleet)
    found = FoundPlatforms(discover(environ))
    address, beside = docker.find(environ), None
    busy: Busy = nothing_known
    others: list[Platform] = []
    found.counters["host"] = count_process
    if address is not None:
        engine = docker.Engine(address, environ)
        place = hostname() if engine.local else engine.host
        beside = DockerPlatform(engine, place, clock, gpus.inventory, loaded.policy)
        others.append(beside)
        found.storage.append(beside)
        if beside.local:
            found.counters["docker"] = partial(count_container, records=beside.records)
    if _wants_ray(loaded, found.reaches):
        inside = no_containers if beside is None else partial(_nodes_in, beside)
        own = _own_folders(loaded, environ)
        nodes = RayPlatform(hostname(), loaded.policy, clock, inside, environ=environ, directories=own)
        others.append(nodes)
        busy = nodes.busy_here
    client = _cluster(loaded, environ, found.reaches)
    if client is not None:
        cluster = KubernetesPlatform(client, clock, loaded.policy)
        others.append(cluster)
        found.measured += _cluster_meter(cluster, loaded, clock)
    needed = nothing_needed if beside is None else beside.bound
    found.platforms += (_host(loaded, clock, environ, busy, needed), *others)
    return found


def _fleet_of_files(fleet: str) -> FoundPlatforms:
    kind, *directories = fleet.split(":")
    if kind != "folder" or not directories or not all(Path(one).is_dir() for one in directories):
        raise UsageError(f'{FLEET}="{fleet}" is not folder:PATH[:PATH…] with existing directories')
    from gpukeeper.platforms.simulated.folder import FolderPlatform

    places = [FolderPlatform(Path(one)) for one in directories]
    reaches = [
        Reach(one.name, one.place, True, f"a fleet from files below {where}")
        for one, where in zip(places, directories, strict=True)
    ]
    return FoundPlatforms(reaches, list(places))


def _host(loaded: Loaded, clock: SystemClock, environ: Mapping[str, str], busy: Busy, needed: Needed) -> HostPlatform:
    directories = _own_folders(loaded, environ)
    return HostPlatform(hostname(), loaded.policy, clock, directories=directories, busy=busy, needed=needed)


def _own_folders(loaded: Loaded, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The directories of gpukeeper itself, which no removal may include."""
    path = ledger_path(environ)
    return str(path.parent), loaded.policy.capture.to or str(evidence_folder(path))


def _wants_ray(loaded: Loaded, reaches: list[Reach]) -> bool:
    """A node may come later, and containers are known only to their engine: the policy's word is enough."""
    at = next(number for number, one in enumerate(reaches) if one.platform == "ray")
    if reaches[at].reachable or "ray" not in loaded.policy.scope:
        return reaches[at].reachable
    reaches[at] = Reach("ray", hostname(), True, "no node on the host itself; containers are searched for nodes")
    return True


async def _nodes_in(engine: DockerPlatform, patterns: Sequence[str]) -> Sequence[NodeContainer] | Unknown:
    found = await engine.called(patterns)
    if isinstance(found, Unknown):
        return found
    return [NodeContainer(one.plain_name, one.state.pid, one.id) for one in found]


def _cluster(loaded: Loaded, environ: Mapping[str, str], reaches: list[Reach]) -> kubernetes.Cluster | None:
    """A kubeconfig that cannot be used is reported, and does not prevent the use of other platforms."""
    if kubernetes.find(environ) is None:
        return None
    settings = cluster_settings(loaded.policy)
    at = next(number for number, one in enumerate(reaches) if one.platform == "kubernetes")
    try:
        cluster = kubernetes.Cluster.from_environment(environ, settings.context, settings.requests, settings.burst)
    except UsageError as problem:
        reaches[at] = replace(reaches[at], reachable=False, why=str(problem))
        return None
    reaches[at] = replace(reaches[at], place=cluster.place)
    return cluster


@dataclass(frozen=True)
class LocalMeters:
    """`all`: of GPUs and everything else, here and elsewhere."""

    usage: GpuUsage
    gpus: GpuMeter
    all: Meter


def local_meters(found: FoundPlatforms, loaded: Loaded, clock: SystemClock) -> LocalMeters | None:
    """What happens on this machine is measured here, with the driver kept open between readings."""
    if not found.counters:
        return None
    usage = GpuUsage(clock, exporter=loaded.policy.gpu.dcgm)
    gpus = GpuMeter(usage, clock, list(found.counters))
    counted = [CounterMeter(name, clock, count) for name, count in found.counters.items()]
    return LocalMeters(usage, gpus, Meters(gpus, *counted, *found.measured))


def past_meter(found: FoundPlatforms, loaded: Loaded) -> Meter | None:
    """A Prometheus has past values, too."""
    knows = cluster_settings(loaded.policy).prometheus is not None
    return Meters(*found.measured) if found.measured and knows else None
