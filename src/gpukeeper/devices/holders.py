"""Which processes have a GPU open, by /proc/*/fd. Reads only; nothing is signalled here.

It finds holders that the driver's own list misses: a forked child that never used the GPU keeps it open after its
parent died. Needs the permission to read descriptors of other users; processes that could not be read are in
`hidden`.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from gpukeeper.model.unknown import Unknown

FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's own number for it (PROC_PID_INIT_INO)
_GPU = re.compile(r"/dev/nvidia(\d+)(?: \(deleted\))?")
_CAPABILITY = re.compile(r"/dev/nvidia-caps/nvidia-cap(\d+)(?: \(deleted\))?")
_SLICE = re.compile(r"gpu(\d+)/gi(\d+)/ci(\d+)/access (\d+)")
_CONTAINER = re.compile(r"(?:[/:]|docker-|cri-containerd-|crio-|libpod-)([0-9a-f]{64})(?![0-9a-f])")
_NODES = "/dev/nvidia"
KERNEL_THREAD = 0x00200000
FIRST_PERSON_UID = 1000  # lower uids are system users, among them the driver's services
ENDED_STATES = frozenset("ZXx")
STOPPED_STATES = frozenset("Tt")
# closed since it was listed; longer than the path of any device node
NO_NODE = frozenset({errno.ENOENT, errno.ENAMETOOLONG})


def user_name(uid: int) -> str:
    """A name that only this uid has. Otherwise "uid 1234": a user may be named 1234, and a second uid may have the same
    name; neither must be taken for this one.
    """
    try:
        name = pwd.getpwuid(uid).pw_name
        if pwd.getpwnam(name).pw_uid == uid:
            return name
    except KeyError:
        pass
    return f"uid {uid}"


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process with a GPU open. Identified by pid and starttime together; a pid alone is reused."""

    pid: int
    starttime: int  # clock ticks since boot
    uid: int
    comm: str
    stopped: bool  # by SIGSTOP: it does nothing and keeps everything open
    minors: tuple[int, ...]  # of /dev/nvidia<minor>
    capabilities: tuple[int, ...] = ()  # of /dev/nvidia-caps: which slices it may use
    container: str | Unknown | None = None  # the id in its cgroup; None: on the bare host

    @property
    def identity(self) -> str:
        return f"{self.pid}@{self.starttime}"


class Holders(msgspec.Struct, frozen=True):
    found: tuple[Holder, ...]
    hidden: tuple[int, ...]  # pids whose descriptors we may not read


class Stat(msgspec.Struct, frozen=True):
    """The fields of /proc/<pid>/stat that are needed."""

    comm: str
    state: str
    flags: int
    starttime: int

    @property
    def holds_nothing(self) -> bool:
        return self.state in ENDED_STATES or bool(self.flags & KERNEL_THREAD)


def scan(proc: str = "/proc") -> Holders:
    found, hidden = [], []
    for pid in pids(proc):
        try:
            holder = look_up(pid, proc) if _may_hold(pid, proc) else None
        except (OSError, ValueError):
            # A sandbox may hide its init even from root. Init holds no GPU, and counting it would hide everything for
            # good.
            # One process that cannot be parsed must not hide all others.
            if pid != 1 or os.geteuid() != 0:
                hidden.append(pid)
        else:
            if holder is not None and holder.minors:
                found.append(holder)
    return Holders(tuple(found), tuple(hidden))


def _may_hold(pid: int, proc: str) -> bool:
    """Most processes hold no GPU. Their descriptors alone show that, so that nothing else is read of them; as text,
    since this runs for every process all the time.
    """
    directory = f"{proc}/{pid}/fd"
    try:
        for number in os.listdir(directory):  # noqa: PTH208
            try:
                if os.readlink(f"{directory}/{number}").startswith(_NODES):  # noqa: PTH115
                    return True
            except OSError as error:
                if error.errno not in NO_NODE:
                    raise
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True  # unreadable processes are looked up, and hidden or ended is distinguished there
    return False


def look_up(pid: int, proc: str = "/proc") -> Holder | None:
    """One process, whether or not it holds a GPU. None: it does not exist, or has ended and holds nothing.
    PermissionError: it exists and may not be read.
    """
    home = Path(proc, str(pid))
    try:
        stat = parse_stat(text_of(home / "stat"))
        if stat.holds_nothing:
            return None
        links = _links(home / "fd")
        uid = parse_uid(text_of(home / "status"))
        container = _container(home / "cgroup")
        again = parse_stat(text_of(home / "stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if again.starttime != stat.starttime:  # the pid was reused between two reads: neither is known
        return None
    return Holder(
        pid=pid,
        starttime=stat.starttime,
        uid=uid,
        comm=stat.comm,
        stopped=stat.state in STOPPED_STATES,
        minors=numbers(_GPU, links),
        capabilities=numbers(_CAPABILITY, links),
        container=container,
    )


def pids(proc: str = "/proc") -> tuple[int, ...]:
    return tuple(sorted(int(home.name) for home in Path(proc).iterdir() if home.name.isdecimal()))


def shows_everyone(proc: str = "/proc") -> bool:
    """False if this /proc hides the processes of other users (mount option hidepid)."""
    return Path(proc, "1", "stat").exists()


def text_of(path: Path) -> str:
    r"""Of a file of the kernel. Not read_text: that takes b"\r" for the end of a line, which any name may contain."""
    return path.read_bytes().decode("utf-8", "replace")


def parse_stat(text: str) -> Stat:
    """The name is in brackets and may itself contain brackets and blanks, so the last one counts."""
    begin, end = text.index("("), text.rindex(")")
    fields = text[end + 2 :].split()
    return Stat(comm=text[begin + 1 : end], state=fields[0], flags=int(fields[6]), starttime=int(fields[19]))


def parse_uid(status: str) -> int:
    """The real uid. The owner of /proc/<pid> is not suitable: it is root for processes that are not dumpable. Only a
    newline ends a line: a process may put any other line separator into its name.
    """
    line = next((line for line in status.split("\n") if line.startswith("Uid:\t")), "")
    if not line:
        raise ValueError("its status contains no uid")
    return int(line.split("\t")[1])


def parse_container(cgroup: str) -> str | None:
    """The outermost id: nested containers append theirs."""
    found = _CONTAINER.search(cgroup)
    return found.group(1) if found else None


def parse_containers(cgroup: str) -> tuple[str, ...]:
    """Every id, outermost first: the engine decides which of them is meant."""
    return tuple(dict.fromkeys(_CONTAINER.findall(cgroup)))


def parse_mig_minors(text: str) -> dict[int, tuple[int, int, int]]:
    """Which capability opens which slice: number → (minor of the GPU, GPU instance, compute instance)."""
    rows = (match.groups() for match in _SLICE.finditer(text))
    return {int(number): (int(gpu), int(gi), int(ci)) for gpu, gi, ci, number in rows}


def mig_minors(proc: str = "/proc") -> dict[int, tuple[int, int, int]]:
    try:
        return parse_mig_minors(text_of(Path(proc, "driver/nvidia-caps/mig-minors")))
    except OSError:
        return {}  # no driver, or one without slices


def parse_boot_time(stat: str) -> datetime:
    line = next(line for line in stat.splitlines() if line.startswith("btime "))
    return datetime.fromtimestamp(int(line.split()[1]), UTC)


def boot_time(proc: str = "/proc") -> datetime:
    return parse_boot_time(text_of(Path(proc, "stat")))


def boot_id(proc: str = "/proc") -> str:
    """Identifies the boot that a start time counts from; empty if the kernel does not report it."""
    try:
        return text_of(Path(proc, "sys/kernel/random/boot_id")).strip()
    except OSError:
        return ""


def started(starttime: int, boot: datetime) -> datetime:
    return boot + timedelta(seconds=starttime / os.sysconf("SC_CLK_TCK"))


def numbers(pattern: re.Pattern[str], links: Iterable[str]) -> tuple[int, ...]:
    matches = (pattern.fullmatch(link) for link in links)
    return tuple(sorted({int(match.group(1)) for match in matches if match}))


def _links(directory: Path) -> list[str]:
    links = []
    for link in directory.iterdir():
        try:
            links.append(str(link.readlink()))
        except OSError as error:
            if error.errno not in NO_NODE:
                raise
    return links


def _container(path: Path) -> str | Unknown | None:
    try:
        return parse_container(text_of(path))
    except PermissionError as error:
        return Unknown(f"its cgroup could not be read: {error.strerror}")


def is_walled(proc: str = "/proc") -> bool:
    try:
        return Path(proc, "self/ns/pid").stat().st_ino != FIRST_PID_NAMESPACE
    except OSError:
        return False
