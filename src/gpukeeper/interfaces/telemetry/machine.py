"""Series of the GPUs of a machine and their owners, of its last acceptance runs, events and storage, and of its
copy in the fleet database.

At most MOST_GPUS are exported one by one; beyond that only the sums. What was not measured has no series. Images,
logs and what workloads wrote are measured rarely, in the background, while somebody scrapes.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec
from prometheus_client.core import GaugeMetricFamily

from gpukeeper.acceptance.record import ref_of
from gpukeeper.blocking import in_thread
from gpukeeper.disk.mounts import Usage, usage
from gpukeeper.engine.live import LiveState
from gpukeeper.engine.loop import in_slices
from gpukeeper.engine.ports import bug_words
from gpukeeper.interfaces.telemetry.series import gauge
from gpukeeper.ledger.copy.admin import CopyState
from gpukeeper.model.errors import LedgerError, PlatformError
from gpukeeper.model.gpu import Past
from gpukeeper.model.policy import DAY, MINUTE
from gpukeeper.model.ports import StorageBytes, StorageReader
from gpukeeper.model.series import Sample
from gpukeeper.model.subject import EMPTY
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import GpuState, GpuTile
from gpukeeper.views.live_rows import LiveRows
from gpukeeper.wiring.benches import node_name
from gpukeeper.wiring.session import Session

LARGEST = 20
REST, SHARED = "(other)", "(shared)"  # no names of images, workloads or further owners
FACTS = ("images", "layers", "written", "logs")
FIRST = timedelta(minutes=1)  # after the first scrape: the first pass has the engine for itself
CALM = 50  # a measurement takes at most this part of the time
Place = tuple[str, str]
Numbers = dict[tuple[str, ...], float]


class StorageFacts(msgspec.Struct, frozen=True):
    """The last measurement of a place, or why there is none, and how long it took."""

    place: Place
    found: StorageBytes | Unknown
    took: timedelta = timedelta()


class StorageWatch:
    """`every`: None if nothing is measured."""

    def __init__(self, readers: Sequence[StorageReader], every: Callable[[], timedelta | None]) -> None:
        self._readers, self._every = readers, every
        self._facts: dict[Place, StorageFacts] = {}
        self._due: float | None = None  # steady time
        self._task: asyncio.Task[None] | None = None

    def facts(self) -> tuple[StorageFacts, ...]:
        """As last measured. Starts a measurement if one is due; waits for nothing."""
        every = self._every()
        if every is None:
            return ()
        steady = asyncio.get_running_loop().time()
        if self._due is None:
            self._due = steady + min(FIRST, every).total_seconds()
        if self._readers and steady >= self._due and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._measure(every))
        return tuple(self._facts.values())

    async def _measure(self, every: timedelta) -> None:
        """One place after the other."""
        steady = asyncio.get_running_loop().time
        begun = steady()
        for one in self._readers:
            place, start = (one.name, one.place), steady()
            found = await _read(one)
            self._facts[place] = StorageFacts(place, found, timedelta(seconds=steady() - start))
        self._due = steady() + max(every.total_seconds(), CALM * (steady() - begun))


async def _read(reader: StorageReader) -> StorageBytes | Unknown:
    try:
        return await reader.read_storage()
    except PlatformError as problem:
        return Unknown(str(problem))
    except Exception as bug:  # a metric must not end the program
        return Unknown(bug_words(bug))


def of_storage(places: Iterable[StorageFacts]) -> Iterator[GaugeMetricFamily]:
    images, written, logs, cache, times, spans, missing = (Numbers() for _ in range(7))
    for one in places:
        here, found = one.place, one.found
        spans[here] = one.took.total_seconds()
        if isinstance(found, Unknown):
            missing |= {(*here, fact): 1 for fact in FACTS}
            continue
        times[here] = found.at.timestamp()
        images |= _images(here, found)
        written |= _largest(here, [(item.name, item.written) for item in found.workloads])
        logs |= _largest(here, [(item.name, item.log) for item in found.workloads])
        cache |= {} if found.cache is None else {here: found.cache}
        missing |= {(*here, fact): number for fact, number in _not_measured(found).items()}
    labels = ("platform", "place")
    yield gauge("gpukeeper_image_bytes", images, *labels, "image")
    yield gauge("gpukeeper_workload_written_bytes", written, *labels, "workload")
    yield gauge("gpukeeper_workload_log_bytes", logs, *labels, "workload")
    yield gauge("gpukeeper_build_cache_bytes", cache, *labels)
    yield gauge("gpukeeper_storage_timestamp_seconds", times, *labels)
    yield gauge("gpukeeper_storage_seconds", spans, *labels)
    yield gauge("gpukeeper_storage_not_measured", missing, *labels, "what")


def _images(here: Place, found: StorageBytes) -> Numbers:
    """All of them add up to the layers, each counted once."""
    numbers = _largest(here, [(one.name, one.own) for one in found.images])
    own = sum(one.own for one in found.images if not isinstance(one.own, Unknown))
    measured = all(not isinstance(one.own, Unknown) for one in found.images)
    if measured and not isinstance(found.layers, Unknown):
        numbers[*here, SHARED] = max(found.layers - own, 0)
    return numbers


def _largest(here: Place, sizes: Iterable[tuple[str, int | Unknown | None]]) -> Numbers:
    """Those with the same name (images without one of a short id) are added."""
    known: Tally[str] = Tally()
    for name, size in sizes:
        if isinstance(size, int):
            known[name] += size
    ranked = known.most_common()
    numbers: Numbers = {(*here, name): size for name, size in ranked[:LARGEST]}
    if len(ranked) > LARGEST:
        numbers[*here, REST] = sum(size for _, size in ranked[LARGEST:])
    return numbers


def _not_measured(found: StorageBytes) -> Mapping[str, int]:
    return {
        "images": sum(isinstance(one.own, Unknown) for one in found.images),
        "layers": int(isinstance(found.layers, Unknown)),
        "written": sum(isinstance(one.written, Unknown) for one in found.workloads),
        "logs": sum(isinstance(one.log, Unknown) for one in found.workloads),
    }


MOST_OWNERS = 200
MIB = 1024**2
RECENT_CPU = timedelta(minutes=5)  # an older measurement of the CPU is none


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
    return isinstance(sample.value, float | int) and sample.value >= 0 and now - sample.at < RECENT_CPU


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
    shown = {owner for owner, _ in held.most_common(MOST_OWNERS)}
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


MOST_GPUS = 2_000
DISK = timedelta(seconds=2)  # to read how full the disk with the ledger is
OF_A_GPU = ("place", "gpu", "uuid")
# Of several holders of one GPU, the state that comes first here is the GPU's.
ORDER = (
    *(GpuState.QUARANTINED, GpuState.DIRTY, GpuState.OUTSIDE, GpuState.HELD, GpuState.IDLE),
    *(GpuState.UNKNOWN, GpuState.FREE),
)
Device = tuple[str, str, str]  # place, name, uuid


class MachineFacts(msgspec.Struct, frozen=True):
    tiles: tuple[GpuTile, ...] = ()
    tested: tuple[Past, ...] = ()
    copy: CopyState | None = None
    cores: Mapping[str, float] = {}  # by owner
    events: Mapping[str, int] | None = None  # by type, of the last day; None: could not be read
    storage: tuple[StorageFacts, ...] = ()
    state: Usage | None = None  # of the disk with the ledger; None: could not be read


class MachineReader:
    """Reads the facts for a scrape. GPUs are read again only after a pass changed something."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._node = ref_of(node_name()).key
        self._rows = LiveRows(session.keeper.host)
        self._updating = asyncio.Lock()
        self._tiles: tuple[GpuTile, ...] = ()
        self._version = -1
        self._events: dict[str, int] = {}
        self._counted: datetime | None = None
        self._storage = StorageWatch(session.storage, lambda: session.book.policy.metrics.sizes)
        live = session.keeper.live
        if not live.enabled:
            live.enabled, live.gpus_only = True, True

    async def read(self) -> MachineFacts:
        """If the ledger cannot be read, only what needs none of it: the other series must not be missing."""
        keeper = self._session.keeper
        facts = MachineFacts(
            copy=self._session.copy_state(),
            cores=cores_by_owner(keeper.live, keeper.clock.now()),
            storage=self._storage.facts(),
            state=await self._disk(),
        )
        try:
            tiles, tested, events = await self._gpus(), await self._tested(), await self._last_day()
        except LedgerError:
            return facts
        return msgspec.structs.replace(facts, tiles=tiles, tested=tested, events=events)

    async def _gpus(self) -> tuple[GpuTile, ...]:
        session, keeper = self._session, self._session.keeper
        async with self._updating:
            version = keeper.live.version
            if version != self._version:
                live, now = keeper.live, keeper.clock.now()
                await in_slices(self._rows.update(live, session.book, now))
                remembered = await keeper.ledger.memories(self._rows.devices)
                await in_slices(self._rows.update_gpus(live, now, remembered))
                self._tiles, self._version = self._rows.gpus, version
            return self._tiles

    async def _last_day(self) -> dict[str, int]:
        """By an index, at most once a minute."""
        now = self._session.keeper.clock.now()
        if self._counted is None or not now - MINUTE < self._counted <= now:
            self._events = await self._session.ledger.lines_by_type(now - DAY)
            self._counted = now
        return self._events

    async def _disk(self) -> Usage | None:
        directory = str(self._session.ledger.path.parent)
        try:
            return await in_thread(lambda: usage(directory), DISK)
        except (OSError, TimeoutError):
            return None

    async def _tested(self) -> tuple[Past, ...]:
        memories = await self._session.keeper.ledger.memories([self._node])
        return memories.get(self._node, EMPTY).tested


def of_machine(facts: MachineFacts, now: datetime) -> Iterator[GaugeMetricFamily]:
    yield from of_gpus(facts.tiles, now)
    yield from of_owners(facts.tiles, facts.cores)
    yield from of_acceptance(facts.tested)
    yield from of_storage(facts.storage)
    if facts.state is not None:
        yield gauge("gpukeeper_state_disk_free_bytes", {(): facts.state.free})
        yield gauge("gpukeeper_state_disk_used_ratio", {(): facts.state.used})
    if facts.events is not None:
        yield gauge("gpukeeper_events_last_day", {(name,): n for name, n in facts.events.items()}, "type")
    if facts.copy is not None:
        yield from of_copy(facts.copy)


def of_gpus(tiles: Iterable[GpuTile], now: datetime) -> Iterator[GaugeMetricFamily]:
    """A GPU of which only the number is known (of a cluster without measurements) is not exported."""
    gpus: dict[Device, list[GpuTile]] = {}
    for tile in tiles:
        if tile.device:
            gpus.setdefault((tile.place, tile.name.rpartition("/")[2], tile.device), []).append(tile)
    states = {gpu: min((one.state for one in found), key=ORDER.index) for gpu, found in gpus.items()}
    counts: Tally[tuple[str, ...]] = Tally()
    for gpu, found in gpus.items():
        counts[gpu[0], found[0].model, states[gpu].value] += 1
    yield gauge("gpukeeper_gpus", counts, "place", "model", "state")
    shown = {} if len(gpus) > MOST_GPUS else gpus
    by_state: Numbers = {(*gpu, states[gpu].value): 1 for gpu in shown}
    yield gauge("gpukeeper_gpu_state", by_state, *OF_A_GPU, "state")
    yield gauge("gpukeeper_gpu_use_ratio", _known(shown, _use), *OF_A_GPU)
    yield gauge("gpukeeper_gpu_memory_used_ratio", _known(shown, _memory), *OF_A_GPU)
    idle: Numbers = {
        gpu: (now - found[0].idle_since).total_seconds()
        for gpu, found in shown.items()
        if states[gpu] is GpuState.IDLE and found[0].idle_since is not None
    }
    yield gauge("gpukeeper_gpu_idle_seconds", idle, *OF_A_GPU)
    holders: Numbers = {
        (*gpu, one.platform, "" if isinstance(one.class_, Unknown) else one.class_, one.owner_word): 1
        for gpu, found in shown.items()
        for one in found
        if one.key
    }
    yield gauge("gpukeeper_gpu_holder", holders, *OF_A_GPU, "platform", "class", "owner")


def of_acceptance(tested: Iterable[Past]) -> Iterator[GaugeMetricFamily]:
    """Of each GPU the last run. Oldest first, so that the last one stays."""
    last: dict[str, Past] = {one.identity: one for one in tested}
    verdicts: Numbers = {(one.identity, one.verdict.value): 1 for one in last.values()}
    yield gauge("gpukeeper_acceptance_verdict", verdicts, "gpu", "verdict")
    times: Numbers = {(one.identity,): one.at.timestamp() for one in last.values()}
    yield gauge("gpukeeper_acceptance_timestamp_seconds", times, "gpu")


def of_copy(copy: CopyState) -> Iterator[GaugeMetricFamily]:
    yield gauge("gpukeeper_fleet_copy_connected", {(): copy.connected})
    yield gauge("gpukeeper_fleet_copy_lag_seconds", {} if copy.lag is None else {(): copy.lag})
    yield gauge("gpukeeper_fleet_copy_unsent_lines", {} if copy.unsent is None else {(): copy.unsent})


def _known(gpus: Mapping[Device, list[GpuTile]], value: Callable[[GpuTile], float | None]) -> Numbers:
    """The largest of what is known of each."""
    found = {gpu: [known for one in tiles if (known := value(one)) is not None] for gpu, tiles in gpus.items()}
    return {gpu: max(values) for gpu, values in found.items() if values}


def _use(tile: GpuTile) -> float | None:
    return tile.use / 100 if isinstance(tile.use, float | int) else None


def _memory(tile: GpuTile) -> float | None:
    used, total = tile.memory_used_mib, tile.memory_total_mib
    return None if isinstance(used, Unknown) or isinstance(total, Unknown) or not total else used / total
