"""A neighbour keeps a file or a folder of a tree in use, and never in the same place: the tree is never deleted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpukeeper.disk import open_files
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import TreeRemoval
from tests.real.disk.filesystems import REPOSITORY
from tests.smoke import smoke
from tests.unit.disk.trees import expected, removed, tree

TRIES = 30  # of each kind; 210 in all


@contextmanager
def holder(how: str, path: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.real.disk.holder", how, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=REPOSITORY) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == b"\n"
        try:
            yield
        finally:
            running.stdin.write(b"end")
            running.stdin.close()
            running.stdout.read()  # ends with the last process that has it


def scan() -> OpenFiles:
    """Where a sandbox hides its first process even from root, the test vouches for that one."""
    return open_files.scan(unreadable=(Path("/proc/1/comm").read_text().strip(),))


def deletions(path: Path) -> int:
    """How often it was deleted, of so many tries; it is made anew then, and nobody uses that one."""
    lost = 0
    for _ in range(TRIES):
        lost += isinstance(removed(path, expected(path), scan=scan), TreeRemoval)
        if lost:
            break
    return lost


def goes_in_the_end(path: Path) -> bool:
    """Somebody else on this machine may be as restless for a while."""
    return any(isinstance(removed(path, expected(path), scan=scan), TreeRemoval) for _ in range(TRIES))


@pytest.mark.parametrize("how", smoke(["moving", "disguised", "relayed", "passed"], "moving".__eq__))
def test_a_file_that_is_open_all_the_time_is_never_deleted(tmp_path: Path, how: str) -> None:
    path = tree(tmp_path)
    with holder(how, path):
        assert deletions(path) == 0
    assert goes_in_the_end(path)


@pytest.mark.parametrize("how", ["moving-folder", "disguised-folder", "relayed-folder"])
def test_a_directory_that_is_open_all_the_time_is_never_deleted(tmp_path: Path, how: str) -> None:
    """Of folders the kernel does not say whether they are open: what the look at processes sees must do."""
    path = tree(tmp_path)
    with holder(how, path):
        assert deletions(path) == 0
    assert goes_in_the_end(path)


def test_a_process_that_waits_for_a_connection_hides_nothing(tmp_path: Path) -> None:
    """The number of the descriptor it will get is taken already, so the kernel counts one more than it lists."""
    path = tree(tmp_path)
    waiting = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(flush=True); s.accept()"
    with subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"\n"
        try:
            assert goes_in_the_end(path)
        finally:
            running.kill()
