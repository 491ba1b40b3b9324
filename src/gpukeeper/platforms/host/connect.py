"""Access to this machine: its name, its users, time limits, errors as sentences, and the path to a directory that the
policy names: only through links of root or of our own user. A user who may write in a directory above a root could
replace it by a link, and make us remove files of others.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.devices.holders import user_name
from gpukeeper.disk import measure
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import TreeRemoval
from gpukeeper.model.decision import Refused, Unseen, too_slow
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import size_in_words

T = TypeVar("T")
Page: TypeAlias = tuple[tuple[Subject, ...], tuple[Unseen, ...]]
Scan: TypeAlias = Callable[[], OpenFiles]
# Directories that something will need when it starts, each with a clause that names it.
Needed: TypeAlias = Callable[[], Awaitable[Mapping[str, str] | Unknown]]
PAGE = 500  # subjects


class Timeouts(msgspec.Struct, frozen=True):
    """Time limits of each kind of read, and of a removal."""

    gpus: timedelta = timedelta(seconds=10)
    processes: timedelta = timedelta(seconds=30)
    tree: timedelta = timedelta(minutes=5)
    trees: timedelta = timedelta(minutes=15)  # of one pass; the rest is listed and not measured
    removal: timedelta = timedelta(minutes=15)  # of one tree; the rest of it stays in the trash
    disk: timedelta = timedelta(seconds=10)


async def nothing_needed() -> Mapping[str, str]:
    """Used if there is no engine whose containers could need directories of this machine."""
    return {}


def hostname() -> str:
    return socket.gethostname()


LINKS = 40  # as many as the kernel follows
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class ForeignLink(OSError):
    """Such a root is not read, whatever is there."""

    def __init__(self, path: str, link: str, user: str) -> None:
        why = f"is reached through a link of {user} ({measure.printable(link)}); use its target in the policy"
        super().__init__(errno.ELOOP, why, path)


def resolved_path(path: str) -> str:
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


READ_ONLY = Refused("gpukeeper only reports GPUs, processes and disks of the machine itself; nothing was done")
CANNOT_MEASURE = Refused("it could not be measured completely, so it was not removed")
NO_COPY = Refused("nothing was saved of it, so it cannot be restored")
NEVER_FROM_HERE = "so it is never removed from here, however old it is; no policy setting changes that"
SHOWN_ENTRIES = 3  # of entries that could not be removed


def unreadable(what: str, error: OSError) -> Unseen:
    if isinstance(error, ForeignLink):
        return Unseen(what, str(error.strerror))
    return Unseen(what, f"could not be read: {error.strerror}")


async def in_time(work: Callable[[], T], what: str, deadline: timedelta, more: timedelta = timedelta()) -> T | Unseen:
    """A blocking read of that, in a thread, or why it was not read. `more`: for work that has the deadline itself."""
    try:
        return await in_thread(work, deadline + more)
    except TimeoutError:
        return too_slow(what, deadline)
    except OSError as error:
        return unreadable(what, error)


def not_all_removed(removal: TreeRemoval, trash: str) -> Refused:
    """A part of it is left. An immediate retry would leave the same."""
    more = f"; and {len(removal.left) - SHOWN_ENTRIES} more" if len(removal.left) > SHOWN_ENTRIES else ""
    back = removal.bytes_back
    gone = f"{removal.entries:,} entries" + ("" if isinstance(back, Unknown) else f" ({size_in_words(back)})")
    why = f"{'; '.join(removal.left[:SHOWN_ENTRIES])}{more}"
    return Refused(f"{gone} of it were removed, but not all: {why}. The rest is in {trash}; a later pass retries")
