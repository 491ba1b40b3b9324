"""What Python does not offer of the kernel: opening without leaving a directory, renaming without replacing, and files
of /proc as bytes, up to a limit. If openat2 is missing or forbidden, directories are opened one name at a time
without following links; a filesystem that cannot rename without replacing has no substitute, and the caller gets
the error. Names in /proc are chosen by any user and may contain any byte except NUL and what the kernel escapes:
only a newline ends a line there, and only a blank or a tab ends a field.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import signal
from functools import cache

Name = str | bytes
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPENAT2 = 437  # the same number on every architecture
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "s390x": 282}
_IOPRIO_IDLE = 3 << 13
_KCMP = {"x86_64": 312, "aarch64": 272, "ppc64le": 354, "s390x": 343}
KERNEL = 0  # as a holder of a file: no process, the kernel itself
OPEN_FILES, FOLDERS = 2, 3  # what two threads may share: descriptors; working directory, root and so mount namespace
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x01, 0x02, 0x04, 0x08
_NOREPLACE, _EXCHANGE = 1, 2
_F_SETSIG = 10
_AT_FDCWD, _AT_NO_AUTOMOUNT, _AT_DONT_SYNC, _BASIC_STATS = -100, 0x800, 0x4000, 0x7FF
# Held, or about to be: EAGAIN from a lease, EBUSY from some filesystems, EWOULDBLOCK from an open that breaks one.
_IS_OPEN = {errno.EAGAIN, errno.EBUSY, errno.ETXTBSY}


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)
_openat2 = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(_OpenHow),
    ctypes.c_size_t,
    use_errno=True,
)(("syscall", _libc))


def open_inside(directory: int, path: Name, flags: int = FOLDER) -> int:
    """Opens the entry at `path` below the directory, without following any link, leaving the directory or crossing a
    mount.

    A mount point is EXDEV, whatever is mounted there: a bind mount of the same filesystem has the same device number.
    Without updating access times where permitted: only owners and root may do that, and a read of ours that counted as
    use would keep every tree forever.
    """
    try:
        return _open_inside(directory, path, flags | os.O_NOATIME)
    except PermissionError:
        return _open_inside(directory, path, flags)


def stat_inside(directory: int, name: Name) -> os.stat_result:
    """Of the entry, also of a link itself. EXDEV where something is mounted on it."""
    fd = _open_inside(directory, name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def rename_inside(directory: int, name: Name, other: int, new_name: Name) -> None:
    """Never replaces: FileExistsError. EINVAL: this filesystem cannot guarantee that."""
    done = _libc.renameat2(directory, os.fsencode(name), other, os.fsencode(new_name), _NOREPLACE)
    if done != 0:
        raise _failure(name)


def exchange_inside(directory: int, name: Name, other: int, other_name: Name) -> None:
    """Each gets the name of the other, in one step. EINVAL: this filesystem cannot do that."""
    done = _libc.renameat2(directory, os.fsencode(name), other, os.fsencode(other_name), _EXCHANGE)
    if done != 0:
        raise _failure(name)


def is_open(directory: int, name: Name) -> bool | None:
    """Whether a process has this regular file open or mapped. None: the kernel does not report it.

    The kernel grants a write lease only on a file that nothing else has open, and knows that without searching: also of
    a descriptor that changes its number, is in transit through a socket, or is registered with io_uring. The lease
    needs the owner or CAP_LEASE. It is released at once. A process that opens the file in that moment (only by a
    descriptor of a parent directory) waits for that; the signal that reports it to us is ignored by default.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        return True if error.errno in _IS_OPEN else None
    try:
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return True if error.errno in _IS_OPEN else None
    finally:
        os.close(fd)
    return False


class FileStatus(ctypes.Structure):
    """The first fields of statx(2)."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("blksize", ctypes.c_uint32),
        ("attributes", ctypes.c_uint64),
        ("nlink", ctypes.c_uint32),
        ("uid", ctypes.c_uint32),
        ("gid", ctypes.c_uint32),
        ("mode", ctypes.c_uint16),
        ("spare", ctypes.c_uint16),
        ("ino", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("attributes_mask", ctypes.c_uint64),
        ("times", ctypes.c_uint64 * 8),
        ("rdev_major", ctypes.c_uint32),
        ("rdev_minor", ctypes.c_uint32),
        ("dev_major", ctypes.c_uint32),
        ("dev_minor", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 14),
    )

    @property
    def dev(self) -> int:
        return os.makedev(self.dev_major, self.dev_minor)


def status_of(path: str) -> FileStatus:
    """What a path leads to, as the kernel has it cached: no filesystem is queried, so a dead server or program cannot
    block us.
    """
    found = FileStatus()
    if _libc.statx(_AT_FDCWD, os.fsencode(path), _AT_DONT_SYNC | _AT_NO_AUTOMOUNT, _BASIC_STATS, ctypes.byref(found)):
        raise _failure(path)
    return found


def lock(directory: int) -> bool:
    """False: another process holds a lock on it, shared or exclusive. Kept until the descriptor is closed."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lower_priority() -> None:
    """Lowers the CPU and I/O priority of this process. What the kernel refuses is skipped."""
    os.nice(10)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        _libc.syscall(ctypes.c_long(number), ctypes.c_int(1), ctypes.c_int(0), ctypes.c_int(_IOPRIO_IDLE))


def is_same(kind: int, one: int, other: int) -> bool | None:
    """Whether two threads share their OPEN_FILES or FOLDERS. None: the kernel does not report it, or one of them
    ended.
    """
    number = _KCMP.get(os.uname().machine)
    if number is None:
        return None
    zero = ctypes.c_ulong(0)
    answer = _libc.syscall(
        ctypes.c_long(number), ctypes.c_int(one), ctypes.c_int(other), ctypes.c_int(kind), zero, zero
    )
    return None if answer < 0 else answer == 0


def mount_id(fd: int) -> str:
    with open(f"/proc/self/fdinfo/{fd}") as lines:  # noqa: PTH123 - importing pathlib takes longer than this
        return next(line.split()[1] for line in lines if line.startswith("mnt_id:"))


@cache
def has_openat2() -> bool:
    root = os.open("/", FOLDER)
    try:
        os.close(_by_openat2(root, b".", FOLDER))
    except OSError:
        return False
    finally:
        os.close(root)
    return True


def _open_inside(directory: int, path: Name, flags: int) -> int:
    if has_openat2():
        return _by_openat2(directory, os.fsencode(path), flags)
    return _by_steps(directory, os.fsencode(path), flags)


def _by_openat2(directory: int, path: bytes, flags: int) -> int:
    fd = _openat2(_OPENAT2, directory, path, _how(flags), ctypes.sizeof(_OpenHow))
    if fd < 0:
        raise _failure(path)
    return int(fd)


@cache
def _how(flags: int) -> _OpenHow:
    return _OpenHow(flags, 0, _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS | _NO_XDEV)


def _by_steps(directory: int, path: bytes, flags: int) -> int:
    """One name at a time, so that no link on the path is followed either. Each is opened as a path first: a filesystem
    that is mounted there may never answer, and is not queried by that.
    """
    mount, *names = mount_id(directory), *path.split(b"/")
    fd = os.dup(directory)
    for number, name in enumerate(names, start=1):
        above, of_folder = fd, os.O_DIRECTORY if number < len(names) else flags & os.O_DIRECTORY
        try:
            if name == b"..":
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | of_folder, dir_fd=above)
        finally:
            os.close(above)
        if mount_id(fd) != mount:
            os.close(fd)
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    if flags & os.O_PATH:
        return fd
    try:
        return os.open(f"/proc/self/fd/{fd}", flags & ~os.O_NOFOLLOW)
    finally:
        os.close(fd)


def _failure(path: Name) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)


STATUS_MAX = 64 * 1024
TABLE_MAX = 32 * 1024 * 1024  # of maps and mountinfo: more than 65,530 mappings with usual names
_ESCAPED = re.compile(rb"\\([0-7]{3})")


class TooLong(OSError):
    """The file is longer than what is read of one process."""


def read_proc(path: str, limit: int) -> bytes:
    """The whole file, or TooLong."""
    found = read_proc_part(path, limit + 1)
    if len(found) > limit:
        raise TooLong(0, f"more than {limit:,} bytes", path)
    return found


def read_proc_part(path: str, limit: int) -> bytes:
    """Its beginning. The kernel returns such files in pieces, whatever size is requested."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces, size = [], 0
        while size < limit and (piece := os.read(fd, min(limit - size, 1 << 18))):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def stat_fields(stat: bytes) -> list[bytes]:
    """Of /proc/PID/stat, from the state on. The name before it is in brackets and may contain brackets itself."""
    return stat[stat.rindex(b")") + 2 :].split()


def status_value(status: bytes, key: bytes) -> bytes | None:
    """Of /proc/PID/status and fdinfo: what follows `key:` and a tab."""
    for line in status.split(b"\n"):
        if line.startswith(key + b":"):
            return line[len(key) + 1 :].strip()
    return None


def unescaped(field: bytes) -> str:
    """A name as the kernel writes it in tables: blank, tab, newline and backslash are \\040, \\011, \\012, \\134."""
    return os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field))
