"""All objects, contradictions, and what could not be listed. For `observe`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from gpukeeper.engine.fleet import FleetSnapshot, UnseenAt
from gpukeeper.lifecycle.contradictions import Contradiction, findings
from gpukeeper.lifecycle.narrow import Narrow
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Unseen
from gpukeeper.model.subject import Subject

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
    return findings(
        found.views, book, now, recorded=found.recorded, absent=found.absent, doubtful=found.doubtful
    )


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
