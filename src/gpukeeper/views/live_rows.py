"""The rows of a machine's live view, made of the facts of a daemon and kept up to date: what did not change is not
built again. A row depends on its fact, on the facts of the same GPU, on what the ledger remembers of it, and on the
time, which matters only at moments that are known in advance: countdowns do not count, readers are sent the time
they run to. Pure: the same facts at the same time give the same rows, whatever was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from math import ceil

import msgspec

from gpukeeper.engine.live import STEP, STEPS, LiveFact, LiveState, UseHistory, step_of, step_start
from gpukeeper.lifecycle.claims import (
    ClaimState,
    GpuClaim,
    Inventory,
    about_subject,
    blocks_use,
    claim_on,
    claim_state,
    devices_of,
    on_device,
    runs_on_gpus,
    unheld,
    why_nothing,
)
from gpukeeper.lifecycle.decide import NOT_HELD
from gpukeeper.lifecycle.forecast import NextActions, as_next
from gpukeeper.lifecycle.rules import max_runtime
from gpukeeper.lifecycle.rules.hold import only_of, precedence, suspends
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.gpu import CheckResult
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import EMPTY, Memory, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import (
    NOT_MEASURED,
    Delta,
    GpuState,
    GpuTile,
    MachineView,
    Row,
    ShownHold,
    WorkloadLine,
    gpu_order,
    row_id,
)

DIRTY = (CheckResult.DIRTY, CheckResult.RESET_FAILED, CheckResult.ORPHANED_SHARED)
NOTHING = NextActions("", ())  # comes
OLD = timedelta(minutes=2)  # a measurement older than this is marked
NEVER = datetime.max.replace(tzinfo=UTC)
_MOMENT = timedelta(microseconds=1)
_UNUSED = (ClaimState.KEPT, ClaimState.FREE, ClaimState.UNSURE, ClaimState.QUARANTINE)  # nothing runs that could use it
_STATES = {
    ClaimState.FREE: GpuState.FREE,
    ClaimState.BARE: GpuState.OUTSIDE,
    ClaimState.QUARANTINE: GpuState.QUARANTINED,
    ClaimState.UNSURE: GpuState.UNKNOWN,
}


def gpu_tile(
    claim: GpuClaim, device: Subject | None, coming: NextActions, memory: Memory, now: datetime, machine: str = ""
) -> GpuTile:
    """`coming`: to its holder. `memory`: what the ledger remembers of the device."""
    return GpuTile(
        key=claim.key,
        name=claim.name,
        place=claim.place,
        how=claim.how,
        device=claim.device,
        holder=claim.by if claim.holder is None else claim.holder.path,
        owner=claim.owner,
        class_=coming.class_,
        since=claim.since,
        use=_use(claim, device),
        use_is_old=claim.use_at is not None and now - claim.use_at >= OLD,
        memory_used_mib=_mib(device, "memory_used_mib"),
        memory_total_mib=_mib(device, "memory_total_mib"),
        steps=coming.steps,
        reason=coming.reason or claim.next,
        id=row_id(machine, claim.place, claim.device, claim.key),
        workload=row_id(machine, claim.key) if claim.key else "",
        platform="" if claim.holder is None else claim.holder.platform,
        state=_state(claim, memory),
        model="" if device is None else device.labels.get("model", ""),
    )


def live_tile(tile: GpuTile, fact: LiveFact | None, history: UseHistory | None, now: datetime) -> GpuTile:
    """With what a daemon knows of its holder (`fact`), and of how it was used."""
    waste = None if fact is None else fact.waste
    return msgspec.structs.replace(
        tile,
        state=tile.state if waste is None else GpuState.IDLE,
        idle_since=None if waste is None else waste.since,
        hold=None if fact is None else _hold(fact, now),
        history_start=None if history is None else step_start(history.start),
        history=() if history is None else _until(history, now),
    )


def _use(claim: GpuClaim, device: Subject | None) -> float | Unknown | None:
    if claim.how in _UNUSED:
        return None
    if not isinstance(claim.use, Unknown) or claim.holder is not None or device is None:
        return claim.use
    words = device.labels.get("utilisation_percent", "")  # held by processes that are no workload
    return float(words) if words.isascii() and words.isdecimal() else claim.use


def _mib(device: Subject | None, label: str) -> int | Unknown:
    words = "" if device is None else device.labels.get(label, "")
    return int(words) if words.isascii() and words.isdecimal() else NOT_MEASURED


def tile_moments(claim: GpuClaim, fact: LiveFact | None, history: UseHistory | None, now: datetime) -> list[datetime]:
    """When it changes by time alone, earliest or not."""
    found = [] if history is None else [step_start(step_of(now)), step_start(step_of(now) + 1)]
    if claim.use_at is not None:
        found.append(claim.use_at + OLD)
    if fact is not None:
        found += [one.at for one in fact.ahead]
        found += [one.until for one in fact.view.memory.holds]
        found += [] if fact.decision.due is None else [fact.decision.due]
    return found


def next_of(fact: LiveFact, now: datetime, *, would: bool) -> NextActions:
    """A pass decides on nothing that the place does not offer."""
    return as_next(fact.ahead, fact.decision, fact.view.subject.class_, now, would=would, offered=True)


def workload_line(fact: LiveFact, machine: str, now: datetime, *, would: bool = False) -> WorkloadLine:
    """`would`: the policy's mode is plan."""
    subject, decision, memory = fact.view.subject, fact.decision, fact.view.memory
    ref = subject.ref
    held = _hold(fact, now)
    warned = max(memory.warnings, key=lambda one: one.at, default=None)
    announced = None if warned is None or _is_suspended(warned.rule, memory, now) else warned.until
    ended = (subject.ended,) if subject.state is State.ENDED else ()
    times = (*ended, subject.started, subject.created)
    return WorkloadLine(
        id=row_id(machine, ref.key),
        key=ref.key,
        path=ref.path,
        platform=ref.platform,
        place=ref.place,
        kind=ref.kind,
        name=ref.name,
        state=subject.state,
        owner=subject.owner,
        owner_verified=subject.owner_verified,
        class_=decision.class_ or str(subject.class_),
        gpus=decision.gpus if runs_on_gpus(subject) or not isinstance(decision.gpus, Unknown) else 0,
        since=next((one for one in times if isinstance(one, datetime)), None),
        next=decision.word,
        due=decision.due,
        rule=decision.rule,
        verdict=decision.verdict,
        reason=decision.reason,
        steps=next_of(fact, now, would=would).steps,
        idle_since=None if fact.waste is None else fact.waste.since,
        held_by="" if held is None else held.by,
        hold_until=None if held is None else held.until,
        hold_only=() if held is None else held.only,
        hold_but_max_runtime=held is not None and held.but_max_runtime,
        warned=None if warned is None else warned.at,
        stop_announced=None if announced is None or announced < now else announced,
        size=None if isinstance(subject.size, Unknown) else subject.size,
    )


def _hold(fact: LiveFact, now: datetime) -> ShownHold | None:
    memory = fact.view.memory
    last = max((one for one in memory.holds if one.until > now), key=precedence, default=None)
    if last is None:
        return None
    spared = fact.max_runtime is not None and not _is_suspended(max_runtime.NAME, memory, now)
    return ShownHold(last.by, last.until, spared, only_of(last))


def _is_suspended(rule: str, memory: Memory, now: datetime) -> bool:
    """By a hold: what was announced does not happen while it lasts."""
    holds = [one for one in memory.holds if one.until > now]
    return any(suspends(one, rule, holdable=rule not in NOT_HELD) for one in holds)


def line_moments(fact: LiveFact) -> list[datetime]:
    """When it changes by time alone, earliest or not."""
    memory = fact.view.memory
    return [
        *(one.until for one in memory.holds),
        *(one.until for one in memory.warnings if one.until is not None),
        *(one.at for one in fact.ahead),
    ]


def next_moment(moments: Iterable[datetime], now: datetime) -> datetime:
    """The first from now on. One that is just now may still have to come: some values change after it."""
    return min((one if one > now else one + _MOMENT for one in moments if one >= now), default=NEVER)


def _until(history: UseHistory, now: datetime) -> tuple[float | None, ...]:
    """Whole percents: a tile that did not change visibly is not sent again. Steps without a measurement up to now are
    None."""
    means = tuple(None if one is None else float(round(one)) for one in history.means())
    missing = ceil((now - step_start(history.start)) / STEP) - len(means)
    return means + (None,) * min(max(missing, 0), STEPS)


def _state(claim: GpuClaim, memory: Memory) -> GpuState:
    gpu = memory.gpu
    if claim.how in (ClaimState.FREE, ClaimState.UNSURE) and gpu is not None and gpu.result in DIRTY:
        return GpuState.DIRTY
    return _STATES.get(claim.how, GpuState.HELD)


Device = tuple[str, str]  # place, and uid; without a uid: a workload there has a GPU, and which is unknown
GONE = 10_000  # ids of rows that are kept for readers


class _Entry(msgspec.Struct, frozen=True):
    """A fact, how it has its devices, and until when that and its line stay as they are."""

    fact: LiveFact
    how: ClaimState | None
    until: datetime

    @property
    def devices(self) -> list[Device]:
        """Those it has now."""
        subject = self.fact.view.subject
        return [] if self.how is None else [(subject.ref.place, one) for one in devices_of(subject)]


class _Tiles(msgspec.Struct, frozen=True):
    """Of one device. `added`: the values in the histories that are drawn in them."""

    ids: tuple[str, ...] = ()
    until: datetime = NEVER
    added: int = 0


class LiveRows:
    """`generation` rises with each update. A reader with the rows of an older one gets by `delta` what changed since,
    unless that is before `oldest`."""

    def __init__(self, machine: str) -> None:
        self.generation = 0
        self.oldest = 1
        self._machine = machine
        self._gpus: dict[str, GpuTile] = {}
        self._workloads: dict[str, WorkloadLine] = {}
        self._changed: dict[str, int] = {}  # by id: the generation; of rows that are gone, too
        self._entries: dict[str, _Entry] = {}  # by key
        self._holders: dict[Device, dict[str, None]] = {}  # keys, in order
        self._tiles: dict[Device, _Tiles] = {}
        self._inventory = Inventory(())
        self._remembered: Mapping[str, Memory] = {}
        self._doubtful: frozenset[str] = frozenset()
        self._book: Rulebook | None = None
        # What is left to do.
        self._dirty: set[Device] = set()
        self._to_note: set[str] = set()
        self._inventory_changed = False
        self._about_subjects: dict[str, tuple[str, ...]] = {}  # notes, by key
        self._about_devices: dict[Device, tuple[str, ...]] = {}

    @property
    def devices(self) -> list[str]:
        """Keys of the GPUs."""
        return [one.ref.key for one in self._inventory.devices.values()]

    @property
    def gpus(self) -> tuple[GpuTile, ...]:
        return tuple(sorted(self._gpus.values(), key=gpu_order))

    @property
    def notes(self) -> tuple[str, ...]:
        found = (*self._about_subjects.values(), *self._about_devices.values())
        return tuple(sorted(words for one in found for words in one))

    def view(self, head: MachineView) -> MachineView:
        """`head`: everything but the rows."""
        workloads = tuple(sorted(self._workloads.values(), key=lambda one: one.path))
        return msgspec.structs.replace(head, gpus=self.gpus, workloads=workloads)

    def delta(self, head: MachineView, since: int) -> Delta:
        """What changed after that generation; of one that is too old, everything."""
        whole = since < self.oldest
        ids = [one for one, generation in self._changed.items() if whole or generation > since]
        return Delta(
            head=head,
            gpus=tuple(self._gpus[one] for one in ids if one in self._gpus),
            workloads=tuple(self._workloads[one] for one in ids if one in self._workloads),
            gone=() if whole else tuple(one for one in ids if one not in self._gpus and one not in self._workloads),
        )

    def update(self, live: LiveState, book: Rulebook, now: datetime) -> Iterator[None]:
        """The first part of an update: facts, and the lines of workloads. Yields after each small part of the work, so
        that others may run. What is not finished is continued by the next update."""
        self.generation += 1
        self._forget()
        facts = {key: fact for place in live.places.values() for key, fact in place.facts.items()}
        changed = self._stale(facts, now, everything=book is not self._book)
        changed += [key for key in self._entries if key not in facts]
        for key in changed:
            fact = facts.get(key)
            self._replace(key, None if fact is None else _entry(fact, book, now), book, now)
            yield
        self._book = book
        self._take_inventory()
        self._doubt(frozenset(key[1] for key, place in live.places.items() if place.state.unseen))

    def update_gpus(self, live: LiveState, now: datetime, remembered: Mapping[str, Memory]) -> Iterator[None]:
        """The second part, at the same time: tiles and notes. `remembered`: of each of `devices`."""
        self._remember(remembered)
        while self._to_note:
            self._note(self._to_note.pop())
            yield
        self._dirty |= self._affected(live, now)
        while self._dirty:
            self._rebuild(self._dirty.pop(), live, now)
            yield

    def _forget(self) -> None:
        """Of rows that are gone only so many are kept; a reader that does not know of them gets everything."""
        if len(self._changed) > len(self._gpus) + len(self._workloads) + GONE:
            self._changed = {
                one: generation
                for one, generation in self._changed.items()
                if one in self._gpus or one in self._workloads
            }
            self.oldest = self.generation

    def _stale(self, facts: Mapping[str, LiveFact], now: datetime, *, everything: bool) -> list[str]:
        if everything:
            return list(facts)
        known = self._entries
        return [
            key
            for key, fact in facts.items()
            if (entry := known.get(key)) is None or entry.fact is not fact or entry.until <= now
        ]

    def _replace(self, key: str, after: _Entry | None, book: Rulebook, now: datetime) -> None:
        before = self._entries.pop(key, None)
        for device in () if before is None else before.devices:
            self._holders[device].pop(key, None)
            if not self._holders[device]:
                del self._holders[device]
        if after is not None:
            self._entries[key] = after
            for device in after.devices:
                self._holders.setdefault(device, {})[key] = None
        for entry in (before, after):
            if entry is not None:
                self._dirty.update(entry.devices)
                if _is_device(entry):
                    self._dirty.add(_itself(entry))
                    self._inventory_changed = True
        self._to_note.add(key)
        line = None
        if after is not None and not _is_device(after):
            line = workload_line(after.fact, self._machine, now, would=book.policy.mode is Mode.PLAN)
        self._set(self._workloads, row_id(self._machine, key), line)

    def _take_inventory(self) -> None:
        if not self._inventory_changed:
            return
        before = self._inventory
        self._inventory = Inventory([one.fact.view.subject for one in self._entries.values() if _is_device(one)])
        if not self._inventory.is_like(before):  # other devices, or cut otherwise: that concerns all
            self._dirty.update(self._inventory.devices, before.devices, self._holders, self._tiles)
            self._to_note.update(self._entries)
        self._inventory_changed = False

    def _doubt(self, doubtful: frozenset[str]) -> None:
        if doubtful != self._doubtful:
            self._to_note.update(self._entries)
        self._doubtful = doubtful

    def _remember(self, remembered: Mapping[str, Memory]) -> None:
        if remembered is self._remembered:
            return
        before, self._remembered = self._remembered, remembered
        for key in {**before, **remembered}:
            if key in self._entries and before.get(key, EMPTY) != remembered.get(key, EMPTY):
                self._dirty.add(_itself(self._entries[key]))
                self._to_note.add(key)

    def _note(self, key: str) -> None:
        entry = self._entries.get(key)
        if entry is None:
            self._about_subjects.pop(key, None)
            return
        found = about_subject(
            entry.fact.view.subject,
            self._remembered.get(key),
            self._inventory,
            self._doubtful,
            has_device=entry.how is not None,
        )
        words = tuple(one.words for one in found)
        if words:
            self._about_subjects[key] = words
        else:
            self._about_subjects.pop(key, None)

    def _affected(self, live: LiveState, now: datetime) -> set[Device]:
        """The devices that overlap dirty ones, those that change by time, and those with new measurements."""
        found = {(place, one) for place, device in self._dirty for one in self._inventory.overlapping(place, device)}
        unsure = {place for place, device in self._dirty if not device}
        if unsure:
            found |= {one for one in self._inventory.devices if one[0] in unsure}
        for device, tiles in self._tiles.items():
            if tiles.until <= now or tiles.added != self._added(device, live):
                found.add(device)
        return found

    def _added(self, device: Device, live: LiveState) -> int:
        found = [live.history.get((key, device[1])) for key in self._holders.get(device, ())]
        return sum(one.added for one in found if one is not None)

    def _rebuild(self, device: Device, live: LiveState, now: datetime) -> None:
        """The tiles of one device, and the notes about it."""
        subject = self._inventory.devices.get(device)
        memory = EMPTY if subject is None else self._remembered.get(subject.ref.key, EMPTY)
        would = self._book is not None and self._book.policy.mode is Mode.PLAN
        ids, moments = [], []
        for claim in self._claims(device, now):
            fact = self._entries[claim.key].fact if claim.key else None
            history = live.history.get((claim.key, claim.device))
            coming = NOTHING if fact is None else next_of(fact, now, would=would)
            tile = live_tile(gpu_tile(claim, subject, coming, memory, now, self._machine), fact, history, now)
            self._set(self._gpus, tile.id, tile)
            ids.append(tile.id)
            moments += tile_moments(claim, fact, history, now)
        before = self._tiles.pop(device, _Tiles())
        for gone in set(before.ids) - set(ids):
            self._set(self._gpus, gone, None)
        if ids:
            self._tiles[device] = _Tiles(tuple(ids), next_moment(moments, now), self._added(device, live))
        self._note_device(device)

    def _claims(self, device: Device, now: datetime) -> Iterator[GpuClaim]:
        for key in self._holders.get(device, ()):
            entry = self._entries[key]
            assert entry.how is not None
            decision = entry.fact.decision
            words = why_nothing(decision)
            yield claim_on(device[1], entry.fact.view, entry.how, self._inventory, words, decision.due, now)
        subject = self._inventory.devices.get(device)
        if subject is not None:
            around = [(device[0], one) for one in self._inventory.overlapping(*device)]
            taken = device in self._inventory.cut or any(self._is_taken(one) for one in around)
            memory = self._remembered.get(subject.ref.key, EMPTY)
            shared = any(one in self._holders for one in around)
            free = unheld(subject, memory, taken=taken, perhaps=self._is_taken((device[0], "")), shared=shared)
            yield from () if free is None else (free,)

    def _is_taken(self, device: Device) -> bool:
        hows = (self._entries[key].how for key in self._holders.get(device, ()))
        return any(how is not None and blocks_use(how) for how in hows)

    def _note_device(self, device: Device) -> None:
        found: tuple[str, ...] = ()
        if device[1] and device in self._holders:
            around = [(device[0], one) for one in self._inventory.overlapping(*device)]
            holders = {one: [self._having(key) for key in self._holders.get(one, ())] for one in around}
            found = tuple(one.words for one in on_device(*device, holders, self._inventory))
        if found:
            self._about_devices[device] = found
        else:
            self._about_devices.pop(device, None)

    def _having(self, key: str) -> tuple[Subject, ClaimState]:
        entry = self._entries[key]
        assert entry.how is not None
        return entry.fact.view.subject, entry.how

    def _set(self, rows: dict[str, Row], id_: str, row: Row | None) -> None:
        """A row that is equal stays the one it was, and counts as unchanged."""
        if row is None:
            if rows.pop(id_, None) is not None:
                self._changed[id_] = self.generation
        elif rows.get(id_) != row:
            rows[id_] = row
            self._changed[id_] = self.generation


def _entry(fact: LiveFact, book: Rulebook, now: datetime) -> _Entry:
    how = claim_state(fact.view, book, now)
    if how is ClaimState.KEPT:  # until a time that follows from the settings: checked at each update
        return _Entry(fact, how, now)
    device = fact.view.subject.shape is Shape.DEVICE
    return _Entry(fact, how, NEVER if device else next_moment(line_moments(fact), now))


def _is_device(entry: _Entry) -> bool:
    return entry.fact.view.subject.shape is Shape.DEVICE


def _itself(entry: _Entry) -> Device:
    ref = entry.fact.view.subject.ref
    return (ref.place, ref.uid)
