"""How this machine is reached: its name, its users, and how long a look or a removal may take."""

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
# Folders that something will need when it starts, each with a clause that says what.
Needed: TypeAlias = Callable[[], Awaitable[Mapping[str, str] | Unknown]]
PAGE = 500  # subjects
A_MOMENT = timedelta(seconds=5)  # for work that ends by itself at its deadline to say so


class Patience(msgspec.Struct, frozen=True):
    """How long each kind of look, and a removal, may take."""

    gpus: timedelta = timedelta(seconds=10)
    processes: timedelta = timedelta(seconds=30)
    tree: timedelta = timedelta(minutes=5)
    trees: timedelta = timedelta(minutes=15)  # all of one pass; the rest is listed and not measured
    removal: timedelta = timedelta(minutes=15)  # of one tree; what is left of it then waits in the trash
    disk: timedelta = timedelta(seconds=10)


async def nothing_needed() -> Mapping[str, str]:
    """There is no engine whose containers could need folders of this machine."""
    return {}


def hostname() -> str:
    return socket.gethostname()


def user_name(uid: int) -> str:
    """A name that is this uid's alone. Otherwise "uid 1234": somebody may be called 1234, and a second uid may have
    the same name; neither must be taken for this one."""
    try:
        name = pwd.getpwuid(uid).pw_name
        if pwd.getpwnam(name).pw_uid == uid:
            return name
    except KeyError:
        pass
    return f"uid {uid}"
