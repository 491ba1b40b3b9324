"""Nodes and their GPUs (`node list|show|register`): the condition of each GPU of one machine as last recorded,
quarantine, and what has it open. And the register: GPUs by serial number, and machines, with each time one was taken
out, came back or failed a run. Pure.

The register is made from lines of the ledger, and from the reports of runs that were collected here.

A machine is the same under another node name: it is known by its system UUID. Where a line has none, it is that of the
only machine that had this node name; else the name itself. The order of the lines does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

import msgspec

from gpukeeper.acceptance.fleet.collect import RunReport
from gpukeeper.model.event import Event, NodeMarked, NodeTested, Quarantined, Returned
from gpukeeper.model.gpu import GpuMemory, Grade
from gpukeeper.model.subject import Ref
from gpukeeper.model.words import in_words


class GpuCondition(msgspec.Struct, frozen=True, kw_only=True):
    """`held_by`: processes that have it open now, or why that is unknown. None: nothing, or never recorded."""

    uuid: str
    index: int | None
    held_by: str | None
    condition: str | None
    checked: datetime | None
    reason: str | None
    quarantined: datetime | None
    quarantine_reason: str | None
    quarantined_by: str | None
    baseline_mib: int | None
    last_reset: datetime | None


class NodeView(msgspec.Struct, frozen=True):
    """`unseen`: why the GPUs could not be listed; then these are the ones in the ledger."""

    node: str
    gpus: tuple[GpuCondition, ...]
    unseen: str | None


class NodeGpuView(msgspec.Struct, frozen=True):
    node: str
    gpu: GpuCondition
    lines: tuple[dict[str, object], ...]


def gpu_condition(
    uuid: str, index: int | None, remembered: GpuMemory | None, held_by: str | None = None
) -> GpuCondition:
    gpu = remembered or GpuMemory()
    return GpuCondition(
        uuid=uuid,
        index=index,
        held_by=held_by,
        condition=gpu.result.value if gpu.result is not None else None,
        checked=gpu.checked,
        reason=gpu.reason or None,
        quarantined=gpu.quarantined,
        quarantine_reason=gpu.quarantine_reason or None,
        quarantined_by=gpu.quarantined_by or None,
        baseline_mib=gpu.baseline_mib,
        last_reset=gpu.last_reset,
    )


TYPES = tuple(str(one.__struct_config__.tag) for one in (NodeTested, NodeMarked, Quarantined, Returned))
GPU, MACHINE, NODE = "gpu", "machine", "node"
TAKEN_OUT, RETURNED, INTERRUPTED = "taken out", "returned", "interrupted"
FAILED, NOT_MARKED = "failed", "failed, not marked"
Subject: TypeAlias = tuple[str, str]  # kind and name


class RegisterEvent(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """`what`: taken out, returned, failed (a run), or interrupted: a change was begun, and its result is unknown.
    "failed, not marked": the report of the run was collected, and no node was marked with it."""

    at: datetime
    what: str
    node: str
    run: str
    by: str
    reason: str


class RegisterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: of a GPU its serial number, or uuid where there is none; of a machine its system UUID. `nodes`: names of
    the nodes it was in, the last one first. `lately`: how often it was taken out within the time that counts.
    `failed`: all runs; `not_marked`: those of them that were only collected."""

    kind: str
    name: str
    model: str
    nodes: tuple[str, ...]
    taken_out: int
    returned: int
    failed: int
    not_marked: int
    lately: int
    warning: str
    events: tuple[RegisterEvent, ...]


class Register(msgspec.Struct, frozen=True):
    """Those that were taken out most often first. `unread`: sentences about archives and reports that could not be
    read; there may be more entries."""

    entries: tuple[RegisterEntry, ...]
    unread: tuple[str, ...] = ()


def register(
    lines: Iterable[Event],
    now: datetime,
    *,
    repeats: int,
    within: timedelta,
    collected: Iterable[NodeTested] = (),
) -> Register:
    """`repeats`: an entry that was taken out so often `within` this time has a warning. `collected`: of runs on many
    nodes; they have no lines in the ledger."""
    given = sorted(lines, key=lambda one: one.at)
    names = _Names(given)
    found: dict[Subject, set[RegisterEvent]] = defaultdict(set)
    for line in given:
        for subject, event in names.events(line):
            found[subject].add(event)
    for line in collected:
        for subject, event in names.events(line):
            found[subject].add(msgspec.structs.replace(event, what=NOT_MARKED))
    entries = [
        _entry(subject, _once_for_each_run(events), names.models.get(subject[1], ""), now, repeats, within)
        for subject, events in found.items()
    ]
    return Register(
        tuple(sorted(entries, key=lambda one: (-one.lately, -one.taken_out, -one.failed, one.kind, one.name)))
    )


def lines_of_run(report: RunReport) -> Iterator[NodeTested]:
    """The nodes that failed, as far as real GPUs were tested."""
    for node in report.fleet.nodes:
        if node.verdict is Grade.FAIL and report.engine != "simulated":
            yield NodeTested(
                at=node.ended,
                ref=Ref("host", node.node, "node", node.node, node.node),
                by=report.owner,
                run=report.run,
                verdict=node.verdict,
                reason=node.reason,
                device=node.device,
                gpus={one.identity: one.verdict for one in report.gpus if one.node == node.node},
            )


class _Names:
    """Which machine, GPU and model a line means, as far as all lines together say it."""

    def __init__(self, lines: Sequence[Event]) -> None:
        self.models: dict[str, str] = {}
        self._serials: dict[str, str] = {}
        self._machines: dict[str, set[str]] = defaultdict(set)
        self._ended: set[tuple[str, str]] = set()
        for line in lines:
            if isinstance(line, NodeTested):
                self.models |= line.models
                self._serials |= line.serials
            if isinstance(line, NodeMarked):
                self._machines[_node(line)] |= {line.machine} if line.machine else set()
                if line.result != "begun":
                    self._ended.add((line.step, _node(line)))

    def events(self, line: Event) -> Iterator[tuple[Subject, RegisterEvent]]:
        match line:
            case NodeTested(device="cuda"):
                failed = (who for who, grade in line.gpus.items() if grade is Grade.FAIL and who != _node(line))
                if line.verdict is Grade.FAIL:
                    yield from self._of(line, FAILED, failed)
            case NodeMarked(result="begun"):
                if (line.step, _node(line)) not in self._ended:
                    yield from self._of(line, INTERRUPTED)
            case NodeMarked():
                if line.failed:
                    yield from self._of(line, FAILED, line.gpus)
                if line.out:
                    yield from self._of(line, TAKEN_OUT, line.gpus)
                if line.action == "return" and line.result == "done":
                    yield from self._of(line, RETURNED)
            case Quarantined() | Returned() if line.ref is not None:
                what = TAKEN_OUT if isinstance(line, Quarantined) else RETURNED
                yield (GPU, self._serials.get(line.ref.name, line.ref.name)), _event(line, what, line.ref.place)

    def _of(self, line: Event, what: str, gpus: Iterable[str] = ()) -> Iterator[tuple[Subject, RegisterEvent]]:
        """The machine, and these GPUs."""
        node = _node(line)
        event = _event(line, what, node)
        known = self._machines.get(node, set())
        machine = getattr(line, "machine", "") or (next(iter(known)) if len(known) == 1 else "")
        yield (MACHINE, machine) if machine else (NODE, node), event
        yield from (((GPU, one), event) for one in gpus)


def _node(line: Event) -> str:
    return line.ref.name if line.ref is not None else ""


def _event(line: Event, what: str, node: str) -> RegisterEvent:
    run, reason = getattr(line, "run", ""), getattr(line, "reason", "")
    return RegisterEvent(at=line.at, what=what, node=node, run=run, by=line.by, reason=reason)


def _once_for_each_run(events: Iterable[RegisterEvent]) -> list[RegisterEvent]:
    """A run that was recorded where it ran, collected, and marked later, failed once: with its mark, if it has one."""
    kept: dict[object, RegisterEvent] = {}
    for one in sorted(events, key=lambda one: (one.what == NOT_MARKED, one)):
        kept.setdefault(one.run if one.what in (FAILED, NOT_MARKED) else one, one)
    return sorted(kept.values())


def _entry(
    subject: Subject, events: Sequence[RegisterEvent], model: str, now: datetime, repeats: int, within: timedelta
) -> RegisterEntry:
    kind, name = subject
    lately = sum(one.what == TAKEN_OUT and now - one.at <= within for one in events)
    times = "once" if lately == 1 else f"{lately} times"
    many = f"{'GPU' if kind == GPU else kind} {name} was taken out {times} in {in_words(within)}"
    return RegisterEntry(
        kind=kind,
        name=name,
        model=model,
        nodes=tuple(dict.fromkeys(one.node for one in reversed(events))),
        taken_out=sum(one.what == TAKEN_OUT for one in events),
        returned=sum(one.what == RETURNED for one in events),
        failed=sum(one.what in (FAILED, NOT_MARKED) for one in events),
        not_marked=sum(one.what == NOT_MARKED for one in events),
        lately=lately,
        warning=many if lately >= repeats else "",
        events=tuple(events),
    )


def entries_of(found: Register, name: str) -> tuple[RegisterEntry, ...]:
    """Named so, or last in a node of this name."""
    return tuple(one for one in found.entries if name == one.name or name == next(iter(one.nodes), ""))


def warnings_about(found: Register, nodes: Collection[str]) -> tuple[str, ...]:
    """Of GPUs and machines that were last in these nodes."""
    return tuple(one.warning for one in found.entries if one.warning and one.nodes[0] in nodes)
