"""What the gpukeeper of a server printed about a pass: `plan --json` or `apply --yes --json`. Values only.

Only what is shown of many servers is read. A server may have another version: fields that are missing are empty,
unknown ones are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from gpukeeper.model.decision import Unseen
from gpukeeper.model.identity import Ref

RECLAIMED: Final = "reclaimed"


class _Seen(msgspec.Struct, frozen=True):
    ref: Ref


class PlannedStep(msgspec.Struct, frozen=True):
    seen: _Seen
    action: str
    reason: str


class StepOutcome(msgspec.Struct, frozen=True):
    ref: Ref
    action: str
    result: str
    reason: str


class PlacePass(msgspec.Struct, frozen=True, kw_only=True):
    """`leased`, `stopped`, `breaker`, `paused`: why nothing, or not everything, was done."""

    platform: str
    place: str
    steps: tuple[PlannedStep, ...] = ()
    outcomes: tuple[StepOutcome, ...] = ()
    deferred: tuple[PlannedStep, ...] = ()
    unseen: tuple[Unseen, ...] = ()
    bytes_back: int = 0
    leased: str | None = None
    stopped: str | None = None
    breaker: str | None = None
    paused: str | None = None


class ServerPass(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a server. `code`: of the command there, and what it `said` where that is not 0. `problem`: why it
    printed nothing that can be read."""

    code: int
    mode: str = ""
    places: tuple[PlacePass, ...] = ()
    said: str = ""
    problem: str = ""


class Step(msgspec.Struct, frozen=True):
    """A line for people: what would be done, or what was."""

    word: str
    path: str
    action: str
    reason: str


def steps(place: PlacePass) -> Iterator[Step]:
    for one in place.steps:
        yield Step("due", one.seen.ref.path, one.action, one.reason)
    for done in place.outcomes:
        yield Step(done.result, done.ref.path, done.action, done.reason)


def why_not_all(found: ServerPass) -> tuple[str, ...]:
    """Why a pass is not complete, in words; empty: it is."""
    words = [found.problem] if found.problem else []
    for place in found.places:
        name = f"{place.platform}/{place.place}"
        words += [f"{name}: {why}" for why in (place.leased, place.stopped, place.breaker, place.paused) if why]
        words += [f"{name}: {one.what} could not be read: {one.why}" for one in place.unseen]
        failed = sum(one.result != RECLAIMED for one in place.outcomes)
        words += [f"{name}: {failed} of {len(place.outcomes)} steps did not reclaim"] if failed else []
        words += [f"{name}: {len(place.deferred)} deferred by the budget"] if place.deferred else []
    return tuple(words) or ((found.said or f"exit code {found.code}",) if found.code else ())
