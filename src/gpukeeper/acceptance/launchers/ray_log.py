"""The log of a Ray job that carries a run: the state of each node, and what its program wrote. Pure.

Written by programs/ray_driver.py. Everything else in the log, such as Ray's own messages, is skipped. A job of the same
name that was removed before has written to the same log: only records with the token of this job count, and only lines
after its begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from gpukeeper.acceptance.fleet.status import NodeStatus, Phase
from gpukeeper.acceptance.launchers.programs.ray_driver import MARK
from gpukeeper.acceptance.launchers.ssh import HostState, status_of
from gpukeeper.model import reading

BETWEEN = " | "  # the name of a node and its line


class Record(msgspec.Struct, frozen=True):
    token: str
    at: float | None = None
    begin: str | None = None
    end: bool = False
    node: str = ""
    phase: Phase | None = None
    code: str = ""
    reason: str = ""
    state: HostState | None = None
    left: Sequence[str] = ()


@dataclass
class JobLog:
    """`begun`: its driver runs, or has run. `ended`: it came to its own end, and nothing of the run is on its nodes."""

    begun: bool = False
    ended: bool = False
    statuses: dict[str, NodeStatus] = field(default_factory=dict)
    outputs: dict[str, bytearray] = field(default_factory=dict)
    left: dict[str, tuple[str, ...]] = field(default_factory=dict)


def read_log(text: str, token: str, program: str) -> JobLog:
    """`program`: what gpukeeper is called on the nodes, for the reasons."""
    found = JobLog()
    for line in text.split("\n"):
        if line.startswith(MARK):
            record = _record(line)
            if record is None or record.token != token:
                found.begun = found.begun and record is None  # another job of that name writes from here on
            elif record.begin is not None:
                found = JobLog(begun=True)
            elif found.begun:
                _take(found, record, program)
        elif found.begun:
            node, between, words = line.partition(BETWEEN)
            if between:
                found.outputs.setdefault(node, bytearray()).extend(words.encode("utf-8", "replace") + b"\n")
    return found


def _record(line: str) -> Record | None:
    try:
        return reading.decode(line[len(MARK) :].encode("utf-8", "replace"), type=Record)
    except msgspec.DecodeError:  # cut off, or not ours
        return None


def _take(found: JobLog, record: Record, program: str) -> None:
    found.ended = found.ended or record.end
    if record.left:
        found.left[record.node] = tuple(record.left)
    if record.state is not None:
        found.statuses[record.node] = status_of(record.state, program)
    elif record.node and record.phase is not None:
        found.statuses[record.node] = NodeStatus(
            node=record.node, phase=record.phase, code=record.code, reason=record.reason, since=_moment(record.at)
        )


def _moment(seconds: float | None) -> datetime | None:
    try:
        return None if seconds is None else reading.instant(seconds)
    except ValueError:
        return None


def statuses(found: JobLog, nodes: Sequence[str], over: NodeStatus | None) -> tuple[NodeStatus, ...]:
    """`over`: what became of nodes that had not ended when the job did; None: the job runs."""
    waiting = NodeStatus(node="", phase=Phase.WAITING, reason="Ray has not started it yet")
    return tuple(_status(found.statuses, node, over, waiting) for node in nodes)


def _status(known: Mapping[str, NodeStatus], node: str, over: NodeStatus | None, waiting: NodeStatus) -> NodeStatus:
    status = known.get(node, msgspec.structs.replace(waiting, node=node))
    if over is None or status.phase in (Phase.ENDED, Phase.GONE):
        return status
    reason = over.reason if status.phase is Phase.RUNNING or not status.code else f"{over.reason}; {status.reason}"
    return msgspec.structs.replace(over, node=node, reason=reason, since=status.since)
