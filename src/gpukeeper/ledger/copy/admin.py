"""What an administrator does with the fleet database: create it, add machines, see how it is. For commands."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpukeeper.ledger.copy.connect import load_driver, problem_of_machine
from gpukeeper.ledger.copy.migrate import Migration, migrate, migrations, schema_of
from gpukeeper.ledger.secret_file import read_secret
from gpukeeper.model.errors import UsageError

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection

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


def status(connection: Connection) -> FleetStatus:
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
