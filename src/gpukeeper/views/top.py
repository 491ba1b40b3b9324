"""Every GPU with its use, its holder and what happens to that next, by which rule. Behind `top`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

import msgspec

from gpukeeper.engine.outlook import Outlooks
from gpukeeper.engine.view import FleetSnapshot
from gpukeeper.lifecycle.claims import ClaimState, GpuClaim, why_nothing
from gpukeeper.lifecycle.forecast import act_of, steps_of
from gpukeeper.lifecycle.settings import Narrow, Rulebook
from gpukeeper.model.decision import Decision
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import EMPTY, Shape
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.fleet import claims_of, findings_view, unseen_everywhere, unseen_lines, upcoming_of
from gpukeeper.views.live import NOT_MEASURED, GpuState, GpuTile, row_id
from gpukeeper.views.live_rows import NOTHING, gpu_tile

SORTS = ("gpu", "use", "memory", "owner", "next")


class TopView(msgspec.Struct, frozen=True, kw_only=True):
    """`notes`: sentences about what could not be seen and what does not fit together."""

    at: datetime
    mode: Mode
    gpus: tuple[GpuTile, ...]
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

    def tile(claim: GpuClaim) -> GpuTile:
        device = devices.get((claim.place, claim.device))
        memory = EMPTY if device is None else found.recorded.get(device.ref.key, EMPTY)
        return gpu_tile(claim, device, upcoming.get(claim.key, NOTHING), memory, now)

    return TopView(
        at=now,
        mode=book.policy.mode,
        gpus=tuple(tile(one) for one in claims),
        paused=paused,
        notes=(*unseen_everywhere(found.unseen), *(one.words for one in findings_view(found, book, narrow, now))),
    )


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
    gpus += (_daemon_tile(one, view.at, mode) for one in others)
    notes = [line for one in plan.places for line in unseen_lines(one.platform, one.place, one.unseen)]
    return msgspec.structs.replace(view, gpus=tuple(gpus), mode=mode, paused=plan.paused, notes=(*view.notes, *notes))


def _replaced(tile: GpuTile, decision: Decision, now: datetime, mode: Mode) -> GpuTile:
    steps = steps_of(decision, now, would=mode is Mode.PLAN)
    reason = decision.reason if steps else why_nothing(decision)
    return msgspec.structs.replace(tile, class_=decision.class_, steps=steps, reason=reason)


def _daemon_tile(decision: Decision, now: datetime, mode: Mode) -> GpuTile:
    count, ref = decision.gpus, decision.seen.ref
    tile = GpuTile(
        id=row_id("", ref.key),
        key=ref.key,
        name="? GPUs" if isinstance(count, Unknown) else f"{count} GPU{'' if count == 1 else 's'}",
        platform=ref.platform,
        place=ref.place,
        state=GpuState.HELD,
        how=ClaimState.RUNNING,
        count=1 if isinstance(count, Unknown) else count,
        holder=ref.path,
        owner=decision.owner,
        use=NOT_MEASURED,
    )
    return _replaced(tile, decision, now, mode)


def ordered(gpus: Sequence[GpuTile], by: str, *, reverse: bool = False) -> list[GpuTile]:
    """The most interesting first; within that as the driver counts. What is not known comes last."""
    keys = {
        "use": lambda one: -one.use if isinstance(one.use, float | int) else 1.0,
        "memory": lambda one: -one.memory_used_mib if isinstance(one.memory_used_mib, int) else 1,
        "owner": lambda one: one.owner if isinstance(one.owner, str) else "\U0010ffff",
        "next": _soon,
    }
    found = sorted(gpus, key=keys[by]) if by in keys else list(gpus)
    return found[::-1] if reverse else found


def _soon(tile: GpuTile) -> float:
    """When its act comes, as a timestamp."""
    act = act_of(tile.steps)
    if act is None:
        return float("inf")
    return 0.0 if act.at is None else act.at.timestamp()
