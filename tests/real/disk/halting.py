"""Removes a tree, and kills itself with everything it started just before its change number N of the filesystem:

    python -m tests.real.disk.halting N PATH

N may be `share`: when the first worker process has deleted a share of a large tree. gpukeeper has no such switch; what
changes names is wrapped here, as `tests/halt.py` wraps the ports.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpukeeper.disk import kernel
from gpukeeper.disk.worker_pool import WorkerPool
from tests.unit.disk.trees import removed

SHARE = "share"
CHANGES = ((os, ("mkdir", "symlink", "unlink", "rmdir", "chmod")), (kernel, ("rename_inside", "exchange_inside")))


class Halt:
    def __init__(self, number: int) -> None:
        self.left = number

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                kill_all()
            return call(*given, **named)

        return counted


def kill_all(entries: int = 0) -> None:
    os.killpg(0, signal.SIGKILL)


def when_one_is_ready(enter: Callable[[WorkerPool], WorkerPool]) -> Callable[[WorkerPool], WorkerPool]:
    """On a busy machine this process deletes the whole tree before a worker process has started."""

    def entered(pool: WorkerPool) -> WorkerPool:
        enter(pool)
        while not pool.is_ready():
            time.sleep(0.01)
        return pool

    return entered


def main(point: str, path: Path) -> None:
    os.setsid()  # a process group of its own, with its workers
    if point == SHARE:
        with patch.object(WorkerPool, "__enter__", when_one_is_ready(WorkerPool.__enter__)):
            removed(path, progress=kill_all)
        return
    halt = Halt(int(point))
    for module, names in CHANGES:
        for name in names:
            setattr(module, name, halt.before(getattr(module, name)))
    removed(path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
