"""What a daemon replies to questions: what will happen, which are the decisions of its last passes (a request reads
nothing, so that it costs the passes nothing); everything about one workload, for `explain` and for users who may not
read its ledger; and when and why something was removed. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.live import PlaceState, coming_of
from gpukeeper.engine.memory import Outlook
from gpukeeper.engine.observe import Survey
from gpukeeper.engine.ports import Platform, key_of
from gpukeeper.engine.schedule import opening
from gpukeeper.engine.view import FoundSubject
from gpukeeper.lifecycle.claims import Contradiction
from gpukeeper.lifecycle.decide import answers, decide
from gpukeeper.lifecycle.explain import MeasuredSignal, remedies, signals
from gpukeeper.lifecycle.forecast import UpcomingAction
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Answer, Decision, PlaceHead, Plan, Result, head_fields
from gpukeeper.model.event import Closed, Event
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import EMPTY, Diagnosis, Memory, Subject
from gpukeeper.model.unknown import Unknown


def not_there(problem: str, lines: Sequence[Event], book: Rulebook, now: datetime) -> str:
    """`problem`, or the more exact reason from the ledger."""
    gone = [
        one
        for one in lines
        if isinstance(one, Closed) and one.result is Result.RECLAIMED and one.action is Action.REMOVE and one.ref
    ]
    if not gone:
        return problem
    last = gone[-1]
    assert last.ref is not None
    kept = last.at + book.policy.capture.keep
    back = f"Restore it: gpukeeper restore {last.ref.path} (until {kept:%Y-%m-%d %H:%M} UTC, as far as it was captured)"
    was = f"{last.ref.path} was removed by gpukeeper at {last.at:%Y-%m-%d %H:%M} UTC: {last.reason}"
    return f"{was}. {back}" if kept > now else was


HISTORY = 8  # lines


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """As of `now`. `whole`: False if the user may see no more than `observe` shows."""

    now: datetime
    subject: Subject
    memory: Memory = EMPTY
    decision: Decision
    answers: tuple[Answer, ...] = ()
    signals: tuple[MeasuredSignal, ...] = ()
    mode: Mode = Mode.ENFORCE
    ahead: tuple[UpcomingAction, ...] = ()
    remedies: tuple[str, ...] = ()
    findings: tuple[Contradiction, ...] = ()
    history: tuple[Event, ...] = ()
    diagnosis: Diagnosis | None = None  # its platform's own view of why it is still there
    undiagnosed: Unknown | None = None  # why there is none
    whole: bool = True


async def explained(
    keeper: Keeper, book: Rulebook, found: FoundSubject, history: Sequence[Event], strange: Sequence[Contradiction] = ()
) -> Explanation:
    view, ref = found.view, found.view.subject.ref
    closer = await found.platform.read(ref)
    if isinstance(closer, Subject):  # what its removal would destroy is read only for a single object
        view = msgspec.structs.replace(view, subject=msgspec.structs.replace(view.subject, loses=closer.loses))
    diagnosis = await found.platform.diagnose(ref)
    now = keeper.clock.now()
    given, opens, decision = answers(view, book, now), opening(book.policy.schedule), decide(view, book, now)
    decision = keeper.back_off.postponed(decision, now) or decision
    return Explanation(
        now=now,
        subject=view.subject,
        memory=view.memory,
        decision=decision,
        answers=given,
        signals=signals(view, book, now),
        mode=book.policy.mode,
        ahead=coming_of(view, decision, book, now, frozenset(found.platform.guards)),
        remedies=remedies(view, book, given, now, opens),
        findings=tuple(one for one in strange if any(about.key == ref.key for about in one.about)),
        history=tuple(history[-HISTORY:]),
        diagnosis=None if isinstance(diagnosis, Unknown) else diagnosis,
        undiagnosed=diagnosis if isinstance(diagnosis, Unknown) else None,
    )


def as_others_see(one: Explanation, whose: str) -> Explanation:
    """What `observe` shows of it, and what comes next; not why, nor what it is made of."""
    subject = one.subject
    shown = Subject(
        seen=subject.seen,
        shape=subject.shape,
        root=subject.root,
        state=subject.state,
        owner=subject.owner,
        owner_verified=subject.owner_verified,
        class_=subject.class_,
        created=subject.created,
        started=subject.started,
        ended=subject.ended,
        outcome=subject.outcome,
        devices=subject.devices,
        slices=subject.slices,
        size=subject.size,
        last_used=subject.last_used,
    )
    return Explanation(
        now=one.now,
        subject=shown,
        decision=without_reason(one.decision, whose),
        mode=one.mode,
        ahead=tuple(msgspec.structs.replace(step, reason="", currently="") for step in one.ahead),
        whole=False,
    )


def without_reason(decision: Decision, whose: str) -> Decision:
    return msgspec.structs.replace(decision, reason=whose, complaints=(), begins=None, unheard=None)


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
