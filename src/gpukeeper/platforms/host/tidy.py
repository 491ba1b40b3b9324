"""A private temporary directory for one command, removed afterwards: for work that leaves files behind.

The directory belongs to the user of the command, and no other user may enter it. So, unlike for any other tree, it is
enough to know that no process of the command is left: whatever it started and left becomes our child (subreaper), and
its open files can be read. What a remaining process still uses is kept, and so is what could not be read: a service of
root may have started something for the command (docker, sudo, systemd) that is no child of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gpukeeper.disk import measure, open_files
from gpukeeper.disk.kernel import STATUS_MAX, read_proc, stat_fields
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.process_files import KERNEL_THREAD
from gpukeeper.disk.remove import ExpectedTree, RemovalResult, TreeRemoval, remove
from gpukeeper.model.decision import Changed
from gpukeeper.model.unknown import Unknown

PREFIX = "tmp-gpukeeper-"  # so that the usual pattern of a policy matches it if we are killed
INSIDE = "tmp"  # removed through a trash beside it, which must not be left in a shared directory
VARIABLES = ("TMPDIR", "TMP", "TEMP")
MARK = "GPUKEEPER_TIDY"  # the path of the directory, for the command
PATIENCE = 15 * 60  # seconds
TRIES = 3
FORWARDED = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGWINCH),
)
_PR_SET_CHILD_SUBREAPER = 36
_BY_THE_KERNEL = 0x80  # si_code of a signal from a terminal, which the command got itself


class Remainder(msgspec.Struct, frozen=True):
    """What is left of the directory, and why."""

    path: str
    why: str


def make_folder(root: str | None, environ: Mapping[str, str]) -> Path:
    """Only its owner may enter it. Without a root: the temporary directory of the environment."""
    where = root or next((environ[name] for name in VARIABLES if environ.get(name)), "/tmp")  # noqa: S108
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
    (path / INSIDE).mkdir(mode=0o700)
    return path


def environment(directory: Path, environ: Mapping[str, str]) -> dict[str, str]:
    inside = str(directory / INSIDE)
    return {**environ, **dict.fromkeys(VARIABLES, inside), MARK: inside}


def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Its exit code, or 128 + the number of the signal that ended it. Signals to us are forwarded to the command."""
    _become_subreaper()
    waited = {signal.SIGCHLD, *FORWARDED}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        pid = os.posix_spawnp(command[0], list(command), environ, setsigmask=before)
        while (code := _reaped(pid)) is None:
            received = signal.sigwaitinfo(waited)
            if received.si_signo != signal.SIGCHLD and received.si_code != _BY_THE_KERNEL:
                with suppress(ProcessLookupError):
                    os.kill(pid, received.si_signo)
        return code
    finally:
        # Further signals are ignored: what follows ends by itself.
        for one in FORWARDED:
            signal.signal(one, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def moment() -> int:
    """Now, in the kernel's unit for the start of a process: ticks since boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def remove_folder(directory: Path, since: int, proc: str = "/proc") -> int | Remainder:
    """Bytes returned, or why it is kept. With the checks of every other removal. `since`: the moment before the command
    began.
    """
    try:
        with measure.open_directory(str(directory)) as parent:
            answer = _removed(parent, since, proc)
        if not isinstance(answer, TreeRemoval):
            return Remainder(str(directory), answer.why)
        if answer.left:
            return Remainder(str(directory), "; ".join(answer.left))
        directory.rmdir()
    except OSError as error:
        return Remainder(str(directory), error.strerror or str(error))
    return 0 if isinstance(answer.bytes_back, Unknown) else answer.bytes_back


def _removed(parent: int, since: int, proc: str) -> RemovalResult:
    """Retried a few times if it changes: the remaining processes of the command may be about to end."""
    until = time.monotonic() + PATIENCE
    answer: RemovalResult = TreeRemoval(entries=0, bytes_back=0)
    for _ in range(TRIES):
        found = measure.measure(INSIDE, parent)
        if found is None:
            return TreeRemoval(entries=0, bytes_back=0)  # the command removed it itself
        if isinstance(found.ctime_ns, Unknown):
            return found.ctime_ns
        expected = ExpectedTree((found.device, found.inode), found.ctime_ns)
        dead = not _survivors(proc)  # then its sockets are unused, too
        answer = remove(parent, INSIDE, expected, scan=lambda: _scan(since, proc), until=until, sockets=dead)
        if not isinstance(answer, Changed):
            break
    return answer


def _become_subreaper() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reaped(pid: int) -> int | None:
    """Reaps everything that ended, adopted children too. Returns the command's exit code once it is among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                found = os.waitstatus_to_exitcode(ended[1])
                code = found if found >= 0 else 128 - found
    return code


def _scan(since: int, proc: str) -> OpenFiles:
    """Works for ordinary users, too: of all processes that may not be read, only those that the command left, or had
    started for it, could have an open file in a directory that no other user may enter.
    """
    found = open_files.scan(proc)
    return msgspec.structs.replace(found, hidden=_why_hidden(since, proc))


def _why_hidden(since: int, proc: str) -> str | None:
    unread = [pid for pid in _survivors(proc) if not _is_readable(Path(proc, str(pid)))]
    if unread:
        return f"the open files of pid {unread[0]}, which the command left running, could not be read"
    if not _is_shown(proc):
        return "this machine hides the processes of other users (hidepid), and one may work for the command"
    later = [pid for pid in _pids(proc) if _may_work_for_us(Path(proc, str(pid)), since)]
    if later:
        return (
            f"pid {later[0]} started after the command, perhaps for it, and its open files could not be read; "
            "that needs root"
        )
    return None


def _is_shown(proc: str) -> bool:
    with suppress(FileNotFoundError):
        return _status(Path(proc, "1")) is not None
    return False


class _Status(msgspec.Struct, frozen=True):
    """What every user may read of a process."""

    parent: int
    started: int  # in the unit of `moment`
    has_files: bool


def _may_work_for_us(home: Path, since: int) -> bool:
    try:
        began = _status(home)
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended
    if began is not None and (not began.has_files or began.started < since):
        return False
    return not _is_readable(home)


def _status(home: Path) -> _Status | None:
    """None: it may not be read. A kernel thread has no files, nor has a process that ended, unless threads of it
    continue.
    """
    try:
        fields = stat_fields(read_proc(f"{home}/stat", STATUS_MAX))
    except PermissionError:
        return None
    ended = fields[0] in {b"Z", b"X", b"x"} and int(fields[17]) <= 1
    of_the_kernel = bool(int(fields[6]) & KERNEL_THREAD)
    return _Status(int(fields[1]), int(fields[19]), not ended and not of_the_kernel)


def _survivors(proc: str) -> list[int]:
    """Every process below us: our children by birth or adoption, and theirs."""
    parents = dict(_parents(proc))
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        above = pending.pop()
        below = [pid for pid, parent in parents.items() if parent == above]
        found += below
        pending += below
    return found


def _parents(proc: str) -> Iterable[tuple[int, int]]:
    for pid in _pids(proc):
        with suppress(FileNotFoundError, ProcessLookupError):
            status = _status(Path(proc, str(pid)))
            if status is not None:
                yield pid, status.parent


def _pids(proc: str) -> list[int]:
    return sorted(int(home.name) for home in Path(proc).iterdir() if home.name.isdecimal())


def _is_readable(home: Path) -> bool:
    try:
        for link in (home / "fd").iterdir():
            link.readlink()
    except (FileNotFoundError, ProcessLookupError):
        return True  # it ended, or closed one in the meantime
    except OSError:
        return False
    return True
