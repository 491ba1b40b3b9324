"""One machine as of now: its GPUs, workloads and places. Behind the web dashboard and the fleet's copy.

A `MachineView` is complete. A `Delta` is what changed since another one, so that what is sent follows what happened and
not the size of the fleet. `for_reader` removes what a reader may not see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from hashlib import blake2b
from math import ceil

import msgspec

from gpukeeper.engine.live import STEP, LiveFact, LivePlace, LiveState, UseHistory, step_start
from gpukeeper.engine.outlook import NOT_SHOWN, PolicyHead
from gpukeeper.engine.ports import PlaceKey
from gpukeeper.lifecycle import claims
from gpukeeper.lifecycle.claims import ClaimState, GpuClaim, runs_on_gpus
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.condition import CheckResult
from gpukeeper.model.decision import Unseen, Verdict
from gpukeeper.model.direct import direct
from gpukeeper.model.memory import EMPTY, Memory
from gpukeeper.model.subject import Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.top import GpuLine, NextActions, NextStep, gpu_line
from gpukeeper.views.workload import next_word

DIRTY = (CheckResult.DIRTY, CheckResult.RESET_FAILED, CheckResult.ORPHANED_SHARED)


@direct
class GpuState(StrEnum):
    """How a GPU is in one word. IDLE: held by a running workload and not used for half an hour or longer."""

    FREE = "free"
    HELD = "held"
    IDLE = "idle"
    OUTSIDE = "outside"
    DIRTY = "dirty"
    QUARANTINED = "quarantined"
    UNKNOWN = "unknown"


_STATES = {
    ClaimState.FREE: GpuState.FREE,
    ClaimState.BARE: GpuState.OUTSIDE,
    ClaimState.QUARANTINE: GpuState.QUARANTINED,
    ClaimState.UNSURE: GpuState.UNKNOWN,
}


class GpuTile(GpuLine, frozen=True, kw_only=True):
    """`history`: mean use in steps of five minutes from `history_start` on; None: not measured. `as_of`: its machine
    was not seen since then, when its state was `last_state`; None: it is current."""

    id: str
    workload: str = ""  # id of the holder's line
    platform: str
    state: GpuState
    model: str = ""
    idle_since: datetime | None = None
    history_start: datetime | None = None
    history: tuple[float | None, ...] = ()
    as_of: datetime | None = None
    last_state: GpuState | None = None

    @property
    def owner_word(self) -> str:
        return self.owner if isinstance(self.owner, str) else "unknown"


class WorkloadLine(msgspec.Struct, frozen=True, kw_only=True):
    """`next`: the action, or how it is kept. `since`: start of what runs, end of what ended."""

    id: str
    key: str
    path: str
    platform: str
    place: str
    kind: str
    name: str
    state: State | Unknown
    owner: str | Unknown | None
    owner_verified: bool
    class_: str
    gpus: int | Unknown
    since: datetime | None
    next: str
    due: datetime | None
    rule: str
    verdict: Verdict
    reason: str
    steps: tuple[NextStep, ...] = ()
    idle_since: datetime | None = None
    held_by: str = ""
    hold_until: datetime | None = None
    warned: datetime | None = None
    stop_announced: datetime | None = None
    size: int | Unknown | None = None
    as_of: datetime | None = None  # its machine was not seen since then; None: it is current

    @property
    def uid(self) -> str:
        """Requests name it by this: another object may have its name by now."""
        return self.key[len(self.platform) + len(self.place) + 2 :]


class PlaceState(msgspec.Struct, frozen=True, kw_only=True):
    """`steps` and `deferred`: of the last pass; keys of workloads, in order."""

    platform: str
    place: str
    at: datetime
    seen: int
    running: int
    unseen: tuple[Unseen, ...] = ()
    breaker: str | None = None
    steps: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()
    left_out: int = 0


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    machine: str
    at: datetime
    version: str  # of gpukeeper
    policy: PolicyHead
    paused: str | None
    places: tuple[PlaceState, ...]
    gpus: tuple[GpuTile, ...]
    workloads: tuple[WorkloadLine, ...]
    notes: tuple[str, ...] = ()  # contradictions that somebody should check
    not_seen_since: datetime | None = None  # what is shown is old; None: it is current


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """From one view of a machine to the next. `head`: everything but the rows; the order of rows is theirs by id."""

    head: MachineView  # without rows
    gpus: tuple[GpuTile, ...] = ()  # new or changed
    workloads: tuple[WorkloadLine, ...] = ()
    gone: tuple[str, ...] = ()  # ids


def machine_view(
    live: LiveState,
    book: Rulebook,
    now: datetime,
    *,
    machine: str,
    version: str,
    policy: PolicyHead,
    paused: str | None,
    gpus: Mapping[str, Memory],
) -> MachineView:
    """`gpus`: what the ledger remembers of each GPU, by key."""
    facts = [fact for place in live.places.values() for fact in place.facts.values()]
    return MachineView(
        machine=machine,
        at=now,
        version=version,
        policy=policy,
        paused=paused,
        places=tuple(_place(key, place) for key, place in sorted(live.places.items())),
        gpus=gpu_tiles(live, facts, book, now, machine, gpus),
        workloads=tuple(
            sorted(
                (_workload(one, machine, now) for one in facts if one.view.subject.shape is not Shape.DEVICE),
                key=lambda line: line.path,
            )
        ),
        notes=_notes(live, facts, book, now, gpus),
    )


def difference(before: MachineView | None, after: MachineView) -> Delta:
    head = msgspec.structs.replace(after, gpus=(), workloads=())
    if before is None:
        return Delta(head=head, gpus=after.gpus, workloads=after.workloads)
    gpus, workloads = {one.id: one for one in before.gpus}, {one.id: one for one in before.workloads}
    kept = {one.id for one in after.gpus} | {one.id for one in after.workloads}
    return Delta(
        head=head,
        gpus=tuple(one for one in after.gpus if gpus.get(one.id) != one),
        workloads=tuple(one for one in after.workloads if workloads.get(one.id) != one),
        gone=tuple(one for one in (*gpus, *workloads) if one not in kept),
    )


def patched(before: MachineView | None, delta: Delta) -> MachineView:
    """The view after the delta, rows in order of place and name."""
    gone = set(delta.gone)
    gpus = {one.id: one for one in before.gpus if one.id not in gone} if before is not None else {}
    workloads = {one.id: one for one in before.workloads if one.id not in gone} if before is not None else {}
    gpus.update((one.id, one) for one in delta.gpus)
    workloads.update((one.id, one) for one in delta.workloads)
    return msgspec.structs.replace(
        delta.head,
        gpus=tuple(sorted(gpus.values(), key=_gpu_order)),
        workloads=tuple(sorted(workloads.values(), key=lambda one: one.path)),
    )


def for_reader(view: MachineView, who: str, *, admin: bool) -> MachineView:
    """What `who` may see: of the work of others what `observe` shows, but no reasons."""
    if admin:
        return view
    return msgspec.structs.replace(
        view,
        gpus=tuple(one if one.owner == who else reduced(one) for one in view.gpus),
        workloads=tuple(one if one.owner == who else reduced_line(one) for one in view.workloads),
        notes=(),
    )


def reduced(tile: GpuTile) -> GpuTile:
    return msgspec.structs.replace(tile, reason=NOT_SHOWN) if tile.reason and tile.key else tile


def reduced_line(line: WorkloadLine) -> WorkloadLine:
    return msgspec.structs.replace(line, reason=NOT_SHOWN)


def row_id(machine: str, *parts: str) -> str:
    """Short, stable, and fit for an attribute of a page."""
    return blake2b("\0".join((machine, *parts)).encode(errors="surrogateescape"), digest_size=9).hexdigest()


def _place(key: PlaceKey, place: LivePlace) -> PlaceState:
    last = place.last
    return PlaceState(
        platform=key[0],
        place=key[1],
        at=last.at,
        seen=last.seen,
        running=last.running,
        unseen=last.unseen,
        breaker=last.breaker,
        steps=tuple(one.seen.ref.key for one in last.steps),
        deferred=tuple(one.seen.ref.key for one in last.deferred),
        left_out=place.left_out,
    )


def gpu_tiles(
    live: LiveState,
    facts: Iterable[LiveFact],
    book: Rulebook,
    now: datetime,
    machine: str,
    remembered: Mapping[str, Memory],
) -> tuple[GpuTile, ...]:
    """One for each GPU and holder."""
    by_key = {one.view.subject.ref.key: one for one in facts}
    views = [one.view for one in by_key.values()]
    decisions = {key: one.decision for key, one in by_key.items()}
    devices = {(s.ref.place, s.ref.uid): s for view in views if (s := view.subject).shape is Shape.DEVICE}
    found = claims.claims(views, book, now, recorded=remembered, decisions=decisions)
    tiles = [_tile(one, devices.get((one.place, one.device)), by_key, live, now, machine, remembered) for one in found]
    return tuple(sorted(tiles, key=_gpu_order))


def _gpu_order(tile: GpuTile) -> tuple[str, int, str, str, str, str]:
    """A GPU stays where it is, held or free: what is free has no platform."""
    return (tile.place, len(tile.name), tile.name, tile.device, tile.platform, tile.holder)


def _tile(
    claim: GpuClaim,
    device: Subject | None,
    facts: Mapping[str, LiveFact],
    live: LiveState,
    now: datetime,
    machine: str,
    remembered: Mapping[str, Memory],
) -> GpuTile:
    key = "" if claim.holder is None else claim.holder.key
    fact = facts.get(key)
    waste = None if fact is None else fact.waste
    line = gpu_line(claim, device, {} if fact is None else {key: _next(fact, now)}, now)
    history = live.history.get((key, claim.device))
    memory = remembered.get(device.ref.key, EMPTY) if device is not None else EMPTY
    return GpuTile(
        **{name: getattr(line, name) for name in GpuLine.__struct_fields__},
        id=row_id(machine, claim.place, claim.device, key),
        workload="" if claim.holder is None else row_id(machine, key),
        platform=claim.holder.platform if claim.holder is not None else "",
        state=_state(claim, idle=waste is not None, memory=memory),
        model="" if device is None else device.labels.get("model", ""),
        idle_since=None if waste is None else waste.since,
        history_start=None if history is None else step_start(history.start),
        history=() if history is None else _until(history, now),
    )


def _until(history: UseHistory, now: datetime) -> tuple[float | None, ...]:
    """Rounded: a tile that did not change visibly is not sent again. Steps without a measurement up to now are None."""
    means = tuple(None if one is None else round(one, 1) for one in history.means())
    missing = ceil((now - step_start(history.start)) / STEP) - len(means)
    return means + (None,) * min(max(missing, 0), 72)


def _state(claim: GpuClaim, *, idle: bool, memory: Memory) -> GpuState:
    if idle:
        return GpuState.IDLE
    gpu = memory.gpu
    if claim.how in (ClaimState.FREE, ClaimState.UNSURE) and gpu is not None and gpu.result in DIRTY:
        return GpuState.DIRTY
    return _STATES.get(claim.how, GpuState.HELD)


def _next(fact: LiveFact, now: datetime) -> NextActions:
    steps = tuple(NextStep(one.action.value, one.at if one.at > now else None, one.rule) for one in fact.ahead)
    class_ = fact.decision.class_ or fact.view.subject.class_
    return NextActions(class_, steps, fact.ahead[-1].reason if fact.ahead else "")


def _workload(fact: LiveFact, machine: str, now: datetime) -> WorkloadLine:
    subject, decision, memory = fact.view.subject, fact.decision, fact.view.memory
    ref = subject.ref
    hold = max((one for one in memory.holds if one.until > now), key=lambda one: one.until, default=None)
    warned = max(memory.warnings, key=lambda one: one.at, default=None)
    times = (
        (subject.ended, subject.started, subject.created)
        if subject.state is State.ENDED
        else (
            subject.started,
            subject.created,
        )
    )
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
        next=next_word(decision),
        due=decision.due,
        rule=decision.rule,
        verdict=decision.verdict,
        reason=decision.reason,
        steps=_next(fact, now).steps,
        idle_since=None if fact.waste is None else fact.waste.since,
        held_by="" if hold is None else hold.by,
        hold_until=None if hold is None else hold.until,
        warned=None if warned is None else warned.at,
        stop_announced=None if warned is None or warned.until is None or warned.until < now else warned.until,
        size=None if isinstance(subject.size, Unknown) else subject.size,
    )


def _notes(
    live: LiveState, facts: Iterable[LiveFact], book: Rulebook, now: datetime, remembered: Mapping[str, Memory]
) -> tuple[str, ...]:
    doubtful = {key[1] for key, place in live.places.items() if place.last.unseen}
    views = [one.view for one in facts]
    return tuple(one.words for one in claims.findings(views, book, now, recorded=remembered, doubtful=doubtful))
