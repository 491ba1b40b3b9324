"""Every process of this machine, as far as Ray nodes need it: argv, namespaces, CPU time. Reads only.

A process whose namespaces may not be read (another user's, a guarded init) is assumed to see this machine's own
files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from gpukeeper.devices.holders import KERNEL_THREAD, parse_container, parse_uid, pids, text_of
from gpukeeper.disk import procfs

ENDED = frozenset("ZXx")
COMMAND_LINE = 256 * 1024  # bytes read of one
TICKS = os.sysconf("SC_CLK_TCK")
_FLAG = re.compile(r"--([a-z_-]+)=(.*)", re.DOTALL)


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Identified by pid and starttime together."""

    pid: int
    starttime: int  # clock ticks since boot
    parent: int
    uid: int  # the real one
    ticks: int  # of CPU time, user and system
    comm: str
    argv: tuple[str, ...]
    mounts: str | None  # its mount namespace; None: it may not be read
    pids: str | None  # its pid namespace
    inside: int  # its pid in its own namespace
    container: str | None  # the id in its cgroup
    cut: bool = False  # its argv is longer than the part that was read

    @property
    def title(self) -> str:
        return " ".join(self.argv)


class Raylet(msgspec.Struct, frozen=True, kw_only=True):
    """What a running raylet reports about itself in its argv; an empty string where a version does not."""

    process: Process
    node_id: str
    session_name: str
    temp_dir: str


Everyone: TypeAlias = Callable[[], tuple[Process, ...]]


def read_all(proc: str = "/proc") -> tuple[Process, ...]:
    return tuple(found for pid in pids(proc) if (found := read(pid, proc)) is not None)


def read(pid: int, proc: str = "/proc") -> Process | None:
    """None: it ended, or is a kernel thread."""
    home = Path(proc, str(pid))
    try:
        fields = _stat(home)
        if fields[0] in ENDED or int(fields[6]) & KERNEL_THREAD:
            return None
        words = procfs.read_part(f"{home}/cmdline", COMMAND_LINE + 1)
        status = text_of(home / "status")
        again = _stat(home)
        if again[19] != fields[19]:
            return None  # the pid was reused between two reads
        return Process(
            pid=pid,
            starttime=int(fields[19]),
            parent=int(fields[1]),
            uid=parse_uid(status),
            ticks=int(again[11]) + int(again[12]),
            comm=text_of(home / "comm").rstrip("\n"),
            argv=tuple(os.fsdecode(word) for word in words[:COMMAND_LINE].rstrip(b"\0").split(b"\0")),
            cut=len(words) > COMMAND_LINE,
            mounts=_link(home / "ns/mnt"),
            pids=_link(home / "ns/pid"),
            inside=parse_inside(status, pid),
            container=_container(home),
        )
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_still(pid: int, starttime: int, proc: str = "/proc") -> bool:
    try:
        fields = _stat(Path(proc, str(pid)))
    except OSError:
        return False
    return int(fields[19]) == starttime and fields[0] not in ENDED


def parse_inside(status: str, pid: int) -> int:
    """The last number is the one of its own namespace. Only a newline ends a line: a name may contain other
    separators.
    """
    line = next((line for line in status.split("\n") if line.startswith("NSpid:")), "")
    numbers = line.split()[1:]
    return int(numbers[-1]) if numbers else pid


def raylet_of(process: Process) -> Raylet | None:
    """By its program, which never rewrites its argv. Flags are written with - and _, depending on the version."""
    if not process.argv or Path(process.argv[0]).name != "raylet":
        return None
    flags = flags_of(process.argv)
    return Raylet(
        process=process,
        node_id=flags.get("node_id", ""),
        session_name=flags.get("session_name") or Path(flags.get("session_dir", "")).name,
        temp_dir=flags.get("temp_dir", ""),
    )


def flags_of(argv: Iterable[str]) -> dict[str, str]:
    """Only arguments that begin with the flag: one of them contains whole command lines of others."""
    matches = (_FLAG.fullmatch(word) for word in argv)
    return {match[1].replace("-", "_"): match[2] for match in matches if match}


def descendants(parents: Iterable[int], everyone: Iterable[Process]) -> Iterator[Process]:
    """Of these pids, themselves not included."""
    children: dict[int, list[Process]] = {}
    for one in everyone:
        children.setdefault(one.parent, []).append(one)
    waiting = list(parents)
    while waiting:
        for child in children.pop(waiting.pop(), []):
            yield child
            waiting.append(child.pid)


def ancestors(pid: int, everyone: Iterable[Process]) -> frozenset[int]:
    """Of that process, itself included."""
    parents = {one.pid: one.parent for one in everyone}
    found: set[int] = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return frozenset(found)


def _stat(home: Path) -> list[str]:
    text = text_of(home / "stat")
    return text[text.rindex(")") + 2 :].split()


def _link(path: Path) -> str | None:
    try:
        return str(path.readlink())
    except PermissionError:
        return None


def _container(home: Path) -> str | None:
    try:
        return parse_container(text_of(home / "cgroup"))
    except PermissionError:
        return None
