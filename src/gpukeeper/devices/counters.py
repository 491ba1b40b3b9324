"""What a workload does besides its GPU, read from outside by the pid of its first process: CPU, disk, network, typing.

Counters of its control group, so that every process in it counts, no matter which user started it. Reads only, on the
host's own /proc. What this workload cannot have is Unknown by design; a read that failed is Unknown and must not be
skipped.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import msgspec

from gpukeeper.devices.holders import parse_stat, text_of
from gpukeeper.model.series import Signal
from gpukeeper.model.unknown import Unknown

T = TypeVar("T")

_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_TERMINAL = re.compile(r"/dev/|/[0-9]+(?: \(deleted\))?$")  # the latter if the workload's own /dev is not visible
TERMINAL_MAJORS = range(136, 144)  # of /dev/pts
_NO_TERMINAL = frozenset({errno.ENOENT, errno.ESRCH, errno.ENOTDIR, errno.ENAMETOOLONG})  # closed, ended, or a file
NO_GROUP = Unknown("it has no control group of its own, so its share is unknown")
HOST_NETWORK = Unknown("it shares the host's network, so its share is unknown", by_design=True)
NO_TERMINAL = Unknown("it has no terminal", by_design=True)
NO_EARLIER = Unknown("it was not read before")


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Since the start of the workload. Two of them give rates."""

    starttime: int  # of its first process; another one means another start
    cpu_ns: int | Unknown
    disk_bytes: int | Unknown
    network_bytes: int | Unknown
    typed: datetime | Unknown  # newest input of its terminals, with a resolution of 8 s


class ControlGroup(msgspec.Struct, frozen=True):
    """Where the counters of a control group are. v1 has a hierarchy for each kind, v2 one for all."""

    path: Path
    v2: bool


def read_counters(
    pid: int, proc: str = "/proc", cgroup_root: str = "/sys/fs/cgroup", host_network: bool = False
) -> Counters | None:
    """None: there is no such process, or it ended while it was read."""
    home = Path(proc, str(pid))
    starttime = _starttime(home)
    if starttime is None:
        return None
    network = HOST_NETWORK if host_network else _network(home, Path(proc))
    counters = Counters(
        starttime=starttime,
        cpu_ns=_attempt("CPU use", lambda: _cpu(home, Path(cgroup_root))),
        disk_bytes=_attempt("disk use", lambda: _disk(home, Path(cgroup_root))),
        network_bytes=network,
        typed=_attempt("what was typed", lambda: _typed(home, Path(proc), Path(cgroup_root))),
    )
    return counters if _starttime(home) == starttime else None


def read_process(pid: int, proc: str = "/proc") -> Counters | None:
    """One process on the bare host: its group is that of the whole login, so only its own counters are used."""
    home = Path(proc, str(pid))
    starttime = _starttime(home)
    if starttime is None:
        return None
    counters = Counters(
        starttime=starttime,
        cpu_ns=_attempt("CPU use", lambda: parse_cpu_time(text_of(home / "stat"))),
        disk_bytes=_attempt("disk use", lambda: parse_io(text_of(home / "io"))),
        network_bytes=HOST_NETWORK,
        typed=_attempt("what was typed", lambda: _newest(_terminal_inputs(home / "fd"))),
    )
    return counters if _starttime(home) == starttime else None


def processes_of(pid: int, proc: str = "/proc", cgroup_root: str = "/sys/fs/cgroup") -> tuple[int, ...] | Unknown:
    """Every process in the control group of this one, and in the groups below."""
    return _attempt("its processes", lambda: _members(Path(proc, str(pid)), Path(cgroup_root)))


def rates(before: Counters | None, after: Counters, seconds: float) -> dict[Signal, float | Unknown]:
    """Pure. In the units of model/series.py."""
    if before is None or before.starttime != after.starttime or seconds <= 0:
        missing = NO_EARLIER if before is None else Unknown("it was restarted since the previous reading")
        facts = {Signal.CPU: after.cpu_ns, Signal.DISK: after.disk_bytes, Signal.NETWORK: after.network_bytes}
        everything = {**facts, Signal.TERMINAL: after.typed}
        return {signal: fact if isinstance(fact, Unknown) else missing for signal, fact in everything.items()}
    cpu = _growth(before.cpu_ns, after.cpu_ns)
    disk = _growth(before.disk_bytes, after.disk_bytes)
    network = _growth(before.network_bytes, after.network_bytes)
    return {
        Signal.CPU: cpu if isinstance(cpu, Unknown) else cpu / (seconds * 1e9) * 100,
        Signal.DISK: disk if isinstance(disk, Unknown) else disk / seconds,
        Signal.NETWORK: network if isinstance(network, Unknown) else network / seconds,
        Signal.TERMINAL: _typing(before.typed, after.typed),
    }


def _growth(before: int | Unknown, after: int | Unknown) -> int | Unknown:
    if isinstance(after, Unknown):
        return after
    if isinstance(before, Unknown):
        return NO_EARLIER
    return after - before if after >= before else Unknown("its counter went backwards")


def _typing(before: datetime | Unknown, after: datetime | Unknown) -> float | Unknown:
    if isinstance(after, Unknown):
        # Without a terminal there is no input: that is a value, and it continues when a terminal was closed.
        return 0.0 if after.by_design else after
    if isinstance(before, Unknown):
        return 1.0 if before.by_design else NO_EARLIER  # the first terminal was opened
    return 1.0 if after > before else 0.0


# Where its counters are.


def parse_groups(cgroup: str) -> dict[str, str]:
    """/proc/<pid>/cgroup: kind of counter → path; the hierarchy of v2 has the empty name."""
    found: dict[str, str] = {}
    for line in _lines(cgroup):
        _number, kinds, path = line.split(":", 2)
        found.update(dict.fromkeys(kinds.split(","), path))
    return found


def _lines(text: str) -> list[str]:
    """Only a newline ends a line: names of groups and interfaces may contain other characters that end lines
    elsewhere.
    """
    return [line for line in text.split("\n") if line]


def own_path(path: str) -> str | None:
    """The group of the whole workload: its first process may be in a group below (an init of its own creates some).

    The last id is the workload's: outer ones belong to what the engine itself runs in. None: the root, or not
    visible.
    """
    if path.strip("/") == "" or ".." in path.split("/"):
        return None
    steps = path.strip("/").split("/")
    named = [place for place, step in enumerate(steps) if _ID.search(step)]
    return "/".join(steps[: named[-1] + 1] if named else steps)


def _group(home: Path, root: Path, kind: str) -> ControlGroup | None:
    """None: it shares the root's group. FileNotFoundError: this kind is not mounted."""
    kinds = parse_groups(text_of(home / "cgroup"))
    v2 = kind not in kinds
    if v2 and "" not in kinds:
        raise FileNotFoundError(errno.ENOENT, f"the kernel has no {kind} group for it")
    path = own_path(kinds["" if v2 else kind])
    if path is None:
        return None
    for tree in (f"{root}", f"{root}/unified") if v2 else _trees(str(root), kind):
        if os.path.isdir(found := f"{tree}/{path}"):  # noqa: PTH112  (as text: read for every workload all the time)
            return ControlGroup(Path(found), v2)
    raise FileNotFoundError(errno.ENOENT, f"{path} is not below {root}")


@lru_cache(maxsize=64)
def _trees(root: str, kind: str) -> tuple[str, ...]:
    """Of version 1: mounted once, at boot. A missing hierarchy raises, and is looked up again."""
    found = tuple(sorted(tree.path for tree in os.scandir(root) if kind in tree.name.split(",")))
    if not found:
        raise FileNotFoundError(errno.ENOENT, f"no {kind} group below {root}")
    return found


def _cpu(home: Path, root: Path) -> int | Unknown:
    group = _group(home, root, "cpuacct")
    if group is None:
        return NO_GROUP
    if not group.v2:
        return int(text_of(group.path / "cpuacct.usage"))
    lines = dict(line.split(" ", 1) for line in _lines(text_of(group.path / "cpu.stat")))
    return int(lines["usage_usec"]) * 1000


def _disk(home: Path, root: Path) -> int | Unknown:
    group = _group(home, root, "blkio")
    if group is None:
        return NO_GROUP
    if not group.v2:
        return parse_throttle(text_of(_recursive(group.path)))
    if "io" not in text_of(group.path / "cgroup.controllers").split():
        return Unknown("the kernel does not account its disk use", by_design=True)
    return parse_io_stat(text_of(group.path / "io.stat"))


def _recursive(group: Path) -> Path:
    """With the groups below it, if the kernel sums them up."""
    recursive = group / "blkio.throttle.io_service_bytes_recursive"
    return recursive if recursive.exists() else group / "blkio.throttle.io_service_bytes"


def parse_throttle(text: str) -> int:
    """`8:0 Read 4096`, …, and one last `Total 8192` over all devices."""
    totals = [line.split() for line in _lines(text) if line.startswith("Total ")]
    return int(totals[-1][1]) if totals else 0


def parse_io_stat(text: str) -> int:
    """`8:0 rbytes=4096 wbytes=0 rios=1 …`; an empty file has seen no device."""
    fields = (field.partition("=") for line in _lines(text) for field in line.split()[1:])
    return sum(int(value) for name, _, value in fields if name in {"rbytes", "wbytes"})


def parse_cpu_time(text: str) -> int:
    """Of /proc/<pid>/stat, in nanoseconds: in user and kernel mode, with children it waited for."""
    fields = text[text.rindex(")") + 2 :].split()
    return sum(map(int, fields[11:15])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def parse_io(text: str) -> int:
    """Of /proc/<pid>/io: what was really read from and written to disks."""
    fields = dict(line.split(": ") for line in _lines(text))
    return int(fields["read_bytes"]) + int(fields["write_bytes"])


def _network(home: Path, proc: Path) -> int | Unknown:
    def read() -> int | Unknown:
        if (home / "ns/net").readlink() == _hosts_network(proc):
            return HOST_NETWORK
        return parse_net_dev(text_of(home / "net/dev"))

    return _attempt("network use", read)


def _hosts_network(proc: Path) -> Path:
    """If the first process may not be read, our own is used instead. If that is not the host's, the worst case is that
    the host's traffic counts as the workload's, which keeps it.
    """
    try:
        return (proc / "1/ns/net").readlink()
    except PermissionError:
        return (proc / "self/ns/net").readlink()


def parse_net_dev(text: str) -> int:
    """Received and sent over every external interface."""
    total = 0
    for line in _lines(text)[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            fields = numbers.split()
            total += int(fields[0]) + int(fields[8])
    return total


# The processes in it, and the input of its terminals.


def _members(home: Path, root: Path) -> tuple[int, ...] | Unknown:
    group = _group(home, root, "cpuacct")
    if group is None:
        return NO_GROUP
    found: set[int] = set()
    for directory, _folders, _files in os.walk(group.path):
        found.update(_listed(Path(directory, "cgroup.procs")))
    if 0 in found:
        return Unknown("some of its processes are outside the pid namespace that gpukeeper runs in")
    return tuple(sorted(found))


def _listed(path: Path) -> list[int]:
    try:
        return [int(line) for line in text_of(path).split()]
    except OSError as error:
        if error.errno in {errno.EOPNOTSUPP, errno.ENOENT, errno.ENODEV}:
            return []  # a group of threads, listed further up; or a group that was just removed
        raise


def _typed(home: Path, proc: Path, root: Path) -> datetime | Unknown:
    members = _members(home, root)
    if isinstance(members, Unknown):
        return members
    return _newest(at for pid in members for at in _terminal_inputs(proc / str(pid) / "fd"))


def _newest(inputs: Iterable[float]) -> datetime | Unknown:
    newest = max(inputs, default=None)
    return datetime.fromtimestamp(newest, UTC) if newest is not None else NO_TERMINAL


def _terminal_inputs(directory: Path) -> Iterator[float]:
    """By the open descriptor, never by a path inside the workload: that could lead anywhere."""
    for number in range(3):
        try:
            # A file on a hanging disk would block us: only what can be a terminal is read.
            if not _TERMINAL.match(str((directory / str(number)).readlink())):
                continue
            found = (directory / str(number)).stat()
        except OSError as error:
            if error.errno in _NO_TERMINAL:
                continue
            raise
        if stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) in TERMINAL_MAJORS:
            yield found.st_atime


def _starttime(home: Path) -> int | None:
    try:
        found = parse_stat(text_of(home / "stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if found.state in "ZXx" else found.starttime


def _attempt(what: str, read: Callable[[], T | Unknown]) -> T | Unknown:
    try:
        return read()
    except OSError as error:
        return Unknown(f"{what} could not be read: {error.strerror or error}")
    except (ValueError, KeyError, IndexError) as error:
        return Unknown(f"{what} could not be parsed: {error}")
