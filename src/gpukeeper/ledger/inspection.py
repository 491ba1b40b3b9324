"""Is the ledger whole? Reads everything and changes nothing: SQLite's own check, every line, every packed day of
measurements, every archive."""

from __future__ import annotations

import sqlite3

import msgspec

from gpukeeper.ledger.archive import ArchiveInfo, LedgerStatus, status
from gpukeeper.ledger.journal import SqliteLedger
from gpukeeper.ledger.lines import decode
from gpukeeper.ledger.minutes import unreadable_days
from gpukeeper.model.errors import LedgerError

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
