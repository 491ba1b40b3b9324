"""Who may use the web dashboard: one-time links, sessions and personal tokens. Only hashes are stored.

A file of its own beside the ledger: it is no record of what happened, is not copied, and can be deleted to log out
everybody. A secret has 256 random bits, so that one fast hash is enough.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec

from gpukeeper.ledger.database import transaction, translated
from gpukeeper.ledger.files import make_private
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.unknown import direct

FILE = "logins.db"
LINK_LASTS = timedelta(minutes=10)
MOST_EACH = 50  # logins of one person; the oldest session or link is dropped
SCHEMA = 2
MOST_REPORTED = 1_000
T = TypeVar("T")


@direct
class LoginKind(StrEnum):
    LINK = "link"  # works once, for a few minutes, and becomes a session
    SESSION = "session"  # of a browser
    TOKEN = "token"  # for programs  # noqa: S105


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """`id` names it in lists and in the ledger; it is no secret. `peer`: only processes of this uid may use a session
    that began on this machine; None: it began on another one, and may be used from there."""

    id: str
    kind: LoginKind
    person: str
    uid: int | None
    name: str  # what a token is for
    created: datetime
    expires: datetime
    used: datetime | None = None
    address: str = ""  # from where it was used last
    peer: int | None = None


class NewLogin(msgspec.Struct, frozen=True):
    login: Login
    secret: str  # shown once


def open_logins(ledger: Path) -> Logins:
    """`ledger` is the path of the ledger's file."""
    path = ledger.parent / FILE
    make_private(path.parent)
    with translated(path):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
        path.chmod(0o600)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA:
            connection.close()
            raise LedgerError(
                f"{path} was written by a newer gpukeeper. Nothing was changed. Use that version, or delete the file "
                "to log out everybody."
            )
        connection.execute("PRAGMA journal_mode = WAL")
        with transaction(connection):
            for statement in _TABLES:
                connection.execute(statement)
            if version == 1:
                connection.execute("ALTER TABLE logins ADD COLUMN peer INTEGER")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
    return Logins(path, connection)


_TABLES = (
    """CREATE TABLE IF NOT EXISTS logins (
        hash BLOB PRIMARY KEY, id TEXT UNIQUE NOT NULL, kind TEXT NOT NULL, person TEXT NOT NULL, uid INTEGER,
        name TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER NOT NULL, used INTEGER, address TEXT NOT NULL,
        peer INTEGER
    ) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS keys (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
)


class Logins:
    """Made by `open_logins`."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._connection = path, connection
        self.on_revoke: Callable[[], None] = lambda: None  # called in a thread, before anybody reads that it is done
        self.on_misuse: Callable[[str], None] = lambda words: (
            None
        )  # a session from where it does not belong; in a thread
        self._misused: set[tuple[str, int | None]] = set()  # reported once: session, and who had it
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="logins")

    def close(self) -> None:
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    async def key(self, name: str) -> bytes:
        """A random key that stays the same over restarts."""
        return await self._do(lambda c: _key(c, name))

    async def create(
        self, kind: LoginKind, person: str, uid: int | None, now: datetime, lasts: timedelta, name: str = ""
    ) -> NewLogin:
        made = _new(kind, person, uid, now, lasts, name)

        def do(c: sqlite3.Connection) -> None:
            _insert(c, made, now)
            self.on_revoke()  # it may have taken the place of an older one

        await self._do(do)
        return made

    async def redeem(
        self, secret: str, now: datetime, lasts: timedelta, address: str, peer: int | None = None
    ) -> NewLogin | None:
        """A session for a link, once. None: the link is unknown, used or expired."""

        def do(c: sqlite3.Connection) -> NewLogin | None:
            with transaction(c):
                row = c.execute(
                    "DELETE FROM logins WHERE hash = ? AND kind = ? AND expires > ? RETURNING *",
                    (_hash(secret), LoginKind.LINK.value, _seconds(now)),
                ).fetchone()
                if row is None:
                    return None
                link = _login(row)
                made = _new(LoginKind.SESSION, link.person, link.uid, now, lasts, "")
                made = NewLogin(msgspec.structs.replace(made.login, used=now, address=address, peer=peer), made.secret)
                _insert_row(c, made)
            return made

        return await self._do(do)

    async def find(self, secret: str, now: datetime, address: str, peer: int | None = None) -> Login | None:
        """The session or token with that secret. None: unknown, revoked, expired, or a session of another peer."""

        def do(c: sqlite3.Connection) -> Login | None:
            row = c.execute(
                "SELECT * FROM logins WHERE hash = ? AND kind != ? AND expires > ?",
                (_hash(secret), LoginKind.LINK.value, _seconds(now)),
            ).fetchone()
            if row is None:
                return None
            found = _login(row)
            if found.kind is LoginKind.SESSION and found.peer != peer:
                self._report(found, peer)
                return None
            if found.address != address or found.used is None or now - found.used > timedelta(minutes=1):
                with suppress(sqlite3.OperationalError):  # a full disk must not log anybody out
                    c.execute(
                        "UPDATE logins SET used = ?, address = ? WHERE hash = ?",
                        (_seconds(now), address, _hash(secret)),
                    )
            return msgspec.structs.replace(found, used=now, address=address)

        return await self._do(do)

    def _report(self, found: Login, peer: int | None) -> None:
        if (found.id, peer) in self._misused:
            return
        if len(self._misused) >= MOST_REPORTED:
            self._misused.clear()
        self._misused.add((found.id, peer))
        self.on_misuse(
            f"refused the session {found.id} of {found.person}: it came from {_whose(peer)} and belongs to "
            f"{_whose(found.peer)}. If the same person uses both, they log in again. Otherwise its cookie was stolen: "
            f"gpukeeper login --revoke {found.id}"
        )

    async def of(self, person: str | None, now: datetime) -> Sequence[Login]:
        """The valid sessions and tokens of one person; None: of everybody. Newest first."""

        def do(c: sqlite3.Connection) -> Sequence[Login]:
            rows = c.execute(
                "SELECT * FROM logins WHERE kind != ? AND expires > ? AND (? IS NULL OR person = ?) "
                "ORDER BY created DESC, id",
                (LoginKind.LINK.value, _seconds(now), person, person),
            )
            return [_login(row) for row in rows]

        return await self._do(do)

    async def revoke(self, id_: str | None, person: str | None) -> int:
        """How many ended. `id_` None: all; `person` None: of anybody. Unused links of that person end, too."""

        def do(c: sqlite3.Connection) -> int:
            ended = c.execute(
                "DELETE FROM logins WHERE (? IS NULL OR id = ?) AND (? IS NULL OR person = ?)",
                (id_, id_, person, person),
            ).rowcount
            self.on_revoke()
            return ended

        return await self._do(do)

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def do() -> T:
            with translated(self.path):
                return work(self._connection)

        return await asyncio.wrap_future(self._thread.submit(do))


def _key(c: sqlite3.Connection, name: str) -> bytes:
    c.execute("INSERT OR IGNORE INTO keys (name, value) VALUES (?, ?)", (name, secrets.token_bytes(32)))
    return bytes(c.execute("SELECT value FROM keys WHERE name = ?", (name,)).fetchone()[0])


def _new(kind: LoginKind, person: str, uid: int | None, now: datetime, lasts: timedelta, name: str) -> NewLogin:
    login = Login(
        id=secrets.token_hex(4), kind=kind, person=person, uid=uid, name=name, created=now, expires=now + lasts
    )
    return NewLogin(login, secrets.token_urlsafe(32))


def _insert(c: sqlite3.Connection, made: NewLogin, now: datetime) -> None:
    with transaction(c):
        c.execute("DELETE FROM logins WHERE expires <= ?", (_seconds(now),))
        person = made.login.person
        c.execute(
            "DELETE FROM logins WHERE hash IN (SELECT hash FROM logins WHERE person = ? AND kind != ? "
            "ORDER BY created DESC LIMIT -1 OFFSET ?)",
            (person, LoginKind.TOKEN.value, MOST_EACH - 1),
        )
        tokens = c.execute(
            "SELECT count(*) FROM logins WHERE person = ? AND kind = ?", (person, LoginKind.TOKEN.value)
        ).fetchone()[0]
        if made.login.kind is LoginKind.TOKEN and tokens >= MOST_EACH:
            raise LedgerError(f"{person} has {tokens} tokens already. Nothing was changed. Revoke one first.")
        _insert_row(c, made)


def _insert_row(c: sqlite3.Connection, made: NewLogin) -> None:
    one = made.login
    used = None if one.used is None else _seconds(one.used)
    c.execute(
        "INSERT INTO logins VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(_hash(made.secret), one.id, one.kind.value, one.person, one.uid, one.name),
            *(_seconds(one.created), _seconds(one.expires), used, one.address, one.peer),
        ),
    )


def _login(row: tuple[bytes, str, str, str, int | None, str, int, int, int | None, str, int | None]) -> Login:
    _, id_, kind, person, uid, name, created, expires, used, address, peer = row
    return Login(
        id=id_,
        kind=LoginKind(kind),
        person=person,
        uid=uid,
        name=name,
        created=_moment(created),
        expires=_moment(expires),
        used=None if used is None else _moment(used),
        address=address,
        peer=peer,
    )


def _whose(peer: int | None) -> str:
    return (
        "another machine"
        if peer is None
        else "a process of an unknown user"
        if peer < 0
        else f"processes of uid {peer}"
    )


def _hash(secret: str) -> bytes:
    return sha256(secret.encode(errors="surrogateescape")).digest()


def _seconds(at: datetime) -> int:
    return int(at.timestamp())


def _moment(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
