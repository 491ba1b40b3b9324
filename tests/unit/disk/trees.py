"""Real trees for tests: made, looked at, removed, used by real children."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpukeeper.disk.measure import TreeMeasurement, measure, open_directory
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import ExpectedTree, RemovalResult, finish, remove
from gpukeeper.disk.trash import TRASH, leftovers
from tests.own_processes import everything_seen

COARSE_CLOCK = 5  # CLOCK_REALTIME_COARSE, with which files are stamped


def tree(root: Path, name: str = "tree", folders: int = 3, files: int = 4) -> Path:
    for folder in range(folders):
        (root / name / f"d{folder}").mkdir(parents=True)
        for file in range(files):
            (root / name / f"d{folder}" / f"f{file}").write_bytes(b"x" * 5000)
    return root / name


def read(path: Path) -> TreeMeasurement:
    with open_directory(str(path.parent)) as parent:
        found = measure(path.name, parent)
    assert found is not None
    return found


def expected(path: Path) -> ExpectedTree:
    found = read(path)
    assert isinstance(found.ctime_ns, int), found.problems
    # Times have the grain of the kernel's tick: what changes within the same one cannot be told apart.
    while time.clock_gettime_ns(COARSE_CLOCK) <= found.ctime_ns:
        pass
    return ExpectedTree((found.device, found.inode), found.ctime_ns)


def removed(path: Path, wanted: ExpectedTree | None = None, **given: object) -> RemovalResult:
    wanted = expected(path) if wanted is None else wanted
    settings = {"scan": everything_seen, "until": math.inf} | given
    with open_directory(str(path.parent)) as parent:
        return remove(parent, path.name, wanted, **settings)  # type: ignore[arg-type]


def finished(root: Path, **given: object) -> list[RemovalResult]:
    settings = {"scan": everything_seen, "until": math.inf} | given
    with open_directory(str(root)) as parent:
        return [finish(parent, taken, **settings) for taken in leftovers(parent)]  # type: ignore[arg-type]


def trash_in(root: Path) -> list[Path]:
    return sorted(root.glob(f"{TRASH}*"))


def before_the_look(act: Callable[[], object]) -> Callable[[], OpenFiles]:
    """A scan that comes just after something happened: the tree is in the trash already."""

    def scan() -> OpenFiles:
        act()
        return everything_seen()

    return scan


@contextmanager
def child(program: str, *arguments: object, before: tuple[str, ...] = ()) -> Iterator[int]:
    """Runs while the block does; it has printed an empty line when the block begins, and ends with its input."""
    command = [*before, sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == b"\n"
        try:
            yield running.pid
        finally:
            running.stdin.close()


READY = "print(flush=True); sys.stdin.read()"
HOLD_OPEN = f"import sys; f = open(sys.argv[1]); {READY}"
HOLD_MAPPED = f"""
import mmap, sys
with open(sys.argv[1], 'rb') as f: m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
{READY}
"""
SIT_INSIDE = f"import os, sys; os.chdir(sys.argv[1]); {READY}"
HOLD_FOLDER = f"import os, sys; os.open(sys.argv[1], os.O_RDONLY); {READY}"
LOCK = f"""
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), getattr(fcntl, sys.argv[2])); {READY}
"""
