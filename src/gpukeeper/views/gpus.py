"""GPUs: which workload has which, since when, and what happens next; and which are held without use."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from gpukeeper.engine.fleet import FleetSnapshot, UnseenAt
from gpukeeper.engine.schedule import opening
from gpukeeper.lifecycle.claims import ClaimState, GpuClaim, claims
from gpukeeper.lifecycle.coming import NextActions, act_of, coming_in_words, next_actions
from gpukeeper.lifecycle.narrow import Narrow
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.lifecycle.warnings import without_steps
from gpukeeper.lifecycle.waste import Waste, wasted
from gpukeeper.views.fleet import FindingView, findings_view, fitting


class GpusView(msgspec.Struct, frozen=True, kw_only=True):
    at: datetime
    gpus: tuple[GpuClaim, ...]
    findings: tuple[FindingView, ...]
    unseen: tuple[UnseenAt, ...]


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
