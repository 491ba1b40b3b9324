"""A run over many nodes, the same for every engine: its description, how far each node is, and what an engine does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Protocol

import msgspec

from gpukeeper.model.unknown import Unknown, direct

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # it is a label in Kubernetes
PORT = 29500  # of the rendezvous
STAYING = frozenset({"daemonset", "statefulset"})  # forms whose programs stay after they have reported
DEADLINE_S = 3600.0
PLACES = ("context", "namespace", "engine", "hosts", "nodes")  # options without which a run is not found
BACKOFF = 3  # restarts of a node's program before the engine gives up


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`run` is on every object that is created for it. Each node runs `gpukeeper accept` with `arguments`."""

    run: str
    owner: str
    created: datetime
    engine: str  # docker, kubernetes, ray, ssh, simulated
    form: str = ""  # of the objects, where an engine has several: job, daemonset, indexed-job, …
    nodes: tuple[str, ...] = ()  # names; empty: all that have a GPU
    selector: str = ""  # instead of names
    gpus_per_node: int | None = None  # None: all
    image: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    together: bool = False  # one run over all nodes, besides the run on each
    port: int = PORT
    deadline_s: float = DEADLINE_S
    backoff: int = BACKOFF
    options: Mapping[str, str] = {}  # of the engine: namespace, hosts, shm, rdma, priority, pull secrets, …


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A node that the run is to test. `gpus`: announced by the engine; None: it announces none."""

    node: str
    gpus: int | None = None
    resource: str = ""  # what the engine calls its GPUs, where that differs between nodes
    excluded: str = ""  # why it cannot be tested; a sentence. It is reported as INCONCLUSIVE.


def flags(spec: RunSpec) -> str:
    """With which `accept list|show|logs|fetch|remove` find the run again."""
    where = [f"--option {shlex.quote(f'{name}={spec.options[name]}')}" for name in PLACES if name in spec.options]
    return " ".join([f"--on {spec.engine}", *where])


def command(spec: RunSpec) -> tuple[str, ...]:
    """What each node runs. A run over all nodes always passes --together; without it each node is tested alone."""
    together = ("--together",) if spec.together and "--together" not in spec.arguments else ()
    return ("gpukeeper", "accept", "--report-to-log", spec.run, *together, *spec.arguments)


# Each node is tested alone, whatever the variables of a launcher say: without it `accept` refuses them.
ALONE = {"GPUKEEPER_GROUP_SIZE": "1"}


def environment(spec: RunSpec, node: str) -> dict[str, str]:
    return {**spec.environment, **({} if spec.together else ALONE), "GPUKEEPER_NODE": node}


def group_environment(spec: RunSpec, index: int, size: int, master: str) -> dict[str, str]:
    """Where the nodes of one run meet; empty for a run on each node alone. `master`: the address of node 0."""
    if not spec.together:
        return {}
    return {
        "MASTER_ADDR": master,
        "MASTER_PORT": str(spec.port),
        "GPUKEEPER_GROUP_SIZE": str(size),
        "GPUKEEPER_GROUP_INDEX": str(index),
    }


LOST = frozenset({"node-gone", "node-not-ready"})  # codes: of its node nothing is known any more


@direct
class Phase(StrEnum):
    WAITING = "waiting"  # not started: pending, pulling, queued
    RUNNING = "running"
    ENDED = "ended"  # its program has ended, with any exit code; or it has reported and stays idle (GPUKEEPER_STAY)
    GONE = "gone"  # there is nothing of it: evicted and removed, never created, host unreachable


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`reason`: a sentence that says why a node waits, failed or is gone, with the taint, resource or quota."""

    node: str
    phase: Phase
    code: str = ""  # stable: taint, resources, quota, image, deadline, evicted, node-not-ready, vanished, …
    reason: str = ""
    exit_code: int | None = None
    attempt: int = 0
    message: str = ""  # the termination message: the verdict, where the engine keeps one
    since: datetime | None = None


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run that an engine still has objects of."""

    spec: RunSpec
    nodes: tuple[NodeStatus, ...]
    objects: tuple[str, ...] = ()  # what remove would remove, as people name it: job/accept-…-gpu1


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """The result of removing a run: verified by a read afterwards."""

    removed: tuple[str, ...] = ()
    left: tuple[tuple[str, str], ...] = ()  # object and why it is still there


class Launcher(Protocol):
    """Starts runs on the nodes of one engine, and finds them again by their run id, from any machine.

    An engine that does not reply raises PlatformError (model/errors.py); one node that does not reply is in the status
    of that node.
    """

    engine: str

    async def targets(self, spec: RunSpec) -> tuple[Target, ...]:
        """The nodes that `spec` selects. A name that does not exist is a UsageError; a node that cannot be tested is
        in the result, with the reason."""
        ...

    def render(self, spec: RunSpec, targets: Sequence[Target]) -> str:
        """What `start` would create: manifests, or commands."""
        ...

    async def start(self, spec: RunSpec, targets: Sequence[Target]) -> None:
        """Idempotent by run id: called again after a crash it creates only what is missing."""
        ...

    async def runs(self) -> tuple[RunSummary, ...] | Unknown: ...

    async def run(self, run: str) -> RunSummary | None:
        """None: the engine has nothing of that run."""
        ...

    async def output(self, spec: RunSpec, node: str) -> bytes | Unknown:
        """All that the node's program has written so far and that the engine still has."""
        ...

    async def remove(self, run: str) -> Removal:
        """Remove every object of the run, running or not, each by its uid. Again is allowed."""
        ...

    async def close(self) -> None: ...
