"""Act: one step, on exactly what was read. Evidence first, then a durable intent, then a re-check."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.memory import FollowedRemoval
from gpukeeper.engine.ports import Platform
from gpukeeper.engine.verify import gpu_hours, verify
from gpukeeper.engine.view import build_views
from gpukeeper.lifecycle.budget import TREES
from gpukeeper.lifecycle.decide import REQUEST, decide, still_holds
from gpukeeper.lifecycle.rules import idle, unused_image, unused_network, unused_volume
from gpukeeper.lifecycle.rules.idle import may_be_idle
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import (
    Accepted,
    Action,
    Changed,
    Decision,
    Evidence,
    NothingToCapture,
    Refused,
    Result,
    Step,
    View,
)
from gpukeeper.model.event import Captured, Closed, Complaint, Held, Intended, WarningSent
from gpukeeper.model.fold import warned_by
from gpukeeper.model.policy import Mode
from gpukeeper.model.ports import Delivery, Message, MessageKind
from gpukeeper.model.subject import LIVE, RESTORE, Disk, Gone, Hold, Shape, Subject
from gpukeeper.model.unknown import Unknown

HOUR = timedelta(hours=1)
MANIFEST = ("manifest",)
ATTACHED: tuple[str, ...] = (unused_volume.NAME, unused_network.NAME)
SURVIVES = ". Mounted volumes stay; what was written inside it is deleted with it"
BY_HAND = ". The policy's mode is plan: this happens only if an admin applies the policy after that time"


async def take(
    keeper: Keeper, platform: Platform, step: Step, book: Rulebook, pass_id: int, hourly: int | None = None
) -> Closed:
    """One acting step from evidence to outcome. Whatever happens, exactly one outcome is written."""
    problem = await _save_evidence(keeper, platform, step, book)
    if problem is not None:
        return await _close(keeper, step, *problem)
    # Evidence may take minutes: a lease may be lost, or an admin has paused everything.
    paused = keeper.permission.why_not() or await keeper.ledger.paused()
    if paused is not None:
        return await _close(keeper, step, Result.DEFERRED, f"everything was paused meanwhile ({paused})")
    if not await _intend(keeper, step, pass_id, hourly):
        return await _close(
            keeper, step, Result.DEFERRED, "the budget of this hour is used up; the next pass continues"
        )
    fresh = await read_again(keeper, platform, step, book)
    if not isinstance(fresh, View):
        return await _close(keeper, step, *fresh)
    lost = keeper.permission.why_not()
    if lost is not None:
        return await _close(keeper, step, Result.DEFERRED, f"not done: {lost}")
    keeper.beside.note(step, fresh.subject)
    now = keeper.clock.now()
    changed = keeper.clock_watch.doubt(now) or still_holds(step, fresh, book, now)
    if changed is not None:
        words = changed if step.decision.rule == REQUEST else f"changed since the plan was made: {changed}"
        return await _close(keeper, step, Result.CHANGED, words)
    answer = await platform.act(step, fresh.subject)
    match answer:
        case Changed():
            words = answer.why if step.decision.rule == REQUEST else f"changed at the last moment: {answer.why}"
            return await _close(keeper, step, Result.CHANGED, words)
        case Refused():
            return await _close(keeper, step, Result.REFUSED, answer.why)
        case Accepted() | Unknown():
            return await _verify_and_close(keeper, platform, step, fresh.subject, answer)


async def _verify_and_close(
    keeper: Keeper, platform: Platform, step: Step, subject: Subject, answer: Accepted | Unknown
) -> Closed:
    """Unknown: the command may have arrived. Only another read can show that."""
    result, words = await verify(platform, step)
    # Not a stop: whose it was decides what comes next, and a person may be quicker than the platform.
    if result is Result.UNKNOWN and isinstance(answer, Accepted) and step.decision.action is not Action.STOP:
        back = _bytes_back(step.decision.action, answer)
        keeper.followed.note(step.id, FollowedRemoval(step.decision.seen.ref, _gpus_back(subject), back))
    if isinstance(answer, Accepted) and answer.missed:
        words = f"{words}; {answer.missed}"
        await _report_missed(keeper, step, answer.missed)
    return await _close(keeper, step, result, words, subject, answer)


async def _report_missed(keeper: Keeper, step: Step, missed: str) -> None:
    """Something of its owner's was lost unread. The owner and admins are notified."""
    decision = step.decision
    what = f"{decision.action} of {decision.seen.ref.path}: {missed}"
    line = Complaint(at=keeper.clock.now(), ref=decision.seen.ref, owner=decision.owner, what=what)
    await keeper.ledger.append([line])
    path = decision.seen.ref.path
    await keeper.notifier.to_owner(
        Message(kind=MessageKind.LOSS, about=path, text=what, at=line.at, owner=decision.owner, ref=decision.seen.ref)
    )


async def warn(keeper: Keeper, platform: Platform, step: Step, book: Rulebook) -> WarningSent | None:
    """Warn the owner: what will happen, when, and how to prevent it. None: nothing to warn about any more."""
    fresh = await read_again(keeper, platform, step, book)
    begun = keeper.clock.now()
    if not isinstance(fresh, View) or keeper.clock_watch.doubt(begun):
        return None
    if still_holds(step, fresh, book, begun) is not None:
        return None
    decision = decide(fresh, book, begun)  # the same as was planned, with the time it announces from now on
    lost = _lost(fresh, decision, book)
    if book.policy.mode is Mode.PLAN and decision.then is not Action.KEEP:
        lost += BY_HAND
    message, until = f"{decision.seen.ref.path}: {decision.reason}{lost}", decision.announced
    warning = Message(
        kind=MessageKind.NOTICE if decision.then is Action.KEEP else MessageKind.WARNING,
        about=decision.seen.ref.path,
        text=message,
        at=begun,
        owner=decision.owner,
        subject=fresh.subject,
        ref=decision.seen.ref,
        until=until,
    )
    delivery = await keeper.notifier.to_owner(warning)
    if not delivery.channels and decision.unheard is not None:
        # Not delivered, so there is more time; the line announces that time, and it is used.
        message, until = f"{decision.seen.ref.path}: {decision.unheard.words}{lost}", decision.unheard.at
    now = keeper.clock.now()
    if until is not None:
        until += now - begun  # "in 10m" counts from when it was sent
    line = _warning_sent(decision, delivery, message, until, now)
    await keeper.ledger.append([line])
    await platform.announce(fresh.subject, message, warned_by(line))
    return line


def _warning_sent(
    decision: Decision, delivery: Delivery, message: str, until: datetime | None, now: datetime
) -> WarningSent:
    return WarningSent(
        at=now,
        ref=decision.seen.ref,
        owner=decision.owner,
        rule=decision.rule,
        stage=decision.stage,
        incarnation=decision.seen.incarnation,
        limit=decision.limit,
        delivered=bool(delivery.channels),
        channel=", ".join(delivery.channels),
        message=message,
        until=until,
        removes=decision.then is Action.REMOVE,
        why_not=delivery.why_not,
    )


def _lost(view: View, decision: Decision, book: Rulebook) -> str:
    """What a warning adds: the owner can still save it. What the platform reports is more exact than what is usual."""
    subject, then = view.subject, decision.then
    if then is Action.KEEP:
        return ""
    at_once = then is Action.REMOVE or subject.goes_when_stopped
    by_class = decision.rule == idle.NAME and idle.removed_later(view, book.settings(subject)) is not None
    usual = SURVIVES if at_once or by_class else ""
    if isinstance(subject.loses, Unknown):
        return f"{usual}. What would be lost could not be determined ({subject.loses.why})"
    if not subject.loses:
        return usual
    return f". Lost {'with it' if at_once else 'when it is removed'}: {', '.join(subject.loses)}"


async def read_again(keeper: Keeper, platform: Platform, step: Step, book: Rulebook) -> View | tuple[Result, str]:
    """A fresh view of the object, with a fresh measurement; or how the step ends without one."""
    found = await _read(platform, step)
    if not isinstance(found, Subject):
        return found
    # Only idleness can change from one moment to the next by itself; a measurement takes seconds.
    if keeper.meter is not None and step.decision.rule == idle.NAME and may_be_idle(found, book):
        await keeper.signals.add(await keeper.meter.read([found]))
    return (await build_views(keeper, platform, [found], book, [], keeper.clock.now()))[0]


async def _read(platform: Platform, step: Step) -> Subject | tuple[Result, str]:
    found = await platform.read(step.decision.seen.ref)
    if isinstance(found, Unknown):
        return Result.CHANGED, f"it could not be read ({found.why}), so it was skipped"
    if isinstance(found, Gone):
        return Result.CHANGED, "it is already gone; it was removed by another person or program"
    return found


async def _save_evidence(keeper: Keeper, platform: Platform, step: Step, book: Rulebook) -> tuple[Result, str] | None:
    """None when evidence is safe (or there is none to be had); otherwise how the step ends."""
    ref = step.decision.seen.ref
    found = await _read(platform, step)
    if not isinstance(found, Subject):
        return found
    work = keeper.beside.note(step, found)
    if work is not None:
        return Result.CHANGED, f"changed since the plan was made: {work}"
    if step.decision.disk and found.disk is not None and not keeper.pressure.is_too_full(found, book.policy.disk):
        # Seen before its evidence is taken, which may be long; the steps after it are not even begun.
        return Result.CHANGED, f"changed since the plan was made: {_relieved(found.disk, book)}"
    ends = step.decision.action in (Action.REMOVE, Action.TRIM) or found.goes_when_stopped
    # Of what is only stopped, enough to bring it back as it was.
    taken = await platform.capture(found, book.policy.capture.what if ends else MANIFEST)
    name: str | Unknown = ""
    note = ""
    match taken:
        case Unknown():
            return Result.NOT_CAPTURED, f"its evidence could not be captured ({taken.why}), so it was kept"
        case NothingToCapture():
            note = f"nothing to capture: {taken.why}"
        case Evidence():
            name = await keeper.evidence.save(ref, step.id, keeper.clock.now(), taken)
    if isinstance(name, Unknown):
        return Result.NOT_CAPTURED, f"its evidence could not be saved ({name.why}), so it was kept"
    line = Captured(at=keeper.clock.now(), ref=ref, owner=step.decision.owner, step=step.id, evidence=name, note=note)
    await keeper.ledger.append([line, *_needed_held(found, book, line)] if ends else [line])
    return None


def _needed_held(subject: Subject, book: Rulebook, captured: Captured) -> list[Held]:
    """Its image, volumes and networks, for as long as it can be restored: removing them would defeat that."""
    capture = book.policy.capture
    if not captured.evidence or not set(MANIFEST) <= set(capture.what):
        return []
    reason = f"needed to restore {subject.ref.path}"
    needed = [(ref, ATTACHED) for ref in subject.attached]
    needed += [(subject.image, (unused_image.NAME,))] if subject.image is not None else []
    until = captured.at + capture.keep
    return [
        Held(at=captured.at, ref=ref, hold=Hold(RESTORE, captured.at, until, reason, admin=True, suspends=rules))
        for ref, rules in needed
    ]


def _relieved(disk: Disk, book: Rulebook) -> str:
    low = f"{book.policy.disk.low:.0%}"
    return f"{disk.name} is {disk.full:.0%} full, below {low}, and it was due only because the disk was too full"


async def _intend(keeper: Keeper, step: Step, pass_id: int, hourly: int | None) -> bool:
    """Write the intent durably, unless the hour's budget has been used up since the plan was made."""
    async with keeper.budget_lock:
        now = keeper.clock.now()
        if hourly is not None and await _acts_like(keeper, step, now) >= hourly:
            return False
        await keeper.ledger.append([_intent(step, pass_id, now)])
        return True


async def _acts_like(keeper: Keeper, step: Step, now: datetime) -> int:
    """In the last hour, of the budget that this step is part of."""
    return await keeper.ledger.acts_since(now - HOUR, TREES, but=step.decision.rule not in TREES)


def _intent(step: Step, pass_id: int, now: datetime) -> Intended:
    decision = step.decision
    return Intended(
        at=now,
        ref=decision.seen.ref,
        owner=decision.owner,
        step=step.id,
        pass_id=pass_id,
        action=decision.action,
        rule=decision.rule,
        reason=decision.reason,
        incarnation=decision.seen.incarnation,
        running=decision.running,
        gpus=decision.gpus,
        since=decision.since,
        owner_verified=decision.owner_verified,
        requested_by=step.requested_by or msgspec.UNSET,
    )


async def _close(
    keeper: Keeper,
    step: Step,
    result: Result,
    words: str,
    subject: Subject | None = None,
    answer: Accepted | Unknown | None = None,
) -> Closed:
    decision, now = step.decision, keeper.clock.now()
    done = result is Result.RECLAIMED
    gpus = _gpus_back(subject) if done and subject is not None else 0
    line = Closed(
        at=now,
        ref=decision.seen.ref,
        owner=decision.owner,
        step=step.id,
        action=decision.action,
        rule=decision.rule,
        result=result,
        reason=f"{decision.reason}; {words}" if done else words,
        incarnation=decision.seen.incarnation,
        gpus_back=gpus,
        gpu_hours=gpu_hours(gpus, decision.since, now),
        bytes_back=_bytes_back(decision.action, answer) if done else 0,
        owner_verified=decision.owner_verified,
        requested_by=step.requested_by or msgspec.UNSET,
    )
    await keeper.ledger.append([line])
    return line


def _gpus_back(subject: Subject) -> int | Unknown:
    """Ended work holds no GPU any more, unless it is an orphan or its children live."""
    holds = subject.state in LIVE or subject.shape is Shape.ORPHAN or subject.live_children != 0
    if not holds:
        return 0
    return subject.devices if isinstance(subject.devices, Unknown) else len(subject.devices)


def _bytes_back(action: Action, answer: Accepted | Unknown | None) -> int | Unknown:
    if action is not Action.REMOVE:
        return 0
    return answer.bytes_back if isinstance(answer, Accepted) else Unknown("the response to the command was lost")
