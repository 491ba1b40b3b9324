"""Lines about steps and their reversal over a span of time: from archives and the journal, oldest first. Only reads."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from gpukeeper.ledger.archive_file import headers, read_archive
from gpukeeper.ledger.lines import decode, micros, moment
from gpukeeper.ledger.paths import archive_folder
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import Event

_ARCHIVED = ("outcome", "restore", "noticed")
_TYPES = "SELECT seq, line FROM journal WHERE type IN ('outcome', 'restore') AND at >= ? AND at < ?"
_NOTICED = "SELECT seq, line FROM journal WHERE type = 'noticed' AND at >= ? AND at < ?"
_RECLAIMED = " AND key IN (SELECT key FROM journal WHERE type = 'outcome' AND result = 'reclaimed' AND at >= ?)"


def covered_from(c: sqlite3.Connection, ledger: Path) -> datetime | None:
    """The time of the oldest line that is still there, archives included. None: there is none."""
    times = [header.since for _, header in headers(archive_folder(ledger))]
    found = c.execute("SELECT min(at) FROM journal WHERE type <> 'checkpoint'").fetchone()[0]
    return min([*times, *([] if found is None else [moment(found)])], default=None)


def outcome_lines(
    c: sqlite3.Connection, ledger: Path, since: datetime, until: datetime, tell: Callable[[str], None]
) -> Iterator[Event]:
    """Outcomes, restores, and what was noticed of things that a step ended. `tell`: gets a sentence for each archive
    that cannot be read."""
    folder = archive_folder(ledger)
    archives = [
        (header.first, path) for path, header in headers(folder) if header.until >= since and header.since < until
    ]
    for _, path in sorted(archives):
        try:
            for _, line in read_archive(path, _ARCHIVED):
                if since <= line.at < until:
                    yield line
        except LedgerError as problem:
            tell(f"Part of what came back is not counted: {problem}")
    span = (micros(since), micros(until))
    question, values = f"{_TYPES} UNION ALL {_NOTICED}", [*span, *span]
    if not archives:  # what was ended is in the journal, too, so that most lines need not be read
        question += _RECLAIMED
        values.append(span[0])
    for seq, stored in c.execute(question + " ORDER BY seq", values):
        yield decode(stored, f"Line {seq} of {ledger}")
