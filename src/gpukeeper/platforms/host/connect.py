"""Access to this machine: its name, its users, and the time limits of reads and removals."""

from __future__ import annotations

import pwd
import socket
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import TypeAlias

import msgspec

from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.model.decision import Unseen
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown

Page: TypeAlias = tuple[tuple[Subject, ...], tuple[Unseen, ...]]
Scan: TypeAlias = Callable[[], OpenFiles]
# Directories that something will need when it starts, each with a clause that names it.
Needed: TypeAlias = Callable[[], Awaitable[Mapping[str, str] | Unknown]]
PAGE = 500  # subjects
A_MOMENT = timedelta(seconds=5)  # extra time for work with its own deadline to report the timeout itself


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


def user_name(uid: int) -> str:
    """A name that only this uid has. Otherwise "uid 1234": a user may be named 1234, and a second uid may have the same
    name; neither must be taken for this one.
    """
    try:
        name = pwd.getpwuid(uid).pw_name
        if pwd.getpwnam(name).pw_uid == uid:
            return name
    except KeyError:
        pass
    return f"uid {uid}"
