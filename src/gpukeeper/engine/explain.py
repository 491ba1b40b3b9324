"""Everything about one workload, as one value: `explain` prints it, and a daemon sends it to users who may not read its
ledger. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from gpukeeper.engine.find import FoundSubject
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.live import coming_of
from gpukeeper.engine.schedule import opening
from gpukeeper.lifecycle.contradictions import Contradiction
from gpukeeper.lifecycle.decide import answers, decide
from gpukeeper.lifecycle.explain import MeasuredSignal, remedies, signals
from gpukeeper.lifecycle.forecast import UpcomingAction
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Answer, Decision
from gpukeeper.model.diagnosis import Diagnosis
from gpukeeper.model.event import Event
from gpukeeper.model.memory import EMPTY, Memory
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown

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
