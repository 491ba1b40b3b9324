"""One machine as of now: its GPUs, workloads and places. Behind the web dashboard and the fleet's copy, whose views
are named as the fleet names the machine, and marked when they are old.

A `MachineView` is complete. A `Delta` is what changed since another one, so that what is sent follows what happened
and not the size of the fleet. `for_reader` removes what a reader may not see. How rows are made: live_rows.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from hashlib import blake2b
from typing import Protocol, TypeVar

import msgspec

from gpukeeper.engine.live import PlaceState
from gpukeeper.engine.outlook import NOT_SHOWN, PolicyHead
from gpukeeper.lifecycle.claims import ClaimState
from gpukeeper.lifecycle.forecast import NextStep
from gpukeeper.model import reading
from gpukeeper.model.decision import Verdict
from gpukeeper.model.reading import EPOCH, LATEST, Moment
from gpukeeper.model.subject import State
from gpukeeper.model.unknown import Unknown, direct

NOT_MEASURED = Unknown("not measured")


@direct
class GpuState(StrEnum):
    """How a GPU is in one word. IDLE: held by a running workload and not used for half an hour or longer."""

    FREE = "free"
    HELD = "held"
    IDLE = "idle"
    OUTSIDE = "outside"
    DIRTY = "dirty"
    QUARANTINED = "quarantined"
    UNKNOWN = "unknown"


class ShownHold(msgspec.Struct, frozen=True):
    """The hold that ends last; one that suspends `only` some rules if there is no other. `but_max_runtime`: its class
    has a maximum runtime, and no hold suspends that."""

    by: str
    until: datetime
    but_max_runtime: bool = False
    only: tuple[str, ...] = ()


class GpuTile(msgspec.Struct, frozen=True, kw_only=True):
    """`history`: mean use in steps of five minutes from `history_start` on; None: not measured. `as_of`: its machine
    was not seen since then, when its state was `last_state`; None: it is current."""

    # One device and one holder.
    key: str  # of the holder
    name: str
    place: str
    how: ClaimState
    device: str = ""  # empty: unknown which
    count: int = 1  # of devices, if they are not known one by one
    holder: str = ""  # its path, or the processes
    owner: str | Unknown | None = None
    class_: str | Unknown = ""
    since: datetime | None = None
    use: float | Unknown | None = None  # percent; None: nothing runs on it
    use_is_old: bool = False
    memory_used_mib: int | Unknown = NOT_MEASURED
    memory_total_mib: int | Unknown = NOT_MEASURED
    steps: tuple[NextStep, ...] = ()  # if nothing changes: up to the act and the removal that follows it
    reason: str = ""  # why, or why nothing comes
    id: str
    workload: str = ""  # id of the holder's line
    platform: str
    state: GpuState
    model: str = ""
    idle_since: datetime | None = None
    hold: ShownHold | None = None  # on its holder
    history_start: datetime | None = None
    history: tuple[float | None, ...] = ()
    as_of: datetime | None = None
    last_state: GpuState | None = None

    @property
    def owner_word(self) -> str:
        return self.owner if isinstance(self.owner, str) else "unknown"


class WorkloadLine(msgspec.Struct, frozen=True, kw_only=True):
    """`next`: the action, or how it is kept. `since`: start of what runs, end of what ended."""

    id: str
    key: str
    path: str
    platform: str
    place: str
    kind: str
    name: str
    state: State | Unknown
    owner: str | Unknown | None
    owner_verified: bool
    class_: str
    gpus: int | Unknown
    since: datetime | None
    next: str
    due: datetime | None
    rule: str
    verdict: Verdict
    reason: str
    steps: tuple[NextStep, ...] = ()
    idle_since: datetime | None = None
    held_by: str = ""
    hold_until: datetime | None = None
    hold_only: tuple[str, ...] = ()  # the rules that it suspends, if it suspends no others
    hold_but_max_runtime: bool = False  # its class has a maximum runtime, and no hold suspends that
    warned: datetime | None = None
    stop_announced: datetime | None = None
    size: int | Unknown | None = None
    as_of: datetime | None = None  # its machine was not seen since then; None: it is current

    @property
    def uid(self) -> str:
        """Requests name it by this: another object may have its name by now."""
        return self.key[len(self.platform) + len(self.place) + 2 :]


class MachineState(msgspec.Struct, frozen=True, kw_only=True):
    """A machine without its GPUs and workloads."""

    machine: str
    at: Moment
    version: str  # of gpukeeper
    policy: PolicyHead
    paused: str | None
    places: tuple[PlaceState, ...]
    not_seen_since: Moment | None = None  # what is shown of it is old; None: it is current


class MachineView(MachineState, frozen=True, kw_only=True):
    gpus: tuple[GpuTile, ...]
    workloads: tuple[WorkloadLine, ...]
    notes: tuple[str, ...] = ()  # contradictions that somebody should check


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """From one view of a machine to the next. `head`: everything but the rows; the order of rows is theirs by id."""

    head: MachineView  # without rows
    gpus: tuple[GpuTile, ...] = ()  # new or changed
    workloads: tuple[WorkloadLine, ...] = ()
    gone: tuple[str, ...] = ()  # ids


def difference(before: MachineView | None, after: MachineView) -> Delta:
    head = msgspec.structs.replace(after, gpus=(), workloads=())
    if before is None:
        return Delta(head=head, gpus=after.gpus, workloads=after.workloads)
    gpus, workloads = {one.id: one for one in before.gpus}, {one.id: one for one in before.workloads}
    kept = {one.id for one in after.gpus} | {one.id for one in after.workloads}
    return Delta(
        head=head,
        gpus=tuple(one for one in after.gpus if gpus.get(one.id) != one),
        workloads=tuple(one for one in after.workloads if workloads.get(one.id) != one),
        gone=tuple(one for one in (*gpus, *workloads) if one not in kept),
    )


def patched(before: MachineView | None, delta: Delta) -> MachineView:
    """The view after the delta, rows in order of place and name."""
    gone = set(delta.gone)
    gpus = {one.id: one for one in before.gpus if one.id not in gone} if before is not None else {}
    workloads = {one.id: one for one in before.workloads if one.id not in gone} if before is not None else {}
    gpus.update((one.id, one) for one in delta.gpus)
    workloads.update((one.id, one) for one in delta.workloads)
    return msgspec.structs.replace(
        delta.head,
        gpus=tuple(sorted(gpus.values(), key=gpu_order)),
        workloads=tuple(sorted(workloads.values(), key=lambda one: one.path)),
    )


Row = TypeVar("Row", GpuTile, WorkloadLine)


def reduced(row: Row) -> Row:
    """What those see of it who are neither its owner nor admins."""
    if isinstance(row, GpuTile) and not (row.reason and row.key):
        return row
    return msgspec.structs.replace(row, reason=NOT_SHOWN)


class Reduce(Protocol):
    def __call__(self, row: Row) -> Row: ...


def for_reader(view: MachineView, who: str, *, admin: bool, less: Reduce = reduced) -> MachineView:
    """What `who` may see: of the work of others what `observe` shows, but no reasons. `less`: the same as `reduced`,
    perhaps from a cache."""
    if admin:
        return view
    return msgspec.structs.replace(
        view,
        gpus=tuple(one if one.owner == who else less(one) for one in view.gpus),
        workloads=tuple(one if one.owner == who else less(one) for one in view.workloads),
        notes=(),
    )


def row_id(machine: str, *parts: str) -> str:
    """Short, stable, and fit for an attribute of a page."""
    return blake2b("\0".join((machine, *parts)).encode(errors="surrogateescape"), digest_size=9).hexdigest()


def gpu_order(tile: GpuTile) -> tuple[str, int, str, str, str, str]:
    """A GPU stays where it is, held or free: what is free has no platform."""
    return (tile.place, len(tile.name), tile.name, tile.device, tile.platform, tile.holder)


_DECODER = reading.Decoder(MachineView)


def read_view(machine: str, body: str) -> MachineView:
    """What that machine wrote. Its name and the ids of its rows are the fleet's, so that no machine can use those of
    another. Raises ValueError for what is not a view of this version."""
    view = _DECODER.decode(body)
    for at in _times(msgspec.to_builtins(view, builtin_types=(datetime,))):
        if at.tzinfo is None or not EPOCH <= at < LATEST:
            raise ValueError("a time in it is not valid")
    return msgspec.structs.replace(
        view,
        machine=machine,
        gpus=tuple(_tile(one, machine) for one in view.gpus),
        workloads=tuple(msgspec.structs.replace(one, id=row_id(machine, one.id)) for one in view.workloads),
    )


def _tile(tile: GpuTile, machine: str) -> GpuTile:
    workload = row_id(machine, tile.workload) if tile.workload else ""
    return msgspec.structs.replace(tile, id=row_id(machine, tile.id), workload=workload)


def _times(value: object) -> Iterator[datetime]:
    match value:
        case datetime():
            yield value
        case dict():
            for one in value.values():
                yield from _times(one)
        case list() | tuple():
            for one in value:
                yield from _times(one)


def aged(view: MachineView, seen: datetime) -> MachineView:
    """What was known at `seen`. How anything is now, and what happens to it next, is unknown."""
    why = Unknown(f"{view.machine} was not seen since {seen:%Y-%m-%d %H:%M} UTC")
    return msgspec.structs.replace(
        view,
        at=seen,
        not_seen_since=seen,
        gpus=tuple(_aged_tile(one, seen, why) for one in view.gpus),
        workloads=tuple(_aged_line(one, seen, why) for one in view.workloads),
    )


def _aged_tile(tile: GpuTile, seen: datetime, why: Unknown) -> GpuTile:
    return msgspec.structs.replace(
        tile,
        as_of=seen,
        last_state=tile.state,
        state=GpuState.UNKNOWN,
        use=why,
        memory_used_mib=why,
        idle_since=None,
        steps=(),
        reason="",
    )


def _aged_line(line: WorkloadLine, seen: datetime, why: Unknown) -> WorkloadLine:
    return msgspec.structs.replace(
        line,
        as_of=seen,
        state=why,
        next="unknown",
        due=None,
        verdict=Verdict.UNKNOWN,
        reason=why.why,
        steps=(),
        idle_since=None,
    )
