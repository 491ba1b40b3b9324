"""The health of the GPUs while they are tested, through one process that keeps the driver open. Reads only.

A process that does not answer is ended and the result is Unknown; the next query starts another. Samples that were not
fetched yet are lost with it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from gpukeeper.blocking import in_thread
from gpukeeper.devices.driver.client import A_MOMENT, CHILD, TO_OPEN, DriverClient
from gpukeeper.devices.driver.facts import NO_SLICE_UTILISATION, GpuFacts, Listed, SliceFacts
from gpukeeper.devices.driver.protocol import DriverReply, FactGroup
from gpukeeper.devices.inventory import gpus_in
from gpukeeper.model.condition import Xid
from gpukeeper.model.durations import in_words
from gpukeeper.model.gpu import Fact, Gpu, Health, Reading
from gpukeeper.model.unknown import Unknown

DEADLINE = timedelta(seconds=20)
NO_SERIAL = Unknown("a slice of a GPU has no serial number", by_design=True)
_PROFILE = re.compile(r"\bMIG (\S+)")


class HealthMonitor:
    """The driver during an acceptance run. It is open from the first query until `close`."""

    def __init__(self, child: Sequence[str] = CHILD, deadline: timedelta = DEADLINE) -> None:
        self._client = DriverClient(child, deadline, to_open=TO_OPEN)
        self._one_at_a_time = asyncio.Lock()

    async def identity(self) -> DriverReply | Unknown:
        """No driver is a valid result: see its state."""
        return await self._query("identity")

    async def health(self) -> tuple[GpuFacts, ...] | Unknown:
        return gpus_in(await self._query("health"), driver_loaded=True)

    async def readings(self) -> tuple[Reading, ...]:
        """`at` by the machine's monotonic clock. Empty if the driver does not answer: `health` reports why."""
        answer = await self._query("readings")
        return () if isinstance(answer, Unknown) else answer.readings

    async def close(self) -> None:
        with suppress(TimeoutError):
            await in_thread(self._client.close, 2 * A_MOMENT)

    async def _query(self, about: FactGroup) -> DriverReply | Unknown:
        longest = self._client.longest
        async with self._one_at_a_time:
            try:
                return await in_thread(lambda: self._client.query(about), longest)
            except TimeoutError:
                return Unknown(f"the NVIDIA driver did not answer within {in_words(longest)}")
            except asyncio.CancelledError:
                await self.close()
                raise


def gpus_of(facts: Sequence[GpuFacts]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """What can be tested: whole GPUs, and instead of one that is split its slices. And why the others cannot."""
    found: list[Gpu] = []
    silent: list[str] = []
    for one in facts:
        if isinstance(one.uuid, Unknown):
            silent.append(f"GPU {one.index} does not report its uuid: {one.uuid.why}")
        elif one.sliced is not True:
            found.append(_whole(one, one.uuid))
        elif isinstance(one.slices, Unknown):
            silent.append(f"GPU {one.index} ({one.uuid}) does not report its slices: {one.slices.why}")
        elif one.slices:
            found += [_slice(part, one, one.uuid) for part in one.slices]
        else:
            silent.append(f"GPU {one.index} ({one.uuid}) is in MIG mode and has no slices, so it cannot be used")
    return tuple(found), tuple(silent)


def _whole(one: GpuFacts, uuid: str) -> Gpu:
    return Gpu(
        uuid=uuid,
        index=one.index,
        name=one.name,
        serial=one.serial,
        pci=one.pci,
        memory_mib=one.memory_total_mib,
        facts=one.facts,
    )


def _slice(part: SliceFacts, whole: GpuFacts, uuid: str) -> Gpu:
    profile = None if isinstance(part.name, Unknown) else _PROFILE.search(part.name)
    return Gpu(
        uuid=part.uuid,
        index=whole.index,
        name=whole.name,
        serial=NO_SERIAL,
        pci=whole.pci,
        memory_mib=part.memory_total_mib,
        part_of=uuid,
        profile=profile[1] if profile else "not known",
        facts={**whole.facts, "sms": part.sms},
    )


def health_of(
    gpus: Sequence[GpuFacts],
    at: datetime,
    foreign: Callable[[str, Listed, Fact], Listed],
    xids: Mapping[str, tuple[Xid, ...] | Unknown],
) -> dict[str, Health]:
    """By uuid. A slice has the counters of its GPU: errors of the memory they share affect it, too."""
    found: dict[str, Health] = {}
    for gpu in gpus:
        if isinstance(gpu.uuid, Unknown):
            continue
        slices = () if isinstance(gpu.slices, Unknown) else gpu.slices
        for one in slices or (gpu,):
            uuid = str(one.uuid)
            found[uuid] = Health(
                uuid=uuid,
                at=at,
                counters={**gpu.counters, "energy_mj": gpu.energy_mj},
                states={**states_of(gpu), **(states_of_slice(one) if isinstance(one, SliceFacts) else {})},
                xids=xids.get(gpu.uuid, Unknown("its PCI address is unknown")),
                foreign=foreign(uuid, one.listed, one.memory_used_mib),
            )
    return found


def states_of(gpu: GpuFacts) -> dict[str, Fact]:
    return {
        **gpu.states,
        "mig": gpu.sliced,
        "memory_used_mib": gpu.memory_used_mib,
        "advice": gpu.advice,
        "remap_pending": gpu.remap_pending,
        "remap_failed": gpu.remap_failed,
    }


def states_of_slice(part: SliceFacts) -> dict[str, Fact]:
    return {"memory_used_mib": part.memory_used_mib, "utilisation": NO_SLICE_UTILISATION}
