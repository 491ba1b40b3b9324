"""When a pass may act: the moments of cron words, in the time zone of this machine.

A nominal time that the clocks skip counts at the first minute after the gap; one that comes twice counts the first
time. So "02:30 every day" happens exactly once a day, also on the days on which the clocks change.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, pairwise

from cronsim import CronSim

from gpukeeper.lifecycle.forecast import MINUTE, Opens
from gpukeeper.model.policy import Schedule

CHANGE = timedelta(
    hours=3
)  # more than clocks are ever set back; times are searched from this long before the last pass
SEARCHED = 400  # moments: more than a year of daily ones


class LocalZone(tzinfo):
    """The zone of TZ or /etc/localtime, with its changes: what the C library has. A fixed offset, which
    `astimezone()` alone gives, is wrong on the other side of a change."""

    def utcoffset(self, dt: datetime | None) -> timedelta | None:
        return None if dt is None else dt.replace(tzinfo=None).astimezone().utcoffset()

    def dst(self, dt: datetime | None) -> timedelta | None:
        return None

    def tzname(self, dt: datetime | None) -> str | None:
        return None if dt is None else dt.replace(tzinfo=None).astimezone().tzname()

    def fromutc(self, dt: datetime) -> datetime:
        found = dt.replace(tzinfo=UTC).astimezone()
        local = found.replace(tzinfo=self, fold=0)
        return local if local.utcoffset() == found.utcoffset() else local.replace(fold=1)


LOCAL = LocalZone()


def may_act_now(schedule: Schedule, last: datetime | None, now: datetime) -> bool:
    """With cron words (in local time) a pass acts only when such a moment lies between the last pass and this one."""
    if schedule.at is None:
        return True
    if last is None:
        return False
    at = next((moment for moment in _moments(schedule.at, last) if moment > last), None)
    return at is not None and at <= now


def next_moment(schedule: Schedule, at: datetime) -> datetime:
    """The first time from then on at which anything is done. Cron words that never fit again: then, as if none were."""
    if schedule.at is None:
        return at
    return next((moment for moment in _moments(schedule.at, at) if moment >= at), at)


def opening(schedule: Schedule) -> Opens:
    """For a forecast: when a pass next acts, after the one that took the last step on the same workload."""

    def opens(at: datetime, acted: datetime | None) -> datetime:
        if acted is None or schedule.at is None:
            return next_moment(schedule, at)
        return next_moment(schedule, max(at, acted + MINUTE))

    return opens


def acts_in_a_row(schedule: Schedule, at: datetime, count: int, apart: timedelta) -> bool:
    """Whether so many acting passes ever follow each other with at most `apart` between two of them."""
    if schedule.at is None:
        return schedule.every <= apart
    found = 1
    for before, after in pairwise(islice(_moments(schedule.at, at), SEARCHED)):
        found = found + 1 if after - before <= apart else 1
        if found >= count:
            return True
    return False


def _moments(words: str, at: datetime) -> Iterator[datetime]:
    """From some time before. In UTC: Python compares two times of one zone by their wall clocks, which is wrong in a
    repeated hour."""
    return (moment.astimezone(UTC) for moment in CronSim(words, (at - CHANGE).astimezone(LOCAL)))
