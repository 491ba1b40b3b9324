"""Small filesystems, mounts and hostile neighbours for tests of the disk; all of it undone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.engines import require

REPOSITORY = Path(__file__).parents[3]


def need_root() -> None:
    require("tmpfs", os.geteuid() == 0)


@contextmanager
def mounted(point: Path, *arguments: object) -> Iterator[Path]:
    point.mkdir(exist_ok=True) if not point.exists() else None
    subprocess.run(["mount", *map(str, arguments), point], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", point], check=True)


@contextmanager
def ext4(folder: Path, size: str, *options: str) -> Iterator[Path]:
    """A filesystem of that size in a file."""
    image = folder / "image"
    subprocess.run(["truncate", "-s", size, image], check=True)
    subprocess.run(["mkfs.ext4", "-q", *options, image], check=True)
    with mounted(folder / "disk", "-o", "loop", image) as point:
        yield point


def fill(folder: Path) -> None:
    """Until not one byte more fits, for whoever asks."""
    fd = os.open(folder / "ballast", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (2**20, 4096, 1):
        with suppress(OSError):
            while os.write(fd, b"x" * size):
                pass
    with suppress(OSError):
        os.fsync(fd)
    os.close(fd)


_AS_NOBODY = """
import ctypes, os, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/src"]
from tests.real.disk.filesystems import *
from tests.unit.disk.trees import *
os.chdir(sys.argv[2])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # who drops rights may not read its own /proc until it says so
here = Path(".")
"""


def as_nobody(folder: Path, program: str) -> str:
    """What the program prints, run by an ordinary user who stands in the folder: those above may be closed to it."""
    command = [sys.executable, "-c", _AS_NOBODY + program, REPOSITORY, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def picture(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything about a tree that must not change."""
    return {
        str(path.relative_to(folder)): (
            found.st_ino,
            found.st_mode,
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in sorted(folder.rglob("*"))
        if (found := path.lstat())
    }
