"""Access to Ray nodes: what is configured from outside, where Ray keeps its files, time limits of reads."""

from __future__ import annotations

import pwd
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeAlias

import msgspec

from gpukeeper.model.unknown import Unknown

RAY = "ray"  # the name of Ray's own directory, below a temporary root
DEFAULT_TMP = "/tmp"  # noqa: S108 - Ray's own default
VARIABLES = ("RAY_TMPDIR", "TMPDIR")


class NodeContainer(msgspec.Struct, frozen=True):
    """A container that the policy lists as a node. `pid` 0: it is not running now."""

    name: str
    pid: int
    uid: str


Containers: TypeAlias = Callable[[Sequence[str]], Awaitable[Sequence[NodeContainer] | Unknown]]


class Timeouts(msgspec.Struct, frozen=True):
    """Time limits of each kind of read."""

    processes: timedelta = timedelta(seconds=30)
    tree: timedelta = timedelta(minutes=5)
    node: timedelta = timedelta(minutes=15)  # of one node in one pass; the rest is listed and not measured
    removal: timedelta = timedelta(minutes=30)
    queries: timedelta = timedelta(seconds=10)  # Ray itself


async def no_containers(patterns: Sequence[str]) -> Sequence[NodeContainer]:
    return ()


def temporary_folders(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Ray creates its own directory below it, unless a command line overrides it."""
    return tuple(dict.fromkeys((DEFAULT_TMP, *(environ[name] for name in VARIABLES if environ.get(name)))))


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
