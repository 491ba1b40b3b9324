"""One archive: gzip, a header line with what is in it, then a journal line each with its number. And lines about
steps and their reversal over a span of time, from archives and the journal, oldest first.

A file has its final name only after it was written, synced, read back and compared.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import secrets
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from gpukeeper.ledger.files import archive_folder
from gpukeeper.ledger.lines import decode, micros, moment, type_of
from gpukeeper.model import reading
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import Event

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
