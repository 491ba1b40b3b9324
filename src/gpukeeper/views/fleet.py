"""What one look at every place found: all objects, contradictions, and what could not be listed; which workload has
which GPU, since when, and what happens next; which GPUs are held without use; and the GPUs as they are watched. Behind
`observe` and `top`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from gpukeeper.engine.outlook import Outlooks
from gpukeeper.engine.schedule import opening
from gpukeeper.engine.view import FleetSnapshot, UnseenAt
from gpukeeper.lifecycle.activity import Waste, wasted
from gpukeeper.lifecycle.claims import (
    ClaimState,
    Contradiction,
    GpuClaim,
    Inventory,
    MayUse,
    claims,
    contradictions,
    may_use,
    why_nothing,
)
from gpukeeper.lifecycle.forecast import NextActions, act_of, coming_in_words, next_actions, steps_of
from gpukeeper.lifecycle.settings import Narrow, Rulebook
from gpukeeper.lifecycle.warnings import without_steps
from gpukeeper.model.decision import Decision, Unseen
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import EMPTY, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.live import NOT_MEASURED, GpuState, GpuTile, row_id
from gpukeeper.views.live_rows import NOTHING, gpu_tile

EVERYTHING = "everything"  # what a place that could not be listed at all reports as unseen


class FindingView(msgspec.Struct, frozen=True):
    """Something that an admin should check. `about`: paths."""

    kind: str
    about: tuple[str, ...]
    words: str


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    at: datetime
    subjects: tuple[Subject, ...]
    findings: tuple[FindingView, ...]
    unseen: tuple[UnseenAt, ...]


def fleet_view(found: FleetSnapshot, book: Rulebook, narrow: Narrow, now: datetime) -> FleetView:
    return FleetView(
        at=now,
        subjects=tuple(view.subject for view in found.views if narrow.fits(view.subject, now)),
        findings=findings_view(found, book, narrow, now),
        unseen=tuple(found.unseen),
    )


def findings_view(found: FleetSnapshot, book: Rulebook, narrow: Narrow, now: datetime) -> tuple[FindingView, ...]:
    """Searched among everything, so that a narrowed view does not miss the other half; shown of what was requested."""
    everything = all_findings(found, book, now)
    if narrow != Narrow():
        fits = fitting(found, narrow, now)
        everything = tuple(one for one in everything if any(ref.key in fits for ref in one.about))
    return tuple(FindingView(one.kind, tuple(ref.path for ref in one.about), one.words) for one in everything)


def all_findings(found: FleetSnapshot, book: Rulebook, now: datetime) -> tuple[Contradiction, ...]:
    return contradictions(found.views, book, now, recorded=found.recorded, absent=found.absent, doubtful=found.doubtful)


def fitting(found: FleetSnapshot, narrow: Narrow, now: datetime) -> set[str]:
    """Keys of what was requested."""
    return {view.subject.ref.key for view in found.views if narrow.fits(view.subject, now)}


def unseen_everywhere(unseen: Sequence[UnseenAt]) -> list[str]:
    """Sentences about each place in turn."""
    places = dict.fromkeys((one.platform, one.place) for one in unseen)
    return [
        line
        for place in places
        for line in unseen_lines(*place, [one for one in unseen if (one.platform, one.place) == place])
    ]


def unseen_lines(platform: str, place: str, unseen: Iterable[Unseen]) -> list[str]:
    """One sentence for each reason: a missing right concerns a dozen kinds, in the same words but for their names."""
    where = f"{platform}/{place}"
    alike: dict[str, list[Unseen]] = {}
    for one in unseen:
        alike.setdefault(_gist(one), []).append(one)
    lines = []
    for first, *others in alike.values():
        what = where if first.what in (where, EVERYTHING) else f"{where}: {first.what}"
        lines.append(f"{what} could not be read ({first.why})")
        if others:
            lines.append(f"{where}: could not be read for the same reason: {', '.join(one.what for one in others)}")
    return lines


def untouched(lines: Iterable[str]) -> list[str]:
    """The same where something would be acted on."""
    return [f"{line}. Its state is unknown, so it is not changed." for line in lines]


def _gist(one: Unseen) -> str:
    """Its reason without names: those in quotes, and its own."""
    kind = re.escape(one.what.partition(" ")[0])
    return re.sub(rf'"[^"]*"|\b{kind}[\w.-]*', "…", one.why)


class GpusView(msgspec.Struct, frozen=True, kw_only=True):
    at: datetime
    gpus: tuple[GpuClaim, ...]
    findings: tuple[FindingView, ...]
    unseen: tuple[UnseenAt, ...]


class MayUseView(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a GPU may be given to a user now. `device`: its uuid; `name`: its path."""

    at: datetime
    device: str
    name: str
    user: str
    answer: MayUse
    reason: str


class WasteView(msgspec.Struct, frozen=True, kw_only=True):
    """The longest unused first."""

    at: datetime
    waste: tuple[Waste, ...]
    findings: tuple[FindingView, ...]
    unseen: tuple[UnseenAt, ...]


def gpus_view(found: FleetSnapshot, book: Rulebook, narrow: Narrow, now: datetime) -> GpusView:
    held = claims_of(found, book, narrow, now)
    upcoming = upcoming_of(found, held, book, now)
    return GpusView(
        at=now,
        gpus=tuple(_with_next(one, upcoming.get(one.key), now) for one in held),
        findings=findings_view(found, book, narrow, now),
        unseen=tuple(found.unseen),
    )


def one_row_each(gpus: Sequence[GpuClaim]) -> list[tuple[GpuClaim, tuple[str, ...]]]:
    """For people: infrastructure, such as an exporter that has every GPU open, takes no row of its own where something
    else is known of the same GPU. With the paths of that infrastructure."""
    beside: dict[tuple[str, str], list[str]] = {}
    for one in gpus:
        if one.how is ClaimState.INFRASTRUCTURE and one.device and one.holder is not None:
            beside.setdefault((one.place, one.device), []).append(one.holder.path)
    others = {(one.place, one.device) for one in gpus if one.how is not ClaimState.INFRASTRUCTURE}
    rows: list[tuple[GpuClaim, tuple[str, ...]]] = []
    for one in gpus:
        device = one.place, one.device
        if one.how is not ClaimState.INFRASTRUCTURE:
            rows.append((one, tuple(beside.get(device, ()))))
        elif not one.device:
            rows.append((one, ()))
        elif device not in others:
            others.add(device)
            rows.append((one, tuple(beside[device][1:])))
    return rows


def may_use_view(found: FleetSnapshot, book: Rulebook, words: str, user: str, now: datetime) -> MayUseView:
    """`words`: a uuid or a unique beginning of it, an index, or gpu-0 as `observe` prints it."""
    inventory = Inventory([view.subject for view in found.views])
    held = claims(found.views, book, now, recorded=found.recorded, offers=found.offers)
    # Without an inventory only the devices are known that workloads have.
    known = {(one.place, one.device): one.device for one in held if one.device}
    known |= {key: one.ref.name for key, one in inventory.devices.items()}
    name = words.rpartition("/")[2].lower()
    fitting = [key for key, called in known.items() if key[1] == words or called.lower() in (name, f"gpu-{name}")]
    fitting = fitting or [key for key in known if key[1].lower().startswith(words.lower())]
    if len(fitting) != 1:
        every = ", ".join(inventory.name(*key) for key in fitting or known) or "none is known"
        what = f"fits {len(fitting)} GPUs" if fitting else "fits no GPU"
        raise UsageError(f'"{words}" {what}: {every}. Nothing is known about it, so do not hand it out.')
    place, uid = fitting[0]
    unread = [f"{one.what} of {one.platform}/{one.place}" for one in found.unseen]
    answer, reason = may_use(place, uid, user, held, inventory, unread)
    return MayUseView(at=now, device=uid, name=inventory.name(place, uid), user=user, answer=answer, reason=reason)


def waste_view(found: FleetSnapshot, book: Rulebook, narrow: Narrow, now: datetime) -> WasteView:
    fits = [view for view in found.views if narrow.fits(view.subject, now)]
    unused = [one for view in fits if (one := wasted(view, book, now)) is not None]
    return WasteView(
        at=now,
        waste=tuple(sorted(unused, key=lambda one: (one.since, one.ref.path))),
        findings=findings_view(found, book, narrow, now),
        unseen=tuple(found.unseen),
    )


def upcoming_of(
    found: FleetSnapshot, held: Sequence[GpuClaim], book: Rulebook, now: datetime
) -> dict[str, NextActions]:
    """What comes next to each holder, by its key."""
    opens = opening(book.policy.schedule)
    holders = {one.key for one in held}
    return {
        ref.key: next_actions(view, book, now, found.offers.get((ref.platform, ref.place), ()), opens)
        for view in found.views
        if (ref := view.subject.ref).key in holders
    }


def _with_next(claim: GpuClaim, coming: NextActions | None, now: datetime) -> GpuClaim:
    """Where nothing comes, it says why."""
    act = None if coming is None else act_of(coming.steps)
    if coming is None or act is None:
        return claim
    words = f"{coming_in_words(coming.steps, now)} ({act.rule}): {without_steps(coming.reason)}"
    return msgspec.structs.replace(claim, next=words, next_at=coming.steps[0].at)


def claims_of(found: FleetSnapshot, book: Rulebook, narrow: Narrow, now: datetime) -> tuple[GpuClaim, ...]:
    """Those of what was requested. A free device has no owner, so it is shown only when nothing was narrowed."""
    everything = claims(found.views, book, now, recorded=found.recorded, offers=found.offers)
    fits, alone = fitting(found, narrow, now), narrow == Narrow()
    return tuple(one for one in everything if (one.key in fits if one.holder is not None else alone))


DISK = "disk"


class Bytes(NamedTuple):
    """Of a disk, as far as its platform reports it."""

    size: int | None
    free: int | None
    held_open: int | None


def bytes_of(subject: Subject) -> Bytes:
    return Bytes(*(_number(subject.labels, name) for name in ("disk_size", "disk_free", "held_open")))


def _number(labels: Mapping[str, str], name: str) -> int | None:
    words = labels.get(name, "")
    return int(words) if words.isascii() and words.isdecimal() else None


class SubjectChange(NamedTuple):
    """A node or a disk as a pass found it, and as it was afterwards. None: nothing was done there, so it was not read
    again."""

    before: Subject
    after: Subject | Unknown | None


SORTS = ("gpu", "use", "memory", "owner", "next")


class TopView(msgspec.Struct, frozen=True, kw_only=True):
    """Every GPU with its use, its holder and what happens to that next, by which rule. `notes`: sentences about what
    could not be seen and what does not fit together."""

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
