"""How far each node of a run is, as an engine reports it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

from gpukeeper.acceptance.fleet.spec import RunSpec
from gpukeeper.model.direct import direct

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
