"""What is to be shipped, read from the ledger itself with a connection of its own that cannot write; lines in the
text format of COPY. SQLite writes most of those itself, which is much faster.

The journal is the outbox: nothing is queued twice, and what was not shipped survives a restart because the ledger
does. Lines that rotation has archived meanwhile are read from the archives.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from gpukeeper.ledger import tables
from gpukeeper.ledger.archive_file import headers, read_archive
from gpukeeper.ledger.database import open_for_reading, translated
from gpukeeper.ledger.files import archive_folder
from gpukeeper.ledger.lines import COLUMNS, decode, fit, micros, moment, row
from gpukeeper.ledger.meta import Identity, read_identity, shipped
from gpukeeper.ledger.signals import Minute, first_minute, read_minutes
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import NodeTested

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
