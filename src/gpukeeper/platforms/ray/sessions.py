"""Sessions: the directories that runs of Ray leave below a Ray root, and whether one is alive.

Dead only if everything agrees: no process names it or has anything of it open, no socket of it answers, no
dashboard reports it, and all of that could be read. The number and date in its name, `session_latest` and its own
times prove nothing.

Of a session that is alive only logs of ended processes are offered: one by one, by the pid in the name, and only closed
files; the end of the newest ones is the evidence before a removal. Without anything else, its spilled objects or
unpacked code, Ray hangs, without a message. Reads only.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec

from gpukeeper.disk import kernel, open_files, tree
from gpukeeper.disk.access_times import Reads, hidden_until
from gpukeeper.disk.measure import TreeMeasurement, instant, printable
from gpukeeper.disk.walk import read_ns
from gpukeeper.model.subject import Category, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray import translate
from gpukeeper.platforms.ray.nodes import NodeAccess, Process, RayRoot, identity_of_entry, opened_node
from gpukeeper.platforms.ray.translate import LONG_LOG, LogFile, long_log
from gpukeeper.platforms.ray.visit import NodeDirectory, Visit

SOCKETS = "sockets"
SOCKET_PATIENCE = 2.0  # seconds
NO_LISTENER = frozenset({errno.ECONNREFUSED, errno.ENOENT})


def listener_of(session: int) -> str | Unknown | None:
    """Of the session that is open as this descriptor: a sentence, or None if every socket in it is dead. By descriptor,
    so that neither the current name of the session nor the length of its path matters.
    """
    try:
        directory = kernel.open_inside(session, SOCKETS)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Unknown(f"its sockets could not be read: {error.strerror}")
    try:
        names = sorted(name for name in os.listdir(directory) if _is_socket(directory, name))  # noqa: PTH208
        answers = [answer for name in names if (answer := _connect_error(directory, name)) is not None]
    except OSError as error:
        return Unknown(f"its sockets could not be read: {error.strerror}")
    finally:
        os.close(directory)
    return next((one for one in answers if isinstance(one, str)), next(iter(answers), None))


def _connect_error(directory: int, name: str) -> str | Unknown | None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(SOCKET_PATIENCE)
            client.connect(f"/proc/self/fd/{directory}/{name}")
            pid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    except OSError as error:
        if error.errno in NO_LISTENER:
            return None
        return Unknown(f"whether a process listens on its socket {name} is unknown: {error.strerror or error}")
    return f"pid {pid} listens on its socket {name}"


def _is_socket(directory: int, name: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


NAME = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6}_\d+")
LATEST = "session_latest"
# Files that users made, themselves or through a framework.
PEOPLES = ("artifacts", "logs/nsight", "logs/rocprof_sys", "logs/profiles")
LONG = 4096  # characters; no path is longer
WAYS = 16
_BETWEEN = re.compile(r"[\s=,;:'\"]")
ROCKSDB = ("CURRENT", "MANIFEST-")


class RaySession(msgspec.Struct, frozen=True):
    """One directory. `path`: as its node sees it."""

    name: str
    path: str
    identity: tuple[int, int]
    uid: int


class SessionState(msgspec.Struct, frozen=True):
    """Whether it is alive, the evidence for it, and what it contains. Not measured if it is alive."""

    alive: bool | Unknown
    why: str | None = None
    measured: TreeMeasurement | None = None
    findings: tuple[str, ...] = ()


def listed(directory: NodeDirectory, root: RayRoot) -> Iterator[RaySession]:
    """Directories only, named as Ray names them: `session_latest` is a link, and other entries are users' own."""
    if root.maybe and not is_temp_dir(directory.fd):
        return
    with os.scandir(directory.fd) as entries:
        names = sorted(entry.name for entry in entries if NAME.fullmatch(entry.name))
    for name in names:
        try:
            found = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(found.st_mode) and root.holds(found.st_uid) and directory.counts(found.st_uid):
            yield RaySession(name, str(Path(directory.path, name)), (found.st_dev, found.st_ino), found.st_uid)


def is_temp_dir(directory: int) -> bool:
    """Whether Ray keeps its sessions in that directory itself (`--temp-dir`): it creates a link to the latest one
    there. A directory with the name of a session is no proof.
    """
    try:
        return NAME.fullmatch(Path(os.readlink(LATEST, dir_fd=directory)).name) is not None
    except OSError:
        return False


def standing(
    session: RaySession, directory: NodeDirectory, visit: Visit, running_sessions: Mapping[str, str]
) -> SessionState:
    """`running_sessions`: names of sessions that a dashboard reports as running, each with a sentence."""
    try:
        fd = kernel.open_inside(directory.fd, session.name)
    except OSError as error:
        return SessionState(Unknown(f"it could not be opened: {error.strerror}"))
    try:
        # Cheapest first, and none of these needs a walk over what may be millions of files.
        answers = [named_by(session, visit), listener_of(fd), running_sessions.get(session.name)]
        alive = next((one for one in answers if isinstance(one, str)), None)
        if alive is not None:
            return SessionState(True, alive)
        found = visit.measure(directory.fd, session.name)
        if found is None:
            return SessionState(Unknown("it was removed while it was read"))
        found = visit.with_mounts(directory, session.name, found)
        user = open_files.user_of(session.name, found, visit.below(directory))
        if user is not None:
            return SessionState(True, visit.about(user), found)
        made = user_files(fd)
        unknown = [
            one for one in (*answers, _unseen(session, directory, visit, found), made) if isinstance(one, Unknown)
        ]
        findings = (made.why,) if made is not None else ()
        return SessionState(unknown[0] if unknown else False, None, found, findings)
    finally:
        os.close(fd)


def subject_of(session: RaySession, state: SessionState, directory: NodeDirectory, visit: Visit) -> Subject | Unknown:
    owner = visit.owner(session.uid)
    if state.alive is True:
        why = state.why or "it is in use"
        return translate.live_session(session.path, session.identity, why, owner, directory.disk, visit.at)
    if state.measured is None:
        assert isinstance(state.alive, Unknown)
        return state.alive
    facts = tree.TreeFacts(
        path=session.path,
        kind=translate.SESSION,
        category=Category.DEAD_SESSION,
        in_use=state.alive,
        owner=owner,
        disk=directory.disk,
        root=directory.path,
        findings=state.findings,
        last_use=visit.last_use(directory, state.measured),
        kept=visit.holds(session.identity),
        of_users=visit.node.is_machine,
    )
    return tree.tree_subject(facts, state.measured, visit.at)


def named_by(session: RaySession, visit: Visit) -> str | Unknown | None:
    """A process that names it in its argv, by whatever path: what counts is where that path leads."""
    return refers(session, visit.around.everyone, {one.pid for one in visit.node.processes}, visit.around.proc)


def refers(session: RaySession, everyone: Iterable[Process], own: set[int], proc: str) -> str | None:
    for process in everyone:
        if process.cut:
            return (
                f"pid {process.pid} ({process.comm}) has a command line that is too long to be read, and may name "
                "it there"
            )
        words = [word for word in process.argv if session.name in word]
        if not words or process.pid == os.getpid():
            continue
        ways = set(islice((one for word in words for one in paths_in(word, session.name)), WAYS))
        # Without a path it can only mean a session of its own node. No honest process has that many.
        lead = len(ways) == WAYS or any(_leads_to(session, process, one, proc) for one in ways)
        named = lead if ways else process.pid in own
        if named:
            return f"pid {process.pid} ({process.comm}) names it in its command line"
    return None


def paths_in(word: str, name: str) -> Iterator[str]:
    """Absolute paths in an argument that end with that name. In linear time: any user's argument may have 2 MB."""
    for part in _BETWEEN.split(word):
        begin, at = part.find("/"), part.find(name)
        while at >= 0:
            end = at + len(name)
            if 0 <= begin < at and part[end : end + 1] in {"", "/"}:
                yield part[max(begin, end - LONG) : end]
            at = part.find(name, end)


def user_files(session: int) -> Unknown | None:
    """Why only a person may decide that it can be removed."""
    for path in PEOPLES:
        if _has_entries(session, path):
            return Unknown(
                f"its {path} contains files that users made; check it, and remove it by hand if it is not needed"
            )
    try:
        with os.scandir(session) as listing:
            directories = [entry.name for entry in listing if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        return Unknown(f"it could not be listed: {error.strerror}")
    for name in directories:
        if _is_rocksdb(session, name):
            return Unknown(f"its {name} is a database that is meant to survive the session; remove it by hand")
    return None


def _leads_to(session: RaySession, process: Process, path: str, proc: str) -> bool:
    """A link that cannot be followed may lead there."""
    if len(path) >= LONG:
        return True
    try:
        with opened_node(NodeAccess(process.pid, process.starttime), proc) as root:
            return identity_of_entry(root, path) == session.identity
    except OSError:
        return True


def _unseen(session: RaySession, directory: NodeDirectory, visit: Visit, found: TreeMeasurement) -> Unknown | None:
    """Why it is not known to be unused. Its sockets were checked one by one, so they are no reason."""
    if (unseen := visit.why_unseen(directory, session.name)) is not None:
        return unseen
    without_sockets = msgspec.structs.replace(found, sockets=0, fifos=0)
    used = open_files.is_in_use(session.name, without_sockets, visit.below(directory))
    if used is True:
        return Unknown("it is also mounted somewhere else")
    return used if isinstance(used, Unknown) else None


@contextmanager
def opened(directory: int, path: str) -> Iterator[int | None]:
    """A directory of a session. None: it does not exist, or is a link, which Ray does not create."""
    try:
        fd = kernel.open_inside(directory, path)
    except OSError:
        fd = None
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def _has_entries(directory: int, path: str) -> bool:
    try:
        fd = kernel.open_inside(directory, path)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # a link, a mount, a file: not created by Ray
    try:
        with os.scandir(fd) as listing:
            return next(iter(listing), None) is not None
    finally:
        os.close(fd)


def _is_rocksdb(session: int, name: str) -> bool:
    with opened(session, name) as fd:
        names = [] if fd is None else os.listdir(fd)  # noqa: PTH208
    return all(any(one.startswith(mark) for one in names) for mark in ROCKSDB)


# Logs

LOGS = "logs"
OLD = "old"  # what Ray moved itself, of workers that ended
FOLDERS = ("", OLD, "events", "export_events")
BLOCK = 512
_OF_A_PROCESS = re.compile(
    r"(?:worker|io_worker)-[0-9a-f]+-[0-9a-f]+-(\d+)\.(?:out|err)(?:\.\d+)?"
    r"|python-core-(?:worker|driver)-[0-9a-f]+_(\d+)(?:\.\d+)?\.log(?:\.\d+)?"
    r"|event_[A-Z_]+_(\d+)\.log(?:\.\d+)?"
)
_SETUP = re.compile(r"runtime_env_setup-[0-9a-f]+\.log(?:\.\d+)?")


def pid_in(name: str) -> int | None:
    """Of the process that wrote it, in its own pid namespace."""
    match = _OF_A_PROCESS.fullmatch(name)
    return next((int(number) for number in match.groups() if number), None) if match else None


def removable(logs: int, visit: Visit, reads: Reads, before: datetime) -> tuple[LogFile, ...]:
    """Closed, of a process that is gone from its node, and not used since then, as far as is known."""
    alive = {one.inside for one in visit.node.processes} | {one.pid for one in visit.node.processes}
    setups = sorted(_setups(logs), key=lambda row: row[1].st_mtime_ns)
    found = [_file("", name, about) for name, about in setups[:-1]]
    for directory in FOLDERS:
        found += [
            _file(directory, name, about)
            for name, about in _files(logs, directory)
            if (directory == OLD and pid_in(name) not in alive) or _is_over(name, alive)
        ]
    used = visit.used.files
    closed = (one for one in found if (one.device, one.inode) not in used)
    return tuple(one for one in closed if (until := hidden_until(one.newest, one.read, reads)) and until < before)


def too_long(logs: int) -> tuple[str, ...]:
    """Sentences about logs that grow without bound."""
    sizes = [(name, about.st_blocks * BLOCK) for name, about in _files(logs, "")]
    return tuple(long_log(name, size) for name, size in sizes if size > LONG_LOG)


def _is_over(name: str, alive: set[int]) -> bool:
    pid = pid_in(name)
    return pid is not None and pid not in alive


def _setups(logs: int) -> Iterator[tuple[str, os.stat_result]]:
    return ((name, about) for name, about in _files(logs, "") if _SETUP.fullmatch(name))


def _files(logs: int, directory: str) -> Iterator[tuple[str, os.stat_result]]:
    with opened(logs, directory or ".") as fd:
        for name in sorted(os.listdir(fd)) if fd is not None else ():  # noqa: PTH208
            try:
                about = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
                yield name, about


def _file(directory: str, name: str, about: os.stat_result) -> LogFile:
    newest = instant(max(about.st_atime_ns, about.st_mtime_ns, about.st_ctime_ns))
    size, read = about.st_blocks * BLOCK, read_ns(about)
    when = instant(read) if read else None
    return LogFile(directory, name, about.st_dev, about.st_ino, about.st_ctime_ns, size, newest, about.st_uid, when)


END_BYTES = 64 * 1024  # bytes of each file
MOST_FILES = 200
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def ends_of(directory: int, wanted: frozenset[tuple[str, str]] | None = None) -> dict[str, bytes]:
    """Of the newest files below an open directory of logs; `wanted`: only these, by directory and name."""
    rows = sorted(_newest_files(directory, wanted), reverse=True)[:MOST_FILES]
    ends = {}
    for _, place, name in rows:
        text = _end_of_file(directory, place, name)
        if text:
            ends["/".join(part for part in (LOGS, place, printable(name)) if part)] = text
    return ends


def _newest_files(directory: int, wanted: frozenset[tuple[str, str]] | None) -> Iterator[tuple[int, str, str]]:
    for place in FOLDERS:
        with opened(directory, place or ".") as fd:
            for name in os.listdir(fd) if fd is not None else ():  # noqa: PTH208
                try:
                    about = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(about.st_mode) and (wanted is None or (place, name) in wanted):
                    yield about.st_mtime_ns, place, name


def _end_of_file(directory: int, place: str, name: str) -> bytes:
    """Without updating its access time: a read of ours must not count as use."""
    try:
        fd = kernel.open_inside(directory, f"{place}/{name}" if place else name, _READ)
    except OSError:
        return b""
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            return b""
        return os.pread(fd, END_BYTES, max(about.st_size - END_BYTES, 0))
    except OSError:
        return b""
    finally:
        os.close(fd)
