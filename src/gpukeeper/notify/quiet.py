"""Quiet hours: a span of every day in one time zone. Pure, except that the time zone database is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

EXAMPLE = "22:00-07:00 Europe/Berlin"
_SHAPE = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d) ([A-Za-z0-9_+/-]{1,64})", re.ASCII)


@dataclass(frozen=True)
class QuietHours:
    begin: time
    end: time
    zone: ZoneInfo

    def contain(self, at: datetime) -> bool:
        now = at.astimezone(self.zone).time()
        if self.begin < self.end:
            return self.begin <= now < self.end
        return now >= self.begin or now < self.end

    def end_after(self, at: datetime) -> datetime:
        """When the quiet hours that contain `at` are over."""
        local = at.astimezone(self.zone)
        day = local.date() if local.time() < self.end else local.date() + timedelta(days=1)
        return datetime.combine(day, self.end, self.zone).astimezone(UTC)


def read_quiet_hours(words: str) -> QuietHours:
    """Raises ValueError with a sentence."""
    found = _SHAPE.fullmatch(words)
    if found is None:
        raise ValueError(f"these are no quiet hours. Write them like {EXAMPLE}.")
    hours = [int(part) for part in found.groups()[:4]]
    try:
        begin, end = time(hours[0], hours[1]), time(hours[2], hours[3])
    except ValueError:
        raise ValueError(f"this is no time of a day. Write quiet hours like {EXAMPLE}.") from None
    if begin == end:
        raise ValueError(f"quiet hours begin and end at the same time. Write them like {EXAMPLE}.")
    try:
        return QuietHours(begin, end, ZoneInfo(found[5]))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f'the time zone "{found[5]}" is unknown. Write quiet hours like {EXAMPLE}.') from None
