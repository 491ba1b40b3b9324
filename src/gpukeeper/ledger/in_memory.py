"""A ledger in memory: for the demo, simulations and reading without a ledger. Same fold as the real one."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from math import isnan

from gpukeeper.model.decision import Evidence
from gpukeeper.model.errors import LeaseHeld
from gpukeeper.model.event import (
    Checkpoint,
    Closed,
    Decided,
    Event,
    Held,
    Intended,
    Noticed,
    Passed,
    Paused,
    Released,
    Resumed,
)
from gpukeeper.model.fold import closes, decision_words, holds_from, is_gone, newest_clocks, refs_of, remember
from gpukeeper.model.ports import Signals
from gpukeeper.model.series import NOT_MEASURED, Sample, Series, Signal, unbroken
from gpukeeper.model.subject import EMPTY, ClockRecord, Hold, Memory, Ref
from gpukeeper.model.unknown import Unknown

BACK_MAX = 2 * 24 * 60  # minutes that a clock may go back without what was measured ahead of it being dropped


class InMemoryLedger:
    def __init__(self, lines: Iterable[Event] = ()) -> None:
        self.lines: list[Event] = []
        self._memories: dict[str, Memory] = {}
        self._present: dict[tuple[str, str], dict[str, Ref]] = defaultdict(dict)
        self._decided: dict[str, str] = {}
        self._open: dict[str, Intended] = {}
        self._acts: list[tuple[datetime, str]] = []
        self._passes = 0
        self._paused: str | None = None
        self._leases: set[tuple[str, str]] = set()
        self.clocks: dict[str, ClockRecord] = {}
        for line in lines:
            self._take(line)

    async def append(self, lines: Sequence[Event]) -> None:
        for line in lines:
            self._take(line)

    async def memories(self, keys: Iterable[str]) -> Mapping[str, Memory]:
        return {key: self._memories[key] for key in keys if key in self._memories}

    async def present(self, platform: str, place: str) -> Mapping[str, Ref]:
        return dict(self._present[platform, place])

    async def decided(self, keys: Iterable[str]) -> Mapping[str, str]:
        return {key: self._decided[key] for key in keys if key in self._decided}

    async def open_intents(self, platform: str, place: str) -> Sequence[Intended]:
        return [i for i in self._open.values() if i.ref and (i.ref.platform, i.ref.place) == (platform, place)]

    async def acts_since(self, since: datetime, rules: frozenset[str], *, but: bool = False) -> int:
        first = bisect.bisect_left(self._acts, (since, ""))
        return sum((rule in rules) is not but for _, rule in self._acts[first:])

    async def holds_of(self, owner: str, since: datetime) -> Mapping[str, tuple[Hold, ...]]:
        return holds_from(
            line
            for line in self.lines
            if isinstance(line, Held | Released) and line.owner == owner and line.at >= since
        )

    async def about(self, words: str) -> Sequence[Event]:
        return [line for line in self.lines if line.ref is not None and line.ref.ends_with(words)]

    async def next_pass(self) -> int:
        self._passes += 1
        return self._passes

    async def last_line_at(self, before: datetime | None = None) -> datetime | None:
        if before is not None:
            return max((line.at for line in self.lines if line.at <= before), default=None)
        return self.lines[-1].at if self.lines else None

    async def clock_records(self) -> Mapping[str, ClockRecord]:
        return dict(self.clocks)

    async def record_clock(self, boot: str, record: ClockRecord) -> None:
        self.clocks = newest_clocks(self.clocks, boot, record)

    async def paused(self) -> str | None:
        return self._paused

    @asynccontextmanager
    async def lease(self, platform: str, place: str) -> AsyncIterator[None]:
        if (platform, place) in self._leases:
            raise LeaseHeld(f"another pass is running on {platform}/{place}; nothing was touched there")
        self._leases.add((platform, place))
        try:
            yield
        finally:
            self._leases.discard((platform, place))

    def _take(self, line: Event) -> None:
        self.lines.append(line)
        match line:
            case Intended():
                self._passes = max(self._passes, line.pass_id)
                self._open[line.step] = line
                bisect.insort(self._acts, (line.at, line.rule))
            case Closed() if closes(line):
                self._open.pop(line.step, None)
            case Paused():
                self._paused = self._paused or line.words
            case Resumed():
                self._paused = None
            case Passed():
                self._passes = max(self._passes, line.pass_id)
            case Checkpoint():
                self._restore(line)
            case _:
                pass
        for ref in refs_of(line):
            self._take_about(ref, line)

    def _restore(self, line: Checkpoint) -> None:
        """A checkpoint is the whole state: what it does not name was not there."""
        self._memories = dict(line.memories)
        self._decided = dict(line.decided)
        self._open = {intent.step: intent for intent in line.open}
        self._present.clear()
        for ref in line.present:
            self._present[ref.platform, ref.place][ref.key] = ref
        self._paused = (line.pause_reason or f"paused by {line.by}") if line.paused else None
        self._passes = max(self._passes, line.passes)

    def _take_about(self, ref: Ref, line: Event) -> None:
        key = ref.key
        memory = remember(self._memories.get(key, EMPTY), line)
        if memory is None:
            self._memories.pop(key, None)
        elif memory is not EMPTY:
            self._memories[key] = memory
        here = self._present[ref.platform, ref.place]
        if isinstance(line, Noticed):
            here[key] = ref
        elif isinstance(line, Decided):
            self._decided[key] = decision_words(line)
        elif is_gone(line):
            here.pop(key, None)
            self._decided.pop(key, None)


class InMemorySignals:
    """One-minute buckets: the mean of what was read in that minute."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[tuple[Signal, str, bool], _Row]] = defaultdict(dict)
        self._absent: dict[str, dict[Signal, Unknown]] = defaultdict(dict)

    async def add(self, samples: Sequence[Sample]) -> None:
        minute, at = 0, None
        for sample in samples:
            if isinstance(sample.value, Unknown):
                if sample.value.by_design:
                    self._absent[sample.key][sample.signal] = sample.value
                continue
            if sample.at is not at:  # a tick has one time for all its samples
                at, minute = sample.at, int(sample.at.timestamp()) // 60
            rows, which = self._rows[sample.key], (sample.signal, sample.device, sample.slice)
            row = rows.get(which)
            if row is None:
                row = rows[which] = _Row(minute)
            row.add(minute, sample, sample.value)

    async def series(self, keys: Sequence[str], since: datetime, until: datetime) -> Mapping[str, tuple[Series, ...]]:
        first, last = int(since.timestamp()) // 60, int(until.timestamp()) // 60
        start = datetime.fromtimestamp(first * 60, until.tzinfo)
        found: dict[str, tuple[Series, ...]] = {}
        for key in keys:
            rows, absent = self._rows.get(key, {}), self._absent.get(key, {})
            found[key] = (
                *(_series(which, start, row, first, last) for which, row in rows.items()),
                *(Series(signal, "", start, (), missing=why) for signal, why in absent.items()),
            )
        return {key: series for key, series in found.items() if series}


def _series(which: tuple[Signal, str, bool], start: datetime, row: _Row, first: int, last: int) -> Series:
    since, until = row.unbroken if row.unbroken is not None else (None, None)
    return Series(which[0], which[1], start, row.cut(first, last), which[2], since=since, until=until)


class RecalledSignals:
    """What a session that must not write learns of the past, over what was measured before. Gone with the session."""

    def __init__(self, stored: Signals) -> None:
        self._stored, self._added = stored, InMemorySignals()

    async def add(self, samples: Sequence[Sample]) -> None:
        await self._added.add(sorted(samples, key=lambda one: one.at))

    async def series(self, keys: Sequence[str], since: datetime, until: datetime) -> Mapping[str, tuple[Series, ...]]:
        stored = await self._stored.series(keys, since, until)
        return {**stored, **await self._added.series(keys, since, until)}


class _Row:
    """Means of consecutive minutes from `first` on."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.means: list[float] = []
        self.counts: list[int] = []
        self.unbroken: tuple[datetime, datetime] | None = None

    def add(self, minute: int, sample: Sample, value: float) -> None:
        if not isnan(value):
            self.unbroken = unbroken(self.unbroken, sample)
        self._add(minute, sample.in_one_minute(value) if value else 0.0)

    def _add(self, minute: int, value: float) -> None:
        at = minute - self.first
        if at == len(self.means):  # as almost always
            self.means.append(value)
            self.counts.append(1)
            return
        if at < 0:  # a clock that went backwards; a reading must not get lost
            if -at > BACK_MAX:
                self.means, self.counts = [], []
            else:
                self.means, self.counts = [NOT_MEASURED] * -at + self.means, [0] * -at + self.counts
            self.first, at = minute, 0
        missing = at + 1 - len(self.means)
        if missing > 0:
            self.means += [NOT_MEASURED] * missing
            self.counts += [0] * missing
        count = self.counts[at] = self.counts[at] + 1
        self.means[at] = value if count == 1 else self.means[at] + (value - self.means[at]) / count

    def cut(self, first: int, last: int) -> tuple[float, ...]:
        before = min(max(0, self.first - first), last + 1 - first)
        begin = max(0, first - self.first)
        have = self.means[begin : max(begin, last + 1 - self.first)]
        after = last + 1 - first - before - len(have)
        return (NOT_MEASURED,) * before + tuple(have) + (NOT_MEASURED,) * after


class InMemoryEvidence:
    def __init__(self) -> None:
        self.saved: dict[str, Evidence] = {}

    async def save(self, ref: Ref, step: str, at: datetime, evidence: Evidence) -> str | Unknown:
        name = f"{at:%Y%m%d}-{step}-{ref.name}"
        self.saved[name] = evidence
        return name

    async def load(self, name: str) -> Evidence | Unknown:
        return self.saved.get(name, Unknown(f"no evidence named {name}"))
