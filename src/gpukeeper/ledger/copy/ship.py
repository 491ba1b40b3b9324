"""Shipping: what is in the ledger goes into the fleet database, each batch in one transaction with the cursor it moves.
Exactly once by (machine, ledger, line): the cursor is a row of the database, changed only together with the lines, so
that whatever a crash, a restart or a promoted replica lost is sent again, and nothing else. The journal is the outbox:
nothing is queued twice, and what was not shipped survives a restart because the ledger does. Archived lines are read
from the archives.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpukeeper.ledger import tables
from gpukeeper.ledger.archive import headers, read_archive
from gpukeeper.ledger.copy.connect import load_driver
from gpukeeper.ledger.database import open_for_reading, translated
from gpukeeper.ledger.files import archive_folder
from gpukeeper.ledger.lines import COLUMNS, decode, fit, micros, moment, row
from gpukeeper.ledger.meta import Identity, read_identity, shipped
from gpukeeper.ledger.signals import Minute, first_minute, read_minutes
from gpukeeper.ledger.usage import UsageReader
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, LedgerError
from gpukeeper.model.event import NodeTested
from gpukeeper.model.series import DevicePresence, HourUse, RecordedHour

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection


NULL = "\x01"  # an owner or a name of this one character reads as NULL; in exchange one replace does for a whole row
_NUL_IN_JSON = re.compile(r"(?<!\\)((?:\\\\\\\\)*)\\\\u0000")  # in COPY text every backslash of JSON is two
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\0": "\ufffd"})
_OR_NULL = [f"coalesce({column}, char(1))" for column in COLUMNS[:-1]]

# An expression over the table `journal`: one row as a line of COPY, if no name in it has a tab or a line break (JSON
# has none).
SQLITE_ROW = f"replace({' || char(9) || '.join(['seq', *_OR_NULL, 'line'])}, '\\', '\\\\')"
TARGET_COLUMNS = ("line", *COLUMNS[:-1], "body")


def is_plain(row: str) -> bool:
    """Whether SQLITE_ROW gave a row with all its columns and no more."""
    return row.count("\t") == len(COLUMNS) and "\n" not in row and "\r" not in row


def without_nul(row: str) -> str:
    """A line of COPY that PostgreSQL can store.

    PostgreSQL stores no NUL: neither as a character nor, in jsonb, as \\u0000. Both become the replacement
    character.
    """
    if "\0" in row:
        row = row.replace("\0", "\ufffd")
    return _NUL_IN_JSON.sub(r"\1\\\\ufffd", row) if "\\\\u0000" in row else row


def copy_row(values: Sequence[object], null: str = NULL) -> str:
    """Values of one row, whatever is in them; None is NULL."""
    return "\t".join(null if value is None else str(value).translate(_ESCAPES) for value in values)


LINES, BYTES = 5_000, 4 * 2**20  # the largest batch
_BATCH = f"SELECT seq, {SQLITE_ROW} FROM journal WHERE seq > ? AND type <> 'checkpoint' ORDER BY seq LIMIT ?"  # noqa: S608
_ONE = f"SELECT seq, {', '.join(COLUMNS)} FROM journal WHERE seq = ?"  # noqa: S608
_SERIES = "SELECT id, key, signal, device, slice FROM series WHERE newest >= ?"


class Batch(msgspec.Struct, frozen=True):
    """Lines of COPY, oldest first. `last`: the number of the newest; `full`: more may follow."""

    rows: tuple[str, ...] = ()
    last: int = 0
    full: bool = False


class SignalRow(msgspec.Struct, frozen=True):
    series: uuid.UUID
    key: str
    signal: str
    device: str
    slice: bool
    minute: datetime
    mean: float | None
    samples: int


class Outbox:
    """Used by one thread. Each method is one short read, so that the ledger's own checkpoints are not held up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = open_for_reading(path)
        self._archived: Iterator[tuple[int, str]] | None = None
        self._archived_until = 0  # the number that `_archived` gave last
        self._archived_runs: list[tuple[int, NodeTested]] = []
        self._searched = -1  # no archive has a line between this one and the next of the journal

    def close(self) -> None:
        self._connection.close()

    def identity(self) -> Identity:
        with translated(self.path):
            found = read_identity(self._connection)
        if found is None:
            raise LedgerError(f"The ledger {self.path} has no identity yet. Nothing was sent.")
        return found

    def remembered(self) -> int:
        """How far the copy was when the daemon noted it last: for what waits while the database is away."""
        with translated(self.path):
            return shipped(self._connection)

    def newest(self) -> int:
        """The last number ever given, archived lines included."""
        with translated(self.path):
            found = self._connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'journal'").fetchone()
        return 0 if found is None else int(found[0])

    def first(self) -> int:
        with translated(self.path):
            return int(self._connection.execute("SELECT coalesce(min(seq), 1) FROM journal").fetchone()[0])

    def last_until(self, line: int) -> tuple[int, datetime] | None:
        """The last line in the journal that is shipped and has no higher number."""
        question = "SELECT seq, at FROM journal WHERE seq <= ? AND type <> 'checkpoint' ORDER BY seq DESC LIMIT 1"
        with translated(self.path):
            found = self._connection.execute(question, (line,)).fetchone()
        return None if found is None else (int(found[0]), moment(found[1]))

    def next_after(self, line: int) -> tuple[int, datetime] | None:
        """The first unsent line that is still in the journal."""
        question = "SELECT seq, at FROM journal WHERE seq > ? AND type <> 'checkpoint' ORDER BY seq LIMIT 1"
        with translated(self.path):
            found = self._connection.execute(question, (line,)).fetchone()
        return None if found is None else (int(found[0]), moment(found[1]))

    def batch(self, after: int, lines: int = LINES) -> Batch:
        """The lines after this number. Archived ones come first."""
        following = self.next_after(after)
        until = self.newest() + 1 if following is None else following[0]
        if until > after + 1 and self._searched != after:
            found = _taken(self._from_archives(after, until), lines)
            if found.rows:
                self._archived_until = found.last
                return msgspec.structs.replace(found, full=True)
            self._searched = after
        if following is None:
            return Batch()
        with translated(self.path):
            return _taken(self._from_journal(after, lines), lines)

    def runs(self, after: int, until: int) -> tuple[tuple[int, NodeTested], ...]:
        """Acceptance runs among those lines, with their numbers."""
        question = "SELECT seq, line FROM journal WHERE type = 'acceptance' AND seq > ? AND seq <= ? ORDER BY seq"
        with translated(self.path):
            stored = self._connection.execute(question, (after, until)).fetchall()
        found = [(seq, decode(line, f"Line {seq} of {self.path}")) for seq, line in stored]
        self._archived_runs = [one for one in self._archived_runs if one[0] > after]
        archived = [one for one in self._archived_runs if one[0] <= until]
        return (*archived, *((seq, line) for seq, line in found if isinstance(line, NodeTested)))

    def series_since(self, minute: int) -> int:
        """How many series were measured since then."""
        with translated(self.path):
            return int(
                self._connection.execute("SELECT count(*) FROM series WHERE newest >= ?", (minute,)).fetchone()[0]
            )

    def first_minute(self, since: int) -> int | None:
        """The first minute not before `since` in which something was measured, in minutes since 1970."""
        c = self._connection
        with translated(self.path):
            firsts = [first_minute(c, one[0], since) for one in c.execute(_SERIES, (since,)).fetchall()]
        return min((first for first in firsts if first is not None), default=None)

    def signals(self, since: int, until: int) -> list[SignalRow]:
        """What was measured in [since, until), in minutes since 1970."""
        c = self._connection
        with translated(self.path):
            return [
                _signal_row(row[1:], measured)
                for row in c.execute(_SERIES, (since,)).fetchall()
                for measured in read_minutes(c, row[0], since, until - 1)
            ]

    def _from_journal(self, after: int, lines: int) -> Iterator[tuple[int, str]]:
        for seq, text in self._connection.execute(_BATCH, (after, lines)):
            yield seq, text if is_plain(text) else copy_row(self._connection.execute(_ONE, (seq,)).fetchone())

    def _from_archives(self, after: int, until: int) -> Iterator[tuple[int, str]]:
        """The files are read once from beginning to end, over as many batches as that takes."""
        if self._archived is None or self._archived_until != after:
            self._archived = self._read_archives(after)
        for seq, text in self._archived:
            if seq >= until:
                break
            yield seq, text
        else:
            self._archived = None

    def _read_archives(self, after: int) -> Iterator[tuple[int, str]]:
        """Of this ledger only: one that was created again counts from 1, and the old archives are still there."""
        with translated(self.path):
            identity = read_identity(self._connection)
            archived = tables.meta(self._connection, "archived_until")
        if identity is None or archived is None:
            return
        ours = [
            (header.first, path)
            for path, header in headers(archive_folder(self.path))
            if header.last > after and path.name not in identity.foreign and micros(header.until) <= int(archived)
        ]
        for _, path in sorted(ours):
            for seq, line in read_archive(path):
                if seq > after:
                    if isinstance(line, NodeTested):
                        self._archived_runs.append((seq, line))
                    yield seq, copy_row((seq, *row(*fit(line))))


def _taken(found: Iterator[tuple[int, str]], lines: int) -> Batch:
    """At most so many lines; the one that exceeds the bytes is the last."""
    rows: list[str] = []
    last = size = 0
    for seq, text in found:
        rows.append(without_nul(text))
        last, size = seq, size + len(text)
        # Not before the line is taken: what was read from an archive does not come again.
        if len(rows) >= lines or size >= BYTES:
            return Batch(tuple(rows), last, full=True)
    return Batch(tuple(rows), last)


def _signal_row(names: tuple[str, str, str, int], measured: Minute) -> SignalRow:
    (key, signal, device, part), (minute, total, count) = names, measured
    words = "\0".join((key, signal, device, str(part)))
    series = uuid.UUID(bytes=hashlib.sha256(words.encode("utf-8", "backslashreplace")).digest()[:16])
    at = moment(minute * 60_000_000)
    return SignalRow(series, key, signal, device, bool(part), at, None if total is None else total / count, count)


REPORT = "report.json"
LARGEST_REPORT = 16 * 2**20
_COLUMNS = ", ".join(TARGET_COLUMNS)
_TEMPORARY = """
CREATE TEMPORARY TABLE new_lines (
    line bigint, at bigint, type text, platform text, place text, workload text, key text, owner text, rule text,
    result text, pass_id bigint, step text, error integer, body jsonb
) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE new_signals (
    series uuid, key text, signal text, device text, slice boolean, minute timestamptz, mean double precision,
    samples integer
) ON COMMIT DELETE ROWS
"""
_COPY_LINES = f"COPY new_lines ({_COLUMNS}) FROM STDIN WITH (NULL E'\\x01')"
_INSERT = f"""
INSERT INTO gpukeeper.lines (machine, ledger, {_COLUMNS})
SELECT %s, %s, line, to_timestamp(at / 1000000.0), type, platform, place, workload, key, owner, rule, result, pass_id,
    step, error <> 0, body
FROM new_lines ON CONFLICT DO NOTHING
"""  # noqa: S608


class Position(msgspec.Struct, frozen=True):
    """How far this ledger is in the database, as the database says."""

    machine: str
    ledger: int
    shipped: int
    signals_until: datetime | None = None
    usage_until: datetime | None = None


class UsageRow(msgspec.Struct, frozen=True):
    """One hour of one GPU for one holder. `body` is JSON; the copy does not interpret it."""

    hour: datetime
    device: str
    holder: str
    body: bytes


def begin(connection: Connection, machine: str, outbox: Outbox) -> Position:
    """Once a connection: the cursor, and a new one where this ledger is not the one that was shipped before."""
    connection.execute(_TEMPORARY)
    identity = outbox.identity()
    with connection.transaction():
        # Of two programs that begin at the same time, the second must find the cursor of the first. A row, not an
        # advisory lock: the role of another machine could hold that one.
        connection.execute("SELECT FROM gpukeeper.machines WHERE name = %s FOR NO KEY UPDATE", (machine,))
        found = connection.execute(
            "SELECT ledger, shipped, signals_until, usage_until FROM gpukeeper.ledgers "
            "WHERE machine = %s AND id = %s ORDER BY ledger DESC LIMIT 1",
            (machine, identity.id),
        ).fetchone()
        position = None if found is None else Position(machine, *found)
        if position is not None and _is_same(connection, position, outbox, position.shipped):
            return position
        start = outbox.first() - 1 if position is None else _last_common(connection, position, outbox)
        return _new_ledger(connection, machine, identity.id, start, position)


def ship_lines(connection: Connection, position: Position, batch: Batch, runs: Sequence[NodeTested]) -> Position:
    """Raises psycopg.Error, and KeeperError when another program moved the cursor."""
    with connection.transaction():
        _own_cursor(connection, position)
        _copy(connection, _COPY_LINES, batch.rows)
        connection.execute(_INSERT, (position.machine, position.ledger))
        for run in runs:
            _insert_run(connection, position.machine, run)
        connection.execute(
            "UPDATE gpukeeper.ledgers SET shipped = %s WHERE machine = %s AND ledger = %s",
            (batch.last, position.machine, position.ledger),
        )
    return msgspec.structs.replace(position, shipped=batch.last)


def ship_signals(connection: Connection, position: Position, rows: Sequence[SignalRow], until: datetime) -> Position:
    """A minute that is there stays as it is."""
    with connection.transaction():
        _own_cursor(connection, position)
        _copy(
            connection,
            "COPY new_signals FROM STDIN",
            [without_nul(copy_row(_signal_values(one), "\\N")) for one in rows],
        )
        connection.execute(
            "INSERT INTO gpukeeper.series (machine, series, key, signal, device, slice) "
            "SELECT DISTINCT %s, series, key, signal, device, slice FROM new_signals ON CONFLICT DO NOTHING",
            (position.machine,),
        )
        connection.execute(
            "INSERT INTO gpukeeper.signals (machine, series, minute, mean, samples) "
            "SELECT %s, series, minute, mean, samples FROM new_signals ON CONFLICT DO NOTHING",
            (position.machine,),
        )
        _move(connection, position, "signals_until", until)
    return msgspec.structs.replace(position, signals_until=until)


def ship_usage(connection: Connection, position: Position, rows: Sequence[UsageRow], until: datetime) -> Position:
    """An hour that was computed again replaces what was there."""
    with connection.transaction():
        _own_cursor(connection, position)
        with connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO gpukeeper.usage (machine, hour, device, holder, body) VALUES (%s, %s, %s, %s, %s) "
                "ON CONFLICT (machine, hour, device, holder) DO UPDATE SET body = excluded.body",
                [(position.machine, one.hour, one.device, one.holder, _json(one.body)) for one in rows],
            )
        _move(connection, position, "usage_until", until)
    return msgspec.structs.replace(position, usage_until=until)


def ship_view(connection: Connection, machine: str, seq: int, body: bytes) -> None:
    connection.execute(
        "INSERT INTO gpukeeper.views (machine, at, seq, body) VALUES (%s, now(), %s, %s) "
        "ON CONFLICT (machine) DO UPDATE SET at = excluded.at, seq = excluded.seq, body = excluded.body",
        (machine, seq, _json(body)),
    )


def confirm_view(connection: Connection, machine: str) -> None:
    """It did not change, and is current."""
    connection.execute("UPDATE gpukeeper.views SET at = now() WHERE machine = %s", (machine,))


def report_alive(connection: Connection, machine: str, version: str) -> None:
    connection.execute("UPDATE gpukeeper.machines SET seen = now(), version = %s WHERE name = %s", (version, machine))


def replacement(row: str, why: str) -> str:
    """A line that the database refuses, without what may be the cause: number, time and type stay."""
    line, at, kind, *_ = row.split("\t")
    body = msgspec.json.encode({"type": kind, "not_copied": why}).decode()
    empty = [None] * (len(TARGET_COLUMNS) - 5)
    return copy_row((line, at, kind, *empty, 0, body))


def _is_same(connection: Connection, position: Position, outbox: Outbox, line: int) -> bool:
    """Whether the database has this very line. A ledger restored from a backup gives its numbers to other lines."""
    if outbox.newest() < line:
        return False
    ours = outbox.last_until(line)
    if ours is None:
        return True  # archived: nothing to compare
    found = connection.execute(
        "SELECT now() - s.retention, l.at FROM gpukeeper.settings s LEFT JOIN gpukeeper.lines l "
        "ON l.machine = %s AND l.ledger <= %s AND l.line = %s ORDER BY l.ledger DESC LIMIT 1",
        (position.machine, position.ledger, ours[0]),
    ).fetchone()
    assert found is not None
    kept_since, theirs = found
    return ours[1] < kept_since if theirs is None else bool(theirs == ours[1])


def _last_common(connection: Connection, position: Position, outbox: Outbox) -> int:
    low, high = outbox.first() - 1, min(outbox.newest(), position.shipped)
    while low < high:
        middle = (low + high + 1) // 2
        if _is_same(connection, position, outbox, middle):
            low = middle
        else:
            high = middle - 1
    return low


def _new_ledger(
    connection: Connection, machine: str, ledger_id: str, shipped: int, before: Position | None
) -> Position:
    signals, usage = (None, None) if before is None else (before.signals_until, before.usage_until)
    made = connection.execute(
        "INSERT INTO gpukeeper.ledgers (machine, ledger, id, shipped, signals_until, usage_until) "
        "SELECT %s, coalesce(max(ledger), 0) + 1, %s, %s, %s, %s FROM gpukeeper.ledgers WHERE machine = %s "
        "RETURNING ledger",
        (machine, ledger_id, shipped, signals, usage, machine),
    ).fetchone()
    assert made is not None
    return Position(machine, made[0], shipped, signals, usage)


def _own_cursor(connection: Connection, position: Position) -> None:
    """Locks it. Two daemons with the credentials of one machine must not both move it."""
    found = connection.execute(
        "SELECT shipped FROM gpukeeper.ledgers WHERE machine = %s AND ledger = %s FOR UPDATE",
        (position.machine, position.ledger),
    ).fetchone()
    if found is None or found[0] != position.shipped:
        raise KeeperError(
            f"another program ships the ledger of {position.machine}: its position is {found and found[0]}, expected "
            f"{position.shipped}. Nothing was sent twice. Give each machine a name of its own (fleet-db add-machine)"
        )


def _copy(connection: Connection, statement: str, rows: Sequence[str]) -> None:
    if rows:
        with connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
            copy.write("\n".join(rows) + "\n")


def _move(connection: Connection, position: Position, column: str, until: datetime) -> None:
    statement = f"UPDATE gpukeeper.ledgers SET {column} = %s WHERE machine = %s AND ledger = %s"  # noqa: S608
    connection.execute(statement.encode(), (until, position.machine, position.ledger))


def _insert_run(connection: Connection, machine: str, run: NodeTested) -> None:
    report, problem = _read_report(run)
    node = run.ref.name if run.ref is not None else machine
    values = (machine, run.run, run.at, node, run.verdict.value, run.reason, msgspec.json.encode(run.gpus))
    insert = (
        "INSERT INTO gpukeeper.runs (machine, run, at, node, verdict, reason, gpus, report, problem) "
        "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
    )
    plain = [storable(one) if isinstance(one, str) else one for one in values[:-1]]
    psycopg = load_driver()
    try:
        with connection.transaction():
            connection.execute(insert, (*plain, _json(values[-1]), report and _json(report), problem))
    except psycopg.DataError as error:
        note = f"the database refused the report: {type(error).__name__}"
        connection.execute(insert, (*plain, "{}", None, note))


def _read_report(run: NodeTested) -> tuple[bytes | None, str | None]:
    """The run's report.json, if it is still there. A link is not followed."""
    if not run.report:
        return None, "the run has no report directory"
    path = Path(run.report) / REPORT
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_REPORT:
                return None, f"{path} is not a file of at most {LARGEST_REPORT >> 20} MiB"
            body = file.read(LARGEST_REPORT)
        reading.decode(body)
    except OSError as error:
        return None, f"{path} could not be read: {error.strerror}"
    except msgspec.MsgspecError:
        return None, f"{path} is not JSON"
    return body, None


def _signal_values(one: SignalRow) -> tuple[object, ...]:
    minute = one.minute.astimezone(UTC).isoformat()
    return (one.series, one.key, one.signal, one.device, one.slice, minute, one.mean, one.samples)


def _json(body: object) -> str:
    """For a jsonb column, which has no NUL."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body)
    return without_nul(text.replace("\\", "\\\\")).replace("\\\\", "\\") if "\\u0000" in text else text


def storable(words: str) -> str:
    """What a text column can hold."""
    return words.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


HOUR = timedelta(hours=1)
SHORTEST = 6 * HOUR  # longer than what is computed again, so that each call gets further


class UsageBody(msgspec.Struct, frozen=True):
    """`use` is None: the device was there, and nothing was recorded about that hour."""

    device: DevicePresence
    use: HourUse | None = None


_DECODER = reading.Decoder(UsageBody)


def usage_rows(reader: UsageReader, since: datetime | None, now: datetime, most: int) -> Iterator[UsageRow]:
    """The first hours since then of which something is recorded; about `most` rows."""
    oldest = reader.oldest()
    if oldest is None:
        return
    first = _moment(oldest)
    begin = first if since is None else max(since, first)
    span = min(max(SHORTEST, most // max(reader.count(begin, now), 1) * HOUR), timedelta(days=31))
    while begin < now:
        end = min(begin + span, now)
        found = False
        for hour in reader.hours(begin, end, now):
            yield from _rows(hour)
            found = True
        if found:
            return
        begin = end


def _rows(recorded: RecordedHour) -> Iterator[UsageRow]:
    hour, device = _moment(recorded.hour), recorded.device
    name = f"{device.place}/{device.device}/{device.since}"
    if not recorded.uses:
        yield UsageRow(hour, name, "", msgspec.json.encode(UsageBody(device)))
    for use in recorded.uses:
        one = use.holder
        holder = "\n".join((one.key, one.owner, one.class_, one.group))
        yield UsageRow(hour, name, holder, msgspec.json.encode(UsageBody(device, use)))


def recorded_hours(rows: Iterable[tuple[datetime, str, str]]) -> Iterator[RecordedHour]:
    """From hour, device and body of rows in order of hour and device. What is not ours is left out."""
    for (hour, _), group in groupby(rows, key=lambda row: (row[0], row[1])):
        found = [body for _, _, text in group if (body := _body(text)) is not None]
        if found:
            device = max((one.device for one in found), key=lambda one: one.until)
            uses = tuple(one.use for one in found if one.use is not None)
            yield RecordedHour(int(hour.timestamp()) // 3600, device, uses)


def _body(text: str) -> UsageBody | None:
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, ValueError):
        return None


def _moment(hour: int) -> datetime:
    return datetime.fromtimestamp(hour * 3600, UTC)
