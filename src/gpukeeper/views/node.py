"""The GPUs of one machine: condition as last recorded, quarantine, and what has each open. Behind `node list|show`."""

from __future__ import annotations

from datetime import datetime

import msgspec

from gpukeeper.model.condition import GpuMemory


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
