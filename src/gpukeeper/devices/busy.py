"""How busy a GPU was, judged from several sources. Pure: the same readings and times give the same results.

One source may be wrong: it stops and repeats itself, reports 0 for all, or 100 % after a crash. So a whole GPU needs
two, and the energy counter, which grows even at idle, must show that the driver is alive. Doubtful values are
Unknown. `UsageJudge` judges readings one after the other; platforms/kubernetes/minutes.py judges a recorded history
with the same rules and limits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Generic, TypeAlias, TypeVar

import msgspec

from gpukeeper.clients.prometheus import ExportedGpu
from gpukeeper.devices.driver.facts import ActivityFacts, GpuFacts, SliceFacts
from gpukeeper.model.gpu import NOT_QUERIED
from gpukeeper.model.unknown import Unknown, larger

K = TypeVar("K", bound=Hashable)
Export: TypeAlias = Mapping[tuple[str, int | None], ExportedGpu]

BUSY_FROM, SLICE_BUSY_FROM = 5.0, 0.5  # percent; below is idle
LATCHED_FROM = 50.0  # percent with no process on it
EMPTY_MIB_MAX, STEADY_MIB = 1024, 64  # what the driver itself may use, and how much memory in use varies at rest
COVERED_MIN, SAMPLE_S_MAX = 0.8, 1.0  # of the window, covered by utilisation samples; the newest may be a second old
EXPORTED_S = 45.0  # a value of an exporter is valid for its own interval, which is 30 s
STALE_AFTER = timedelta(minutes=2)  # without growth of the energy counter
DOUBT_FOR = timedelta(minutes=5)  # after all GPUs became idle at once
SETTLES_IN = timedelta(minutes=1)  # memory is scrubbed when the driver loads, and that reads as use

NOT_CONFIGURED = Unknown("no DCGM exporter is configured", by_design=True)
CUT = Unknown("the GPU is split into slices; each is measured separately")


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """How a GPU or slice was used since the previous reading."""

    uuid: str
    slice: bool
    busy: float | Unknown  # percent of the time
    memory_used_mib: int | Unknown
    pids: tuple[int, ...] | Unknown  # as the driver lists them: may be dead or reused, never signalled
    parent: str | None = None  # of a slice
    gpu_instance: int | Unknown = NOT_QUERIED  # of a slice
    energy_mj: int | Unknown = NOT_QUERIED  # of a whole GPU
    covered_s: float = 0.0  # `busy` is the mean of so many seconds up to the reading


class UsageJudge:
    """Keeps what one reading must be compared with."""

    def __init__(self) -> None:
        self._layouts: dict[str, tuple[bool, frozenset[str]]] = {}
        self._energy: dict[str, Heartbeat] = {}
        self._exported_energy: dict[tuple[str, int | None], Heartbeat] = {}
        self._all_idle = AllIdle[str]()
        self._alone: dict[str, bool] = {}  # no process was there at the last reading
        self._floor: dict[str, int] = {}  # least memory used without a process

    def judge(
        self, gpus: Sequence[GpuFacts], now: datetime, exported: Export | Unknown | None = None
    ) -> dict[str, GpuUse]:
        """By uuid. A GPU that does not even report its uuid is not included."""
        self._update_exporter(exported, now)
        uses: list[GpuUse] = []
        for gpu in gpus:
            if isinstance(gpu.uuid, str):
                uses += self._uses(gpu, gpu.uuid, now, exported)
        judged = [self._without_latch(use) for use in uses]
        return {use.uuid: use for use in self._doubted(judged, now)}

    def _uses(self, gpu: GpuFacts, uuid: str, now: datetime, exported: Export | Unknown | None) -> list[GpuUse]:
        energy, window_s = self._energy.setdefault(uuid, Heartbeat()), gpu.activity.window_s
        energy.update(gpu.energy_mj, now, gpu.activity.energy_before_mj)
        trouble = self._trouble(gpu, uuid, energy, now)
        busy = trouble if trouble is not None else self._whole(gpu, uuid, energy, now, exported)
        whole = GpuUse(
            uuid=uuid,
            slice=False,
            busy=busy,
            memory_used_mib=gpu.memory_used_mib,
            pids=gpu.listed,
            energy_mj=gpu.energy_mj,
            covered_s=covered(window_s, gpu.activity, sampled=not isinstance(samples_of(gpu.activity), Unknown)),
        )
        parts = () if isinstance(gpu.slices, Unknown) else gpu.slices
        return [
            whole,
            *(
                GpuUse(
                    uuid=part.uuid,
                    slice=True,
                    busy=trouble if trouble is not None else self._part(part, uuid, energy, now, exported),
                    memory_used_mib=part.memory_used_mib,
                    pids=part.listed,
                    parent=uuid,
                    gpu_instance=part.gpu_instance,
                    covered_s=covered(window_s, part.activity),
                )
                for part in parts
            ),
        ]

    def _trouble(self, gpu: GpuFacts, uuid: str, energy: Heartbeat, now: datetime) -> Unknown | None:
        """What makes every value of this GPU doubtful."""
        if isinstance(gpu.sliced, Unknown):
            return Unknown(f"whether it is split into slices is unknown: {gpu.sliced.why}")
        if isinstance(gpu.slices, Unknown):
            return Unknown(f"its slices could not be listed: {gpu.slices.why}")
        if self._layout_changed(uuid, gpu.sliced, gpu.slices):
            return Unknown("its slices changed since the previous reading")
        if energy.settles(now):
            return Unknown("the driver was loaded less than a minute ago")
        if energy.is_stale(now):
            return Unknown("its energy counter does not grow, so the driver's values are stale")
        return None

    def _layout_changed(self, uuid: str, sliced: bool, parts: Sequence[SliceFacts]) -> bool:
        layout = (sliced, frozenset(part.uuid for part in parts))
        before = self._layouts.get(uuid)
        self._layouts[uuid] = layout
        if before is None or before == layout:
            return False
        for gone in before[1] - layout[1] | {uuid}:
            self._all_idle.forget(gone)
            for kept in (self._alone, self._floor):
                kept.pop(gone, None)
        return True

    def _whole(
        self, gpu: GpuFacts, uuid: str, energy: Heartbeat, now: datetime, exported: Export | Unknown | None
    ) -> float | Unknown:
        if gpu.sliced is True:
            return CUT
        export = self._export(exported, (uuid, None), now)
        utilisation = larger(samples_of(gpu.activity), export if isinstance(export, Unknown) else export.utilisation)
        return of_sources(
            {
                "GPM": plausible(gpu.activity.gpm),
                "utilisation samples": utilisation,
                "DCGM": export if isinstance(export, Unknown) else export.engine,
            },
            energy.is_alive(now),
        )

    def _part(
        self, part: SliceFacts, parent: str, energy: Heartbeat, now: datetime, exported: Export | Unknown | None
    ) -> float | Unknown:
        """A slice has no utilisation: its activity counters, and the energy of the whole GPU as a heartbeat."""
        instance = part.gpu_instance
        export = instance if isinstance(instance, Unknown) else self._export(exported, (parent, instance), now)
        engine = export if isinstance(export, Unknown) else export.engine
        sources = {"GPM": plausible(part.activity.gpm), "DCGM": engine}
        known = [value for value in sources.values() if not isinstance(value, Unknown)]
        if not known:
            return none_answered(sources)
        return max(known) if energy.is_alive(now) else Unknown("the GPU's energy counter does not grow")

    # The exporter: it may answer and repeat old values for weeks, so its own energy counter must grow too.

    def _update_exporter(self, exported: Export | Unknown | None, now: datetime) -> None:
        for key, export in ({} if exported is None or isinstance(exported, Unknown) else exported).items():
            self._exported_energy.setdefault(key, Heartbeat()).update(export.energy_mj, now)

    def _export(
        self, exported: Export | Unknown | None, key: tuple[str, int | None], now: datetime
    ) -> ExportedGpu | Unknown:
        if exported is None:
            return NOT_CONFIGURED
        if isinstance(exported, Unknown):
            return exported
        if key not in exported:
            return Unknown("the DCGM exporter does not report it")
        hearts = (self._exported_energy.get(key), self._exported_energy.get((key[0], None)))
        if any(heart is not None and heart.is_alive(now) for heart in hearts):
            return exported[key]
        return Unknown("the DCGM exporter's energy counter does not grow, so its values may be stale")

    # Readings that cannot be true although every source answered.

    def _without_latch(self, use: GpuUse) -> GpuUse:
        """A process that died inside a kernel can leave a GPU at 100 % for days."""
        alone = use.pids == ()
        if alone and not isinstance(use.memory_used_mib, Unknown):
            self._floor[use.uuid] = min(use.memory_used_mib, self._floor.get(use.uuid, EMPTY_MIB_MAX))
        # A process may have come and gone between two readings; so there must be none at both.
        was_alone, self._alone[use.uuid] = self._alone.get(use.uuid, True), alone
        if not (alone and was_alone and self._is_empty(use)) or isinstance(use.busy, Unknown):
            return use
        if use.busy < LATCHED_FROM:
            return use
        why = f"it reports {use.busy:.0f} % without a process and without memory in use"
        return msgspec.structs.replace(use, busy=Unknown(why))

    def _is_empty(self, use: GpuUse) -> bool:
        used = use.memory_used_mib
        return not isinstance(used, Unknown) and used <= self._floor.get(use.uuid, 0) + STEADY_MIB

    def _doubted(self, uses: Sequence[GpuUse], now: datetime) -> list[GpuUse]:
        known = {use.uuid: is_busy(use.busy, use.slice) for use in uses if not isinstance(use.busy, Unknown)}
        if not self._all_idle.doubts(known, now.timestamp()):
            return list(uses)
        doubt = Unknown("all GPUs became idle at once; the source is doubted")
        return [msgspec.structs.replace(use, busy=doubt) if use.uuid in known else use for use in uses]


class AllIdle(Generic[K]):
    """All of a source idle at once look like a dead source; a single job that ends looks the same for a while."""

    def __init__(self) -> None:
        self._busy: dict[K, bool] = {}  # of every device, when last known
        self._until = -math.inf

    def doubts(self, known: Mapping[K, bool], at: float) -> bool:
        """Whether `known`, which devices are busy, is doubted. `at`: seconds; the times of calls increase."""
        if any(known.values()):
            self._until = -math.inf
        elif sum(self._busy.values()) >= 2 and any(self._busy.get(device) for device in known):
            self._until = at + DOUBT_FOR.total_seconds()
        self._busy.update(known)
        return at < self._until

    def forget(self, device: K) -> None:
        self._busy.pop(device, None)


class Heartbeat:
    """A counter that grows as long as its source is alive."""

    def __init__(self) -> None:
        self._value: int | None = None
        self._exists = True
        self._asked: datetime | None = None
        self._grew: datetime | None = None
        self._fell: datetime | None = None

    def update(self, value: int | Unknown, now: datetime, before: int | Unknown = NOT_QUERIED) -> None:
        self._asked = earlier(self._asked, now) or now
        self._grew, self._fell = earlier(self._grew, now), earlier(self._fell, now)
        if isinstance(value, Unknown):
            self._exists = self._value is not None or not value.by_design
            return
        self._exists = True
        known = [one for one in (self._value, before) if not isinstance(one, Unknown) and one is not None]
        if self._value is not None and value < self._value:
            self._fell = now  # it counts from the load of the driver
        elif any(value > one for one in known):
            self._grew = now
        self._value = value

    def is_alive(self, now: datetime) -> bool:
        return self._grew is not None and now - self._grew <= STALE_AFTER

    def is_stale(self, now: datetime) -> bool:
        """False also if no such counter exists."""
        since = self._grew or self._asked
        return self._exists and since is not None and now - since > STALE_AFTER

    def settles(self, now: datetime) -> bool:
        return self._fell is not None and now - self._fell < SETTLES_IN


def of_sources(sources: Mapping[str, float | Unknown], alive: bool) -> float | Unknown:
    """The largest of at least two. One is enough if the hardware has no other, if the energy counter grows."""
    known = {name: value for name, value in sources.items() if not isinstance(value, Unknown)}
    if not known:
        return none_answered(sources)
    if len(known) == 1:
        (name,) = known
        failed = [f"{other}: {value.why}" for other, value in unknown(sources).items() if not value.by_design]
        if failed:
            return Unknown(f"only one source answered ({name}); {'; '.join(failed)}")
        if not alive:
            return Unknown(f"{name} is the only source here, and the energy counter does not grow")
    return max(known.values())


def none_answered(sources: Mapping[str, float | Unknown]) -> Unknown:
    """Never by design: a GPU without any measurement must not be skipped."""
    return Unknown("; ".join(f"{name}: {value.why}" for name, value in unknown(sources).items()))


def unknown(sources: Mapping[str, float | Unknown]) -> dict[str, Unknown]:
    return {name: value for name, value in sources.items() if isinstance(value, Unknown)}


def samples_of(activity: ActivityFacts) -> float | Unknown:
    enough = activity.utilisation_covered_s >= COVERED_MIN * activity.window_s - SAMPLE_S_MAX
    if isinstance(activity.utilisation, Unknown) or enough:
        return plausible(activity.utilisation)
    covered = f"{activity.utilisation_covered_s:.0f} of {activity.window_s:.0f} seconds"
    return Unknown(f"the driver's utilisation samples cover only {covered}")


def covered(window_s: float, activity: ActivityFacts, *, sampled: bool = False) -> float:
    """How many seconds the sources that answered cover. An exporter reports the current value, not the past."""
    if not isinstance(activity.gpm, Unknown):
        return min(window_s, activity.gpm_s)
    return window_s if sampled else min(window_s, EXPORTED_S)


def plausible(percent: float | Unknown) -> float | Unknown:
    """A blank is printed as a huge number, and rounding may exceed 100 slightly."""
    if isinstance(percent, Unknown):
        return percent
    if not math.isfinite(percent) or not -0.5 <= percent <= 100.5:
        return Unknown(f"{percent:g} % cannot be true")
    return min(max(percent, 0.0), 100.0)


def is_busy(percent: float, slice_: bool) -> bool:
    return percent >= (SLICE_BUSY_FROM if slice_ else BUSY_FROM)


def earlier(one: datetime | None, now: datetime) -> datetime | None:
    """A clock that was set back must not make an old heartbeat look recent for hours."""
    return None if one is None else min(one, now)
