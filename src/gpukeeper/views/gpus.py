"""GPUs: which workload has which, since when, and what happens next; and which are held without use."""

from __future__ import annotations

from datetime import datetime

import msgspec

from gpukeeper.engine.fleet import FleetSnapshot, UnseenAt
from gpukeeper.lifecycle.claims import GpuClaim, claims
from gpukeeper.lifecycle.narrow import Narrow
from gpukeeper.lifecycle.settings import Rulebook
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
    return GpusView(
        at=now,
        gpus=claims_of(found, book, narrow, now),
        findings=findings_view(found, book, narrow, now),
        unseen=tuple(found.unseen),
    )


def waste_view(found: FleetSnapshot, book: Rulebook, narrow: Narrow, now: datetime) -> WasteView:
    fits = [view for view in found.views if narrow.fits(view.subject, now)]
    unused = [one for view in fits if (one := wasted(view, book, now)) is not None]
    return WasteView(
        at=now,
        waste=tuple(sorted(unused, key=lambda one: (one.since, one.ref.path))),
        findings=findings_view(found, book, narrow, now),
        unseen=tuple(found.unseen),
    )


def claims_of(found: FleetSnapshot, book: Rulebook, narrow: Narrow, now: datetime) -> tuple[GpuClaim, ...]:
    """Those of what was requested. A free device has no owner, so it is shown only when nothing was narrowed."""
    everything = claims(found.views, book, now, recorded=found.recorded, offers=found.offers)
    fits, alone = fitting(found, narrow, now), narrow == Narrow()
    return tuple(one for one in everything if (one.holder.key in fits if one.holder is not None else alone))
