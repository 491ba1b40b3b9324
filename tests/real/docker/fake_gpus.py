"""GPUs without a driver: nodes /dev/nvidia<minor> with the numbers of /dev/null, which anyone can really hold open.

Each engine has four of its own. The holders of another engine are then never on our GPUs, where they would look like
strangers (or like leftovers). A node that exists and is not ours (a real driver's) is never touched.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EACH = 4
BLOCKS = 32
_LIKE_NULL = os.makedev(1, 3)


@dataclass(frozen=True)
class FakeGpu:
    index: int
    minor: int

    @property
    def uuid(self) -> str:
        return f"GPU-00000000-0000-0000-0000-{self.minor:012d}"

    @property
    def path(self) -> str:
        return f"/dev/nvidia{self.minor}"

    def at_rest(self) -> dict[str, Any]:
        """What the pretended driver says of it until a test says otherwise."""
        return {
            "index": self.index,
            "uuid": self.uuid,
            "name": "Pretend H200",
            "minor": self.minor,
            "pci": f"00000BED:{self.minor:02X}:00.0",
            "memory_total_mib": 143_771,
            "memory_used_mib": 615,
            "busy": 0.0,
            "pids": None,
            "advice": "none",
        }


@dataclass(frozen=True)
class Block:
    """A number that no other engine on this machine has, its GPUs, and what the last one with this number used."""

    number: int
    gpus: tuple[FakeGpu, ...]
    last_folder: Path | None


@contextmanager
def a_block(folder: Path) -> Iterator[Block]:
    """The lock goes with us, however we end; the folder that is written there is then known to the next one."""
    for number in range(BLOCKS):
        with Path(tempfile.gettempdir(), f"gpukeeper-test-{number}.lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            gpus = tuple(FakeGpu(index, number * EACH + index) for index in range(EACH))
            if any(_is_foreign(gpu.path) for gpu in gpus):
                continue
            lock.seek(0)
            last = lock.read().strip()
            lock.truncate(0)
            lock.write(str(folder))
            lock.flush()
            try:
                _make(gpus)
                yield Block(number, gpus, Path(last) if last else None)
            finally:
                _remove(gpus)
            return
    raise RuntimeError(f"all {BLOCKS} numbers for test beds are taken on this machine")


def _make(gpus: tuple[FakeGpu, ...]) -> None:
    for gpu in gpus:
        if not Path(gpu.path).exists():
            os.mknod(gpu.path, stat.S_IFCHR | 0o666, _LIKE_NULL)
            Path(gpu.path).chmod(0o666)  # mknod obeys the umask


def _remove(gpus: tuple[FakeGpu, ...]) -> None:
    for gpu in gpus:
        if not _is_foreign(gpu.path):
            Path(gpu.path).unlink(missing_ok=True)


def _is_foreign(path: str) -> bool:
    try:
        found = Path(path).lstat()
    except FileNotFoundError:
        return False
    return not (stat.S_ISCHR(found.st_mode) and found.st_rdev == _LIKE_NULL)
