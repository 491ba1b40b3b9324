"""Our own ledger as a trace: what passes measured (`ledger/signals.py`), and starts, ends and holds from the journal.

Only reads. A workload whose lines were archived begins with what the checkpoint remembers of it, or with its first
measured minute. Lines and minutes that are written after it was opened are left out.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from gpukeeper.ledger.database import open_for_reading, translated
from gpukeeper.ledger.lines import decode
from gpukeeper.ledger.signals import first_minute, read_means
from gpukeeper.lifecycle.budget import TREES
from gpukeeper.lifecycle.decide import REQUEST
from gpukeeper.lifecycle.rules import idle, max_runtime
from gpukeeper.model import reading
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.errors import LedgerError, UsageError
from gpukeeper.model.event import (
    Checkpoint,
    Closed,
    Event,
    Held,
    Intended,
    Noticed,
    Passed,
    Released,
    Vanished,
    WarningSent,
)
from gpukeeper.model.fold import remember
from gpukeeper.model.reading import EPOCH
from gpukeeper.model.series import (
    MINUTE,
    NOT_MEASURED,
    BadRow,
    MadePasses,
    RecordedRun,
    RecordedSeries,
    Signal,
    moment_of,
)
from gpukeeper.model.subject import EMPTY, LIVE, OVER, Hold, Memory, PlaceKey, Ref
from gpukeeper.traces.spool import BadRows, unique

_LINES = (
    "SELECT seq, line FROM journal WHERE key = ? AND seq <= ? "
    "AND type IN ('noticed', 'vanished', 'hold', 'release', 'warning', 'outcome') ORDER BY seq"
)
_PASSES = "SELECT seq, line FROM journal WHERE type IN ('pass', 'intent') AND seq <= ?"
_REPLAYED = (idle.NAME, max_runtime.NAME)


class _Life(msgspec.Struct):
    """One incarnation, while its lines are read."""

    incarnation: str
    started: datetime
    ended: datetime | None = None
    owner: str | None = None
    class_: str = ""
    stopped: bool = False


class _Edges(msgspec.Struct, frozen=True):
    first: int
    last: int
    seq: int
    signals: frozenset[Signal]


class RecordedTrace:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._bad, self._rows = BadRows(), 0
        self._made: Mapping[PlaceKey, MadePasses] | None = None
        with translated(path), closing(open_for_reading(path)) as c:
            found = _edges(c)
        if found is None:
            raise UsageError(
                f"The ledger {path} has no measurements of GPUs. Nothing was replayed. They are recorded by "
                "`gpukeeper serve`; another ledger is named with GPUKEEPER_STATE."
            )
        self._edges = found

    @property
    def source(self) -> str:
        return f"ledger {self._path}"

    @property
    def begin(self) -> datetime:
        return moment_of(self._edges.first)

    @property
    def end(self) -> datetime:
        return moment_of(self._edges.last + 1)

    @property
    def signals(self) -> frozenset[Signal]:
        return self._edges.signals

    @property
    def rows(self) -> int:
        """Measured minutes that the last call of `runs` read."""
        return self._rows

    @property
    def bad_count(self) -> int:
        return self._bad.count

    @property
    def bad(self) -> tuple[BadRow, ...]:
        """`line` is the number of the line in the journal."""
        return tuple(self._bad.kept)

    @property
    def made(self) -> Mapping[PlaceKey, MadePasses]:
        if self._made is None:
            self._made = self._read_passes()
        return self._made

    def _read_passes(self) -> Mapping[PlaceKey, MadePasses]:
        with translated(self._path), closing(open_for_reading(self._path)) as c:
            rows = c.execute(_PASSES, (self._edges.seq,))
            measured = c.execute("SELECT DISTINCT key FROM series WHERE signal = ?", (Signal.GPU.value,))
            runs = {str(key) for (key,) in measured}
            found: dict[PlaceKey, list[Passed]] = {}
            others: Counter[int] = Counter()
            for seq, stored in rows:
                with suppress(LedgerError):  # without the line of a pass no run is lost
                    match decode(stored, f"line {seq}"):
                        case Passed() as line:
                            found.setdefault((line.platform, line.place), []).append(line)
                        case Intended() as line if line.rule not in TREES and not _is_replayed(line, runs):
                            others[line.pass_id] += 1
                        case _:
                            pass
        return {place: _made(lines, others) for place, lines in found.items()}

    def runs(self) -> Iterator[RecordedRun]:
        self._bad, self._rows = BadRows(), 0
        taken: set[str] = set()
        with translated(self._path), closing(open_for_reading(self._path)) as c:
            remembered = self._remembered(c)
            keys = c.execute(
                # What is measured of a GPU itself is no run of anything: its key ends with its own name.
                "SELECT key, min(id) FROM series "
                "WHERE signal = ? AND substr(key, -length(device) - 1) <> '/' || device GROUP BY key ORDER BY 2",
                (Signal.GPU.value,),
            )
            for key, _first in keys.fetchall():
                yield from self._runs_of(c, str(key), remembered.get(str(key), EMPTY), taken)

    def _runs_of(self, c: sqlite3.Connection, key: str, memory: Memory, taken: set[str]) -> Iterator[RecordedRun]:
        columns = c.execute("SELECT id, signal, device, slice FROM series WHERE key = ? ORDER BY id", (key,)).fetchall()
        lines = list(self._lines(c, key))
        lives = _lives(lines, memory) or self._measured_only(c, key, [row[0] for row in columns])
        holds = _holds(lines, memory)
        absent = tuple(Signal(name) for (name,) in c.execute("SELECT signal FROM absent WHERE key = ?", (key,)))
        ref = next((line.ref for line in lines if line.ref is not None), None) or _ref_of(c, key)
        first_start = memory.first_start or (lives[0].started if lives else None)
        for life in lives:
            if life.started >= self.end or (life.ended is not None and life.ended <= self.begin):
                continue
            series = tuple(self._series(c, columns, life))
            if not any(one.signal is Signal.GPU for one in series):
                continue
            yield RecordedRun(
                name=unique(ref.name, taken),
                started=life.started,
                ended=None if life.ended is None or life.ended > self.end else life.ended,
                devices=tuple(dict.fromkeys(one.device for one in series if one.signal is Signal.GPU)),
                series=series,
                owner=life.owner,
                class_=life.class_ or "unknown",
                platform=ref.platform,
                place=ref.place,
                namespace=ref.namespace,
                kind=ref.kind,
                stopped=life.stopped,
                holds=tuple(one for one in holds if one.until > life.started and one.at < (life.ended or self.end)),
                first_start=first_start if first_start is not None and first_start < life.started else None,
                absent=absent,
                reachable=not any(isinstance(line, WarningSent) and not line.delivered for line in lines),
            )

    def _lines(self, c: sqlite3.Connection, key: str) -> Iterator[Event]:
        for seq, stored in c.execute(_LINES, (key, self._edges.seq)).fetchall():
            try:
                yield decode(stored, f"line {seq}")
            except LedgerError as error:
                self._bad.add(seq, str(error))

    def _remembered(self, c: sqlite3.Connection) -> Mapping[str, Memory]:
        """As of the checkpoint before the first line, if older lines were archived."""
        row = c.execute("SELECT seq, line FROM journal WHERE type = 'checkpoint' ORDER BY seq LIMIT 1").fetchone()
        if row is None:
            return {}
        try:
            found = decode(row[1], f"line {row[0]}")
        except LedgerError as error:
            self._bad.add(row[0], str(error))
            return {}
        return found.memories if isinstance(found, Checkpoint) else {}

    def _measured_only(self, c: sqlite3.Connection, key: str, series: Sequence[int]) -> list[_Life]:
        """Of one whose lines were archived. What has decisions, and was never noticed as a workload, is none: a process
        that nobody owns, for instance."""
        if c.execute("SELECT 1 FROM journal WHERE key = ? AND type = 'decision'", (key,)).fetchone() is not None:
            return []
        known = [first for one in series if (first := first_minute(c, one)) is not None]
        return [_Life("", moment_of(min(known)))] if known else []

    def _series(
        self, c: sqlite3.Connection, columns: Sequence[tuple[int, str, str, int]], life: _Life
    ) -> Iterator[RecordedSeries]:
        begin, end = max(life.started, self.begin), min(life.ended or self.end, self.end)
        first, last = (begin - EPOCH) // MINUTE, (end - timedelta(microseconds=1) - EPOCH) // MINUTE
        for number, signal, device, part in columns:
            rows = read_means(c, number, first, last)
            if not rows:
                continue
            minutes = array("f", (NOT_MEASURED,)) * (last - first + 1)
            for minute, mean in rows:
                if mean is not None:
                    minutes[minute - first] = mean
            self._rows += len(rows)
            yield RecordedSeries(Signal(signal), device, moment_of(first), minutes, bool(part))


def _edges(c: sqlite3.Connection) -> _Edges | None:
    """By series: a minute has no index of its own."""
    rows = c.execute("SELECT id, newest FROM series WHERE signal = ?", (Signal.GPU.value,)).fetchall()
    known = [(first, newest) for series, newest in rows if (first := first_minute(c, series)) is not None]
    if not known:
        return None
    seq = c.execute("SELECT max(seq) FROM journal").fetchone()[0]
    signals = frozenset(Signal(name) for (name,) in c.execute("SELECT DISTINCT signal FROM series"))
    return _Edges(min(first for first, _last in known), max(last for _first, last in known), seq or 0, signals)


def _is_replayed(line: Intended, runs: Collection[str]) -> bool:
    return line.running and line.rule in _REPLAYED and line.ref is not None and line.ref.key in runs


def _made(lines: list[Passed], others: Mapping[int, int]) -> MadePasses:
    began = sorted((line.at - timedelta(seconds=line.seconds), line.pass_id, line) for line in lines)
    changes, scarce = [], False
    for at, _number, line in began:
        if line.scarce != scarce:
            changes.append(at)
            scarce = line.scarce
    return MadePasses(
        at=tuple(at for at, _number, _line in began),
        seen=tuple(line.seen for _at, _number, line in began),
        running=tuple(line.running for _at, _number, line in began),
        others=tuple(others.get(number, 0) for _at, number, _line in began),
        scarce=tuple(changes),
    )


def _lives(lines: Sequence[Event], memory: Memory) -> list[_Life]:
    found: list[_Life] = []
    if memory.started is not None and memory.state in {str(state) for state in LIVE}:
        found.append(_Life(memory.incarnation, memory.started, class_=memory.class_))
    for line in lines:
        match line:
            case Noticed():
                _notice(found, line)
            case Vanished():
                if found and found[-1].ended is None:
                    found[-1].ended = line.at
            case Closed(action=Action.STOP | Action.REMOVE, result=Result.RECLAIMED) if line.rule != REQUEST:
                if found and found[-1].incarnation == line.incarnation and found[-1].ended is None:
                    found[-1].ended, found[-1].stopped = line.at, True
            case _:
                pass
    return found


def _notice(found: list[_Life], line: Noticed) -> None:
    same = bool(found) and found[-1].incarnation == line.incarnation
    if line.state in OVER:
        if same and (found[-1].ended is None or line.ended is not None):
            found[-1].ended = line.ended or line.at
        elif not same and line.started is not None and line.ended is not None:
            _end_before(found, line)  # it started and ended between two passes
            found.append(_Life(line.incarnation, line.started, line.ended, line.owner, line.class_ or ""))
    elif line.state in LIVE:
        if not same:
            _end_before(found, line)
            found.append(_Life(line.incarnation, line.started or line.at))
        found[-1].ended = None
        found[-1].owner = line.owner or found[-1].owner
        found[-1].class_ = line.class_ or found[-1].class_


def _end_before(found: list[_Life], line: Noticed) -> None:
    if found and found[-1].ended is None:
        found[-1].ended = line.previous_end or line.started or line.at


def _holds(lines: Sequence[Event], memory: Memory) -> tuple[Hold, ...]:
    kept = memory
    for line in lines:
        if isinstance(line, Held | Released):
            kept = remember(kept, line) or EMPTY
    return kept.holds


def _ref_of(c: sqlite3.Connection, key: str) -> Ref:
    """Of one whose lines were archived: as it was last present. Its key does not tell where a uid begins."""
    row = c.execute("SELECT ref FROM present WHERE key = ?", (key,)).fetchone()
    known = None if row is None else _decoded_ref(row[0])
    return known or Ref(key.partition("/")[0], "", "", key, key)


def _decoded_ref(stored: str) -> Ref | None:
    try:
        return reading.decode(stored, Ref)
    except msgspec.MsgspecError:
        return None
