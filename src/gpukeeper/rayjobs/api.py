"""A Ray cluster as its dashboard serves it: nodes, jobs and their logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

OVER: Final = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as Ray reports it; `name` is not unique."""

    node_id: str
    ip: str
    name: str
    alive: bool
    message: str = ""
    gpus: float = 0.0
    labels: Mapping[str, str] = {}


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: its submission id; `job_id`: Ray's own, once its driver runs."""

    name: str
    status: str
    message: str = ""
    job_id: str = ""
    metadata: Mapping[str, str] = {}


class RayApi(Protocol):
    """A cluster that does not reply raises PlatformError."""

    address: str

    async def nodes(self) -> tuple[RayNode, ...]: ...

    async def submit(self, name: str, entrypoint: str, metadata: Mapping[str, str]) -> None:
        """A name that exists is left as it is."""
        ...

    async def jobs(self) -> tuple[RayJob, ...]: ...

    async def job(self, name: str) -> RayJob | None: ...

    async def log(self, name: str) -> str | None:
        """None: there is no such job."""
        ...

    async def stop(self, name: str) -> None: ...

    async def delete(self, name: str) -> None:
        """Ray refuses if it has not ended. One that is gone is no error."""
        ...

    async def parts(self, name: str, job_id: str) -> tuple[str, ...]:
        """Actors and placement groups of a job that are not over, and the actor that supervises its driver."""
        ...

    async def close(self) -> None: ...


def named_nodes(nodes: Sequence[RayNode]) -> dict[str, RayNode]:
    """By the name that reports use: Ray's own, which usually is an address; with a part of its id if others have it.

    A dead node does not take the name of one that is alive: a machine that was restarted is a new node.
    """
    alive = Counter(node.name or node.ip for node in nodes if node.alive)
    found: dict[str, RayNode] = {}
    for node in sorted(nodes, key=lambda one: (not one.alive, one.name, one.ip, one.node_id)):
        name = node.name or node.ip
        if alive[name] > 1:
            name = f"{name}-{node.node_id[:8]}"
        found.setdefault(name, node)
    return found
