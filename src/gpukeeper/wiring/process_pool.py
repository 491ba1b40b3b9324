"""Processes that multiprocessing starts. Nothing else of gpukeeper uses it: child_python starts a single program.

They inherit the environment: multiprocessing has no way to give them another, and to change ours meanwhile would change
it for all threads. They do what the command itself does, as its user, in its directory, and as it was started (-I, -E).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

SAFE_PATH = "PYTHONSAFEPATH"


@contextmanager
def process_pool(size: int, take: Callable[..., object], given: tuple[Any, ...]) -> Iterator[ProcessPoolExecutor]:
    """`take` gets `given` in each of the processes first. They, and one that cleans up after them, are started with
    `-c`, so that `multiprocessing.py` in the current directory would run; only a variable prevents that."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    pool = ProcessPoolExecutor(size, get_context("spawn"), initializer=take, initargs=given)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before
