"""Queries Ray itself about what runs on a node: through its dashboard, where its own processes reach it.

A dashboard usually listens on 127.0.0.1 of its own network namespace; the thread that connects enters it, and ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.busy import ClusterState, busy, without
from gpukeeper.platforms.ray.processes import Process, Raylet, is_still
from gpukeeper.platforms.ray.state import DEADLINE, StateApi, addresses, read_token, why_out_of_reach

AT_ONCE = 16  # requests
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
        limit = asyncio.Semaphore(AT_ONCE)

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
            self._answers[found.session] = await found.api.answers(found.session)  # which requests its name once more
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
                inside = partial(enter, raylet.process, self._proc)
                yield StateApi(address, deadline=self._deadline, enter=inside)


def enter(process: Process, proc: str = "/proc") -> None:
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
