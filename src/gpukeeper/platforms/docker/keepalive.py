"""The keep-alive file of a container, read from outside: nothing is ever run in the container.

Only its existence counts, and that it was created for this container: by its ctime, which users cannot set. In a
directory that several containers have mounted its words may name the one it is for. How long the file holds the
container is decided by its lease, on our own clock.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from datetime import datetime
from pathlib import PurePosixPath
from typing import TypeVar

T = TypeVar("T")

FILE = "/workspace/.keep-alive"
WORDS = 4096  # bytes that are read of it
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_there(root: str, path: str, not_before: datetime) -> bool:
    """`root`: /proc/PID/root, or a directory of this machine that is mounted there. No link below it is followed.
    OSError if it could not be read.
    """
    facts = _facts(root, path)
    # As numbers: a user's own filesystem may return a time that no calendar has.
    return facts is not None and stat.S_ISREG(facts.st_mode) and facts.st_ctime >= not_before.timestamp()


def words(root: str, path: str) -> frozenset[str]:
    """The words in a regular file there. OSError if it could not be read."""
    text = b""

    def read(here: int, name: str) -> None:
        nonlocal text
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
        try:
            if stat.S_ISREG(os.fstat(file).st_mode):
                text = os.read(file, WORDS)
        finally:
            os.close(file)

    _at(root, path, read)
    return frozenset(text.decode("utf-8", "replace").split())


def _facts(root: str, path: str) -> os.stat_result | None:
    return _at(root, path, lambda here, name: os.stat(name, dir_fd=here, follow_symlinks=False))


def _at(root: str, path: str, do: Callable[[int, str], T]) -> T | None:
    """`do` with its directory and name; None: it does not exist, or a link leads there."""
    *directories, name = PurePosixPath(path).relative_to("/").parts
    here = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for directory in directories:
            try:
                below = os.open(directory, _FOLDER, dir_fd=here)
            except (FileNotFoundError, NotADirectoryError):
                return None  # a link does not count either
            os.close(here)
            here = below
        try:
            return do(here, name)
        except FileNotFoundError:
            return None
    finally:
        os.close(here)
