"""What the copy keeps in the ledger itself: which ledger this is, how far it was shipped, which requests were taken.

All of it are rows of the table `meta`; no line of the journal depends on them.
"""

from __future__ import annotations

import sqlite3
import uuid
from datetime import datetime, timedelta

import msgspec

from gpukeeper.ledger import state
from gpukeeper.ledger.journal import SqliteLedger
from gpukeeper.ledger.lines import micros
from gpukeeper.ledger.paths import archive_folder

_ID, _FOREIGN, _SHIPPED, _NONCE = "copy_id", "copy_foreign", "copy_shipped", "copy_nonce:"
_LONGER = timedelta(hours=1)  # a nonce is remembered beyond its request's expiry: clocks differ


class Identity(msgspec.Struct, frozen=True):
    """`foreign`: names of archives that were there before this ledger was, so that their lines are not of it."""

    id: str
    foreign: tuple[str, ...] = ()


async def ensure_identity(ledger: SqliteLedger) -> None:
    """A ledger gets its id once. The number of a line alone does not say which ledger it was."""

    def do(c: sqlite3.Connection) -> None:
        if state.meta(c, _ID) is None:
            is_new = c.execute("SELECT 1 FROM journal LIMIT 1").fetchone() is None
            is_new = is_new and state.meta(c, "archived_until") is None
            foreign = sorted(path.name for path in archive_folder(ledger.path).glob("*.gz")) if is_new else []
            state.set_meta(c, _ID, str(uuid.uuid4()))
            state.set_meta(c, _FOREIGN, "\n".join(foreign))

    if await ledger.read(read_identity) is None:
        await ledger.change(do)


def read_identity(c: sqlite3.Connection) -> Identity | None:
    found = state.meta(c, _ID)
    return None if found is None else Identity(str(found), tuple(str(state.meta(c, _FOREIGN) or "").splitlines()))


async def remember_shipped(ledger: SqliteLedger, line: int) -> None:
    """For rotation, which keeps what was not shipped. A number that is too small only keeps more."""
    await ledger.change(lambda c: state.set_meta(c, _SHIPPED, line))


def shipped(c: sqlite3.Connection) -> int:
    return int(state.meta(c, _SHIPPED) or 0)


async def take_nonce(ledger: SqliteLedger, nonce: str, expires: datetime, now: datetime) -> bool:
    """False: a request with it was taken before. Durable, so that a restart does not allow a replay."""

    def do(c: sqlite3.Connection) -> bool:
        until = micros(expires + _LONGER)
        c.execute("DELETE FROM meta WHERE substr(name, 1, ?) = ? AND value < ?", (len(_NONCE), _NONCE, micros(now)))
        added = c.execute("INSERT OR IGNORE INTO meta (name, value) VALUES (?, ?)", (f"{_NONCE}{nonce}", until))
        return added.rowcount == 1

    return await ledger.change(do)
