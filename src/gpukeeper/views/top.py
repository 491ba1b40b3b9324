"""Every GPU with its use, its holder and what happens to that next, by which rule. Behind `top`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.engine.fleet import FleetSnapshot
from gpukeeper.engine.outlook import Outlooks
from gpukeeper.lifecycle.claims import ClaimState, GpuClaim, why_nothing
from gpukeeper.lifecycle.coming import NextActions, NextStep, act_of, steps_of
from gpukeeper.lifecycle.narrow import Narrow
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Decision
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.fleet import findings_view, unseen_everywhere, unseen_lines
from gpukeeper.views.gpus import claims_of, upcoming_of

SORTS = ("gpu", "use", "memory", "owner", "next")
NOT_MEASURED = Unknown("not measured")
OLD = timedelta(minutes=2)  # a measurement older than this is marked
_UNUSED = (ClaimState.KEPT, ClaimState.FREE, ClaimState.UNSURE, ClaimState.QUARANTINE)  # nothing runs that could use it


class GpuLine(msgspec.Struct, frozen=True, kw_only=True):
    """One device and one holder. `use`: percent; None: nothing runs on it. `steps`: what comes if nothing changes,
    up to the act and the removal that follows it; `reason`: why, or why nothing comes."""

    key: str  # of the holder
    name: str
    place: str
    how: ClaimState
    device: str = ""  # empty: unknown which
    count: int = 1  # of devices, if they are not known one by one
    holder: str = ""  # its path, or the processes
    owner: str | Unknown | None = None
    class_: str | Unknown = ""
    since: datetime | None = None
    use: float | Unknown | None = None
    use_is_old: bool = False
    memory_used_mib: int | Unknown = NOT_MEASURED
    memory_total_mib: int | Unknown = NOT_MEASURED
    steps: tuple[NextStep, ...] = ()
    reason: str = ""


class TopView(msgspec.Struct, frozen=True, kw_only=True):
    """`notes`: sentences about what could not be seen and what does not fit together."""

    at: datetime
    mode: Mode
    gpus: tuple[GpuLine, ...]
    paused: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> Counter[ClaimState]:
        """Devices by how they are held; one with several holders counts once."""
        devices = {(one.place, one.device or one.key): one for one in reversed(self.gpus)}
        found: Counter[ClaimState] = Counter()
        for one in devices.values():
            found[one.how] += one.count
        return found


def top_view(found: FleetSnapshot, book: Rulebook, narrow: Narrow, now: datetime, paused: str | None = None) -> TopView:
    claims = claims_of(found, book, narrow, now)
    devices = {(one.ref.place, one.ref.uid): one for view in found.views if (one := view.subject).shape is Shape.DEVICE}
    upcoming = upcoming_of(found, claims, book, now)
    return TopView(
        at=now,
        mode=book.policy.mode,
        gpus=tuple(gpu_line(one, devices.get((one.place, one.device)), upcoming, now) for one in claims),
        paused=paused,
        notes=(*unseen_everywhere(found.unseen), *(one.words for one in findings_view(found, book, narrow, now))),
    )


def gpu_line(claim: GpuClaim, device: Subject | None, upcoming: Mapping[str, NextActions], now: datetime) -> GpuLine:
    key = "" if claim.holder is None else claim.holder.key
    coming = upcoming.get(key, NextActions("", ()))
    return GpuLine(
        key=key,
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


def with_notes(view: TopView, notes: Sequence[str]) -> TopView:
    return msgspec.structs.replace(view, notes=(*view.notes, *notes))


def with_daemon_plan(view: TopView, plan: Outlooks) -> TopView:
    """With the decisions of a daemon, which knows holds and warnings that are not known here; and with the workloads
    that only the daemon sees."""
    decisions = {d.seen.ref.key: d for place in plan.places for d in place.decisions}
    mode = plan.policy.mode
    gpus = [_replaced(one, decisions[one.key], view.at, mode) if one.key in decisions else one for one in view.gpus]
    seen = {one.key for one in gpus}
    others = [d for key, d in decisions.items() if key not in seen and d.running and d.gpus != 0]
    gpus += (_daemon_line(one, view.at, mode) for one in others)
    notes = [line for one in plan.places for line in unseen_lines(one.platform, one.place, one.unseen)]
    return msgspec.structs.replace(view, gpus=tuple(gpus), mode=mode, paused=plan.paused, notes=(*view.notes, *notes))


def _replaced(line: GpuLine, decision: Decision, now: datetime, mode: Mode) -> GpuLine:
    steps = steps_of(decision, now, would=mode is Mode.PLAN)
    reason = decision.reason if steps else why_nothing(decision)
    return msgspec.structs.replace(line, class_=decision.class_, steps=steps, reason=reason)


def _daemon_line(decision: Decision, now: datetime, mode: Mode) -> GpuLine:
    count, ref = decision.gpus, decision.seen.ref
    line = GpuLine(
        key=ref.key,
        name="? GPUs" if isinstance(count, Unknown) else f"{count} GPU{'' if count == 1 else 's'}",
        place=ref.place,
        how=ClaimState.RUNNING,
        count=1 if isinstance(count, Unknown) else count,
        holder=ref.path,
        owner=decision.owner,
        use=NOT_MEASURED,
    )
    return _replaced(line, decision, now, mode)


def ordered(gpus: Sequence[GpuLine], by: str, *, reverse: bool = False) -> list[GpuLine]:
    """The most interesting first; within that as the driver counts. What is not known comes last."""
    keys = {
        "use": lambda one: -one.use if isinstance(one.use, float | int) else 1.0,
        "memory": lambda one: -one.memory_used_mib if isinstance(one.memory_used_mib, int) else 1,
        "owner": lambda one: one.owner if isinstance(one.owner, str) else "\U0010ffff",
        "next": _soon,
    }
    found = sorted(gpus, key=keys[by]) if by in keys else list(gpus)
    return found[::-1] if reverse else found


def _soon(line: GpuLine) -> float:
    """When its act comes, as a timestamp."""
    act = act_of(line.steps)
    if act is None:
        return float("inf")
    return 0.0 if act.at is None else act.at.timestamp()
