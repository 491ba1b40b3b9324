"""Ending processes: by a pidfd, never by a bare pid. A pid is reused; a pidfd always refers to the same process.

The pidfd is opened first, and only then is the process compared with what was read (start time and the id in its
cgroup): if they agree, the pidfd refers to that very process. A process that does not match is never signalled.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec

from gpukeeper.devices.holders import parse_containers, parse_stat, text_of
from gpukeeper.model.decision import Accepted, ActResult, Changed, Refused
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

PATIENCE = timedelta(seconds=5)
# SIGKILL of these froze GPUs until a reboot (dcgm-exporter #84); SIGTERM is all they ever get.
NEVER_KILLED = frozenset({"dcgm-exporter", "nv-hostengine"})


class Target(msgspec.Struct, frozen=True):
    """A process as it was read. `workload_id`: the id in its cgroup, None on the bare host."""

    pid: int
    starttime: int
    workload_id: str | None = None


class NotSignalled(msgspec.Struct, frozen=True):
    """Not signalled, and why."""

    target: Target
    why: str


class EndedProcesses(msgspec.Struct, frozen=True):
    gone: tuple[Target, ...] = ()  # seen to have exited, or gone before
    left: tuple[Target, ...] = ()  # signalled and still running
    changed: tuple[NotSignalled, ...] = ()  # not the process that was read any more
    refused: tuple[NotSignalled, ...] = ()  # exists, and may not be signalled


async def terminate(targets: Sequence[Target], grace: timedelta, *, proc: str = "/proc") -> EndedProcesses:
    """SIGTERM to all at once, then waits for their end, up to the grace period."""
    return await _signal(targets, signal.SIGTERM, grace, proc)


async def kill(targets: Sequence[Target], patience: timedelta = PATIENCE, *, proc: str = "/proc") -> EndedProcesses:
    """SIGKILL to all at once. A process that is left is inside the kernel (state D): nothing more can be done from
    here.
    """
    return await _signal(targets, signal.SIGKILL, patience, proc)


async def end(target: Target, patience: timedelta = PATIENCE, *, proc: str = "/proc") -> ActResult:
    """SIGTERM, then after the timeout SIGKILL. Gone is success."""
    for send in (terminate, kill):
        done = await send([target], patience, proc=proc)
        if done.gone:
            return Accepted()
        if done.changed:
            return Changed(done.changed[0].why)
        if done.refused:
            return Refused(done.refused[0].why)
    return Unknown(f"pid {target.pid} did not end within {in_words(patience)} after SIGKILL; it may hang in the kernel")


class _Opened(msgspec.Struct, frozen=True):
    target: Target
    pidfd: int


async def _signal(targets: Sequence[Target], number: signal.Signals, patience: timedelta, proc: str) -> EndedProcesses:
    gone: list[Target] = []
    changed: list[NotSignalled] = []
    refused: list[NotSignalled] = []
    with _closing() as opened:
        for target in targets:
            found = _open(target, number, proc)
            match found:
                case int():
                    opened.append(_Opened(target, found))
                case Changed():
                    changed.append(NotSignalled(target, found.why))
                case Refused():
                    refused.append(NotSignalled(target, found.why))
                case None:
                    gone.append(target)
        signalled = []
        for one in opened:
            try:
                signal.pidfd_send_signal(one.pidfd, number)
            except ProcessLookupError:
                gone.append(one.target)
            except PermissionError as error:
                refused.append(NotSignalled(one.target, f"pid {one.target.pid} may not be signalled: {error.strerror}"))
            else:
                signalled.append(one)
        exited = await _wait_for_exits(signalled, patience)
    gone += [one.target for one in signalled if one.pidfd in exited]
    left = [one.target for one in signalled if one.pidfd not in exited]
    return EndedProcesses(tuple(gone), tuple(left), tuple(changed), tuple(refused))


@contextmanager
def _closing() -> Iterator[list[_Opened]]:
    opened: list[_Opened] = []
    try:
        yield opened
    finally:
        for one in opened:
            os.close(one.pidfd)


def _open(target: Target, number: signal.Signals, proc: str) -> int | Changed | Refused | None:
    """A pidfd of exactly that process; None: it is gone."""
    if target.pid <= 1 or target.pid == os.getpid():
        return Refused(f"pid {target.pid} is never ended")
    try:
        pidfd = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        return Refused(f"pid {target.pid} could not be opened: {error.strerror}")
    answer = _compare(target, number, proc)
    if answer is True:
        return pidfd
    os.close(pidfd)
    return answer


def _compare(target: Target, number: signal.Signals, proc: str) -> bool | Changed | Refused | None:
    """After the pidfd was opened. True: it is the process that was read."""
    home = Path(proc, str(target.pid))
    try:
        stat = parse_stat(text_of(home / "stat"))
        cgroup = text_of(home / "cgroup")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        return Refused(f"pid {target.pid} could not be compared with the process that was read: {error.strerror}")
    if stat.starttime != target.starttime:
        return Changed(f"pid {target.pid} is another process now")
    if stat.holds_nothing:
        return None  # it has ended and was not reaped by its parent yet
    ids = parse_containers(cgroup)
    if (target.workload_id not in ids) if target.workload_id is not None else bool(ids):
        return Changed(f"pid {target.pid} belongs to another workload now")
    if number is signal.SIGKILL and stat.comm in NEVER_KILLED:
        return Refused(f"pid {target.pid} is {stat.comm}, which is never killed: that can freeze a GPU")
    return True


async def _wait_for_exits(signalled: Sequence[_Opened], patience: timedelta) -> set[int]:
    """The pidfds that became readable: their processes have exited."""
    loop = asyncio.get_running_loop()
    exits: dict[int, asyncio.Future[None]] = {one.pidfd: loop.create_future() for one in signalled}
    if not exits:
        return set()
    for pidfd, exited in exits.items():
        loop.add_reader(pidfd, _note_exit, exited)
    try:
        await asyncio.wait(exits.values(), timeout=patience.total_seconds())
    finally:
        for pidfd in exits:
            loop.remove_reader(pidfd)
    return {pidfd for pidfd, exited in exits.items() if exited.done()}


def _note_exit(exited: asyncio.Future[None]) -> None:
    if not exited.done():
        exited.set_result(None)
