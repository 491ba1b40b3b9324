"""The only module that knows both ports and adapters: which platforms are here, and a Keeper over them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gpukeeper.acceptance.ports import Workbench
from gpukeeper.config.load import Loaded, Stamp, load_policy, load_text, policy_file, stamp
from gpukeeper.devices.counters import Counters
from gpukeeper.devices.gpus import LocalGpus
from gpukeeper.devices.meter import CounterMeter, GpuMeter, Meters
from gpukeeper.devices.prometheus import Prometheus
from gpukeeper.devices.usage import GpuUsage
from gpukeeper.engine import admin_events
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.ports import Platform
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.ledger.evidence import DirectoryEvidence
from gpukeeper.ledger.in_memory import RecalledSignals
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.paths import evidence_folder, ledger_path, usage_path
from gpukeeper.ledger.signals import SqliteSignals, open_signals
from gpukeeper.ledger.trust import make_private
from gpukeeper.ledger.usage import SqliteUsage, open_usage
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import LedgerError, PolicyError, UsageError
from gpukeeper.model.event import Event
from gpukeeper.model.message import Kind
from gpukeeper.model.policy import Mode
from gpukeeper.model.ports import Clock, Meter
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.catalog import admin_channels, owner_channels
from gpukeeper.notify.messages import Messages
from gpukeeper.platforms.docker import connect as docker
from gpukeeper.platforms.docker import meter as docker_meter
from gpukeeper.platforms.docker.adapter import DockerPlatform
from gpukeeper.platforms.host import meter as host_meter
from gpukeeper.platforms.host.adapter import Busy, HostPlatform, nothing_known
from gpukeeper.platforms.host.connect import Needed, hostname, nothing_needed, user_name
from gpukeeper.platforms.kubernetes import connect as kubernetes
from gpukeeper.platforms.kubernetes.adapter import KubernetesPlatform
from gpukeeper.platforms.kubernetes.meter import ClusterMeter
from gpukeeper.platforms.kubernetes.settings import settings_of as cluster_settings
from gpukeeper.platforms.ray import connect as ray
from gpukeeper.platforms.ray.adapter import RayPlatform
from gpukeeper.platforms.ray.discovery import names_here

# What only `accept` and the demo need is imported where it is needed: every other verb starts without it.
if TYPE_CHECKING:
    from gpukeeper.acceptance.bench.workbench import LocalWorkbench
    from gpukeeper.acceptance.check import RunRequest
    from gpukeeper.acceptance.self_test import Attempt, FaultTarget, SelfTestOutcome
    from gpukeeper.platforms.simulated.live import LiveFleet
    from gpukeeper.platforms.simulated.week import Week

SIMULATED_GPUS = 8
SIMULATED_SEED = 7
FLEET = "GPUKEEPER_FLEET"  # folder:PATH[:PATH…] plays with places of files instead of this machine


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)


@dataclass(frozen=True)
class Reach:
    """Whether a platform can be looked at from here, in a sentence."""

    platform: str
    place: str
    reachable: bool
    why: str


@dataclass
class Session:
    """A Keeper over what is reachable, with the policy that applies and what should be said about both."""

    keeper: Keeper
    book: Rulebook
    loaded: Loaded
    reaches: list[Reach]
    ledger: SqliteLedger
    signals: SqliteSignals
    evidence: DirectoryEvidence
    user: str
    messages: Messages
    usage: GpuUsage | None = None
    hours: SqliteUsage | None = None  # how GPUs are used, for programs that stay
    notes: list[str] = field(default_factory=list)

    def record_hours(self, log: Callable[[str], None]) -> None:
        """For programs that stay. A file that cannot be opened is reported, and stops nothing else."""
        try:
            self.hours = open_usage(usage_path(self.ledger.path), write=True)
        except LedgerError as problem:
            log(f"how the GPUs are used is not recorded: {problem}")
            return
        self.keeper = replace(self.keeper, usage=self.hours)

    def observe_only(self) -> Rulebook:
        """The last good policy, without the right to act."""
        return Rulebook(msgspec.structs.replace(self.loaded.policy, mode=Mode.PLAN))

    @asynccontextmanager
    async def admins_notified(self, log: Callable[[str], None]) -> AsyncIterator[None]:
        """While the block runs. For programs that stay: a command prints what it finds."""
        self.messages.log = log
        self.messages.admins = admin_channels(self.loaded.policy.notify, log)
        self.ledger.on_append = self._notify_of
        try:
            yield
        finally:
            await self.messages.close()

    def _notify_of(self, lines: Sequence[Event]) -> None:
        for line in lines:
            closed = admin_events.breaker_closed(line)
            if closed is not None:
                self.messages.is_over(Kind.BREAKER, closed)
            message = admin_events.message_of(line)
            if message is not None:
                self.messages.to_admins(message)

    def passed(self, report: PassReport) -> None:
        """Called after each pass of a program that stays."""
        message = admin_events.overdue(report, self.book.policy.mode)
        if message is not None:
            self.messages.to_admins(message)

    def close(self) -> None:
        if self.usage is not None:
            self.usage.close()
        if self.hours is not None:
            self.hours.close()
        self.ledger.close()
        self.signals.close()


def open_session(
    policy: Path | None = None, *, write: bool, environ: Mapping[str, str] = os.environ, only: str | None = None
) -> Session:
    """`write`: the ledger will be written. `only` narrows to one platform, or one place of it."""
    clock = SystemClock()
    loaded = load_policy(policy, environ=environ)
    if write:
        _trust(loaded)
    gpus = LocalGpus()
    found = _find(loaded, clock, environ, gpus)
    platforms, reaches = tuple(found.platforms), found.reaches
    # Of all platforms: however narrow the look, what is acted on is measured again first.
    usage, meter = _meter(found, loaded, clock)
    if only is not None:
        platforms = tuple(p for p in platforms if only in (p.name, f"{p.name}/{p.place}"))
        if not platforms:
            known = ", ".join(f"{r.platform}/{r.place}" for r in reaches if r.reachable)
            why = "".join(f" ({r.why})" for r in reaches if r.platform == only.partition("/")[0] and not r.reachable)
            raise UsageError(f'"{only}" is not a reachable platform{why}. Reachable: {known}')
    path = ledger_path(environ)
    ledger, signals = open_ledger(path, write=write), open_signals(path, write=write)
    capture = loaded.policy.capture
    evidence = DirectoryEvidence(Path(capture.to) if capture.to else evidence_folder(path), capture.quota)
    if usage is not None:
        gpus.let_go = partial(asyncio.to_thread, usage.close)  # nobody may hold a GPU that is reset, nor we
    messages = Messages(owner_channels(platforms))
    keeper = Keeper(
        platforms=platforms,
        ledger=ledger,
        signals=signals if write else RecalledSignals(signals),
        evidence=evidence,
        notifier=messages,
        clock=clock,
        meter=meter,
        recall=_recall(found, loaded),
        gpus=gpus if usage is not None else None,
    )
    book, user = Rulebook(loaded.policy), user_name(os.getuid())
    return Session(keeper, book, loaded, reaches, ledger, signals, evidence, user, messages, usage)


def play(seed: int, length: timedelta, on_report: Callable[[PassReport], None] = lambda report: None) -> Week:
    """The demo: a week of the simulated fleet under the shared-host preset."""
    from gpukeeper.platforms.simulated import week

    return week.play(seed, length, load_text(DEMO_POLICY, "demo policy").policy, on_report)


def simulated_fleet(seed: int = SIMULATED_SEED) -> AbstractContextManager[LiveFleet]:
    """The fleet of the demo, to be watched."""
    from gpukeeper.platforms.simulated.live import live_fleet

    return live_fleet(seed, load_text(DEMO_POLICY, "demo policy").policy)


DEMO_POLICY = """
preset: shared-host
mode: enforce
scope: {docker: {}, kubernetes: {namespaces: ["*"]}, ray: {}}
at_finish: Running
temporary: [{root: /tmp, names: ["ray_tmp_*", "pip-*", "tmp*"], above: 5GB, older_than: 1h}]
activity: {tick: 1m}
schedule: {every: 15m}
"""


@dataclass(frozen=True)
class Bench:
    """A machine whose GPUs can be tested, and the clock that its time passes on."""

    workbench: Workbench
    clock: Clock
    logs: Callable[[], Mapping[str, str]] = dict  # what its programs said on their way, by the name of a file


def open_bench(wish: RunRequest, *, python: str | None = None, count: int | None = None) -> Bench:
    """`python`: the interpreter that was asked for; without it one is found, and without any nothing is computed."""
    from gpukeeper.acceptance.bench.workbench import LocalWorkbench

    if wish.device == "simulated":
        return simulated_bench(count or SIMULATED_GPUS, {})
    workbench = LocalWorkbench(_interpreter(python), wish.device, count=count or 1)
    return Bench(workbench, SystemClock(), lambda: workbench.logs)


def simulated_bench(gpus: int, faults: Mapping[str, Any]) -> Bench:
    from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench

    workbench = SimulatedWorkbench(gpus=gpus, seed=SIMULATED_SEED, **faults)
    return Bench(workbench, workbench.clock)


def node_name() -> str:
    """What this machine is called in reports."""
    from gpukeeper.acceptance.bench import machine

    return machine.node_name()


async def try_detectors(
    *, python: str | None, device: str, tell: Callable[[Attempt], None] = lambda attempt: None
) -> SelfTestOutcome:
    """The self-test: on simulated machines, and on this one as far as it can run probes."""
    from gpukeeper.acceptance.catalog import CHECKS
    from gpukeeper.acceptance.judging import reference
    from gpukeeper.acceptance.self_test import SelfTestSetup, self_test

    found = _interpreter(python)
    opened: list[LocalWorkbench] = []
    try:
        alone, together = await _places(found, device, opened)
        return await self_test(SelfTestSetup(_simulated_place, alone, together, CHECKS, reference.limits, tell))
    finally:
        for one in opened:
            await one.close()


def _interpreter(wanted: str | None) -> str | Unknown:
    """One that was named and cannot be used is a mistake; none at all is a finding of the run."""
    from gpukeeper.acceptance.bench.interpreter import find_python

    found = find_python(wanted)
    if isinstance(found, Unknown) and (wanted is not None or os.environ.get("GPUKEEPER_PYTHON")):
        raise UsageError(f"{found.why} Nothing was run.")
    return found


async def _places(
    python: str | Unknown, device: str, opened: list[LocalWorkbench]
) -> tuple[FaultTarget | Unknown, FaultTarget | Unknown]:
    """Two ranks need two GPUs, else the CPU stands in for them; where a CPU was asked for, it does so for all."""
    from gpukeeper.acceptance.bench.workbench import LocalWorkbench
    from gpukeeper.acceptance.self_test import FaultTarget

    if isinstance(python, Unknown):
        return python, python

    def place(kind: str, count: int, words: str) -> FaultTarget:
        opened.append(LocalWorkbench(python, kind, count=count))
        return FaultTarget(opened[-1], SystemClock(), kind, words)

    if device != "cuda":
        return place("cpu", 1, "this CPU"), place("cpu", 2, "two ranks on this CPU")
    alone = place("cuda", 1, "this machine's GPUs")
    seen = await alone.workbench.machine()
    why = seen.gpus.why if isinstance(seen.gpus, Unknown) else seen.environment.get("torch_why")
    if why or isinstance(seen.gpus, Unknown) or not seen.gpus:
        # What a CPU finds says nothing about the detectors on GPUs that somebody believes to have.
        none = Unknown(f"there is no GPU to run them on ({why or 'none found'}). To run them on the CPU: --device cpu")
        return none, none
    return alone, alone if len(seen.gpus) > 1 else place("cpu", 2, "two ranks on this CPU")


def _simulated_place(faults: Mapping[str, Any]) -> FaultTarget:
    from gpukeeper.acceptance.self_test import FaultTarget

    bench = simulated_bench(SIMULATED_GPUS, faults)
    return FaultTarget(bench.workbench, bench.clock, "simulated", "simulated")


class PolicyRead(NamedTuple):
    loaded: Loaded
    stamp: Stamp | None


def read_policy(policy: Path | None, last: PolicyRead | None = None) -> PolicyRead:
    """As the file says now; `last` where it did not change since. Blocks: a daemon calls it in a thread. PolicyError:
    it is broken, or others could change it, and so nothing acts by it."""
    file, now = policy_file(policy), time.time()
    if last is not None and last.stamp is not None and stamp(last.loaded, file, now) == last.stamp:
        _trust(last.loaded)
        return last
    loaded = load_policy(policy)
    _trust(loaded)
    return PolicyRead(loaded, stamp(loaded, file, now))


def follow_policy(session: Session, loaded: Loaded) -> None:
    """A changed policy file counts from the next pass on."""
    if loaded.policy.digest != session.book.policy.digest:
        session.loaded, session.book = loaded, Rulebook(loaded.policy)
        if session.messages.admins:
            session.messages.admins = admin_channels(loaded.policy.notify, session.messages.log)
        for one in session.keeper.platforms:
            one.follow(loaded.policy)


def _trust(loaded: Loaded) -> None:
    """Refuses to act by a policy that other users can change. Commands that only look print a warning instead."""
    if loaded.untrusted:
        raise PolicyError([f"{one}. A policy that other users can change is not applied." for one in loaded.untrusted])
    if loaded.policy.capture.to:
        try:
            make_private(Path(loaded.policy.capture.to))
        except LedgerError as problem:
            raise PolicyError([f"{loaded.source}: capture.to: {problem}"]) from problem


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
    """Without a container engine: containers that the policy calls nodes are found when it is asked."""
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
class _Found:
    """The platforms that are here, and how what runs on them is measured."""

    reaches: list[Reach]
    platforms: list[Platform] = field(default_factory=list)
    # By platform: of what runs on this machine.
    counters: dict[str, Callable[[Subject], Counters | None]] = field(default_factory=dict)
    measured: list[Meter] = field(default_factory=list)  # by others, elsewhere


def _meter(found: _Found, loaded: Loaded, clock: SystemClock) -> tuple[GpuUsage | None, Meter | None]:
    """What happens on this machine is measured here, with the driver kept open between readings."""
    if not found.counters:
        return None, None
    usage = GpuUsage(clock, exporter=loaded.policy.gpu.dcgm)
    counted = [CounterMeter(name, clock, count) for name, count in found.counters.items()]
    return usage, Meters(GpuMeter(usage, clock, list(found.counters)), *counted, *found.measured)


def _recall(found: _Found, loaded: Loaded) -> Meter | None:
    """A Prometheus knows the past, too."""
    knows = cluster_settings(loaded.policy).prometheus is not None
    return Meters(*found.measured) if found.measured and knows else None


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


def _find(loaded: Loaded, clock: SystemClock, environ: Mapping[str, str], gpus: LocalGpus) -> _Found:
    fleet = environ.get(FLEET)
    if fleet:
        return _fleet_of_files(fleet)
    found = _Found(discover(environ))
    address, beside = docker.find(environ), None
    busy: Busy = nothing_known
    others: list[Platform] = []
    found.counters["host"] = host_meter.count
    if address is not None:
        engine = docker.Engine(address, environ)
        place = hostname() if engine.local else engine.host
        beside = DockerPlatform(engine, place, clock, gpus.inventory, loaded.policy)
        others.append(beside)
        if beside.local:
            found.counters["docker"] = partial(docker_meter.count, records=beside.records)
    if _wants_ray(loaded, found.reaches):
        inside = ray.no_containers if beside is None else partial(_nodes_in, beside)
        own = _own_folders(loaded, environ)
        nodes = RayPlatform(hostname(), loaded.policy, clock, inside, environ=environ, folders=own)
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


def _fleet_of_files(fleet: str) -> _Found:
    kind, *folders = fleet.split(":")
    if kind != "folder" or not folders or not all(Path(one).is_dir() for one in folders):
        raise UsageError(f'{FLEET}="{fleet}" is not folder:PATH[:PATH…] with existing directories')
    from gpukeeper.platforms.simulated.folder import FolderPlatform

    places = [FolderPlatform(Path(one)) for one in folders]
    reaches = [
        Reach(one.name, one.place, True, f"a fleet from files below {where}")
        for one, where in zip(places, folders, strict=True)
    ]
    return _Found(reaches, list(places))


def _host(loaded: Loaded, clock: SystemClock, environ: Mapping[str, str], busy: Busy, needed: Needed) -> HostPlatform:
    policy, folders = loaded.policy, _own_folders(loaded, environ)
    return HostPlatform(
        hostname(),
        policy.temporary,
        clock,
        reports=policy.reports,
        marks=policy.disk,
        folders=folders,
        busy=busy,
        needed=needed,
    )


def _own_folders(loaded: Loaded, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The folders of gpukeeper itself, which no removal may take along."""
    path = ledger_path(environ)
    return str(path.parent), loaded.policy.capture.to or str(evidence_folder(path))


def _wants_ray(loaded: Loaded, reaches: list[Reach]) -> bool:
    """A node may come later, and containers are known only to their engine: the policy's word is enough."""
    at = next(number for number, one in enumerate(reaches) if one.platform == "ray")
    if reaches[at].reachable or "ray" not in loaded.policy.scope:
        return reaches[at].reachable
    reaches[at] = Reach("ray", hostname(), True, "no node on the host itself; containers are searched for nodes")
    return True


async def _nodes_in(engine: DockerPlatform, patterns: Sequence[str]) -> Sequence[ray.NodeContainer] | Unknown:
    found = await engine.called(patterns)
    if isinstance(found, Unknown):
        return found
    return [ray.NodeContainer(one.plain_name, one.state.pid, one.id) for one in found]


def _cluster(loaded: Loaded, environ: Mapping[str, str], reaches: list[Reach]) -> kubernetes.Cluster | None:
    """A kubeconfig that cannot be used is said, and stops nobody who looks at something else."""
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
