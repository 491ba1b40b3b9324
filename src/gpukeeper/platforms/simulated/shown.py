"""The simulated fleet as a dashboard shows it: GPUs with a model and memory, use that varies as that of real work, and
users who take free GPUs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta
from zlib import crc32

import msgspec

from gpukeeper.model.decision import Snapshot
from gpukeeper.model.identity import Ref
from gpukeeper.model.policy import PlaceScope
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Gone, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.adapter import SimulatedMeter, SimulatedPlatform
from gpukeeper.platforms.simulated.clock import VirtualClock, VirtualLoop
from gpukeeper.platforms.simulated.fleet import places
from gpukeeper.platforms.simulated.users import SimulatedUsers
from gpukeeper.platforms.simulated.world import SimulatedPlace, World

MODELS: Mapping[str, tuple[str, int]] = {  # by place: model, and its memory in MiB
    "node-1": ("NVIDIA A100-SXM4-80GB", 81_920),
    "node-2": ("NVIDIA L40S", 46_068),
    "node-3": ("NVIDIA H100 80GB HBM3", 81_559),
    "prod": ("NVIDIA H200", 143_771),
    "ray-1": ("NVIDIA RTX A6000", 49_140),
    "ray-2": ("NVIDIA RTX A6000", 49_140),
}


ARRIVALS: Mapping[str, timedelta] = {"kubernetes": timedelta(minutes=5)}  # mean time between two, by platform
OTHER_ARRIVALS = timedelta(minutes=25)


def shown_world(seed: int, loop: VirtualLoop, begin: datetime) -> World:
    world = World(seed, VirtualClock(loop, begin), places())
    ShownUsers(world, OTHER_ARRIVALS).settle_in()
    return world


class ShownUsers(SimulatedUsers):
    """Of a GPU that several workloads claim the dashboard shows a tile for each, which is rare on a real machine."""

    def pace(self, place: SimulatedPlace) -> timedelta:
        return ARRIVALS.get(place.platform, OTHER_ARRIVALS)

    def some_gpus(self, place: SimulatedPlace) -> tuple[str, ...]:
        wanted, taken = super().some_gpus(place), held_gpus(self._world, place)
        return tuple(gpu for gpu in place.gpus if gpu not in taken)[: len(wanted)]


def held_gpus(world: World, place: SimulatedPlace) -> frozenset[str]:
    things = world.things[place.key].values()
    running = (one for one in things if one.state is State.RUNNING and one.shape is not Shape.DEVICE)
    return frozenset(device for one in running for device in one.devices)


class ShownPlatform(SimulatedPlatform):
    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        async for page in super().observe(scope):
            held = held_gpus(self._world, self._place)
            subjects = tuple(_with_labels(one, held) for one in page.subjects)
            yield msgspec.structs.replace(page, subjects=subjects)

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        found = await super().read(ref)
        return _with_labels(found, held_gpus(self._world, self._place)) if isinstance(found, Subject) else found


def _with_labels(subject: Subject, held: frozenset[str]) -> Subject:
    if subject.shape is not Shape.DEVICE:
        return subject
    model, memory = MODELS[subject.ref.place]
    share = 0.4 + _noise(subject.ref.key) / 2 if subject.ref.uid in held else 0.0
    labels = {"model": model, "memory_total_mib": str(memory), "memory_used_mib": str(int(memory * share))}
    return msgspec.structs.replace(subject, labels={**subject.labels, **labels})


class ShownMeter(SimulatedMeter):
    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]:
        return [_varied(one) for one in await super().read(subjects)]


def _varied(sample: Sample) -> Sample:
    if sample.signal is not Signal.GPU or isinstance(sample.value, Unknown) or not sample.value:
        return sample
    name, minute = f"{sample.key} {sample.device}", int(sample.at.timestamp()) // 60
    value = 55 + 30 * _noise(name) + 14 * _noise(f"{name} {minute // 5}")
    return msgspec.structs.replace(sample, value=round(value, 1))


def _noise(name: str) -> float:
    """From 0 to 1, always the same for the same name."""
    return crc32(name.encode()) / 2**32
