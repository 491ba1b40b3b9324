"""The path to a directory that the policy names: only through links of root or of our own user. Reads only.

A user who may write in a directory above a root could replace it by a link, and make us remove files of others.
Replacing the directory itself requires write access as well; links do not make that worse.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpukeeper.disk import measure
from gpukeeper.platforms.host.connect import user_name

LINKS = 40  # as many as the kernel follows
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class ForeignLink(OSError):
    """Such a root is not read, whatever is there."""

    def __init__(self, path: str, link: str, user: str) -> None:
        why = f"is reached through a link of {user} ({measure.printable(link)}); use its target in the policy"
        super().__init__(errno.ELOOP, why, path)


def resolve(path: str) -> str:
    """Like realpath, each step by descriptor. A path that does not exist yet has no links. Raises ForeignLink."""
    at, links = "/", 0
    left = _steps(os.fspath(Path.cwd() / path))
    while left:
        step = left.pop()
        if step == "..":
            at = os.path.dirname(at)  # noqa: PTH120 - a string all the way
            continue
        here = f"{at.rstrip('/')}/{step}"
        target = _target(path, here)
        if target is None:
            at = here
            continue
        links += 1
        if links > LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        at = "/" if target.startswith("/") else at
        left += _steps(target)
    return at


@contextmanager
def opened(directory: str) -> Iterator[int]:
    """A directory by its resolved path: a link that was created anywhere on the path since then is an error."""
    fd = os.open("/", _STEP)
    try:
        for step in reversed(_steps(directory)):
            below = os.open(step, _STEP | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        with measure.open_directory(".", fd) as found:
            yield found
    finally:
        os.close(fd)


def _steps(path: str) -> list[str]:
    """The next one last."""
    return [step for step in reversed(path.split("/")) if step not in {"", "."}]


def _target(path: str, here: str) -> str | None:
    """The target if it is a link. Owner and target of the same link, whatever has its name by then."""
    try:
        fd = os.open(here, _STEP)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISLNK(found.st_mode):
            return None
        if found.st_uid not in {0, os.geteuid()}:
            raise ForeignLink(path, here, user_name(found.st_uid))
        return os.readlink("", dir_fd=fd)
    finally:
        os.close(fd)
