"""What is in the ledger's tables: state, which is the fold of the journal, kept in the journal's own transaction, the
same fold as in memory; and the lines themselves: which ones, how much came back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice

import msgspec

from gpukeeper.ledger.lines import TYPES, decode, micros, moment, says, text
from gpukeeper.model import reading
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
from gpukeeper.model.gpu import GpuMemory
from gpukeeper.model.reading import EPOCH
from gpukeeper.model.subject import EMPTY, ClockRecord, Hold, Memory, Ref
from gpukeeper.model.unknown import Unknown

_MEMORY = reading.Decoder(Memory)
_REF = reading.Decoder(Ref)
_CLOCKS = reading.Decoder(dict[str, ClockRecord])
_TABLES = ("memories", "present", "decided", "open_intents")


def take(c: sqlite3.Connection, line: Event) -> None:
    """Fold one more line, as `lines.fit` gave it, into the tables."""
    match line:
        case Intended():
            set_meta(c, "passes", max(passes(c), line.pass_id))
            _open(c, line)
        case Closed() if closes(line):
            c.execute("DELETE FROM open_intents WHERE step = ?", (line.step,))
        case Paused():
            if paused(c) is None:  # the first reason applies until `resume`; a later one is in the journal
                set_meta(c, "paused", line.words)
        case Resumed():
            c.execute("DELETE FROM meta WHERE name = 'paused'")
        case Passed():
            set_meta(c, "passes", max(passes(c), line.pass_id))
        case Checkpoint():
            _restore(c, line)
        case _:
            pass
    for ref in refs_of(line):
        _take_about(c, ref, line)


def rebuild(c: sqlite3.Connection, where: str) -> int:
    """Rebuild the state from the newest checkpoint on. Returns the number of lines folded. The pass counter never
    decreases."""
    counted = passes(c)
    begin = c.execute("SELECT coalesce(max(seq), 0) FROM journal WHERE type = 'checkpoint'").fetchone()[0]
    _clear(c)
    folded = 0
    for seq, stored in c.execute("SELECT seq, line FROM journal WHERE seq >= ? ORDER BY seq", (begin,)):
        take(c, decode(stored, f"Line {seq} of {where}"))
        folded += 1
    set_meta(c, "passes", max(passes(c), counted))
    return folded


def checkpoint(c: sqlite3.Connection, at: datetime, where: str) -> Checkpoint:
    """All state as one line, so that folding can begin with it."""
    reason = paused(c)
    return Checkpoint(
        at=at,
        memories={key: _MEMORY.decode(stored) for key, stored in c.execute("SELECT key, memory FROM memories")},
        paused=reason is not None,
        pause_reason=reason or "",
        present=tuple(_REF.decode(ref) for (ref,) in c.execute("SELECT ref FROM present")),
        decided=dict(c.execute("SELECT key, words FROM decided").fetchall()),
        open=tuple(_intents(c.execute("SELECT line FROM open_intents ORDER BY position"), where)),
        passes=passes(c),
    )


def memories(c: sqlite3.Connection, keys: Iterable[str]) -> Mapping[str, Memory]:
    return {key: _MEMORY.decode(stored) for key, stored in _find(c, "SELECT memory FROM memories WHERE key = ?", keys)}


def decided(c: sqlite3.Connection, keys: Iterable[str]) -> Mapping[str, str]:
    return dict(_find(c, "SELECT words FROM decided WHERE key = ?", keys))


def present(c: sqlite3.Connection, platform: str, place: str) -> Mapping[str, Ref]:
    rows = c.execute("SELECT ref FROM present WHERE platform = ? AND place = ?", (text(platform), text(place)))
    return {ref.key: ref for ref in (_REF.decode(stored) for (stored,) in rows)}


def open_intents(c: sqlite3.Connection, platform: str, place: str, where: str) -> list[Intended]:
    rows = c.execute(
        "SELECT line FROM open_intents WHERE platform = ? AND place = ? ORDER BY position",
        (text(platform), text(place)),
    )
    return list(_intents(rows, where))


def gpus(c: sqlite3.Connection, place: str) -> dict[str, GpuMemory]:
    """By uuid: what is remembered of the GPUs of that machine."""
    begin = text(f"host/{place}/")
    rows = c.execute("SELECT key, memory FROM memories WHERE substr(key, 1, ?) = ?", (len(begin), begin)).fetchall()
    found = {key[len(begin) :]: _MEMORY.decode(stored).gpu for key, stored in rows}
    return {uuid: gpu for uuid, gpu in found.items() if gpu is not None}


def read_memory(stored: str) -> Memory:
    return _MEMORY.decode(stored)


def paused(c: sqlite3.Connection) -> str | None:
    found = meta(c, "paused")
    return None if found is None else str(found)


def passes(c: sqlite3.Connection) -> int:
    return int(meta(c, "passes") or 0)


def next_pass(c: sqlite3.Connection) -> int:
    number = passes(c) + 1
    set_meta(c, "passes", number)
    return number


def clock_records(c: sqlite3.Connection) -> dict[str, ClockRecord]:
    found = meta(c, "clock")
    try:
        return {} if found is None else _CLOCKS.decode(str(found))
    except (msgspec.MsgspecError, ValueError):
        # Damaged, or of another version: what it said is unknown, so the clock is doubted for a while.
        return {"": ClockRecord(zero=EPOCH, doubted_until=0.0)}


def record_clock(c: sqlite3.Connection, boot: str, record: ClockRecord) -> None:
    records = newest_clocks(clock_records(c), boot, record)
    set_meta(c, "clock", msgspec.json.encode(records).decode())


def meta(c: sqlite3.Connection, name: str) -> str | int | None:
    found = c.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return None if found is None else found[0]


def set_meta(c: sqlite3.Connection, name: str, value: str | int) -> None:
    c.execute("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", (name, value))


def _take_about(c: sqlite3.Connection, ref: Ref, line: Event) -> None:
    key = ref.key
    here = (ref.platform, ref.place, key)
    before = memories(c, [key]).get(key, EMPTY)
    memory = remember(before, line)
    if memory is None:
        c.execute("DELETE FROM memories WHERE key = ?", (key,))
    elif memory is not before:
        _remember(c, key, memory)
    if isinstance(line, Noticed):
        c.execute("INSERT OR REPLACE INTO present (platform, place, key, ref) VALUES (?, ?, ?, ?)", (*here, _json(ref)))
    elif isinstance(line, Decided):
        _decide(c, key, decision_words(line))
    elif is_gone(line):
        c.execute("DELETE FROM present WHERE platform = ? AND place = ? AND key = ?", here)
        c.execute("DELETE FROM decided WHERE key = ?", (key,))


def _open(c: sqlite3.Connection, line: Intended) -> None:
    ref = line.ref
    c.execute(
        "INSERT INTO open_intents (step, platform, place, line) VALUES (?, ?, ?, ?) ON CONFLICT (step) DO UPDATE "
        "SET platform = excluded.platform, place = excluded.place, line = excluded.line",
        (line.step, ref and ref.platform, ref and ref.place, _json(line)),
    )


def _remember(c: sqlite3.Connection, key: str, memory: Memory) -> None:
    c.execute("INSERT OR REPLACE INTO memories (key, memory) VALUES (?, ?)", (key, _json(memory)))


def _decide(c: sqlite3.Connection, key: str, words: str) -> None:
    c.execute("INSERT OR REPLACE INTO decided (key, words) VALUES (?, ?)", (key, words))


def _restore(c: sqlite3.Connection, line: Checkpoint) -> None:
    """A checkpoint is the whole state: what it does not name was not there."""
    counted = passes(c)
    _clear(c)
    for key, memory in line.memories.items():
        _remember(c, key, memory)
    for ref in line.present:
        row = (ref.platform, ref.place, ref.key, _json(ref))
        c.execute("INSERT OR REPLACE INTO present (platform, place, key, ref) VALUES (?, ?, ?, ?)", row)
    for key, words in line.decided.items():
        _decide(c, key, words)
    for intent in line.open:
        _open(c, intent)
    if line.paused:
        set_meta(c, "paused", line.pause_reason or f"paused by {line.by}")
    set_meta(c, "passes", max(counted, line.passes))


def _clear(c: sqlite3.Connection) -> None:
    for table in _TABLES:
        c.execute(f"DELETE FROM {table}")  # noqa: S608 (our own names)
    c.execute("DELETE FROM meta WHERE name IN ('paused', 'passes')")


def _intents(rows: Iterable[tuple[str]], where: str) -> Iterator[Intended]:
    for (stored,) in rows:
        line = decode(stored, f"An open intent in {where}")
        assert isinstance(line, Intended)
        yield line


def _find(c: sqlite3.Connection, question: str, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    for key in keys:
        found = c.execute(question, (text(key),)).fetchone()
        if found is not None:
            yield key, found[0]


def _json(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


PAGE = 500


HIGHEST = 2**63 - 1  # number of a line that SQLite can compare


class LineFilter(msgspec.Struct, frozen=True, kw_only=True):
    last: int | None = 100  # the newest that fit; None: all
    types: tuple[str, ...] = ()
    owner: str | None = None
    workload: str | None = None  # any ending of its path, or a uid
    errors_only: bool = False
    since: datetime | None = None
    search: str | None = None  # text in any of its words
    before: int | None = None  # only lines with a lower number


class Reclaimed(msgspec.Struct):
    """What was returned. The `unmeasured` counts are the steps with an unknown value; it is in no sum."""

    steps: int = 0
    gpus: int = 0
    gpu_hours: float = 0.0
    bytes: int = 0
    unmeasured_gpus: int = 0
    unmeasured_gpu_hours: int = 0
    unmeasured_bytes: int = 0

    def add(self, line: Closed) -> None:
        self.steps += 1
        for name, value in (("gpus", line.gpus_back), ("gpu_hours", line.gpu_hours), ("bytes", line.bytes_back)):
            if isinstance(value, Unknown):
                setattr(self, f"unmeasured_{name}", getattr(self, f"unmeasured_{name}") + 1)
            else:
                setattr(self, name, getattr(self, name) + value)


class Totals(msgspec.Struct, frozen=True):
    """Only what was verified as reclaimed. Owner "" is: unknown."""

    whole: Reclaimed
    owners: Mapping[str, Reclaimed]
    rules: Mapping[str, Reclaimed]
    platforms: Mapping[str, Reclaimed]
    covers_from: datetime | None = None  # later than requested, if older lines are in the archive


def read_lines(c: sqlite3.Connection, wanted: LineFilter, where: str) -> list[tuple[int, Event]]:
    conditions, values = _conditions(c, wanted)
    question = "SELECT seq, line FROM journal"
    if conditions:
        question += " WHERE " + " AND ".join(conditions)
    question += " ORDER BY seq DESC LIMIT ?"
    all_of_them = wanted.last is None or wanted.search is not None
    found = _decoded(c.execute(question, (*values, -1 if all_of_them else wanted.last)), where)
    if wanted.search is not None:
        text_ = wanted.search
        found = islice(((seq, line) for seq, line in found if says(line, text_)), wanted.last)
    return list(found)[::-1]


def lines_by_type(c: sqlite3.Connection, since: datetime) -> dict[str, int]:
    """One search in an index for each type."""
    question = "SELECT count(*) FROM journal WHERE type = ? AND at >= ?"
    return {type_: int(c.execute(question, (type_, micros(since))).fetchone()[0]) for type_ in sorted(TYPES)}


def lines_after(c: sqlite3.Connection, after: int, where: str) -> list[tuple[int, Event]]:
    rows = c.execute("SELECT seq, line FROM journal WHERE seq > ? ORDER BY seq LIMIT ?", (after, PAGE))
    return list(_decoded(rows, where))


def totals(c: sqlite3.Connection, since: datetime, where: str) -> Totals:
    found = Totals(Reclaimed(), {}, {}, {}, _covers_from(c, since))
    rows = c.execute(
        "SELECT seq, line FROM journal WHERE type = 'outcome' AND result = 'reclaimed' AND at >= ? ORDER BY seq",
        (micros(since),),
    )
    counted: set[str] = set()
    for _, line in _decoded(rows, where):
        assert isinstance(line, Closed)
        # A step that was read again after a crash may have two outcomes; it freed once.
        if line.step not in counted:
            counted.add(line.step)
            _add_to_totals(found, line)
    return found


def holds_of(c: sqlite3.Connection, owner: str, since: datetime, where: str) -> dict[str, tuple[Hold, ...]]:
    rows = c.execute(
        "SELECT seq, line FROM journal WHERE type IN ('hold', 'release') AND at >= ? AND owner = ? ORDER BY seq",
        (micros(since), text(owner)),
    )
    return holds_from(line for _, line in _decoded(rows, where) if isinstance(line, Held | Released))


def last_line_at(c: sqlite3.Connection, before: datetime | None = None) -> datetime | None:
    if before is None:
        found = c.execute("SELECT at FROM journal ORDER BY seq DESC LIMIT 1").fetchone()
    else:
        found = c.execute("SELECT max(at) FROM journal WHERE at <= ?", (micros(before),)).fetchone()
    return None if found is None or found[0] is None else moment(found[0])


def _conditions(c: sqlite3.Connection, wanted: LineFilter) -> tuple[list[str], list[object]]:
    conditions: list[str] = []
    values: list[object] = []
    if wanted.types:
        conditions.append(f"type IN ({', '.join('?' for _ in wanted.types)})")
        values.extend(wanted.types)
    if wanted.owner is not None:
        conditions.append("owner = ?")
        values.append(text(wanted.owner))
    if wanted.workload is not None:
        c.create_function("is_named", 3, _is_named, deterministic=True)
        conditions.append("is_named(workload, substr(key, length(platform) + length(place) + 3), ?)")
        values.append(text(wanted.workload))
    if wanted.errors_only:
        conditions.append("error = 1")
    if wanted.since is not None:
        conditions.append("at >= ?")
        values.append(micros(wanted.since))
    if wanted.before is not None:
        conditions.append("seq < ?")
        values.append(min(wanted.before, HIGHEST))
    return conditions, values


def _is_named(path: str | None, uid: str | None, words: str) -> bool:
    """As Ref.ends_with: any ending of the path on a word boundary, or the uid."""
    if path is None:
        return False
    wanted = words.strip("/").lower()
    return path.lower() == wanted or path.lower().endswith("/" + wanted) or uid == words


def _decoded(rows: sqlite3.Cursor, where: str) -> Iterator[tuple[int, Event]]:
    for seq, stored in rows:
        yield seq, decode(stored, f"Line {seq} of {where}")


def _add_to_totals(found: Totals, line: Closed) -> None:
    found.whole.add(line)
    platform = line.ref.platform if line.ref else ""
    for group, name in ((found.owners, line.owner or ""), (found.rules, line.rule), (found.platforms, platform)):
        assert isinstance(group, dict)
        group.setdefault(name, Reclaimed()).add(line)


def _covers_from(c: sqlite3.Connection, since: datetime) -> datetime | None:
    archived = meta(c, "archived_until")
    if archived is None or moment(int(archived)) < since:
        return None
    return moment(int(archived))
