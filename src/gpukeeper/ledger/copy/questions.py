"""What the fleet database holds about machines: lines, runs, hours of GPUs and signals. Only reads.

Machines may have other versions of gpukeeper: what this one cannot decode is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from gpukeeper.ledger.copy.usage_rows import recorded_hours
from gpukeeper.ledger.lines import decode, says
from gpukeeper.ledger.queries import HIGHEST, LineFilter
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import Closed, Event
from gpukeeper.model.usage import RecordedHour

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection

PAGE = 500
_NEWEST = "ledger = (SELECT max(ledger) FROM gpukeeper.ledgers g WHERE g.machine = l.machine)"
_LEDGER = """
SELECT g.shipped, l.at FROM gpukeeper.machines m
LEFT JOIN LATERAL (SELECT ledger, shipped FROM gpukeeper.ledgers g WHERE g.machine = m.name
    ORDER BY ledger DESC LIMIT 1) g ON true
LEFT JOIN gpukeeper.lines l ON l.machine = m.name AND l.ledger = g.ledger AND l.line = g.shipped
WHERE m.name = %s
"""
_OUTCOMES = """
SELECT l.machine || '/' || l.ledger, l.body::text FROM gpukeeper.lines l
WHERE l.machine = ANY(%(machines)s) AND l.at >= %(since)s AND l.at < %(until)s AND (l.type IN ('outcome', 'restore')
    OR l.type = 'noticed' AND (l.machine, l.key) IN (
        SELECT o.machine, o.key FROM gpukeeper.lines o
        WHERE o.machine = ANY(%(machines)s) AND o.at >= %(since)s AND o.type = 'outcome' AND o.result = 'reclaimed'))
ORDER BY l.at, l.machine, l.ledger, l.line
"""
_USAGE = """
SELECT hour, machine || '/' || device, body::text FROM gpukeeper.usage
WHERE machine = ANY(%(machines)s) AND hour > %(since)s - interval '1 hour' AND hour < %(until)s ORDER BY hour, 2
"""
_SIGNALS = """
SELECT s.signal, s.device, v.minute, v.mean FROM gpukeeper.series s
JOIN gpukeeper.signals v ON v.machine = s.machine AND v.series = s.series
WHERE s.machine = %s AND left(s.key, 200) = left(%s, 200) AND s.key = %s
    AND v.minute >= %s AND v.minute < now() + interval '1 hour'
ORDER BY s.signal, s.device, v.minute LIMIT 200000
"""


class CopiedLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The journal of one machine as far as it is here. `newest`: time of its last line."""

    lines: int
    newest: datetime | None


class SignalMinute(msgspec.Struct, frozen=True):
    signal: str
    device: str
    minute: datetime
    mean: float | None


def copied_lines(connection: Connection, machine: str, wanted: LineFilter) -> list[tuple[int, Event]]:
    """The newest that fit, oldest first; of the machine's present ledger."""
    conditions, values = _conditions(wanted)
    question = (
        f"SELECT l.line, l.body::text FROM gpukeeper.lines l WHERE l.machine = %s AND l.{_NEWEST}"  # noqa: S608
        f"{''.join(f' AND {one}' for one in conditions)} ORDER BY l.line DESC"
    )
    most, found = wanted.last or PAGE, list[tuple[int, Event]]()
    with connection.transaction(), connection.cursor(name="lines") as cursor:
        cursor.itersize = PAGE if wanted.search else min(most, PAGE)
        cursor.execute(question.encode(), (machine, *values))
        for number, line in _decoded(cursor):
            if wanted.search is None or says(line, wanted.search):
                found.append((number, line))
            if len(found) >= most:
                break
    return found[::-1]


def copied_ledger(connection: Connection, machine: str) -> CopiedLedger:
    found = connection.execute(_LEDGER, (machine,)).fetchone()
    shipped, newest = found or (None, None)
    return CopiedLedger(lines=shipped or 0, newest=newest)


def outcomes(connection: Connection, machines: Sequence[str], since: datetime, until: datetime) -> Iterator[Event]:
    """Steps and their reversal, oldest first. Numbers of steps are made unique: each machine counts its own."""
    values = {"machines": list(machines), "since": since, "until": until}
    with connection.transaction(), connection.cursor(name="outcomes") as cursor:
        cursor.itersize = PAGE
        cursor.execute(_OUTCOMES, values)
        for where, line in _decoded(cursor):
            yield msgspec.structs.replace(line, step=f"{where}/{line.step}") if isinstance(line, Closed) else line


def hours(connection: Connection, machines: Sequence[str], since: datetime, until: datetime) -> Iterator[RecordedHour]:
    values = {"machines": list(machines), "since": since, "until": until}
    with connection.transaction(), connection.cursor(name="hours") as cursor:
        cursor.itersize = 5 * PAGE
        cursor.execute(_USAGE, values)
        yield from recorded_hours((hour, device, body) for hour, device, body in cursor)


def oldest_hour(connection: Connection, machines: Sequence[str]) -> int | None:
    """Hours since 1970."""
    found = connection.execute(
        "SELECT min(hour) FROM gpukeeper.usage WHERE machine = ANY(%s)", (list(machines),)
    ).fetchone()
    return None if found is None or found[0] is None else int(found[0].timestamp()) // 3600


def signal_minutes(connection: Connection, machine: str, key: str, since: datetime) -> list[SignalMinute]:
    return [SignalMinute(*row) for row in connection.execute(_SIGNALS, (machine, key, key, since)).fetchall()]


def _conditions(wanted: LineFilter) -> tuple[list[str], list[object]]:
    conditions: list[str] = []
    values: list[object] = []

    def add(condition: str, *more: object) -> None:
        conditions.append(condition)
        values.extend(more)

    if wanted.types:
        add("l.type = ANY(%s)", list(wanted.types))
    if wanted.owner is not None:
        add("l.owner = %s", storable(wanted.owner))
    if wanted.workload is not None:
        named = storable(wanted.workload)
        ending = _pattern(named.strip("/").lower())
        uid = "substr(l.key, length(l.platform) + length(l.place) + 3) = %s"
        add(f"(lower(l.workload) LIKE %s OR lower(l.workload) LIKE %s OR {uid})", ending, f"%/{ending}", named)
    if wanted.errors_only:
        add("l.error")
    if wanted.since is not None:
        add("l.at >= %s", wanted.since)
    if wanted.before is not None:
        add("l.line < %s", min(wanted.before, HIGHEST))
    if wanted.search is not None:
        text = storable(wanted.search)
        inside = f"%{_pattern(msgspec.json.encode(text).decode()[1:-1])}%"
        add("(l.body::text ILIKE %s OR l.workload ILIKE %s)", inside, f"%{_pattern(text)}%")
    return conditions, values


def storable(words: str) -> str:
    """What a text column can hold."""
    return words.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _pattern(words: str) -> str:
    return words.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _decoded(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, Event]]:
    for name, body in rows:
        try:
            yield name, decode(body, f"Line {name}")
        except LedgerError:
            continue
