"""What is configured: the settings of the policy that only this platform reads, containers that are nodes, where Ray
keeps its files, time limits; and errors as sentences.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec

from gpukeeper.model import setting as s
from gpukeeper.model.decision import Refused, Unseen
from gpukeeper.model.policy import DAY, HOUR, MINUTE, Policy, Value
from gpukeeper.model.unknown import Unknown, direct


@direct
class Counted(StrEnum):
    """What is compared with `above` on a Ray node."""

    NAMED = "named"  # trees of the names that may go
    ALL = "all"  # everything in its temporary directories, sessions included


class RaySettings(Value, frozen=True, kw_only=True):
    """Ray nodes on this machine, in containers and beside them."""

    workers: Annotated[
        tuple[str, ...], "Containers that are Ray nodes: names, or labels as `key=value`. Shell patterns."
    ] = ("ray-worker*",)
    dashboard: Annotated[s.Address, "URL of Ray's dashboard. Default: as reported by the cluster."] = None
    roots: Annotated[tuple[s.Root, ...], "Directories of temporary files, as seen by each node."] = ("/tmp",)  # noqa: S108
    names: Annotated[tuple[s.NamePattern, ...], "Names of trees directly below a root. Shell patterns."] = (
        *("ray_tmp_*", "pip-*", "tmp*", "pymp-*"),
        *("checkpoint_tmp_*", "ray_shuffle_disk_*", "lightning_checkpoints-job_id=*"),
    )
    keep: Annotated[tuple[s.NamePattern, ...], "Names that are never deleted. Shell patterns."] = ()
    above: Annotated[
        s.Size, "Delete only if all matching trees of a node, in all its roots, together are larger than this."
    ] = 5_000_000_000
    above_counts: Annotated[
        Counted, "`all`: compare `above` with everything in the roots, not only with trees that may be deleted."
    ] = Counted.NAMED
    older_than: Annotated[s.Span, "Minimum time without use, on a node that Ray reports as idle."] = HOUR
    under_pressure: Annotated[s.Span, "The same while the disk is too full; see `disk`."] = 10 * MINUTE
    cpu: Annotated[
        s.Percent, "A node above this CPU usage is busy in any case: percent of one core, without Ray's processes."
    ] = 5.0
    window: Annotated[s.Interval, "Minimum window of the CPU measurement."] = timedelta(seconds=10)
    sessions: Annotated[
        s.Limit, "Delete dead sessions after this time without use; at least 1h. `none`: only report."
    ] = DAY
    logs: Annotated[
        s.Limit, "The same for logs of ended processes of a live session, with a resolution of one hour."
    ] = 7 * DAY


DEFAULT = RaySettings()


def settings_of(policy: Policy) -> RaySettings:
    found = policy.platforms.get("ray", DEFAULT)
    assert isinstance(found, RaySettings)
    return found


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


NODES_ARE_SHOWN = Refused("a node is only reported; its leftovers are removed, not the node itself")
NOT_BROUGHT_BACK = Refused("temporary files cannot be restored; the last lines of a session's logs are in its evidence")


def unreadable(what: str, error: OSError) -> Unseen:
    return Unseen(what, f"could not be read: {error.strerror}")
