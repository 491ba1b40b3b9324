"""Questions to the journal: which lines, how much came back. Only reads."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice

import msgspec

from gpukeeper.ledger.lines import TYPES, decode, micros, moment, says, text
from gpukeeper.ledger.state import meta
from gpukeeper.model.event import Closed, Event, Held, Released
from gpukeeper.model.fold import holds_from
from gpukeeper.model.memory import Hold
from gpukeeper.model.unknown import Unknown

PAGE = 500


HIGHEST = 2**63 - 1  # number of a line that SQLite can compare


class LineFilter(msgspec.Struct, frozen=True):
    last: int | None = 100
    types: tuple[str, ...] = ()
    owner: str | None = None
    workload: str | None = None
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


def lines(c: sqlite3.Connection, wanted: LineFilter, where: str) -> list[tuple[int, Event]]:
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
            _add(found, line)
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


def _add(found: Totals, line: Closed) -> None:
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
