"""Series of owners: the GPUs they hold, the memory of these, and the CPU of the workloads on them. Sums of what is
measured anyway; of at most MOST owners one by one."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta

from prometheus_client.core import GaugeMetricFamily

from gpukeeper.engine.live import LiveState
from gpukeeper.interfaces.telemetry.series import gauge
from gpukeeper.model.series import Sample
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import GpuTile

MOST = 200
REST = "(other)"
MIB = 1024**2
Numbers = dict[tuple[str, ...], float]
RECENT = timedelta(minutes=5)  # an older measurement of the CPU is none


def cores_by_owner(live: LiveState, now: datetime) -> dict[str, float]:
    """Of workloads with GPUs, as last measured. Owners of whom nothing was measured are absent."""
    cores: dict[str, float] = {}
    for place in live.places.values():
        for key, fact in place.facts.items():
            sample = live.cpu.get(key)
            if sample is not None and _is_measured(sample, now):
                assert not isinstance(sample.value, Unknown)
                owner = fact.view.subject.owner
                name = owner if isinstance(owner, str) else "unknown"
                cores[name] = cores.get(name, 0.0) + sample.value / 100
    return cores


def _is_measured(sample: Sample, now: datetime) -> bool:
    return isinstance(sample.value, float | int) and sample.value >= 0 and now - sample.at < RECENT


def of_owners(tiles: Iterable[GpuTile], cores: Mapping[str, float]) -> Iterator[GaugeMetricFamily]:
    """A GPU that several owners hold counts for each of them; of its memory each has an equal part."""
    gpus: Numbers = {}
    memory: Numbers = {}
    for found in _by_device(tiles):
        owners = {tile.owner_word: tile.state.value for tile in found}
        for owner, state in owners.items():
            gpus[owner, state] = gpus.get((owner, state), 0) + found[0].count
        used = next((tile.memory_used_mib for tile in found if not isinstance(tile.memory_used_mib, Unknown)), None)
        if used is not None:
            for owner in owners:
                memory[owner,] = memory.get((owner,), 0) + used * MIB / len(owners)
    held: Tally[str] = Tally()
    for (owner, _), number in gpus.items():
        held[owner] += round(number)
    shown = {owner for owner, _ in held.most_common(MOST)}
    yield gauge("gpukeeper_owner_gpus", _bounded(gpus, shown), "owner", "state")
    yield gauge("gpukeeper_owner_gpu_memory_bytes", _bounded(memory, shown), "owner")
    yield gauge("gpukeeper_owner_cpu_cores", _bounded({(owner,): n for owner, n in cores.items()}, shown), "owner")


def _by_device(tiles: Iterable[GpuTile]) -> list[list[GpuTile]]:
    """What is held. Of a cluster without measurements it is not known which GPUs these are, only how many."""
    devices: dict[tuple[str, ...], list[GpuTile]] = {}
    for tile in tiles:
        if tile.key:
            devices.setdefault((tile.place, tile.device) if tile.device else ("", tile.id), []).append(tile)
    return list(devices.values())


def _bounded(values: Numbers, shown: set[str]) -> Numbers:
    found: Numbers = {}
    for (owner, *more), number in values.items():
        key = (owner if owner in shown else REST, *more)
        found[key] = found.get(key, 0) + number
    return found
