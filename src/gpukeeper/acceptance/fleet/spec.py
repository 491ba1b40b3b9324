"""The description of a run over many nodes, the same for every engine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import datetime

import msgspec

PORT = 29500  # of the rendezvous
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
    """What each node runs."""
    return ("gpukeeper", "accept", "--report-to-log", spec.run, *spec.arguments)


def environment(spec: RunSpec, node: str) -> dict[str, str]:
    return {**spec.environment, "GPUKEEPER_NODE": node}


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
