"""From the facts of a daemon to the rows of its live view: one tile, one line; and at which moments a row
changes although its facts stay the same. Countdowns do not count: readers are sent the time that they run to.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from math import ceil

import msgspec

from gpukeeper.engine.live import STEP, STEPS, LiveFact, UseHistory, step_of, step_start
from gpukeeper.lifecycle.claims import ClaimState, GpuClaim, runs_on_gpus
from gpukeeper.lifecycle.coming import NextActions, as_next
from gpukeeper.lifecycle.decide import NOT_HELD
from gpukeeper.lifecycle.rules import max_runtime
from gpukeeper.lifecycle.rules.hold import only_of, precedence, suspends
from gpukeeper.model.condition import CheckResult
from gpukeeper.model.memory import Memory
from gpukeeper.model.subject import State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import NOT_MEASURED, GpuState, GpuTile, ShownHold, WorkloadLine, row_id

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
