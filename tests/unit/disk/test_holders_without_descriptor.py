"""What holds a file without a descriptor: a mapping, an io_uring. The calls are made directly, so that no library is
needed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpukeeper.disk.open_files import OpenFiles, below, is_in_use, user_of
from gpukeeper.disk.process_files import parse_registered
from gpukeeper.disk.remove import TreeRemoval
from gpukeeper.disk.walk import OPEN
from gpukeeper.model.decision import Changed
from gpukeeper.model.unknown import Unknown
from tests.own_processes import everything_seen, scan_own
from tests.patience import PATIENCE
from tests.unit.disk.trees import READY, child, expected, read, removed, trash_in, tree

BASE = f"""
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
def held(path, flags=os.O_RDONLY): return os.open(path, flags)
def mapped(fd, access, kind, at=0):
    assert libc.mmap(None, 4096, access, kind, fd, at) != ctypes.c_void_p(-1).value, ctypes.get_errno()
def ring(*fds):
    made = libc.syscall(425, 4, ctypes.create_string_buffer(120))
    assert libc.syscall(427, made, 2, (ctypes.c_int * len(fds))(*fds), len(fds)) == 0, ctypes.get_errno()
    return made
path = sys.argv[1]
{{act}}
os.chdir("/")
{READY}
"""
MAPPED = "fd = held(path + '/d0/f0', os.O_RDWR); mapped(fd, {access}, {kind}); os.close(fd)"
REGISTERED = "fd = held(path + {name!r}); made = ring(fd, -1); os.close(fd)"
WITHOUT_DESCRIPTOR = "; mapped(made, mmap.PROT_READ, mmap.MAP_SHARED, 0x10000000); os.close(made)"


def has_io_uring() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    made = libc.syscall(425, 4, ctypes.create_string_buffer(120))
    if made >= 0:
        os.close(made)
    return bool(made >= 0)


need_io_uring = pytest.mark.skipif(
    not has_io_uring(), reason="io_uring is disabled (kernel.io_uring_disabled, or a filter)"
)
need_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting needs root and unshare"
)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    made = tree(tmp_path)
    yield made
    assert trash_in(tmp_path) == []


def no_process() -> OpenFiles:
    """A scan that misses everything: the kernel alone decides."""
    return OpenFiles({}, {}, (), frozenset(), None)


def goes(path: Path) -> bool:
    """The kernel gives up the files of an io_uring some time after its process has ended."""
    end = time.monotonic() + PATIENCE
    while not isinstance(removed(path), TreeRemoval):
        if time.monotonic() > end:
            return False
    return True


@pytest.mark.parametrize(
    ("access", "kind"),
    [("mmap.PROT_READ", "mmap.MAP_SHARED"), ("0", "mmap.MAP_PRIVATE"), ("mmap.PROT_WRITE", "mmap.MAP_SHARED")],
    ids=["shared", "not even readable", "written"],
)
def test_a_file_that_is_only_mapped_keeps_its_tree(path: Path, access: str, kind: str) -> None:
    wanted = expected(path)
    with child(BASE.format(act=MAPPED.format(access=access, kind=kind)), path) as pid:
        used = below(str(path.parent), everything_seen())
        assert user_of(path.name, read(path), used) == pid
        assert removed(path, wanted) == Changed(f"it is in use by pid {pid}")
        assert removed(path, scan=no_process) == Changed(OPEN)
    assert goes(path)


@need_io_uring
@pytest.mark.parametrize("name", ["/d0/f0", "/d0", ""], ids=["file", "folder", "tree"])
def test_what_is_only_registered_with_an_io_uring_keeps_its_tree(path: Path, name: str) -> None:
    """The kernel answers for files alone: of a folder, the scan must find it."""
    wanted = expected(path)
    with child(BASE.format(act=REGISTERED.format(name=name)), path) as pid:
        assert user_of(path.name, read(path), below(str(path.parent), everything_seen())) == pid
        assert removed(path, wanted) == Changed(f"it is in use by pid {pid}")
    assert goes(path)


@need_io_uring
@need_mounts
@pytest.mark.parametrize("name", ["/d0/f0", "/d0"], ids=["file", "folder"])
def test_of_another_mount_namespace_too_where_it_has_another_path(path: Path, name: str, tmp_path: Path) -> None:
    """Its mount is gone again, so that only the ring has it."""
    point = tmp_path / "point"
    point.mkdir()
    act = f"""
import subprocess
subprocess.run(["mount", "--bind", os.path.dirname(path), {str(point)!r}], check=True)
fd = held({str(point)!r} + "/" + os.path.basename(path) + {name!r}); ring(fd); os.close(fd)
"""
    wanted = expected(path)
    with child(BASE.format(act=act), path, before=("unshare", "--mount")):
        used = below(str(path.parent), everything_seen())
        assert is_in_use(path.name, read(path), used) is True
        assert isinstance(removed(path, wanted), Changed)
    assert goes(path)


@need_io_uring
def test_a_ring_without_a_descriptor_makes_unknown_what_it_has(path: Path) -> None:
    wanted = expected(path)
    with child(BASE.format(act=REGISTERED.format(name="/d0") + WITHOUT_DESCRIPTOR), path) as pid:
        hidden = scan_own().hidden
        assert f"pid {pid} has an io_uring without a descriptor" in str(hidden)
        answer = removed(path, wanted, scan=scan_own)
        assert isinstance(answer, Unknown)
        assert "io_uring" in answer.why


@need_io_uring
def test_a_ring_with_sockets_and_empty_places_hides_nothing(path: Path) -> None:
    act = "import socket; s = socket.socket(); made = ring(s.fileno(), -1, *os.pipe()); mapped(made, 1, 1, 0x10000000)"
    with child(BASE.format(act=act), path) as pid:
        assert f"pid {pid} " not in str(scan_own().hidden)
        assert isinstance(removed(path), TreeRemoval)


def test_a_sealed_memory_file_is_on_no_disk_and_hides_nothing(path: Path) -> None:
    """Whatever its name: a user chooses that."""
    act = """
import fcntl
fd = os.memfd_create(path.replace("/", "", 1), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.write(fd, b"x" * 4096)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0xF)
mapped(fd, mmap.PROT_READ, mmap.MAP_PRIVATE)
os.close(fd)
other = os.memfd_create(path)
"""
    with child(BASE.format(act=act), path) as pid:
        seen = scan_own()
        assert f"pid {pid} " not in str(seen.hidden)
        assert not [one for one in seen.held if one.pid == pid and ("memfd" in one.path or str(path) in one.path)]
        used = below(str(path.parent), msgspec.structs.replace(seen, hidden=None))
        assert is_in_use(path.name, read(path), used) is False
        assert isinstance(removed(path), TreeRemoval)


HEAD, TAIL = b"pos:\t0\nSqMask:\t0x3\nSQEs:\t0\nSqThread:\t-1\n", b"UserBufs:\t1\n    0: 0x7f00/4096\nPollList:\n"


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        (b"", None),
        (b"UserFiles:\t0\n", []),
        (b"UserFiles:\t3\n", []),
        (b"UserFiles:\t2\n    0: /tmp/a\\040b\\012c\n    1: /tmp/d (deleted)\n", ["/tmp/a b\nc", "/tmp/d"]),
        (b"UserFiles:\t4\n    0: <none>\n    1: file\n    2: \n    3: <none>\n", ["file"]),
        (b"UserFiles:\t3\n    0: socket:[7]\n    1: anon_inode:[eventfd]\n   12: /memfd:x (deleted)\n", ["/memfd:x"]),
    ],
    ids=["locked or not listed", "none", "empty places", "paths", "names of an older kernel", "not of a disk"],
)
def test_registered_files_are_parsed_as_each_kernel_lists_them(listed: bytes, found: list[str] | None) -> None:
    assert parse_registered(HEAD + listed + TAIL) == found
