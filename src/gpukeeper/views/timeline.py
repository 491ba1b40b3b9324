"""One workload over time: its signals in steps of five minutes, and what was recorded about it meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from math import isnan

import msgspec

from gpukeeper.lifecycle.explain import idle_window
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.lifecycle.waste import wasted
from gpukeeper.model.decision import View
from gpukeeper.model.event import Closed, Decided, Event, Held, Noticed, Released, WarningSent
from gpukeeper.model.memory import Hold
from gpukeeper.model.series import MINUTE, Series, Signal
from gpukeeper.views.live import WorkloadLine

STEP = timedelta(minutes=5)
_SIGNALS = {one.value: one for one in Signal}


class TimelineSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Means of five minutes; None: not measured."""

    signal: Signal
    device: str
    start: datetime
    values: tuple[float | None, ...]


class TimelineMark(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: warning, hold, release, decision, act or state. `until`: end of a hold, or the announced time."""

    at: datetime
    kind: str
    words: str
    until: datetime | None = None


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """`idle_window`: the time without use after which the idle rule applies. `idle_since`: not used since then."""

    since: datetime
    now: datetime
    series: tuple[TimelineSeries, ...]
    marks: tuple[TimelineMark, ...]
    idle_window: timedelta | None = None
    idle_since: datetime | None = None


def timeline(
    view: View, book: Rulebook, series: Iterable[Series], lines: Sequence[Event], since: datetime, now: datetime
) -> Timeline:
    waste = wasted(view, book, now)
    return Timeline(
        since=since,
        now=now,
        series=tuple(_means(one) for one in series),
        marks=_marks(lines, since),
        idle_window=idle_window(view, book),
        idle_since=None if waste is None else waste.since,
    )


def copied_timeline(
    line: WorkloadLine,
    points: Iterable[tuple[str, str, datetime, float | None]],
    lines: Sequence[Event],
    since: datetime,
    now: datetime,
) -> Timeline:
    """From a copy: signal, device, minute and mean of each minute, in this order. The idle window is not in it."""
    found = []
    for (name, device), group in groupby(points, key=lambda point: point[:2]):
        signal = _SIGNALS.get(name)
        if signal is not None:
            found.append(_stepped(signal, device, [(at, mean) for _, _, at, mean in group]))
    return Timeline(since=since, now=now, series=tuple(found), marks=_marks(lines, since), idle_since=line.idle_since)


def _stepped(signal: Signal, device: str, minutes: Sequence[tuple[datetime, float | None]]) -> TimelineSeries:
    start = minutes[0][0]
    parts: dict[int, list[float]] = {}
    for at, mean in minutes:
        if mean is not None and not isnan(mean):
            parts.setdefault((at - start) // STEP, []).append(mean)
    count = (minutes[-1][0] - start) // STEP + 1
    return TimelineSeries(
        signal=signal, device=device, start=start, values=tuple(_mean(parts.get(one, ())) for one in range(count))
    )


def _marks(lines: Sequence[Event], since: datetime) -> tuple[TimelineMark, ...]:
    ends = _hold_ends(lines)
    return tuple(mark for line in lines if (mark := _mark(line, ends)) is not None and _is_shown(mark, since))


def _is_shown(mark: TimelineMark, since: datetime) -> bool:
    """A hold that began earlier is shown while it lasts."""
    return mark.at >= since or (mark.kind == "hold" and mark.until is not None and mark.until > since)


def _hold_ends(lines: Sequence[Event]) -> dict[Hold, datetime]:
    """Of holds that were released before their time."""
    found: dict[Hold, datetime] = {}
    holds: list[Hold] = []
    for line in lines:
        if isinstance(line, Held):
            holds.append(line.hold)
        elif isinstance(line, Released):
            ended = [one for one in holds if one.by == line.by or not (one.admin or line.own)]
            found.update((one, line.at) for one in ended if one not in found and line.at < one.until)
    return found


def _means(one: Series) -> TimelineSeries:
    size = STEP // MINUTE
    parts = [one.minutes[first : first + size] for first in range(0, len(one.minutes), size)]
    return TimelineSeries(
        signal=one.signal, device=one.device, start=one.start, values=tuple(_mean(part) for part in parts)
    )


def _mean(minutes: Sequence[float]) -> float | None:
    known = [value for value in minutes if not isnan(value)]
    return round(sum(known) / len(known), 2) if known else None


def _mark(line: Event, ends: Mapping[Hold, datetime]) -> TimelineMark | None:
    match line:
        case WarningSent():
            words = f"warning {line.stage}{'' if line.delivered else ', not delivered'}"
            return TimelineMark(at=line.at, kind="warning", words=words, until=line.until)
        case Held():
            until = ends.get(line.hold, line.hold.until)
            return TimelineMark(at=line.at, kind="hold", words=f"held by {line.by}", until=until)
        case Released():
            return TimelineMark(at=line.at, kind="release", words=f"released by {line.by}")
        case Decided():
            return TimelineMark(at=line.at, kind="decision", words=f"{line.action} by rule {line.rule}")
        case Closed():
            return TimelineMark(at=line.at, kind="act", words=f"{line.action}: {line.result}")
        case Noticed():
            return TimelineMark(at=line.at, kind="state", words=str(line.state))
        case _:
            return None
