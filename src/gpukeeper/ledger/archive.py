"""Rotation: old journal lines move into compressed files, and a checkpoint takes their place; old days of measurements
are packed. And is the ledger whole? That reads everything and changes nothing.

A line is deleted only after a verified file holds it, in the transaction that writes the checkpoint. A crash in between
leaves lines in both; the next run finds the file, compares it with the rows and finishes what was begun.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import secrets
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from gpukeeper.ledger import tables
from gpukeeper.ledger.database import open_for_reading, shrink_file, translated
from gpukeeper.ledger.files import archive_folder
from gpukeeper.ledger.journal import Reserve, SqliteLedger, append
from gpukeeper.ledger.lines import decode, micros, moment, type_of
from gpukeeper.ledger.meta import shipped
from gpukeeper.ledger.signals import pack_days, prune, unreadable_days
from gpukeeper.model import reading
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import Event
from gpukeeper.model.policy import LedgerKeep

FORMAT = 1
LINE_MAX = 64 * 2**20  # bytes. The longest line keeps what an engine said of a removed object: a few MiB at most
_ROWS = "SELECT seq, at, line FROM journal WHERE seq BETWEEN ? AND ? AND type <> 'checkpoint' ORDER BY seq"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """`sha256` is of everything after the header line. `until` is the newest time in it."""

    archive: int = FORMAT
    first: int
    last: int
    lines: int
    since: datetime
    until: datetime
    sha256: str


class _Stored(msgspec.Struct, frozen=True):
    seq: int
    line: msgspec.Raw


_HEADER = reading.Decoder(Header)
_STORED = reading.Decoder(_Stored)


def digest_rows(c: sqlite3.Connection, first: int, last: int) -> Header | None:
    """The header of an archive of these rows; None when there are none. Checkpoints are state and not archived."""
    digest = hashlib.sha256()
    numbers: list[int] = []
    oldest = newest = None
    count = 0
    for seq, at, line in c.execute(_ROWS, (first, last)):
        digest.update(_stored(seq, line))
        numbers = [numbers[0] if numbers else seq, seq]
        oldest, newest = min(at, oldest or at), max(at, newest or at)
        count += 1
    if not numbers or oldest is None or newest is None:
        return None
    return Header(
        first=numbers[0],
        last=numbers[1],
        lines=count,
        since=moment(oldest),
        until=moment(newest),
        sha256=digest.hexdigest(),
    )


def write_archive(c: sqlite3.Connection, directory: Path, header: Header, between: Callable[[str], None]) -> Path:
    directory.mkdir(mode=0o750 if os.geteuid() == 0 else 0o700, exist_ok=True)
    path = _free_name(directory, header)
    # A name of its own: a run that was cancelled may still be writing in its thread.
    made = directory / f".{path.name}.{secrets.token_hex(4)}.tmp"
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    with os.fdopen(fd, "wb") as raw:
        with gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as packed:
            packed.write(msgspec.json.encode(header) + b"\n")
            for seq, _, line in c.execute(_ROWS, (header.first, header.last)):
                packed.write(_stored(seq, line))
        raw.flush()
        os.fsync(raw.fileno())
    between("written")
    verify(made, header)
    between("verified")
    made.rename(path)
    _sync_folder(directory)
    between("named")
    return path


def headers(directory: Path) -> list[tuple[Path, Header]]:
    """Of every archive that has a readable one."""
    found = []
    for path in sorted(directory.glob("journal-*.gz")):
        try:
            found.append((path, read_header(path)))
        except LedgerError:
            continue
    return found


def read_header(path: Path) -> Header:
    with _opened(path) as packed:
        return _take_header(path, packed)


def verify(path: Path, expected: Header | None = None) -> Header:
    """Read it from end to end and compare count and digest; raises LedgerError when anything differs."""
    with _opened(path) as packed:
        header = _take_header(path, packed)
        digest, count = hashlib.sha256(), 0
        for line in _lines(path, packed):
            digest.update(line)
            count += 1
    if (count, digest.hexdigest()) != (header.lines, header.sha256) or expected not in {None, header}:
        raise LedgerError(
            f"The archive {path} does not hold what its header says ({count} of {header.lines} lines read). "
            "Nothing was deleted. Keep it for inspection and move it away."
        )
    return header


def read_archive(path: Path, types: Collection[str] = ()) -> Iterator[tuple[int, Event]]:
    """`types`: others are skipped, as far as possible without decoding them. None given: all lines."""
    tags = [f'"type":"{one}"'.encode() for one in types]
    with _opened(path) as packed:
        _take_header(path, packed)
        for line in _lines(path, packed):
            if tags and not any(tag in line for tag in tags):
                continue
            try:
                stored = _STORED.decode(line)
            except msgspec.MsgspecError as error:
                raise _unreadable(path, error) from error
            event = decode(bytes(stored.line), f"Line {stored.seq} of {path}")
            if not types or type_of(event) in types:
                yield stored.seq, event


def _stored(seq: int, line: str) -> bytes:
    return f'{{"seq":{seq},"line":{line}}}\n'.encode()


def _opened(path: Path) -> gzip.GzipFile:
    try:
        return gzip.GzipFile(path, "rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def _take_header(path: Path, packed: gzip.GzipFile) -> Header:
    try:
        return _HEADER.decode(_line(path, packed))
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise _unreadable(path, error) from error


def _lines(path: Path, packed: gzip.GzipFile) -> Iterator[bytes]:
    try:
        while line := _line(path, packed):
            yield line
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _line(path: Path, packed: gzip.GzipFile) -> bytes:
    """A file of some KiB can unpack to one line that fills the memory."""
    line = packed.readline(LINE_MAX + 1)
    if len(line) > LINE_MAX:
        raise LedgerError(
            f"The archive {path} cannot be read (a line is over {LINE_MAX >> 20} MiB). Nothing was changed."
        )
    return line


def _unreadable(path: Path, error: Exception) -> LedgerError:
    return LedgerError(f"The archive {path} cannot be read ({error}). Nothing was changed.")


def _free_name(directory: Path, header: Header) -> Path:
    """Named after its newest day. A clock that went back may give two runs the same day."""
    path = directory / f"journal-{header.until:%Y%m%d}.jsonl.gz"
    return path if not path.exists() else directory / f"journal-{header.until:%Y%m%d}-{header.first}.jsonl.gz"


def _sync_folder(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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


# Budgets count the acts of the last hour in the journal, so a shorter setting must not take those lines away.
LEAST = timedelta(days=1)
# A line from further in the future was written under a wrong clock and must not hold up rotation until then.
WRONG_CLOCK = timedelta(days=1)

# Between two transactions that pack measurements. SQLite does not queue writers: one that waits tries every 0.1 s.
PAUSE = timedelta(milliseconds=150)


class Rotation(msgspec.Struct, frozen=True):
    """What one run did. `finished`: files of an interrupted run whose lines were only now deleted."""

    lines: int = 0
    archive: str | None = None
    finished: tuple[str, ...] = ()
    archives_deleted: tuple[str, ...] = ()
    signals_deleted: int = 0
    believed: datetime | None = None


class ArchiveInfo(msgspec.Struct, frozen=True):
    """`damage`: why it cannot be trusted, or None."""

    name: str
    size: int
    header: Header | None
    damage: str | None = None


class LedgerStatus(msgspec.Struct, frozen=True):
    lines: int
    oldest: datetime | None
    newest: datetime | None
    size: int
    archives: tuple[ArchiveInfo, ...]
    reserve: bool
    paused: str | None


def _nothing(step: str) -> None:
    """Called between the steps; tests raise here."""


async def rotate(
    ledger: SqliteLedger,
    keep: LedgerKeep,
    now: datetime,
    between: Callable[[str], None] = _nothing,
    *,
    keep_unsent: timedelta | None = None,
) -> Rotation:
    """Archive, delete what has expired, prune signals. Raises LeaseHeld if another run is in progress.

    `keep_unsent`: lines are copied to a database, and those that were not stay this much longer."""
    directory = archive_folder(ledger.path)
    horizons = (_horizon(keep, now), None if keep_unsent is None else _horizon(keep, now - keep_unsent))
    async with ledger.lease("ledger", "archive"):
        finished = await _finish(ledger, directory, now)
        written = await asyncio.to_thread(_write, ledger.path, directory, horizons, now, between)
        if written is not None:
            header = written[1]
            await ledger.change(lambda c: _retire(c, header, now, str(ledger.path)))
            between("deleted")
        believed = await believed_now(ledger, now)
        gone = () if believed is None else await asyncio.to_thread(_delete_old, directory, believed - keep.keep)
        between("pruned")
        signals = await ledger.change(lambda c: prune(c, now - keep.signals))
    lines, name = (written[1].lines, written[0].name) if written else (0, None)
    return Rotation(lines, name, finished, gone, signals, believed)


async def pack_signals(ledger: SqliteLedger, now: datetime, stop: asyncio.Event) -> None:
    """Days of measurements that ended two days ago, one row for each. In short transactions: the first time it may take
    an hour, and passes write meanwhile. What is left when it stops, the next run packs."""
    start: int | None = 0
    while start is not None and not stop.is_set():
        start = await ledger.change(lambda c, at=start: pack_days(c, now, at), acts=True)  # type: ignore[misc]
        if start is not None:
            await asyncio.sleep(PAUSE.total_seconds())


async def status(ledger: SqliteLedger, *, check: bool = False) -> LedgerStatus:
    """`check` reads every archive from end to end; otherwise only its header."""
    directory = archive_folder(ledger.path)
    archives = await asyncio.to_thread(
        lambda: tuple(_archive_info(p, check) for p in sorted(directory.glob("journal-*.gz")))
    )
    lines, oldest, newest = await ledger.read(_extent)
    size = sum(p.stat().st_size for p in ledger.path.parent.glob(ledger.path.name + "*"))
    there = Reserve(ledger.path.parent).is_there()
    return LedgerStatus(lines, oldest, newest, size, archives, there, await ledger.paused())


async def believed_now(ledger: SqliteLedger, now: datetime) -> datetime | None:
    """The time by which data is deleted forever: at most two days further per run, whatever the clock shows.
    None: this clock was not observed before."""

    def do(c: sqlite3.Connection) -> datetime | None:
        last = tables.meta(c, "believed_now")
        believed = now if last is None else min(now, moment(int(last)) + timedelta(days=2))
        tables.set_meta(c, "believed_now", micros(believed))
        return None if last is None else believed

    return await ledger.change(do)


def _horizon(keep: LedgerKeep, now: datetime) -> datetime:
    """Whole days only, so that files do not share one."""
    return (now - max(keep.archive_after, LEAST)).replace(hour=0, minute=0, second=0, microsecond=0)


async def _finish(ledger: SqliteLedger, directory: Path, now: datetime) -> tuple[str, ...]:
    """Files whose very lines are still in the journal: the run that wrote them was interrupted."""
    found = await asyncio.to_thread(_unfinished, ledger.path, directory)
    for _, header in found:
        await ledger.change(lambda c, h=header: _retire(c, h, now, str(ledger.path)))  # type: ignore[misc]
    return tuple(path.name for path, _ in found)


def _unfinished(ledger: Path, directory: Path) -> list[tuple[Path, Header]]:
    with translated(ledger), closing(open_for_reading(ledger)) as c:
        # Numbers alone prove nothing: a new ledger counts from 1 again. The digest of the rows does.
        same = [(path, h) for path, h in headers(directory) if digest_rows(c, h.first, h.last) == h]
        for path, header in same:
            verify(path, header)
        return sorted(same, key=lambda pair: pair[1].first)


def _write(
    ledger: Path,
    directory: Path,
    horizons: tuple[datetime, datetime | None],
    now: datetime,
    between: Callable[[str], None],
) -> tuple[Path, Header] | None:
    """`horizons`: of all lines, and of those that are to be copied to a database and were not yet."""
    horizon, unsent_horizon = horizons
    with translated(ledger), closing(open_for_reading(ledger)) as c:
        last = _last_before(c, horizon, now)
        if unsent_horizon is not None:
            last = min(last, max(shipped(c), _last_before(c, unsent_horizon, now)))
        header = digest_rows(c, 0, last)
        return None if header is None else (write_archive(c, directory, header, between), header)


def _last_before(c: sqlite3.Connection, horizon: datetime, now: datetime) -> int:
    """Lines go from the front only, up to the first that is young."""
    young = c.execute(
        "SELECT seq FROM journal WHERE at >= ? AND at <= ? ORDER BY seq LIMIT 1",
        (micros(horizon), micros(now + WRONG_CLOCK)),
    ).fetchone()
    if young is not None:
        return int(young[0]) - 1
    return int(c.execute("SELECT coalesce(max(seq), 0) FROM journal").fetchone()[0])


def _retire(c: sqlite3.Connection, header: Header, now: datetime, where: str) -> None:
    """Checkpoint and deletion are one transaction: state and journal never disagree."""
    _forget(c, header, now)
    number = append(c, [tables.checkpoint(c, now, where)])
    # Exactly what the file holds. Older checkpoints are state, not history: this one replaces them.
    c.execute("DELETE FROM journal WHERE seq BETWEEN ? AND ?", (header.first, header.last))
    c.execute("DELETE FROM journal WHERE type = 'checkpoint' AND seq < ?", (number,))
    tables.set_meta(c, "archived_until", max(micros(header.until), int(tables.meta(c, "archived_until") or 0)))
    shrink_file(c)


def _forget(c: sqlite3.Connection, header: Header, now: datetime) -> None:
    """What is not there any more, has no line left and no hold that still counts needs no memory. Nor does what was
    decided about it: no line records that a tree or a process disappeared by itself."""
    # NOT IN and not a join: SQLite makes one index of each list instead of searching `present` for every memory.
    silent_keys = (
        "key NOT IN (SELECT key FROM present) AND key NOT IN "
        "(SELECT key FROM journal WHERE key IS NOT NULL AND seq NOT BETWEEN ? AND ?)"
    )
    archived = (header.first, header.last)
    c.execute(f"DELETE FROM decided WHERE {silent_keys}", archived)  # noqa: S608
    silent = c.execute(f"SELECT key, memory FROM memories WHERE {silent_keys}", archived).fetchall()  # noqa: S608
    for key, stored in silent:
        memory = tables.read_memory(stored)
        # A GPU's baseline and quarantine outlive their lines, however old those are.
        if memory.gpu is None and not memory.tested and all(hold.until <= now for hold in memory.holds):
            c.execute("DELETE FROM memories WHERE key = ?", (key,))


def _delete_old(directory: Path, before: datetime) -> tuple[str, ...]:
    """By their newest line. A file whose header cannot be read stays: its content is unknown."""
    gone = []
    for path, header in headers(directory):
        if header.until < before:
            path.unlink()
            gone.append(path.name)
    for left in directory.glob(".journal-*.tmp"):
        left.unlink()
    return tuple(sorted(gone))


def _archive_info(path: Path, check: bool) -> ArchiveInfo:
    header = None
    try:
        header = read_header(path)
        if check:
            verify(path, header)
    except LedgerError as error:
        return ArchiveInfo(path.name, path.stat().st_size, header, str(error))
    return ArchiveInfo(path.name, path.stat().st_size, header)


def _extent(c: sqlite3.Connection) -> tuple[int, datetime | None, datetime | None]:
    lines = c.execute("SELECT count(*) FROM journal").fetchone()[0]
    ends: list[datetime | None] = [None, None]
    for i, order in enumerate(("ASC", "DESC")):
        with suppress(TypeError):  # no line: no row
            ends[i] = moment(c.execute(f"SELECT at FROM journal ORDER BY seq {order} LIMIT 1").fetchone()[0])  # noqa: S608
    return lines, ends[0], ends[1]


MOST = 20  # problems of one kind that are listed; the rest is counted


class LedgerFile(msgspec.Struct, frozen=True):
    name: str
    size: int


class InspectionResult(msgspec.Struct, frozen=True):
    """`problems`: a sentence each; none when everything could be read and is what it was when it was written."""

    lines: int
    archives: tuple[ArchiveInfo, ...]
    problems: tuple[str, ...]


async def inspect(ledger: SqliteLedger) -> InspectionResult:
    found = await ledger.damage()
    if found:
        return InspectionResult(0, (), tuple(f"{ledger.path}: {words}" for words in _few(found)))
    lines, unreadable = await ledger.read(lambda c: _read_all(c, str(ledger.path)))
    archives = (await status(ledger, check=True)).archives
    damaged = [one.damage for one in archives if one.damage is not None]
    packed = await ledger.read(unreadable_days)
    return InspectionResult(lines, archives, (*_few(unreadable), *_few(packed), *_few(damaged)))


async def schema_of(ledger: SqliteLedger) -> int:
    """The number of its last migration."""
    return await ledger.read(lambda c: int(c.execute("PRAGMA user_version").fetchone()[0]))


def files_of(ledger: SqliteLedger) -> tuple[LedgerFile, ...]:
    """The database and what belongs to it."""
    found = sorted(ledger.path.parent.glob(ledger.path.name + "*"))
    return tuple(LedgerFile(path.name, path.stat().st_size) for path in found)


def archived_size(found: LedgerStatus) -> int:
    return sum(one.size for one in found.archives)


def _read_all(c: sqlite3.Connection, where: str) -> tuple[int, list[str]]:
    lines, unreadable = 0, []
    for seq, stored in c.execute("SELECT seq, line FROM journal ORDER BY seq"):
        try:
            decode(stored, f"Line {seq} of {where}")
        except LedgerError as problem:
            unreadable.append(str(problem))
        else:
            lines += 1
    return lines, unreadable


def _few(found: list[str]) -> list[str]:
    more = len(found) - MOST
    return [*found[:MOST], f"and {more} more"] if more > 0 else found
