"""Child processes: how they start, end and are listened to. What they are for is known where they are used.

Modules of gpukeeper run in the Python that runs this one. Each is started with `module_command`, in DIRECTORY and with
`environment()`, and gets nothing else of ours. Not for the Python that has PyTorch, which may be another one and needs
the variables of its libraries, and not for multiprocessing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

DIRECTORY = "/"  # of such a process: the caller's may be any
# Where this process has found programs, modules and libraries: GPUs in containers are often found by LD_LIBRARY_PATH.
_LISTS = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_DIRECTORIES = ("HOME", "PYTHONUSERBASE", "TMPDIR")
_WORDS = ("LANG", "LANGUAGE", "TZ")
_SWITCHES = ("PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "PYTHONUNBUFFERED", "PYTHONUTF8")
KEPT = 64 * 1024  # bytes of what a program writes to stderr: the last ones
READ_AT_ONCE = 64 * 1024  # bytes
KILLED_WITHIN_S = 1.0
ABANDONED_MAX = 4


def module_command(module: str, *words: str) -> tuple[str, ...]:
    """`-P`: modules are never searched for in the current directory. Root may work in a directory where any user can
    write, and `json.py` there would run as root."""
    return (sys.executable, "-P", "-m", module, *words)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What such a process gets of it: what it needs to start and to write as this one. No secrets, and nothing else
    that makes Python or a library run or write something (PYTHONPYCACHEPREFIX, LD_PRELOAD, SSLKEYLOGFILE).

    A process that ignores the variables of Python (-I, -E), or packages in the home directory (-s), has children that
    do, too.
    """
    found = {name: _absolute(environ[name].split(":")) for name in _LISTS if name in environ}
    found |= {name: _absolute([environ[name]]) for name in _DIRECTORIES if name in environ}
    found |= {name: environ[name] for name in (*_WORDS, *_SWITCHES) if name in environ}
    found |= {name: value for name, value in environ.items() if name.startswith("LC_")}
    if sys.flags.ignore_environment:
        found = {name: value for name, value in found.items() if not name.startswith("PYTHON")}
    if sys.flags.no_user_site:
        found["PYTHONNOUSERSITE"] = "1"
    return {name: value for name, value in found.items() if value}


def _absolute(directories: list[str]) -> str:
    """An empty or relative one means the current directory, which is not trusted. In DIRECTORY it would be another."""
    return ":".join(directory for directory in directories if directory.startswith("/"))


@asynccontextmanager
async def running(*command: str, alone: bool = False, **options: Any) -> AsyncIterator[Process]:
    """A program that runs no longer than the block. It gets a process group: if it still runs at the end of the block,
    all that it has started is killed with it (if it has ended, another program may have its number, and nothing is).
    `alone`: it stays in our group, and only itself is killed. `options`: of asyncio.create_subprocess_exec.
    """
    start = asyncio.create_subprocess_exec(*command, start_new_session=not alone, **options)
    starting = asyncio.create_task(start)
    try:
        child = await asyncio.shield(starting)
    except asyncio.CancelledError:  # it may have children already
        with suppress(OSError):
            await _end(await starting, alone)
        raise
    try:
        yield child
    finally:
        await _end(child, alone)


async def _end(child: Process, alone: bool) -> None:
    if child.returncode is None:
        if alone:
            with suppress(ProcessLookupError):
                child.kill()
        else:
            kill_group(child)
        await child.wait()


def kill_group(child: Process) -> None:
    """With its children. It is the first of its group."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


class Tail:
    """The end of what a program writes, however much that is."""

    def __init__(self) -> None:
        self.kept = b""

    def add(self, part: bytes) -> None:
        self.kept = (self.kept + part)[-KEPT:]

    async def read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(READ_AT_ONCE):
            self.add(part)


async def read_at_most(stream: asyncio.StreamReader, most: int) -> bytes:
    """All of it. More than `most` bytes: there are more than that, and the rest was not read."""
    found = bytearray()
    while len(found) <= most and (part := await stream.read(READ_AT_ONCE)):
        found += part
    return bytes(found)


def last_line(output: bytes) -> str:
    """The last one with words, where a program says why it ended."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


class Abandoned:
    """Processes that not even SIGKILL ended: a call inside a driver or a dead filesystem may never return. With
    ABANDONED_MAX of one kind no more are started. For threads.
    """

    def __init__(self) -> None:
        self._left: list[subprocess.Popen[bytes]] = []
        self._counting = threading.Lock()

    def __len__(self) -> int:
        """Those that have not ended meanwhile."""
        with self._counting:
            self._left = [child for child in self._left if child.poll() is None]
            return len(self._left)

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        """It is abandoned if it does not end."""
        child.kill()
        try:
            child.wait(timeout=KILLED_WITHIN_S)
        except subprocess.TimeoutExpired:
            with self._counting:
                self._left.append(child)
