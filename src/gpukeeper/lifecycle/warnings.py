"""Warnings before running work is stopped, as a staged answer: warn, warn, then the stop, never without lead."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from functools import lru_cache

import msgspec

from gpukeeper.lifecycle.rules.hold import last_end
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Announcement, Answer, Verdict, View
from gpukeeper.model.policy import Mode, Policy, Warnings
from gpukeeper.model.subject import Warned
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import due_in_words, in_words

_ENDS = {Action.STOP: "be stopped", Action.REMOVE: "be removed"}
DELETED = ", then deleted"
_STEPS = re.compile(
    r"; (?:(?:first warned|warned again|next attempt) at|(?:warned, )?(?:will|would) be) [^;]*"
)  # as written by `staged`
_REACH = "for admins: see notify.owners and warnings.require_delivery"
DAY = timedelta(days=1)
ONE_NIGHT = timedelta(hours=26)  # to the pass of the next night: 25 hours when clocks go back, and it may come late
LONGEST_NOTE = timedelta(days=7)  # between a note on an object and the time that it announces
AGAIN = timedelta(hours=1)  # between attempts to warn an owner whom no warning has reached
AT_ONCE = (0.0,)  # one warning as soon as the condition holds


def valid_for(settings: Warnings, limit: timedelta) -> timedelta:
    """How long a warning counts. Nobody acts on what was announced for last week: a hold, an exemption or a pause was
    in between."""
    return limit + settings.lead + settings.undelivered + ONE_NIGHT


class Countdown(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An action at the end of a limit, with warnings at `stages` (shares of the limit) on the way.

    `remedy`: what the owner can do about it; how it is held is added where that helps. `only_after`: older warnings
    belong to an earlier episode. `told_after`: the first warning is not repeated if its owner got one after this; the
    last one, which announces the action, always is. `holdable`: a user's hold suspends the rule. `then`: what follows
    the action, as a clause. `delivered`: not before one of the warnings was delivered. `shortened`: the limit is,
    because demand is high.
    """

    rule: str
    action: Action
    begin: datetime
    limit: timedelta
    stages: tuple[float, ...]
    condition: str
    since: datetime
    remedy: str
    only_after: datetime | None = None
    told_after: datetime | None = None
    holdable: bool = True
    then: str = ""
    delivered: bool = False
    shortened: bool = False


def staged(view: View, settings: Settings, now: datetime, to: Countdown) -> Answer:
    """What is due of warnings and action. A warning from the future (the clock was wrong then) does not count."""
    sent, lapsed, oldest, done = list[Warned](), "", now, 0
    if view.memory.warnings or view.subject.marks.warned:  # of nearly nothing
        sent, lapsed, oldest = _counting(view, settings, now, to)
        done = max((w.stage for w in sent), default=0)
        if not done and len(to.stages) > 1:
            done, lapsed = _told_before(view, settings, now, to, lapsed)
    if done >= len(to.stages):
        if to.delivered and not _heard(sent):
            return _not_heard(view, settings, now, to, sent, lapsed)
        return _end(view, settings, now, to, sent, oldest)
    after = share_of(to.limit, to.stages[done])
    if now < to.begin + after:
        first = "first warned" if done == 0 else "warned again"
        words = f"{to.condition}; {first} at {in_words(after)}"
        return Answer(to.rule, Verdict.WAIT, words, due=to.begin + after)
    return _warn(view, settings, now, to, sent, lapsed, done, to.begin + after)


def without_steps(reason: str) -> str:
    """What `staged` answers without what comes when, for where that is said already."""
    return _STEPS.sub("", reason)


def _heard(sent: list[Warned]) -> bool:
    return any(w.delivered for w in sent)


def _not_heard(view: View, settings: Settings, now: datetime, to: Countdown, sent: list[Warned], lapsed: str) -> Answer:
    """All warnings were sent and none was delivered: it is kept, and its owner is warned again from time to time."""
    again = sent[-1].at + AGAIN
    if now >= again:
        return _warn(view, settings, now, to, sent, lapsed, len(to.stages) - 1, again)
    words = f"{to.condition}; kept, because no warning could be delivered to its owner ({_REACH}); next attempt"
    return Answer(to.rule, Verdict.REPORT, f"{words} {due_in_words(again, now)}", due=again, since=to.since)


def _counting(view: View, settings: Settings, now: datetime, to: Countdown) -> tuple[list[Warned], str, datetime]:
    """The warnings that count, a clause about those that do not any more, and since when warnings count."""
    oldest = now - valid_for(settings.policy.warnings, to.limit)
    if to.only_after is not None:
        oldest = max(oldest, to.only_after)
    held = last_end(to.rule, view, settings, now, holdable=to.holdable) if _may_have_been_held(view) else None
    sent, lapsed = _sent(view, to, oldest, held, now)
    return sent, lapsed, oldest if held is None else max(oldest, held)


def _told_before(view: View, settings: Settings, now: datetime, to: Countdown, lapsed: str) -> tuple[int, str]:
    """Whether the first warning of an earlier episode is enough: 1, and a clause about what it announced."""
    if to.told_after is None:
        return 0, lapsed
    earlier, _, _ = _counting(view, settings, now, msgspec.structs.replace(to, only_after=to.told_after))
    if not any(one.delivered for one in earlier):
        return 0, lapsed
    void = max((w.until for w in earlier if w.until is not None), default=None)
    words = "" if void is None else f"; the announcement for {_time(void)} is void, because its use was not measured"
    return 1, words


def _may_have_been_held(view: View) -> bool:
    return bool(view.memory.holds) or view.subject.marks.hold_until is not None


def will(policy: Policy) -> str:
    """In mode plan nothing is done unattended."""
    return "would" if policy.mode is Mode.PLAN else "will"


def _warn(
    view: View,
    settings: Settings,
    now: datetime,
    to: Countdown,
    sent: list[Warned],
    lapsed: str,
    done: int,
    at: datetime,
) -> Answer:
    """The warning after the `done` that were sent. `at`: when it was due."""
    ends = f"{will(settings.policy)} {_ENDS[to.action]}"

    def announcement(*, delivered: bool) -> Announcement:
        if to.delivered and not delivered and not _heard(sent):
            not_ended = f"not {_ENDS[to.action].removeprefix('be ')} before a warning is delivered to its owner"
            return Announcement(None, f"{to.condition}{lapsed}; {not_ended}. {remedy}")
        with_this = [*sent, Warned(to.rule, done + 1, now, delivered, "", to.limit)]
        stop = _stop_at(with_this, settings.policy.warnings, to.shortened, to.begin + to.limit, now)
        words = f"{to.condition}{lapsed}; {ends} {due_in_words(stop, now)}{_then(view, to)}. {remedy}"
        return Announcement(stop, words)

    remedy = f"{to.remedy}: {keep_it(view, settings, now)}" if to.holdable else to.remedy
    usual, undelivered = announcement(delivered=True), announcement(delivered=False)
    return Answer(
        to.rule,
        Verdict.DUE,
        usual.words,
        Action.WARN,
        at,
        to.since,
        stage=done + 1,
        limit=to.limit,
        then=to.action,
        announced=usual.at,
        unheard=undelivered,
    )


def _end(view: View, settings: Settings, now: datetime, to: Countdown, sent: list[Warned], oldest: datetime) -> Answer:
    """All warnings were sent: the action, or how long it still waits."""
    stop = _stop_at(sent, settings.policy.warnings, to.shortened, to.begin + to.limit, now)
    last = _last_announced(view, to.rule, oldest, now)
    stop = max([stop, *last])
    if now >= stop:
        then = _then(view, to)
        words = f"{to.condition}; stopped{then}" if then else to.condition
        return Answer(to.rule, Verdict.DUE, words, to.action, stop, to.since, limit=to.limit)
    ends = f"{will(settings.policy)} {_ENDS[to.action]} {due_in_words(stop, now)}{_then(view, to)}"
    words = f"{to.condition}; warned, {ends}"
    announced = max([*last, *(w.until for w in sent if w.until is not None)], default=stop)
    if stop > announced:
        words += f", later than announced ({_time(announced)}): the limit of {in_words(to.limit)} is not over"
    return Answer(to.rule, Verdict.WAIT, words, due=stop)


def _then(view: View, to: Countdown) -> str:
    return DELETED if to.action is Action.STOP and view.subject.goes_when_stopped else to.then


def _sent(
    view: View, to: Countdown, oldest: datetime, held: datetime | None, now: datetime
) -> tuple[list[Warned], str]:
    """The warnings that count, and a clause about those that do not any more.

    Those from before the end of a hold (`held`) do not: what they announced did not happen then, and the owner does
    not expect it now. While no daemon ran, nobody could hold it or be granted more time, so the lead begins anew. That
    is different for an announcement on the object itself: whoever can read it there can hold it there.
    """
    about = [w for w in view.memory.warnings if w.rule == to.rule and w.limit == to.limit and oldest <= w.at <= now]
    left = [w for w in _notes(view, now) if w.rule == to.rule and w.limit == to.limit and oldest <= w.at]
    fit, since = about, view.watched_since
    if held is not None:
        fit, left = [w for w in about if w.at >= held], [w for w in left if w.at >= held]
    sent = (fit if since is None else [w for w in fit if w.at >= since]) or left
    gone = max((w.until for w in (fit or about) if w.until is not None), default=None)
    if sent or gone is None:
        return sent, ""
    why = "gpukeeper did not run continuously" if fit or held is None else f"it was held until {_time(held)}"
    return sent, f"; the announcement for {_time(gone)} is void, because {why}"


def _notes(view: View, now: datetime) -> list[Warned]:
    """Announcements on the object itself. Whoever may change the object can write one: what announces a time too far
    away would keep it longer than a hold may, and does not count."""
    notes = [w for w in view.subject.marks.warned if w.at <= now]
    return [w for w in notes if w.until is None or w.until - w.at <= LONGEST_NOTE]


def _last_announced(view: View, rule: str, oldest: datetime, now: datetime) -> list[datetime]:
    """The time that was announced to its owner last, for any limit: limits change with demand, and back again."""
    said = [w for w in view.memory.warnings if w.rule == rule and w.until is not None and oldest <= w.at <= now]
    last = max(said, key=lambda w: w.at, default=None)
    return [] if last is None or last.until is None else [last.until]


def not_before_announced(view: View, answer: Answer, now: datetime) -> Answer:
    """Nothing is removed or ended before the time for which any rule announced its removal, even if the reason for the
    warning has gone meanwhile."""
    if answer.verdict is not Verdict.DUE or answer.action not in (Action.TRIM, Action.REMOVE):
        return answer
    announced = [*view.memory.warnings, *_notes(view, now)]
    until = max((w.until for w in announced if w.removes and w.until is not None and w.at <= now), default=None)
    if until is None or now >= until:
        return answer
    reason = f"{answer.reason}; its removal was announced for {_time(until)}, and nothing is done before then"
    return msgspec.structs.replace(answer, verdict=Verdict.WAIT, action=Action.KEEP, due=until, reason=reason)


def keep_it(view: View, settings: Settings, now: datetime) -> str:
    """How its owner keeps it, as a command. On the object itself where that is where a hold counts."""
    marks = view.subject.marks
    if not marks.hold_with:
        return f"gpukeeper workload hold {view.subject.ref.path}"
    longest = DAY if isinstance(settings.limits, Unknown) else settings.limits.hold
    until = (now + longest).replace(second=0, microsecond=0)
    return f"{marks.hold_with}{until:%Y-%m-%dT%H:%M:%SZ}"


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC"


@lru_cache(maxsize=1024)
def share_of(limit: timedelta, share: float) -> timedelta:
    return share * limit


def remove_with_children(rule: str, view: View, settings: Settings, now: datetime, answer: Answer) -> Answer:
    """A finished root that is due while its children still run: they are running work, so warn first."""
    if answer.verdict is not Verdict.DUE or view.subject.live_children == 0:
        return answer
    lead = settings.policy.warnings.lead
    to = Countdown(
        rule=rule,
        action=Action.REMOVE,
        begin=now - lead,
        limit=lead,
        stages=AT_ONCE,
        condition=f"{answer.reason}; {view.subject.live_children} of its children still run and are removed with it",
        since=answer.since or now,
        remedy="Keep it",
        only_after=answer.since,
    )
    warned = staged(view, settings, now, to)
    return msgspec.structs.replace(warned, suspends=answer.suspends)


def _stop_at(sent: list[Warned], settings: Warnings, shortened: bool, earliest: datetime, now: datetime) -> datetime:
    """Not before the limit, and not before everyone had the lead the policy promises.

    What the last warning announced is what counts. For one that is sent now: if the limit was shortened, the lead
    counts from the last warning instead of the first.
    """
    if not sent:
        return max(earliest, now + settings.lead)
    announced = max((w.until for w in sent if w.until is not None), default=None)
    if announced is not None and sent[-1].until is not None:
        return max(earliest, announced)
    delivered = [w for w in sent if w.delivered]
    warned = (delivered or sent)[-1 if shortened else 0].at
    computed = max(earliest, warned + settings.lead + (timedelta() if delivered else settings.undelivered))
    return computed if announced is None else max(computed, announced)
