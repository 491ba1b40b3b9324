"""Warnings before running work is stopped, as a staged answer: warn, warn, then the stop, never without lead."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache

import msgspec

from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.durations import in_words
from gpukeeper.model.memory import Warned
from gpukeeper.model.policy import Warnings

_ENDS = {Action.STOP: "will be stopped", Action.REMOVE: "will be removed"}
HOLD = "Keep it: gpukeeper workload hold"  # the path follows
DAY = timedelta(days=1)
AT_ONCE = (0.0,)  # one warning as soon as the condition holds


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
    # Nobody acts on what was announced for last week: a hold, an exemption or a pause was in between.
    oldest = now - limit - settings.lead - settings.undelivered - DAY
    if only_after is not None:
        oldest = max(oldest, only_after)
    if view.watched_since is not None:
        # While no daemon ran, nobody could hold it or be granted more time: the lead begins anew.
        oldest = max(oldest, view.watched_since)
    sent = [w for w in view.memory.warnings if w.rule == rule and w.limit == limit and oldest <= w.at <= now]
    done = max((w.stage for w in sent), default=0)
    if done < len(stages):
        after = _share(limit, stages[done])
        at = begin + after
        if now >= at:
            told_now = [*sent, Warned(rule, done + 1, now, True, "", limit)]
            stop = _stop_at(told_now, settings, view.pressure, begin + limit, now)
            when = f"in {in_words(stop - now)}" if stop > now else "at the next pass"
            words = f"{condition}; {_ENDS[action]} {when}. {remedy}"
            return Answer(rule, Verdict.DUE, words, Action.WARN, at, since, stage=done + 1, limit=limit, then=action)
        first = "first warned" if done == 0 else "warned again"
        return Answer(rule, Verdict.WAIT, f"{condition}; {first} at {in_words(after)}", due=at)
    stop = _stop_at(sent, settings, view.pressure, begin + limit, now)
    if now >= stop:
        return Answer(rule, Verdict.DUE, condition, action, stop, since, limit=limit)
    return Answer(rule, Verdict.WAIT, f"{condition}; warned, {_ENDS[action]} in {in_words(stop - now)}", due=stop)


@lru_cache(maxsize=1024)
def _share(limit: timedelta, share: float) -> timedelta:
    return share * limit


def remove_with_children(rule: str, view: View, settings: Warnings, now: datetime, answer: Answer) -> Answer:
    """A finished root that is due while its children still run: they are somebody's running work, so warn first."""
    if answer.verdict is not Verdict.DUE or view.subject.live_children == 0:
        return answer
    warned = staged(
        rule,
        view,
        settings,
        now,
        begin=now - settings.lead,
        limit=settings.lead,
        stages=AT_ONCE,
        action=Action.REMOVE,
        condition=f"{answer.reason}; {view.subject.live_children} of its children still run and go with it",
        since=answer.since or now,
        remedy=f"{HOLD} {view.subject.ref.path}",
        only_after=answer.since,
    )
    return msgspec.structs.replace(warned, suspends=answer.suspends)


def _stop_at(sent: list[Warned], settings: Warnings, pressure: bool, earliest: datetime, now: datetime) -> datetime:
    """Not before the limit, and not before everyone had the lead the policy promises.

    Under high demand the limit is shorter, so the lead counts from the last warning instead of the first.
    """
    if not sent:
        return max(earliest, now + settings.lead)
    heard = [w for w in sent if w.delivered]
    told = (heard or sent)[-1 if pressure else 0].at
    return max(earliest, told + settings.lead + (timedelta() if heard else settings.undelivered))
