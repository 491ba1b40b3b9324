"""The ledger's SQLite file: its tables, as numbered migrations; creating, opening, migrating, and every way in which
that fails, as a sentence.

Nothing is written to a file before it is known to be ours. A migration that was released is never edited, only
followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from gpukeeper.ledger.files import RESTORING_FILE, check_trusted, make_private
from gpukeeper.model.errors import LedgerError

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


BUSY_SECONDS = 10
_ELSEWHERE = "use another directory with GPUKEEPER_STATE"
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
_NO_SHM = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR})


def open_for_writing(path: Path, synchronous: str = "FULL", schema: Schema = LEDGER) -> sqlite3.Connection:
    """`synchronous=FULL`: what was committed survives a power cut. NORMAL may lose the last commits, never the file."""
    assert synchronous in {"FULL", "NORMAL"}
    make_private(path.parent)
    with _alone(path.parent), translated(path):
        check_restored(path)
        _make_file(path)
        connection = _connect(path, "rw")
        try:
            _check(connection, path, schema)
            _keep_older(connection, path, schema)
            # Freed pages can be given back to the filesystem after an archive run. Must come before the first table.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            _migrate(connection, schema)
        except BaseException:
            connection.close()
            raise
    return connection


def open_for_reading(path: Path, schema: Schema = LEDGER) -> sqlite3.Connection:
    """A file that is missing, empty or still without tables reads as an empty ledger; it is not created. One of an
    older gpukeeper is read from a private copy, as it is at this moment."""
    check_trusted(path.parent)
    check_restored(path)
    with translated(path):
        connection = _connect_reading(path) if _has_content(path) else open_in_memory(schema)
        try:
            if _is_being_made(connection):
                connection.close()
                connection = open_in_memory(schema)
            _check(connection, path, schema)
            if connection.execute("PRAGMA user_version").fetchone()[0] < len(schema.migrations):
                connection = _migrated_copy(connection, schema)
            connection.execute("PRAGMA query_only = 1")
        except BaseException:
            connection.close()
            raise
    return connection


def open_in_memory(schema: Schema = LEDGER) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _migrate(connection, schema)
    return connection


def is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", None) in _FULL


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Foreign errors become LedgerError with a sentence."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise LedgerError(_sentence(path, error)) from error
    except msgspec.MsgspecError as error:
        raise LedgerError(
            f"The state in the ledger {path} cannot be read ({error}). Nothing was acted on. "
            "Rebuild it from the journal: gpukeeper doctor"
        ) from error
    except OSError as error:
        raise LedgerError(
            f"The ledger {path} cannot be used: {error.strerror or error}. Nothing was changed. "
            f"Fix this, or {_ELSEWHERE}."
        ) from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def shrink_file(connection: sqlite3.Connection, pages: int = 2_000) -> None:
    """Within a transaction: free pages to the filesystem, at most so many, about 20 µs each. The file becomes shorter
    with the next checkpoint."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    for _ in range(min(free, pages)):
        # One each: Python takes only the first step of this statement, whatever number it has.
        connection.execute("PRAGMA incremental_vacuum(1)")


def damage(connection: sqlite3.Connection) -> list[str]:
    """What SQLite finds wrong with the file; empty when it is whole. Reads all of it."""
    try:
        found = [str(words) for (words,) in connection.execute("PRAGMA quick_check")]
    except sqlite3.DatabaseError as error:
        found = [str(error)]
    return [] if found == ["ok"] else found


def check_restored(path: Path) -> None:
    """Half of a restore reads as an empty ledger that is not paused."""
    state = path.parent
    if os.path.lexists(state / RESTORING_FILE):
        raise LedgerError(
            f"A restore of the ledger in {state} was interrupted, so the ledger is not complete. Nothing was done. "
            f"Repeat `gpukeeper ledger restore FILE`. The files that were there before are in {state}/before-restore-*"
        )


def _make_file(path: Path) -> None:
    # Made here and not by SQLite, so that the mode does not depend on the umask; -wal and -shm follow it.
    if not _has_content(path) and not path.exists():
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two processes that open a new ledger at the same time must not both turn it to WAL and migrate it."""
    with translated(directory):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd, directory)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, directory: Path) -> None:
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise LedgerError(
                    f"Another program has locked the directory {directory} for {BUSY_SECONDS} s. Nothing was changed. "
                    f"Which one: fuser -v {directory}. End it, or {_ELSEWHERE}."
                ) from None
            time.sleep(0.05)
        else:
            return


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    # The connection is used by one thread at a time, which need not be the one that opened it.
    return sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_SECONDS,
    )


def _has_content(path: Path) -> bool:
    if path.parent.exists() and not path.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{path.parent} is not a directory", str(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path.exists() and path.stat().st_size > 0


def _connect_reading(path: Path) -> sqlite3.Connection:
    connection = _connect(path, "ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        # Without rights on the directory, or on a full disk, the -shm file that WAL needs cannot be made. As long as
        # there
        # is no -wal file, everything is in the main one.
        if error.sqlite_errorcode & 0xFF not in _NO_SHM or _has_content(path.with_name(path.name + "-wal")):
            raise
        return _connect(path, "ro&immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_being_made(connection: sqlite3.Connection) -> bool:
    """Another process has turned the new file to WAL and has not committed its first migration, one transaction."""
    made = connection.execute(
        "SELECT (SELECT count(*) FROM sqlite_master), application_id, user_version "
        "FROM pragma_application_id, pragma_user_version"
    )
    return bool(made.fetchone() == (0, 0, 0))


def _check(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    """Ours, of a known version, readable. Read-only."""
    found = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if found != schema.application_id and (tables or found):
        raise LedgerError(
            f"{path} is a database of another program, not a ledger. Nothing was changed. "
            f"Move it away, or {_ELSEWHERE}."
        )
    if version > len(schema.migrations):
        raise LedgerError(
            f"{path} was written by a newer gpukeeper (schema {version}; this one knows {len(schema.migrations)}). "
            f"Nothing was changed. Use that version, restore an older backup with `ledger restore`, or {_ELSEWHERE}."
        )


def _migrated_copy(connection: sqlite3.Connection, schema: Schema) -> sqlite3.Connection:
    """In a temporary file without a name, which the kernel removes when it is closed. The ledger itself may not be
    writable for this user, and its older gpukeeper may still run."""
    with closing(connection):
        copy = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        try:
            connection.backup(copy)
            _migrate(copy, schema)
        except BaseException:
            copy.close()
            raise
    return copy


def copy_to(connection: sqlite3.Connection, path: Path) -> None:
    """As it is at one moment, in one new file that only its owner reads."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(sqlite3.connect(path)) as copy:
        connection.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")


def _keep_older(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    """A copy for the version before: once migrated, it does not read the file any more."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if not 0 < version < len(schema.migrations):
        return
    made = path.with_name(f".{path.stem}.{os.getpid()}")
    try:
        copy_to(connection, made)
        made.replace(path.with_name(f"{path.stem}-schema-{version}.db"))
    finally:
        made.unlink(missing_ok=True)


def _migrate(connection: sqlite3.Connection, schema: Schema) -> None:
    with transaction(connection):
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        for number, statements in enumerate(schema.migrations[version:], version + 1):
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
        connection.execute(f"PRAGMA application_id = {schema.application_id}")


def _sentence(path: Path, error: sqlite3.DatabaseError) -> str:
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_NOTADB:
            return (
                f"{path} is not a ledger: it is not a SQLite file. Nothing was changed. Move it away, or {_ELSEWHERE}."
            )
        case sqlite3.SQLITE_CORRUPT:
            return (
                f"The ledger {path} is damaged ({error}). Nothing was acted on. Move it away together with its -wal "
                "and -shm files; a new one is created at the next start, and archived lines stay readable in archive/."
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return (
                f"Another program has been writing to the ledger {path} for {BUSY_SECONDS} s. Nothing was written "
                "and nothing was acted on. Try again, or end that program."
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return (
                f"The ledger {path} cannot be opened ({error}). Nothing was changed. Check the permissions of it and "
                f"of its directory, or {_ELSEWHERE}."
            )
        case _ if is_full(error):
            return full_sentence(path)
        case _:
            return f"The ledger {path} could not be used ({error}). Nothing more was acted on."


def full_sentence(path: Path) -> str:
    return (
        f"The disk of the ledger {path} is full; no more actions until 32 MiB are free again. "
        "Free some space on it; no restart is needed."
    )
