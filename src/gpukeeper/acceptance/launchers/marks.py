"""Writes marks to the nodes of a cluster: results of a run, a quarantine, its end; and their lines in the ledger.

Each write names the uid and the version that were read. The nodes are listed once for the plan, once more when it is
our turn to take nodes out, and once at the end to verify what is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, TypeAlias

import msgspec

from gpukeeper.acceptance.fleet.marks import (
    FAILED,
    LABEL,
    QUARANTINE,
    TAINT,
    TAINTS,
    Change,
    MarkPlan,
    NodeCondition,
    NodeMarks,
    condition_of,
    counted,
    done,
)
from gpukeeper.acceptance.launchers.kubernetes.objects import GPU_RESOURCES
from gpukeeper.clients.kubernetes.api import NODES, Api
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import Node, condition, count
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.event import NodeMarked
from gpukeeper.model.policy import MarkSettings
from gpukeeper.model.subject import Ref

PRESENT = "nvidia.com/gpu.present"  # label of GPU feature discovery


async def nodes_of(api: Api) -> Sequence[Node]:
    """A list with a gap would make the budget wrong."""
    found = await api.list(NODES, Node)
    if not found.complete or found.problems:
        why = found.problems[0] if found.problems else "the list of nodes is not complete"
        raise PlatformError(f"{api.place}: {why}. Nothing more was marked")
    if not all(one.metadata.name and one.metadata.uid and one.metadata.resource_version for one in found.items):
        why = "the list has a node without a name, uid or resourceVersion"
        raise PlatformError(f"{api.place}: {why}. Nothing more was marked")
    return found.items


def marks_of(node: Node, settings: MarkSettings) -> NodeMarks:
    labels = node.metadata.labels or {}
    announced = any(count(node.status.capacity, resource) for resource in GPU_RESOURCES)
    return NodeMarks(
        node=node.metadata.name,
        uid=node.metadata.uid,
        version=node.metadata.resource_version,
        labels=labels,
        annotations=node.metadata.annotations or {},
        taints={one.key: one.value for one in node.spec.taints or () if one.key in TAINTS},
        conditions=tuple(
            NodeCondition(type=one.type, status=one.status, reason=one.reason, message=one.message)
            for one in node.status.conditions or ()
        ),
        gpu=announced or labels.get(PRESENT) == "true" or LABEL in labels or QUARANTINE in labels,
        out=_out(node, settings),
    )


def _out(node: Node, settings: MarkSettings) -> str:
    blocking = [one.key for one in node.spec.taints or () if one.blocks]
    ours = [one for one in blocking if one in TAINTS]
    if ours:
        return f"with our taint {ours[0]}"
    ready = condition(node.status.conditions, "Ready")
    if ready is None or ready.status != "True":
        return "not ready"
    if node.spec.unschedulable:
        return "cordoned"
    others = [one for one in blocking if one not in settings.ignored_taints]
    return f"with the taint {others[0]}" if others else ""


async def write_condition(api: Api, change: Change, node: Node, settings: MarkSettings, now: datetime) -> Node:
    """Conditions are merged by their type: those of the kubelet are not touched."""
    wanted = change.condition
    before = condition_of(marks_of(node, settings), wanted.type)
    if before == wanted:
        return node
    stamp = f"{now:%Y-%m-%dT%H:%M:%SZ}"
    written: dict[str, str] = {"type": wanted.type, "$patch": "delete"}
    if wanted.status:
        moved = {} if before.status == wanted.status else {"lastTransitionTime": stamp}
        written = {**msgspec.to_builtins(wanted), "lastHeartbeatTime": stamp, **moved}
    status = {"metadata": _read(node), "status": {"conditions": [written]}}
    return await api.patch(NODES, change.node, status, Node, how="strategic", subresource="status")


async def write_marks(api: Api, change: Change, node: Node) -> Node:
    """Labels, annotations and taints in one request: all of them or none."""
    labels = _differences(change.labels, node.metadata.labels or {})
    annotations = _differences(change.annotations, node.metadata.annotations or {})
    taints = _differences(change.taints, {one.key: one.value for one in node.spec.taints or ()})
    if not labels and not annotations and not taints:
        return node
    patch: dict[str, Any] = {"metadata": {**_read(node), "labels": labels, "annotations": annotations}}
    if taints:
        patch["spec"] = {"taints": _taints(node, change.taints)}
    return await api.patch(NODES, change.node, patch, Node)


def _differences(wanted: Mapping[str, str | None], there: Mapping[str, str]) -> dict[str, str | None]:
    return {key: value for key, value in wanted.items() if there.get(key) != value}


def _read(node: Node) -> dict[str, str]:
    """The server refuses a write if the node is another one, or has changed since it was read."""
    return {"uid": node.metadata.uid, "resourceVersion": node.metadata.resource_version}


def _taints(node: Node, wanted: Mapping[str, str | None]) -> list[Any]:
    """All others stay as they are."""
    others = [msgspec.to_builtins(one) for one in node.spec.taints or () if one.key not in wanted]
    ours = [{"key": key, "value": value, "effect": "NoSchedule"} for key, value in wanted.items() if value is not None]
    return [*others, *ours]


TRIES = 4  # of a node that changes at the same time
SERVER_ERROR = 500
AGAIN = "The same command completes it"
Replan: TypeAlias = Callable[[Sequence[NodeMarks]], MarkPlan]
Announce: TypeAlias = Callable[[MarkPlan], Awaitable[None]]


class Turn(Protocol):
    """Only one program at a time takes nodes out. `why_not`: None while it is ours."""

    def why_not(self) -> str | None: ...


class Marked(msgspec.Struct, frozen=True, kw_only=True):
    """One node as read afterwards. `changed`: something was written. `problem`: why it is not as planned. `machine`:
    its system UUID, which stays the same if it gets another name."""

    node: str
    acceptance: str = ""
    tainted: bool = False
    quarantined: bool = False
    changed: bool = False
    deferred: str = ""
    note: str = ""
    problem: str = ""
    machine: str = ""


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """`plan`: made immediately before the first write. `interrupted`: some nodes were not begun."""

    plan: MarkPlan
    nodes: tuple[Marked, ...] = ()
    interrupted: bool = False


async def _announce_nothing(plan: MarkPlan) -> None:
    pass


async def planned(api: Api, replan: Replan, settings: MarkSettings) -> MarkPlan:
    return replan([marks_of(one, settings) for one in await nodes_of(api)])


@dataclass(kw_only=True)
class Work:
    """`announce`: called with the plan immediately before the first write; if it raises, nothing is written. `stop`: no
    more nodes are begun. `written`: nodes that were changed so far, also if it is interrupted."""

    api: Api
    replan: Replan
    settings: MarkSettings
    now: datetime
    turn: Callable[[], AbstractAsyncContextManager[Turn]]
    announce: Announce = _announce_nothing
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    written: set[str] = field(default_factory=set)
    _nodes: dict[str, Node] = field(default_factory=dict)
    _wanted: dict[str, Change] = field(default_factory=dict)  # by node, as it was last planned
    _problems: dict[str, str] = field(default_factory=dict)
    _taken: list[Change] = field(default_factory=list)  # out because of us, in this order
    _silent: str = ""  # why nothing more is sent: the cluster does not answer

    async def apply(self) -> Applied:
        plan = await self._list()
        if not any(one.takes_out for one in plan.changes):
            return await self._applied(plan, None)
        async with self.turn() as turn:
            if turn.why_not() is None:
                plan = await self._list()  # as it is now that no other program takes nodes out
            return await self._applied(plan, turn)

    async def _list(self) -> MarkPlan:
        self._nodes = {one.metadata.name: one for one in await nodes_of(self.api)}
        return self._plan()

    def _plan(self) -> MarkPlan:
        return self.replan([marks_of(one, self.settings) for one in self._nodes.values()])

    async def _applied(self, plan: MarkPlan, turn: Turn | None) -> Applied:
        """Nodes that are taken out come first: how many are out was counted a moment ago."""
        interrupted = False
        await self.announce(plan)
        for change in sorted(plan.changes, key=lambda one: not one.takes_out):
            self._wanted[change.node] = change
            if self.stop.is_set() or self._silent:
                interrupted = interrupted or self.stop.is_set()
                why = self._silent or "interrupted before it was begun"
                self._problems[change.node] = f"{why}. {AGAIN}"
            else:
                await self._write(change, turn)
        if self.written or self._taken:
            await self._verify([one.node for one in plan.changes])
        marked = tuple(self._marked(one.node) for one in plan.changes)
        return Applied(plan=plan, nodes=marked, interrupted=interrupted)

    async def _write(self, change: Change, turn: Turn | None) -> None:
        """A node that has changed in the meantime is read and planned again; one to be taken out, with all others."""
        problem = ""
        for _ in range(TRIES):
            try:
                await self._write_once(self._allowed(change, turn))
            except PlatformError as error:
                problem = str(error)
                answered = isinstance(error, ApiError) and error.status < SERVER_ERROR
                if not isinstance(error, ApiError):
                    self._silent = problem
                if not answered and change.takes_out:
                    await self._undo(change, f"no answer to the taint: {error}")
                    return
                if not isinstance(error, ApiError) or not error.is_conflict:
                    break
            else:
                return
            found = await self._again(change)
            if isinstance(found, str):
                self._problems[change.node] = found
                return
            change = found
        self._problems[change.node] = f"{problem}. {AGAIN}"

    async def _again(self, change: Change) -> Change | str:
        """The change as it is planned now, or why there is none."""
        try:
            if change.takes_out:
                plan = await self._list()
            else:
                node = await self.api.get(NODES, change.node, Node)
                if node is not None:
                    self._nodes[change.node] = node
                plan = self._plan() if node is not None else MarkPlan()
        except (PlatformError, UsageError) as error:
            return str(error)
        found = next((one for one in plan.changes if one.uid == change.uid), None)
        kept = next((one.why for one in plan.kept if one.node == change.node), "the node is gone")
        return found or f"it changed: {kept}"

    def _allowed(self, change: Change, turn: Turn | None) -> Change:
        why = turn.why_not() if turn is not None and change.takes_out else None
        allowed = change if why is None else msgspec.structs.replace(change, taints={}, undone=None, deferred=why)
        self._wanted[change.node] = allowed
        return allowed

    async def _write_once(self, change: Change) -> None:
        if change.deferred and change.whole:
            return
        node = self._nodes[change.node]
        was_out = bool(marks_of(node, self.settings).out)
        after = await write_condition(self.api, change, node, self.settings, self.now)
        self._note(node, after)
        written = await write_marks(self.api, change, after)
        self._note(after, written)
        if change.takes_out and not was_out:
            self._taken.append(change)

    def _note(self, before: Node, after: Node) -> None:
        if after is not before:
            self.written.add(after.metadata.name)
            self._nodes[after.metadata.name] = after

    async def _verify(self, names: Sequence[str]) -> None:
        """What is there now; and whether the limit holds, counted over all nodes again."""
        why = ""
        try:
            self._nodes = {one.metadata.name: one for one in await nodes_of(self.api)}
        except PlatformError as error:
            why = f"the nodes could not be counted again: {error}"
        while self._taken:
            found = counted([marks_of(one, self.settings) for one in self._nodes.values()], names, self.settings)
            if not why and found.out <= found.allowed:
                return
            exceeded = f"another program took out a node at the same time: {found.out} out, {found.allowed} allowed"
            await self._undo(self._taken.pop(), why or exceeded)

    async def _undo(self, change: Change, why: str) -> None:
        """Without our own taint. One of another run or program stays."""
        assert change.undone is not None, "This is a bug in gpukeeper: what takes a node out can be undone."
        problem, left = "the node kept changing", change.undone
        for _ in range(TRIES):
            try:
                node = await self.api.get(NODES, change.node, Node)
                if node is None or node.metadata.uid != change.uid:
                    self._problems[change.node] = "the node is gone"
                    return
                self._nodes[change.node] = node
                there = marks_of(node, self.settings).taints
                words = "It has no taint of this run"
                if all(there.get(key) == value for key, value in change.taints.items()):
                    words = "Its taint was removed again"
                    await self._write_once(left)
                else:
                    left = msgspec.structs.replace(left, taints={}, labels={}, annotations={})
                self._wanted[change.node] = msgspec.structs.replace(left, deferred=f"{why}. {words}")
                return
            except PlatformError as error:
                problem = str(error)
        command = " ".join(f"{key}-" for key in change.taints)
        words = (
            f"Its taint could not be removed again: {problem}. To remove it: kubectl taint node {change.node} {command}"
        )
        self._problems[change.node] = f"{why}. {words}"

    def _marked(self, name: str) -> Marked:
        change, node = self._wanted[name], self._nodes.get(name)
        if node is None or node.metadata.uid != change.uid:
            return Marked(node=name, changed=name in self.written, problem=self._problems.get(name, "the node is gone"))
        marks = marks_of(node, self.settings)
        wrong = "" if change.deferred and change.whole else done(change, marks)
        return Marked(
            node=name,
            acceptance=marks.labels.get(LABEL, ""),
            tainted=TAINT in marks.taints,
            quarantined=QUARANTINE in marks.taints,
            changed=name in self.written,
            deferred=change.deferred,
            note=change.note,
            problem=self._problems.get(name, f"it does not have the marks that were written: {wrong}" if wrong else ""),
            machine=node.status.node_info.system_uuid,
        )


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Who changes marks, and why. `gpus`: by node, serial numbers of those that failed in the run."""

    by: str
    step: str
    run: str = ""
    reason: str = ""
    until: datetime | None = None
    gpus: Mapping[str, tuple[str, ...]] = {}


def lines_before(changes: Iterable[Change], place: str, cause: Cause, at: datetime) -> Iterator[NodeMarked]:
    for change in changes:
        action = action_of(change)
        if action:
            yield NodeMarked(
                at=at,
                ref=Ref("kubernetes", place, "node", change.node, change.uid),
                by=cause.by,
                step=cause.step,
                action=action,
                result="begun",
                reason=_reason(change, cause),
                run=cause.run,
                failed=change.labels.get(LABEL) == FAILED,
                until=cause.until if action in ("quarantine", "update") else None,
                gpus=cause.gpus.get(change.node, ()),
            )


def lines_after(begun: Iterable[NodeMarked], nodes: Iterable[Marked], at: datetime) -> Iterator[NodeMarked]:
    """What became of those."""
    found = {one.node: one for one in nodes}
    for line in begun:
        node = found.get(line.ref.name) if line.ref is not None else None
        if node is not None:
            yield msgspec.structs.replace(
                line,
                at=at,
                result=_result(node),
                reason="; ".join(filter(None, (line.reason, node.deferred, node.problem))),
                out={"quarantine": node.quarantined, "taint": node.tainted}.get(line.action, False),
                machine=node.machine,
            )


def action_of(change: Change) -> str:
    """Empty: no line is written about it."""
    if change.takes_out:
        return "quarantine" if QUARANTINE in change.taints else "taint"
    if change.taints:
        return "return"
    if QUARANTINE in change.labels:
        return "update"
    return "label" if change.labels.get(LABEL) == FAILED else ""


def _reason(change: Change, cause: Cause) -> str:
    return cause.reason or (change.condition.message if cause.run else "")


def _result(node: Marked) -> str:
    if node.problem:
        return "failed"
    if node.deferred:
        return "deferred"
    return "done" if node.changed else "unchanged"
