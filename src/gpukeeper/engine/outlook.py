"""What a daemon replies to the question what will happen: the decisions of its last passes. A request reads nothing, so
that it costs the passes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime

import msgspec

from gpukeeper.engine.explain import without_reason
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.live import PlaceState
from gpukeeper.engine.observe import Survey
from gpukeeper.engine.ports import Platform, key_of
from gpukeeper.engine.request_state import Outlook
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, PlaceHead, Plan, Result, head_fields
from gpukeeper.model.event import Closed
from gpukeeper.model.policy import Mode

MOST = 5000  # decisions kept for a place, and sent in one reply
UNSEEN = 20  # entries sent
NOT_SHOWN = "shown only to its owner and to admins"


class PolicyHead(msgspec.Struct, frozen=True):
    """Which policy decided."""

    source: str
    digest: str
    preset: str
    mode: Mode


class PlaceOutlook(PlaceHead, frozen=True, kw_only=True):
    """As of the last read."""

    decisions: tuple[Decision, ...]
    left_out: int

    @property
    def name(self) -> str:
        return self.platform

    @property
    def due(self) -> list[Decision]:
        return [one for one in self.decisions if one.action is not Action.KEEP]


class Outlooks(msgspec.Struct, frozen=True, kw_only=True):
    now: datetime
    policy: PolicyHead
    paused: str | None
    places: tuple[PlaceOutlook, ...]
    who: str
    admin: bool  # is sent everything


class DaemonState(msgspec.Struct, frozen=True):
    """What only a daemon has: where GPUs are scarce, and since when (steady time) it has watched."""

    scarce: tuple[tuple[str, str], ...]
    watched_from: float | None


def begin(keeper: Keeper, platform: Platform, now: datetime, *, whole: bool) -> Outlook:
    """For a pass that begins. A narrow one changes what the last whole one found."""
    keeper.live.begin(platform, whole=whole)
    known = keeper.request_state.outlooks.get(key_of(platform))
    return Outlook(Survey(platform, now).head()) if whole or known is None else known


def add(outlook: Outlook, decisions: Iterable[Decision], trees: Collection[str]) -> None:
    """Of trees only those that something happens to: there may be tens of thousands."""
    for one in decisions:
        key = one.seen.ref.key
        if key in trees and one.action is Action.KEEP:
            outlook.decisions.pop(key, None)
        elif key in outlook.decisions or len(outlook.decisions) < MOST:
            outlook.decisions[key] = one
        else:
            outlook.left_out += 1


def show(keeper: Keeper, found: Survey, plan: Plan, outlook: Outlook) -> None:
    """From now on users are sent this. Nothing is kept without a socket."""
    head = found.head(plan.breaker)
    state = PlaceState(
        **head_fields(head),
        steps=tuple(step.decision.seen.ref.key for step in plan.steps),
        deferred=tuple(one.seen.ref.key for one in plan.deferred),
    )
    keeper.live.finish(state, [one.ref for one in found.gone], whole=found.whole)
    if not keeper.request_state.enabled:
        return
    for one in found.gone:
        outlook.decisions.pop(one.ref.key, None)
    outlook.head = head if found.whole else msgspec.structs.replace(head, unseen=outlook.head.unseen)
    keeper.request_state.outlooks[key_of(found.platform)] = outlook


def forget(outlook: Outlook, outcomes: Sequence[Closed]) -> None:
    """What a pass removed is not ahead any more."""
    for one in outcomes:
        if one.ref is not None and (one.action, one.result) == (Action.REMOVE, Result.RECLAIMED):
            outlook.decisions.pop(one.ref.key, None)


async def outlooks(keeper: Keeper, book: Rulebook, who: str, source: str) -> Outlooks:
    """As of the last pass at each place. Own work first, and in full."""
    admin = is_admin(book, who)
    policy = book.policy
    return Outlooks(
        now=keeper.clock.now(),
        policy=PolicyHead(source, policy.digest, policy.preset, policy.mode),
        paused=await keeper.ledger.paused(),
        places=tuple(
            _shown_to(one, who, admin=admin)
            for place, one in keeper.request_state.outlooks.items()
            if place[0] in policy.scope
        ),
        who=who,
        admin=admin,
    )


def _shown_to(one: Outlook, who: str, *, admin: bool) -> PlaceOutlook:
    everything = list(one.decisions.values())
    mine = [d for d in everything if admin or d.owner == who]
    others = [] if admin else [without_reason(d, NOT_SHOWN) for d in everything if d.owner != who]
    head = msgspec.structs.replace(one.head, unseen=one.head.unseen[:UNSEEN])
    return PlaceOutlook(**head_fields(head), decisions=(*mine, *others), left_out=one.left_out)


def daemon_state(keeper: Keeper) -> DaemonState:
    return DaemonState(keeper.pressure.scarce_places(), keeper.uptime.watched_from)
