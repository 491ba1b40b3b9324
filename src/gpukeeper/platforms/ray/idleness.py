"""Whether work runs on a node: Ray's own report first, then the titles and the load of its processes. One sign of work
is enough. Idle only if everything could be read: a node whose Ray cannot be queried is not known to be idle.

CPU use is that between two readings. A process that ended between them is not counted: only high use vetoes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.devices import holders
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray import translate
from gpukeeper.platforms.ray.busy import foreign, quiet
from gpukeeper.platforms.ray.nodes import TICKS, Everyone, Node, Process, ancestors, descendants, is_rays_own
from gpukeeper.platforms.ray.settings import RaySettings, Timeouts
from gpukeeper.platforms.ray.state import OWN_JOB, DashboardQueries

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
