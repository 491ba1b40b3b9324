"""The fleet database for an administrator: create it, add machines, see how it and the copy in it are. For commands.

Its schema is numbered SQL files, applied in order and never back. A file that was released is never edited, only
followed; the digest of what was applied is stored and compared. A newer schema must keep daemons of the previous
release working, so that machines can be upgraded one after the other.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpukeeper.ledger.copy.connect import load_driver, problem_of_machine
from gpukeeper.ledger.files import read_secret
from gpukeeper.model.errors import KeeperError, UsageError

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection


class CopyState(msgspec.Struct, frozen=True, kw_only=True):
    """`unsent`: lines; `lag`: age of the oldest of them, in seconds; None: not known yet."""

    machine: str
    connected: bool = False
    connected_since: datetime | None = None
    ledger: int | None = None
    shipped: int | None = None
    unsent: int | None = None
    lag: float | None = None
    signals_until: datetime | None = None
    last_shipped_at: datetime | None = None
    refused_lines: int = 0  # stored without their content, because the database refused it
    last_error: str | None = None
    last_error_at: datetime | None = None
    failures: int = 0  # since the last success


_LOCK = 0x6770756B  # "gpuk": two migrations at the same time wait for each other
_TABLE = """
CREATE SCHEMA IF NOT EXISTS gpukeeper;
CREATE TABLE IF NOT EXISTS gpukeeper.migrations (
    number integer PRIMARY KEY,
    name text NOT NULL,
    digest text NOT NULL,
    applied timestamptz NOT NULL DEFAULT now()
)
"""


class Migration(msgspec.Struct, frozen=True):
    number: int
    name: str
    sql: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations() -> tuple[Migration, ...]:
    found = sorted(
        (one for one in files(__package__).joinpath("migrations").iterdir() if one.name.endswith(".sql")),
        key=lambda one: one.name,
    )
    made = tuple(Migration(int(one.name[:4]), one.name[5:-4], one.read_text(encoding="utf-8")) for one in found)
    assert [one.number for one in made] == list(range(1, len(made) + 1)), "migrations are numbered without gaps"
    return made


def migrate(connection: Connection, known: tuple[Migration, ...] | None = None) -> tuple[Migration, ...]:
    """What was applied now; all of it or nothing. Raises KeeperError when the database is not one we can migrate."""
    known = migrations() if known is None else known
    _check_encoding(connection)
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        connection.execute("SET LOCAL statement_timeout = 0")  # moving old rows takes its time
        connection.execute(_TABLE)
        applied: dict[int, str] = dict(connection.execute("SELECT number, digest FROM gpukeeper.migrations").fetchall())
        _check(applied, known)
        missing = tuple(one for one in known if one.number not in applied)
        for one in missing:
            connection.execute(one.sql.encode())
            connection.execute(
                "INSERT INTO gpukeeper.migrations (number, name, digest) VALUES (%s, %s, %s)",
                (one.number, one.name, one.digest),
            )
    return missing


def schema_of(connection: Connection) -> int:
    """The number of its last migration; 0: it has none of our tables."""
    found = connection.execute("SELECT to_regclass('gpukeeper.migrations')").fetchone()
    if found is None or found[0] is None:
        return 0
    newest = connection.execute("SELECT coalesce(max(number), 0) FROM gpukeeper.migrations").fetchone()
    return 0 if newest is None else int(newest[0])


def check_schema(connection: Connection) -> None:
    """A daemon works with its own schema and with newer ones."""
    found, wanted = schema_of(connection), len(migrations())
    if found < wanted:
        raise KeeperError(
            f"the fleet database has schema {found}, and this version needs {wanted}. Nothing was sent. "
            "Update it: gpukeeper fleet-db migrate"
        )


def _check(applied: dict[int, str], known: tuple[Migration, ...]) -> None:
    if applied and max(applied) > len(known):
        raise KeeperError(
            f"The fleet database has schema {max(applied)}, and this version knows {len(known)}. Nothing was changed. "
            "Use the version of gpukeeper that made it, or a newer one."
        )
    other = [one.number for one in known if applied.get(one.number, one.digest) != one.digest]
    if other:
        raise KeeperError(
            f"Migration {other[0]} of the fleet database is not the one of this version: it was made by a version that "
            "was never released, or changed by hand. Nothing was changed. Restore the database, or use another one."
        )


def _check_encoding(connection: Connection) -> None:
    found = connection.execute("SHOW server_encoding").fetchone()
    if found is None or found[0] != "UTF8":
        raise KeeperError(
            f"The fleet database has the encoding {found and found[0]}; lines need UTF8. Nothing was changed. "
            "Create it with: createdb --encoding UTF8 --template template0 gpukeeper"
        )


ROLE = "gpukeeper_machine_"
WEB = "gpukeeper_web"


class MachineStatus(msgspec.Struct, frozen=True):
    """`shipped`: the number of its last line here. None: there is none yet."""

    name: str
    role: str
    seen: datetime | None
    version: str | None
    shipped: int | None
    newest_line: datetime | None
    view_at: datetime | None
    open_requests: int


class FleetStatus(msgspec.Struct, frozen=True):
    schema: int
    known_schema: int
    retention: timedelta
    size: int
    partitions: int
    oldest_partition: str | None
    machines: tuple[MachineStatus, ...]


def initialize(connection: Connection, web_password_file: Path, retention: timedelta | None) -> tuple[Migration, ...]:
    """Tables, roles and partitions; the web role gets the password in the file, which is created if missing."""
    password = _password(web_password_file)
    applied = migrate(connection)
    _set_password(connection, WEB, password)
    _grant_connect(connection)
    if retention is not None:
        set_retention(connection, retention)
    return applied


def set_retention(connection: Connection, retention: timedelta) -> None:
    if retention < timedelta(days=1):
        raise UsageError("the retention is shorter than one day; nothing was changed")
    connection.execute("UPDATE gpukeeper.settings SET retention = %s", (retention,))
    connection.execute("SELECT gpukeeper.keep_partitions()")


def add_machine(connection: Connection, name: str, password_file: Path) -> str:
    """Its role. A machine that is there gets the password in the file; its rows stay."""
    problem = problem_of_machine(name)
    if problem is not None:
        raise UsageError(f'"{name}" is not a name for a machine: {problem}. Nothing was changed.')
    if schema_of(connection) == 0:
        raise UsageError("this is not a fleet database yet; nothing was changed. Create it: gpukeeper fleet-db init")
    role, password = f"{ROLE}{name}", _password(password_file)
    sql = load_driver().sql
    with connection.transaction():
        there = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone()
        if there is None:
            connection.execute(sql.SQL("CREATE ROLE ") + sql.Identifier(role) + sql.SQL(" LOGIN"))
        connection.execute(sql.SQL("GRANT gpukeeper_machines TO ") + sql.Identifier(role))
        _set_password(connection, role, password)
        connection.execute(
            "INSERT INTO gpukeeper.machines (name, role) VALUES (%s, %s) ON CONFLICT DO NOTHING", (name, role)
        )
    return role


def fleet_status(connection: Connection) -> FleetStatus:
    """What the connected role may see: a machine's own role sees its own machine."""
    schema = schema_of(connection)
    if schema == 0:
        raise UsageError("this is not a fleet database yet. Create it: gpukeeper fleet-db init")
    parts = connection.execute(
        "SELECT count(*), min(substring(c.relname from '[0-9]{6}$')), pg_database_size(current_database()) "
        "FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'gpukeeper.lines'::regclass"
    ).fetchone()
    kept = connection.execute("SELECT retention FROM gpukeeper.settings").fetchone()
    assert parts is not None
    assert kept is not None
    return FleetStatus(schema, len(migrations()), kept[0], parts[2], parts[0], parts[1], _machines(connection))


def _machines(connection: Connection) -> tuple[MachineStatus, ...]:
    rows: Sequence[tuple[object, ...]] = connection.execute(
        """
        SELECT m.name, m.role, m.seen, m.version, g.shipped,
            (SELECT at FROM gpukeeper.lines l WHERE l.machine = m.name AND l.ledger = g.ledger AND l.line = g.shipped),
            v.at,
            (SELECT count(*) FROM gpukeeper.requests r WHERE r.machine = m.name AND r.expires > now()
                AND NOT EXISTS (SELECT FROM gpukeeper.replies p WHERE p.request = r.id))
        FROM gpukeeper.machines m
        LEFT JOIN LATERAL (SELECT ledger, shipped FROM gpukeeper.ledgers g WHERE g.machine = m.name
            ORDER BY ledger DESC LIMIT 1) g ON true
        LEFT JOIN gpukeeper.views v ON v.machine = m.name
        ORDER BY m.name
        """
    ).fetchall()
    return tuple(MachineStatus(*row) for row in rows)  # type: ignore[arg-type]


def _password(path: Path) -> str:
    """The secret in the file. Without a file a random one is made, readable by us alone."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_secret(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be created: {error.strerror}. Nothing was changed.") from error
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    return read_secret(path)


def _set_password(connection: Connection, role: str, password: str) -> None:
    """As a verifier made here: the password itself is in no log of the server."""
    sql = load_driver().sql
    verifier = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
    connection.execute(
        sql.SQL("ALTER ROLE ") + sql.Identifier(role) + sql.SQL(" WITH LOGIN PASSWORD ") + sql.Literal(verifier)
    )


def _grant_connect(connection: Connection) -> None:
    """For databases from which the administrator took what everybody has by default."""
    sql = load_driver().sql
    database = sql.Identifier(connection.info.dbname)
    whom = sql.SQL(" TO gpukeeper_machines, gpukeeper_web")
    connection.execute(sql.SQL("GRANT CONNECT, TEMPORARY ON DATABASE ") + database + whom)
