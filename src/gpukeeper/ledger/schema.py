"""The tables of the ledger, as numbered migrations. A migration that was released is never edited, only followed."""

from __future__ import annotations

from typing import NamedTuple

APPLICATION_ID = 0x47504B50  # "GPKP", in the file's header: distinguishes our file from any other SQLite file

_JOURNAL = """
CREATE TABLE journal (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL,
    type TEXT NOT NULL,
    platform TEXT,
    place TEXT,
    workload TEXT,
    key TEXT,
    owner TEXT,
    rule TEXT,
    result TEXT,
    pass_id INTEGER,
    step TEXT,
    error INTEGER NOT NULL,
    line TEXT NOT NULL
)
"""
_APPEND_ONLY = """
CREATE TRIGGER journal_is_append_only BEFORE UPDATE ON journal
BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END
"""
_OPEN_INTENTS = """
CREATE TABLE open_intents (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    step TEXT NOT NULL UNIQUE,
    platform TEXT,
    place TEXT,
    line TEXT NOT NULL
)
"""
_PRESENT = """
CREATE TABLE present (
    platform TEXT NOT NULL, place TEXT NOT NULL, key TEXT NOT NULL, ref TEXT NOT NULL,
    PRIMARY KEY (platform, place, key)
) WITHOUT ROWID
"""
_SERIES = """
CREATE TABLE series (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL, signal TEXT NOT NULL, device TEXT NOT NULL, slice INTEGER NOT NULL,
    newest INTEGER NOT NULL,
    UNIQUE (key, signal, device, slice)
)
"""
_BUCKETS = """
CREATE TABLE buckets (
    series INTEGER NOT NULL, minute INTEGER NOT NULL, sum REAL, count INTEGER NOT NULL,
    PRIMARY KEY (series, minute)
) WITHOUT ROWID
"""
# With rowid: a table without one keeps a row of this size in pages of its own, mostly empty.
_DAYS = """
CREATE TABLE days (
    series INTEGER NOT NULL, day INTEGER NOT NULL, minutes BLOB NOT NULL,
    PRIMARY KEY (series, day)
)
"""
# Numbers of series are given again.
_NO_DAYS_WITHOUT_SERIES = """
CREATE TRIGGER days_of_series AFTER DELETE ON series
BEGIN DELETE FROM days WHERE series = OLD.id; END
"""
_ABSENT = """
CREATE TABLE absent (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL, signal TEXT NOT NULL, why TEXT NOT NULL,
    newest INTEGER NOT NULL,
    UNIQUE (key, signal)
)
"""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        _JOURNAL,
        "CREATE INDEX journal_type ON journal (type, at)",
        "CREATE INDEX journal_key ON journal (key) WHERE key IS NOT NULL",
        "CREATE INDEX journal_error ON journal (seq) WHERE error = 1",
        _APPEND_ONLY,
        "CREATE TABLE memories (key TEXT PRIMARY KEY, memory TEXT NOT NULL) WITHOUT ROWID",
        _PRESENT,
        "CREATE TABLE decided (key TEXT PRIMARY KEY, words TEXT NOT NULL) WITHOUT ROWID",
        _OPEN_INTENTS,
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID",
        _SERIES,
        _BUCKETS,
        _ABSENT,
    ),
    (  # Measured without a gap from since to until, in microseconds. Earlier measurements do not have that.
        "DELETE FROM buckets",
        "DELETE FROM series",
        "ALTER TABLE series ADD COLUMN since INTEGER",
        "ALTER TABLE series ADD COLUMN until INTEGER",
    ),
    (_DAYS, _NO_DAYS_WITHOUT_SERIES),
)


class Schema(NamedTuple):
    """What one kind of file contains, and the number in its header."""

    application_id: int
    migrations: tuple[tuple[str, ...], ...]


LEDGER = Schema(APPLICATION_ID, MIGRATIONS)

_DEVICES = """
CREATE TABLE devices (
    id INTEGER PRIMARY KEY,
    place TEXT NOT NULL, device TEXT NOT NULL, model TEXT NOT NULL, share REAL, listed INTEGER NOT NULL,
    since INTEGER NOT NULL, until INTEGER NOT NULL,
    open INTEGER NOT NULL
)
"""
_HOLDERS = """
CREATE TABLE holders (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL, path TEXT NOT NULL, owner TEXT NOT NULL, class TEXT NOT NULL, grp TEXT NOT NULL,
    UNIQUE (key, owner, class, grp)
)
"""
_HOURS = """
CREATE TABLE hours (
    hour INTEGER NOT NULL, device INTEGER NOT NULL, holder INTEGER NOT NULL,
    active INTEGER NOT NULL, idle INTEGER NOT NULL, unknown INTEGER NOT NULL, free INTEGER NOT NULL,
    PRIMARY KEY (hour, device, holder)
) WITHOUT ROWID
"""
USAGE = Schema(
    0x47504B55,  # "GPKU"
    (
        (
            _DEVICES,
            "CREATE UNIQUE INDEX devices_open ON devices (place, device) WHERE open = 1",
            _HOLDERS,
            _HOURS,
        ),
    ),
)
