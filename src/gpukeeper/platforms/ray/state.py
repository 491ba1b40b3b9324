"""Whether work runs on a node: what its Ray cluster reports about itself, over the state API of its dashboard, where
its own processes reach it; then the titles and the load of its processes. One sign of work is enough. Idle only if
everything could be read: a node whose Ray cannot be queried is not known to be idle. Reads only.

Incomplete responses are not used: what was cut off, or misses a node, is Unknown. An address counts for a session
only if it reports that session, before and after. A token is sent only to the address that the policy names. A
dashboard usually listens on 127.0.0.1 of its own network namespace; the thread that connects enters it, and ends.

CPU use is that between two readings. A process that ended between them is not counted: only high use vetoes.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.clients.ray import DEADLINE, PORT, Rows, StateApi, Version, first_line, read_token, url
from gpukeeper.devices import holders
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray import translate
from gpukeeper.platforms.ray.busy import (
    ClusterState,
    Job,
    PlacementGroup,
    RayActor,
    RayNode,
    Task,
    Worker,
    busy,
    foreign,
    quiet,
    without,
)
from gpukeeper.platforms.ray.nodes import (
    TICKS,
    Everyone,
    Node,
    Process,
    Raylet,
    ancestors,
    descendants,
    flags_of,
    is_rays_own,
    is_still,
)
from gpukeeper.platforms.ray.settings import RaySettings, Timeouts

LOOPBACK: Final = frozenset(("127.0.0.1", "localhost", "[::1]", "::1"))
_WEBUI = re.compile(r"(?:^|\s)--webui=(\S+)")


async def answers_of(api: StateApi, session: str) -> ClusterState:
    """Everything that shows what runs, of that session. The order matters, for Ray gives no snapshot: a driver may
    create a lasting actor and end between two requests, so what starts something is requested before what it
    starts. And a job exists before its driver, so that a driver without a job is Ray's own.
    """
    workers = await api.rows("workers", Worker)
    jobs = await _jobs_of(api, workers, await api.rows("jobs", Job))
    tasks = await api.rows("tasks", Task)
    groups = await api.rows("placement_groups", PlacementGroup)
    actors = await api.rows("actors", RayActor)
    nodes = await api.rows("nodes", RayNode)
    stranger = _mismatch(api.address, await api.version(), session)
    if stranger is not None:
        return ClusterState(
            nodes=stranger, workers=stranger, actors=stranger, tasks=stranger, groups=stranger, jobs=stranger
        )
    return ClusterState(nodes=nodes, workers=workers, actors=actors, tasks=tasks, groups=groups, jobs=jobs)


def _mismatch(address: str, version: Version | Unknown, session: str) -> Unknown | None:
    if isinstance(version, Unknown):
        return version
    if version.session == session:
        return None
    return Unknown(f"Ray at {address} is {first_line(version.session or 'a session without a name')}, not {session}")


async def _jobs_of(api: StateApi, workers: Rows[Worker], jobs: Rows[Job]) -> Rows[Job]:
    """With the jobs that have ended although a driver of theirs is alive."""
    if isinstance(workers, Unknown) or isinstance(jobs, Unknown):
        return jobs
    found = list(jobs)
    for job_id in sorted({driver.job_id for driver in workers if driver.drives} - {job.job_id for job in jobs}):
        more = await api.some("jobs", Job, "job_id", job_id)
        if isinstance(more, Unknown):
            return more
        found += more
    return tuple(found)


def addresses(raylet: Sequence[str]) -> list[str]:
    """Where the dashboard may be, most likely first, from the arguments of a raylet.

    Every raylet of 2.40 to 2.60 has the address in the command that it starts workers with. No file has it.
    """
    values = [match[1] for part in raylet if (match := _WEBUI.search(part))]
    hosts = [part.partition("=")[2].rpartition(":")[0] for part in raylet if part.startswith("--gcs-address=")]
    known = [one for one in values if re.fullmatch(r"\S+:\d+", one)]
    guesses = [f"{host}:{PORT}" for host in (*hosts, "127.0.0.1") if host]
    return list(dict.fromkeys(url(one) for one in known + guesses))


def why_out_of_reach(raylet: Sequence[str]) -> str | None:
    """For a node on another machine than the head, if the dashboard listens only on the head's own machine (the default
    of `ray start --head`): what to change.
    """
    value = next((match[1] for part in raylet if (match := _WEBUI.search(part))), "")
    flags = flags_of(raylet)
    head, own = flags.get("gcs_address", "").rpartition(":")[0], flags.get("node_ip_address", "")
    host = value.rpartition(":")[0]
    if not head or not own or head == own or host not in LOOPBACK:
        return None
    return (
        f"the dashboard of its cluster listens only on {host} of the head ({head}), which other machines "
        "cannot reach. Start the head with ray start --head --dashboard-host=0.0.0.0 (anyone who reaches that "
        "port can run programs on the cluster, so keep it behind a firewall), or set ray.dashboard in the "
        "policy to an address that this machine reaches"
    )


DASHBOARDS_AT_ONCE = 16  # requests
OWN_JOB = "GPUKEEPER_RAY_JOB"  # set by a task that runs gpukeeper: the job it is part of does not count as work
_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Dashboard(msgspec.Struct, frozen=True):
    """One that reports its session itself."""

    session: str
    version: str
    api: StateApi


class DashboardQueries:
    """One round of queries: each session is queried once, however many of its raylets are here."""

    def __init__(
        self,
        setting: str | None,
        environ: Mapping[str, str],
        deadline: timedelta = DEADLINE,
        proc: str = "/proc",
    ) -> None:
        self._setting, self._environ, self._deadline, self._proc = setting, environ, deadline, proc
        self._known: dict[tuple[str, str], Dashboard | Unknown] = {}
        self._answers: dict[str, ClusterState] = {}

    async def busy(self, raylets: Iterable[Raylet]) -> str | Unknown | None:
        """What runs on the Ray nodes of these raylets; None only if Ray reports each of them as idle."""
        states = [await self._busy(one) for one in raylets]
        words = next((one for one in states if isinstance(one, str)), None)
        return words or next((one for one in states if isinstance(one, Unknown)), None)

    async def find(self, raylets: Iterable[Raylet]) -> None:
        """Their dashboards, some at the same time: one that does not answer delays no other."""
        limit = asyncio.Semaphore(DASHBOARDS_AT_ONCE)

        async def one(raylet: Raylet) -> None:
            async with limit:
                await self.dashboard(raylet)

        some = {(raylet.session_name, _network(raylet.process, self._proc)): raylet for raylet in raylets}
        await asyncio.gather(*(one(raylet) for raylet in some.values()))

    async def dashboard(self, raylet: Raylet) -> Dashboard | Unknown:
        network = _network(raylet.process, self._proc)
        key = raylet.session_name, network or ""
        if key not in self._known:
            self._known[key] = await self._find(raylet, network)
        return self._known[key]

    def answered(self) -> dict[str, Dashboard]:
        """By session, those that answered so far."""
        return {session: one for (session, _), one in self._known.items() if isinstance(one, Dashboard)}

    async def _busy(self, raylet: Raylet) -> str | Unknown | None:
        found = await self.dashboard(raylet)
        if isinstance(found, Unknown):
            return found
        if found.session not in self._answers:
            # This requests its name once more.
            self._answers[found.session] = await answers_of(found.api, found.session)
        state, ours = self._answers[found.session], self._environ.get(OWN_JOB)
        return busy(raylet.node_id, state if ours is None else without(ours, state))

    async def _find(self, raylet: Raylet, network: str | None) -> Dashboard | Unknown:
        whys: list[str] = []
        for api in self._apis(raylet, network):
            version = await api.version()
            if isinstance(version, Unknown):
                whys.append(version.why)
            elif version.session != raylet.session_name:
                whys.append(f"Ray at {api.address} belongs to another session, {version.session}")
            else:
                return Dashboard(raylet.session_name, version.ray, api)
        advice = why_out_of_reach(raylet.process.argv)
        if advice is not None and not self._setting:
            return Unknown(advice)
        return Unknown("; ".join(dict.fromkeys(whys)))

    def _apis(self, raylet: Raylet, network: str | None) -> Iterable[StateApi]:
        if self._setting:
            token = read_token(self._environ, Path(self._environ.get("HOME", "/")))
            yield StateApi(self._setting, token if isinstance(token, str) else None, deadline=self._deadline)
        for address in addresses(raylet.process.argv):
            if network is None:
                yield StateApi(address, deadline=self._deadline)
            else:
                inside = partial(enter_network, raylet.process, self._proc)
                yield StateApi(address, deadline=self._deadline, enter=inside)


def enter_network(process: Process, proc: str = "/proc") -> None:
    """Only this thread enters the network namespace of that process. OSError if it may not, or the process ended."""
    fd = os.open(f"{proc}/{process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not is_still(process.pid, process.starttime, proc):
            raise ProcessLookupError("the raylet has ended")
        if _libc.setns(fd, _NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"its network could not be entered: {os.strerror(number)}")
    finally:
        os.close(fd)


def _network(process: Process, proc: str) -> str | None:
    """Its network namespace; None: ours, or it could not be read."""
    try:
        its, ours = (str(Path(proc, who, "ns/net").readlink()) for who in (str(process.pid), "self"))
    except OSError:
        return None
    return None if its == ours else its


# Titles and load

OLDEST_READING = 30 * 60.0  # seconds: an older reading is not used
FRESH_RESULT = 60.0  # seconds: a newer result is reused
NOT_YET = Unknown("the CPU use was not measured yet")


class Cpu:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, dict[tuple[int, int], int]] | None = None
        self._used: tuple[float, float, dict[tuple[int, int], int]] | None = None  # when, seconds, ticks by process

    def begin(self, everyone: Iterable[Process], window: timedelta) -> None:
        """The first of two readings, unless an earlier one will do."""
        now = self._clock()
        if self._first is None or not window.total_seconds() <= now - self._first[0] <= OLDEST_READING:
            self._first = now, _ticks(everyone)

    async def end(self, read: Callable[[], Sequence[Process]], window: timedelta) -> None:
        """The second one, once for all nodes, when the window is over."""
        assert self._first is not None, "begin() must be called first"
        began = self._first[0]
        left = window.total_seconds() - (self._clock() - began)
        if left > 0:
            await asyncio.sleep(left)
        self.take(read())

    def take(self, everyone: Iterable[Process]) -> None:
        if self._first is None:
            return
        now, later = self._clock(), _ticks(everyone)
        began, earlier = self._first
        if now > began:
            spent = {key: ticks - earlier.get(key, 0) for key, ticks in later.items()}
            self._used = now, now - began, spent
        self._first = now, later

    @property
    def fresh(self) -> bool:
        return self._used is not None and self._clock() - self._used[0] <= FRESH_RESULT

    def percent(self, processes: Iterable[Process]) -> float | Unknown:
        """In percent of one core, of these processes. One that was not in the last reading is new and counts with its
        own time.
        """
        if self._used is None:
            return NOT_YET
        _, seconds, spent = self._used
        ticks = sum(max(spent.get((one.pid, one.starttime), one.ticks), 0) for one in processes)
        return 100 * ticks / TICKS / seconds


def _ticks(everyone: Iterable[Process]) -> dict[tuple[int, int], int]:
    return {(one.pid, one.starttime): one.ticks for one in everyone}


TITLE = "ray::"
SUPERVISOR = "ray::JobSupervisor"
JOB_PARTS = 3  # of our own job: its id, the name it was submitted by, the pid of its driver


class Load(msgspec.Struct, frozen=True):
    """`busy`: what runs, in a few words; None: nothing does."""

    busy: str | Unknown | None
    cpu: float | Unknown  # percent of one core, of everything except Ray itself


class Idleness:
    """Kept between passes: CPU time is measured from one to the next."""

    def __init__(self, environ: Mapping[str, str], everyone: Everyone, proc: str, timeouts: Timeouts) -> None:
        self._environ, self._everyone, self._proc, self._timeouts = environ, everyone, proc, timeouts
        self._cpu = Cpu()

    def queries(self, settings: RaySettings) -> DashboardQueries:
        return DashboardQueries(settings.dashboard, self._environ, self._timeouts.queries, self._proc)

    def begin(self, everyone: Iterable[Process], window: timedelta) -> None:
        self._cpu.begin(everyone, window)

    async def measure(self, window: timedelta) -> None:
        """Waits until the window that began is over, once for all nodes."""
        if not self._cpu.fresh:
            await self._cpu.end(self._everyone, window)

    async def of(self, node: Node, queries: DashboardQueries, settings: RaySettings) -> Load:
        ray = await queries.busy(node.raylets) if node.raylets else None
        node = self._without_us(node)
        rays = of_ray(node)
        gpu = await self._gpu(rays)
        cpu = self._cpu.percent(one for one in rays if not is_rays_own(one))
        return Load(translate.busy_by(ray, works(node), cpu, settings.cpu, gpu), cpu)

    def works(self, node: Node) -> str | None:
        return works(self._without_us(node))

    def _without_us(self, node: Node) -> Node:
        """Without ourselves and what we started; and without our parent if that is a task made for it, and without the
        driver of that task's job and its supervisor."""
        ours = {os.getpid(), *(one.pid for one in descendants((os.getpid(),), node.processes))}
        if OWN_JOB in self._environ:
            ours |= ancestors(os.getpid(), node.processes) - _raylets(node)
            ours |= _job_of(self._environ[OWN_JOB], node)
        return msgspec.structs.replace(node, processes=tuple(one for one in node.processes if one.pid not in ours))

    async def _gpu(self, processes: Iterable[Process]) -> str | Unknown | None:
        try:
            found = await in_thread(lambda: holders.scan(self._proc), self._timeouts.processes)
        except (TimeoutError, OSError):
            return Unknown("the processes that have a GPU open could not be read")
        pids = {one.pid for one in processes}
        holder = next((one for one in found.found if one.pid in pids), None)
        if holder is not None:
            return f"pid {holder.pid} ({holder.comm}) has a GPU open"
        hidden = next((pid for pid in found.hidden if pid in pids), None)
        return (
            None if hidden is None else Unknown(f"whether pid {hidden} has a GPU open could not be read; run as root")
        )


def _job_of(own: str, node: Node) -> set[int]:
    """The driver of that job, if it runs on this node, and what supervises it: `own` ends with its pid then. Only below
    an actor that Ray starts for submitted jobs; a pid that is anything else is not believed."""
    pid = own.rpartition(",")[2] if own.count(",") == JOB_PARTS - 1 else ""
    known = {one.pid: one for one in node.processes}
    driver = known.get(int(pid)) if pid.isdecimal() else None
    supervisor = known.get(driver.parent) if driver is not None else None
    if supervisor is None or supervisor.title != SUPERVISOR or supervisor.parent not in _raylets(node):
        return set()
    return {supervisor.pid, *(one.pid for one in descendants((supervisor.pid,), node.processes))}


def _raylets(node: Node) -> set[int]:
    return {one.process.pid for one in node.raylets}


def of_ray(node: Node) -> tuple[Process, ...]:
    """In a container all processes; on this machine, which runs other things too, what a raylet started and what
    identifies itself as Ray's.
    """
    if not node.is_machine:
        return node.processes
    started = descendants((one.process.pid for one in node.raylets), node.processes)
    named = (one for one in node.processes if one.title.startswith(TITLE))
    return tuple({one.pid: one for one in (*started, *named)}.values())


def works(node: Node) -> str | None:
    """What runs according to process titles: workers, and whatever else a raylet started."""
    started = [
        foreign((raylet.process.title, *(one.title for one in descendants((raylet.process.pid,), node.processes))))
        for raylet in node.raylets
    ]
    return next((work for work in started if work is not None), None) or quiet(one.title for one in node.processes)
