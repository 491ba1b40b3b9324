"""Series of the GPUs of a machine and their owners, of its last acceptance runs, events and storage, and of its copy in
the fleet database.

At most MOST_GPUS are exported one by one; beyond that only the sums. What was not measured has no series.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta

import msgspec
from prometheus_client.core import GaugeMetricFamily

from gpukeeper.acceptance.recording import ref_of
from gpukeeper.blocking import in_thread
from gpukeeper.disk.usage import Usage, usage
from gpukeeper.engine.slices import in_slices
from gpukeeper.interfaces.telemetry.owners import cores_by_owner, of_owners
from gpukeeper.interfaces.telemetry.series import gauge
from gpukeeper.interfaces.telemetry.storage import StorageFacts, StorageWatch, of_storage
from gpukeeper.ledger.copy.state import CopyState
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.grade import Past
from gpukeeper.model.memory import EMPTY
from gpukeeper.model.policy import DAY, MINUTE
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import GpuState, GpuTile
from gpukeeper.views.live_rows import LiveRows
from gpukeeper.wiring.benches import node_name
from gpukeeper.wiring.session import Session

MOST_GPUS = 2_000
DISK = timedelta(seconds=2)  # to read how full the disk with the ledger is
OF_A_GPU = ("place", "gpu", "uuid")
# Of several holders of one GPU, the state that comes first here is the GPU's.
ORDER = (
    *(GpuState.QUARANTINED, GpuState.DIRTY, GpuState.OUTSIDE, GpuState.HELD, GpuState.IDLE),
    *(GpuState.UNKNOWN, GpuState.FREE),
)
Device = tuple[str, str, str]  # place, name, uuid
Numbers = dict[tuple[str, ...], float]


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
