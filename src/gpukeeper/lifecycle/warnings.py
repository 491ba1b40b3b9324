"""Warnings before running work is stopped, as a staged answer: warn, warn, then the stop, never without lead."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache

import msgspec

from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Announcement, Answer, Verdict, View
from gpukeeper.model.durations import in_words
from gpukeeper.model.memory import Warned
from gpukeeper.model.policy import Warnings
from gpukeeper.model.unknown import Unknown

_ENDS = {Action.STOP: "will be stopped", Action.REMOVE: "will be removed"}
DAY = timedelta(days=1)
LONGEST_NOTE = timedelta(days=7)  # between a note on an object and the time that it announces
AT_ONCE = (0.0,)  # one warning as soon as the condition holds


def valid_for(settings: Warnings, limit: timedelta) -> timedelta:
    """How long a warning counts. Nobody acts on what was announced for last week: a hold, an exemption or a pause was
    in between."""
    return limit + settings.lead + settings.undelivered + DAY


def staged(
    rule: str,
    view: View,
    settings: Warnings,
    now: datetime,
    *,
    begin: datetime,
    limit: timedelta,
    stages: tuple[float, ...],
    action: Action,
    condition: str,
    since: datetime,
    remedy: str,
    only_after: datetime | None = None,
) -> Answer:
    """What is due of warnings and stop. A warning from the future (the clock was wrong then) does not count.

    `remedy`: what the owner can do about it. `only_after`: older warnings belong to an earlier episode.
    """
    oldest = now - valid_for(settings, limit)
    if only_after is not None:
        oldest = max(oldest, only_after)
    sent, lapsed = _sent(view, rule, limit, oldest, now)
    done = max((w.stage for w in sent), default=0)
    if done < len(stages):
        after = _share(limit, stages[done])
        at = begin + after
        if now >= at:

            def announce(*, heard: bool) -> Announcement:
                told_now = [*sent, Warned(rule, done + 1, now, heard, "", limit)]
                stop = _stop_at(told_now, settings, view.pressure, begin + limit, now)
                when = f"in {in_words(stop - now)}" if stop > now else "at the next pass"
                return Announcement(stop, f"{condition}{lapsed}; {_ENDS[action]} {when}. {remedy}")

            told, unheard = announce(heard=True), announce(heard=False)
            answer = Answer(rule, Verdict.DUE, told.words, Action.WARN, at, since, stage=done + 1, limit=limit)
            return msgspec.structs.replace(answer, then=action, announced=told.at, unheard=unheard)
        first = "first warned" if done == 0 else "warned again"
        return Answer(rule, Verdict.WAIT, f"{condition}; {first} at {in_words(after)}", due=at)
    stop = _stop_at(sent, settings, view.pressure, begin + limit, now)
    last = _last_announced(view, rule, oldest, now)
    stop = max([stop, *last])
    if now >= stop:
        return Answer(rule, Verdict.DUE, condition, action, stop, since, limit=limit)
    words = f"{condition}; warned, {_ENDS[action]} in {in_words(stop - now)}"
    announced = max([*last, *(w.until for w in sent if w.until is not None)], default=stop)
    if stop > announced:
        words += f", later than announced ({_time(announced)}): the limit of {in_words(limit)} is not over"
    return Answer(rule, Verdict.WAIT, words, due=stop)


def _sent(view: View, rule: str, limit: timedelta, oldest: datetime, now: datetime) -> tuple[list[Warned], str]:
    """The warnings that count, and a clause about those that do not any more.

    While no daemon ran, nobody could hold it or be granted more time, so the lead begins anew. That is different for
    an announcement on the object itself: whoever can read it there can hold it there.
    """
    fit = [w for w in view.memory.warnings if w.rule == rule and w.limit == limit and oldest <= w.at <= now]
    since = view.watched_since
    heard = fit if since is None else [w for w in fit if w.at >= since]
    left = [w for w in _notes(view, now) if w.rule == rule and w.limit == limit and oldest <= w.at]
    sent = heard or left
    gone = max((w.until for w in fit if w.until is not None), default=None)
    if sent or gone is None:
        return sent, ""
    return sent, f"; the announcement for {_time(gone)} is void, because gpukeeper did not run continuously"


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
def _share(limit: timedelta, share: float) -> timedelta:
    return share * limit


def remove_with_children(rule: str, view: View, settings: Settings, now: datetime, answer: Answer) -> Answer:
    """A finished root that is due while its children still run: they are running work, so warn first."""
    if answer.verdict is not Verdict.DUE or view.subject.live_children == 0:
        return answer
    warnings = settings.policy.warnings
    warned = staged(
        rule,
        view,
        warnings,
        now,
        begin=now - warnings.lead,
        limit=warnings.lead,
        stages=AT_ONCE,
        action=Action.REMOVE,
        condition=f"{answer.reason}; {view.subject.live_children} of its children still run and are removed with it",
        since=answer.since or now,
        remedy=f"Keep it: {keep_it(view, settings, now)}",
        only_after=answer.since,
    )
    return msgspec.structs.replace(warned, suspends=answer.suspends)


def _stop_at(sent: list[Warned], settings: Warnings, pressure: bool, earliest: datetime, now: datetime) -> datetime:
    """Not before the limit, and not before everyone had the lead the policy promises.

    What the last warning announced is what counts. For one that is sent now: under high demand the limit is shorter, so
    the lead counts from the last warning instead of the first.
    """
    if not sent:
        return max(earliest, now + settings.lead)
    announced = max((w.until for w in sent if w.until is not None), default=None)
    if announced is not None and sent[-1].until is not None:
        return max(earliest, announced)
    heard = [w for w in sent if w.delivered]
    told = (heard or sent)[-1 if pressure else 0].at
    computed = max(earliest, told + settings.lead + (timedelta() if heard else settings.undelivered))
    return computed if announced is None else max(computed, announced)
