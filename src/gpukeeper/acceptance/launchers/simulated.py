"""An engine that exists only here: every node has a script. Nodes pass, fail, hang, wait, are evicted, vanish, or lose
their log. To try commands without an engine, and to test the story of a run.

The state of a node is a function of the time since it was started, so the engine needs no process: its objects are kept
in a mapping, and another program finds them there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeAlias

import msgspec

from gpukeeper.acceptance.fleet.collect import encode_frames, termination_message
from gpukeeper.acceptance.fleet.launcher import (
    NodeStatus,
    Phase,
    Removal,
    RunSpec,
    RunSummary,
    Target,
    command,
    environment,
)
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports.formats import report_json
from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown, direct

GPUS = 8
LABEL = "rack"
RACK = 4  # nodes


@direct
class Script(StrEnum):
    """What becomes of a node."""

    GOOD = "pass"
    FAIL = "fail"
    HANG = "hang"
    WAIT = "wait"  # nothing tolerates its taint
    IMAGE = "image"  # it cannot be pulled
    EVICTED = "evicted"
    VANISH = "vanish"
    LOST_LOG = "lost-log"
    CUT_LOG = "cut-log"  # the first copy of the report, and a part of the second one, are gone
    CRASH = "crash"
    BAD_NETWORK = "bad-network"  # passes alone; with --together every job with it and another node hangs


class SimulatedObject(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine keeps of one node of a run."""

    spec: RunSpec
    node: str
    script: Script
    created: datetime
    seconds: float  # until it ends


Tested: TypeAlias = Callable[[RunSpec, str, Mapping[str, Script]], Report]


class SimulatedLauncher:
    """`tested`: the report of a node, by the scripts of all nodes of its run. `objects`: by `run/node`, encoded."""

    engine = "simulated"

    def __init__(
        self,
        scripts: Sequence[Script],
        objects: MutableMapping[str, bytes],
        clock: Clock,
        tested: Tested,
        *,
        seconds: float = 2.0,
    ) -> None:
        self._scripts = {f"sim-{number:02}": script for number, script in enumerate(scripts, start=1)}
        self._objects, self._clock, self._tested, self._seconds = objects, clock, tested, seconds
        self._sent: dict[tuple[object, ...], tuple[bytes, str]] = {}

    async def targets(self, spec: RunSpec) -> tuple[Target, ...]:
        unknown = [name for name in spec.nodes if name not in self._scripts]
        if unknown:
            raise UsageError(
                f"--nodes {', '.join(unknown)}: unknown node. Nothing was started. Nodes: {', '.join(self._scripts)}"
            )
        names = spec.nodes or tuple(self._scripts)
        if spec.selector:
            key, _, value = spec.selector.partition("=")
            if key != LABEL:
                raise UsageError(f'--nodes "{spec.selector}": simulated nodes only have the label {LABEL} (1, 2, …).')
            names = tuple(name for name in names if str((_number(name) - 1) // RACK + 1) == value)
        return tuple(Target(node=name, gpus=GPUS) for name in names)

    def render(self, spec: RunSpec, targets: Sequence[Target]) -> str:
        lines = []
        for one in targets:
            variables = [f"{name}={value}" for name, value in environment(spec, one.node).items()]
            lines.append(f"{one.node}: {' '.join([*variables, *command(spec)])}")
        return "\n".join(lines) + "\n"

    async def start(self, spec: RunSpec, targets: Sequence[Target]) -> None:
        for one in targets:
            key = f"{spec.run}/{one.node}"
            if key in self._objects:
                continue
            share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:2]) / 65536
            made = SimulatedObject(
                spec=spec,
                node=one.node,
                script=self._scripts[one.node],
                created=self._clock.now(),
                seconds=self._seconds * (0.5 + share),
            )
            self._objects[key] = msgspec.json.encode(made)

    async def runs(self) -> tuple[RunSummary, ...] | Unknown:
        found: dict[str, list[SimulatedObject]] = {}
        for key in sorted(self._objects):
            if (one := self._object(key)) is not None:
                found.setdefault(one.spec.run, []).append(one)
        return tuple(self._summary(objects) for objects in found.values())

    async def run(self, run: str) -> RunSummary | None:
        known = await self.runs()
        assert not isinstance(known, Unknown), "the simulated engine always answers"
        return next((one for one in known if one.spec.run == run), None)

    async def output(self, spec: RunSpec, node: str) -> bytes | Unknown:
        one = self._object(f"{spec.run}/{node}")
        if one is None:
            return Unknown("the engine has nothing of this node.")
        status = self._status(one)
        if status.phase is Phase.GONE:
            return Unknown("it was removed with its log.")
        head = b"" if status.phase is Phase.WAITING else f"[ENV] {node}: {GPUS} simulated GPUs\n".encode()
        if status.phase is not Phase.ENDED or one.script in (Script.CRASH, Script.HANG):
            return head
        lines = encode_frames(self._report(one)[0], spec.run, node)
        kept = {Script.LOST_LOG: 0, Script.CUT_LOG: len(lines) // 2 + 1}.get(one.script, len(lines))
        return head + "".join(f"{line}\n" for line in lines[len(lines) - kept :]).encode()

    async def remove(self, run: str) -> Removal:
        gone = [key for key in list(self._objects) if key.startswith(f"{run}/")]
        for key in gone:
            self._objects.pop(key, None)
        return Removal(removed=tuple(f"node/{key}" for key in gone))

    async def close(self) -> None:
        """Nothing is open."""

    def _object(self, key: str) -> SimulatedObject | None:
        text = self._objects.get(key)
        if text is None:
            return None
        try:
            return reading.decode(text, type=SimulatedObject)
        except ValueError as error:
            raise PlatformError(f"The simulated engine cannot read {key}: {error}. Nothing was changed.") from error

    def _summary(self, objects: Sequence[SimulatedObject]) -> RunSummary:
        names = tuple(f"node/{one.spec.run}/{one.node}" for one in objects)
        return RunSummary(spec=objects[0].spec, nodes=tuple(self._status(one) for one in objects), objects=names)

    def _report(self, one: SimulatedObject) -> tuple[bytes, str]:
        """As the log and the message have it. A run over all nodes at once has one result on every node, so the scripts
        of the others count."""
        keys = [f"{one.spec.run}/{one.node}"]
        if one.spec.together:
            keys = [key for key in self._objects if key.startswith(f"{one.spec.run}/")]
        found = [other for key in sorted(keys) if (other := self._object(key)) is not None]
        scripts = {other.node: other.script for other in found}
        which = (one.spec.run, one.node, *scripts.items())
        if which not in self._sent:
            report = self._tested(one.spec, one.node, scripts)
            text = report_json(report)
            self._sent[which] = text, termination_message(report, text).decode()
        return self._sent[which]

    def _status(self, one: SimulatedObject) -> NodeStatus:
        passed = (self._clock.now() - one.created).total_seconds()
        late = passed >= one.spec.deadline_s
        if one.script in _WAITING:
            code, reason = _WAITING[one.script]
            return NodeStatus(node=one.node, phase=Phase.WAITING, code=code, reason=reason, since=one.created)
        if passed < one.seconds / 4:
            return NodeStatus(node=one.node, phase=Phase.WAITING, reason="the image is being pulled", since=one.created)
        if one.script is Script.HANG and late:
            reason = "stopped by the engine at the deadline of the run"
            return NodeStatus(node=one.node, phase=Phase.ENDED, code="deadline", reason=reason, exit_code=137)
        if passed < one.seconds or one.script is Script.HANG:
            return NodeStatus(node=one.node, phase=Phase.RUNNING, since=one.created)
        ended = one.created + timedelta(seconds=one.seconds)
        if one.script in _GONE:
            code, reason = _GONE[one.script]
            return NodeStatus(node=one.node, phase=Phase.GONE, code=code, reason=reason, since=ended)
        if one.script is Script.CRASH:
            return NodeStatus(node=one.node, phase=Phase.ENDED, exit_code=139, since=ended)
        return NodeStatus(node=one.node, phase=Phase.ENDED, exit_code=0, message=self._report(one)[1], since=ended)


_WAITING = {
    Script.WAIT: ("taint", "0/10 nodes are available: nothing tolerates the taint maintenance=true:NoSchedule"),
    Script.IMAGE: ("image", "the image registry.example/gpukeeper:1 cannot be pulled: not found"),
}
_GONE = {
    Script.EVICTED: ("evicted", "evicted: the node was low on resource ephemeral-storage"),
    Script.VANISH: ("node-not-ready", "the node is not ready since 5m; its kubelet does not answer"),
}


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
