"""Views of machines that come from a copy: under the name that the fleet has for them, and marked when they are old."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.decision import Verdict
from gpukeeper.model.reading import LATEST
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import GpuState, GpuTile, MachineView, WorkloadLine, row_id

EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_DECODER = reading.Decoder(MachineView)


def read_view(machine: str, body: str) -> MachineView:
    """What that machine wrote. Its name and the ids of its rows are the fleet's, so that no machine can use those of
    another. Raises ValueError for what is not a view of this version."""
    view = _DECODER.decode(body)
    for at in _times(msgspec.to_builtins(view, builtin_types=(datetime,))):
        if at.tzinfo is None or not EARLIEST <= at < LATEST:
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
