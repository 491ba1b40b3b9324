"""The condition of one GPU: which processes have it open (by descriptors), what the driver reports, what the kernel
logged.

Reads only. It finds the forked child that the driver's own list misses, and keeps that list separate: it may name a
process that died.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpukeeper.blocking import in_thread
from gpukeeper.devices import holders, kernel_log
from gpukeeper.devices.driver.client import CHILD, query_once
from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.devices.inventory import gpus_in
from gpukeeper.model.condition import Condition, GpuHolder
from gpukeeper.model.durations import in_words
from gpukeeper.model.unknown import Unknown, is_known

DEADLINE = timedelta(seconds=20)
A_MOMENT = timedelta(seconds=10)  # for the scan of processes, beyond the driver's deadline


async def condition(uuid: str, since: datetime, deadline: timedelta = DEADLINE) -> Condition | Unknown:
    """`since`: earlier Xids are ignored."""
    try:
        return await in_thread(lambda: examine(uuid, since, deadline), deadline + A_MOMENT)
    except TimeoutError:
        return Unknown(f"reading it took longer than {in_words(deadline + A_MOMENT)}")


def examine(
    uuid: str,
    since: datetime,
    deadline: timedelta = DEADLINE,
    *,
    child: Sequence[str] = CHILD,
    proc: str = "/proc",
    log: str = "/dev/kmsg",
) -> Condition | Unknown:
    """Blocks, for the deadline and the time of a scan."""
    gpus = gpus_in(query_once("condition", deadline, child), driver_loaded=True)
    if isinstance(gpus, Unknown):
        return gpus
    # After the query: our driver process has ended by now and is no holder.
    try:
        scanned = holders.scan(proc)
        minors, boot = holders.mig_minors(proc), holders.boot_time(proc)
    except OSError as error:
        return Unknown(f"the processes that have it open could not be read: {error.strerror}")
    found = find(gpus, uuid)
    if isinstance(found, Unknown):
        return found
    whole, part = found
    here = [holder for holder in scanned.found if holds(holder, whole, part, minors)]
    xids = whole.pci if isinstance(whole.pci, Unknown) else kernel_log.xids(whole.pci, since, boot, log)
    hidden = len(scanned.hidden) + (not holders.shows_everyone(proc))
    return Condition(
        uuid=uuid,
        at=datetime.now(UTC),
        holders=tuple(_holder(one, proc) for one in here),
        unread=hidden,
        listed=(part or whole).listed,
        memory_used_mib=(part or whole).memory_used_mib,
        advice=whole.advice,
        remap_pending=whole.remap_pending,
        remap_failed=whole.remap_failed,
        xids=xids,
        sliced=whole.sliced,
        reset_alone=whole.reset_alone,
    )


def find(gpus: Sequence[GpuFacts], uuid: str) -> tuple[GpuFacts, SliceFacts | None] | Unknown:
    """The GPU of that uuid; or, for a slice, the GPU it belongs to and itself."""
    for gpu in gpus:
        if gpu.uuid == uuid:
            return gpu, None
        for part in () if isinstance(gpu.slices, Unknown) else gpu.slices:
            if part.uuid == uuid:
                unknown = [one for one in (part.gpu_instance, part.compute_instance) if isinstance(one, Unknown)]
                return unknown[0] if unknown else (gpu, part)
    silent = [gpu.uuid.why for gpu in gpus if isinstance(gpu.uuid, Unknown)]
    return Unknown(f"the driver reports no {uuid}" + (f"; one GPU does not answer: {silent[0]}" if silent else ""))


def holds(
    holder: holders.Holder, whole: GpuFacts, part: SliceFacts | None, minors: Mapping[int, tuple[int, int, int]]
) -> bool:
    """Whether it has this GPU or slice open. In doubt yes: one holder too many only makes us more careful."""
    if isinstance(whole.minor, Unknown):
        return bool(holder.minors)
    if whole.minor not in holder.minors:
        return False
    opened = [minors[number] for number in holder.capabilities if number in minors]
    if part is None or not opened or not is_known(part.gpu_instance) or not is_known(part.compute_instance):
        return True
    return (whole.minor, part.gpu_instance, part.compute_instance) in opened


def _holder(one: holders.Holder, proc: str) -> GpuHolder:
    try:
        state, parent = parse_parent(holders.text_of(Path(proc, str(one.pid), "stat")))
    except OSError:
        state, parent = "", 0
    return GpuHolder(
        pid=one.pid,
        starttime=one.starttime,
        uid=one.uid,
        comm=one.comm,
        state=state,
        workload_id=one.container,
        ours=os.getpid() in (one.pid, parent),  # the processes that query the driver for us are our children
    )


def parse_parent(stat: str) -> tuple[str, int]:
    """The kernel's letter for its state, and the pid of its parent."""
    state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
    return state, int(parent)
