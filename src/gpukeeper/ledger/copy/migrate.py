"""The schema of the fleet database: numbered SQL files, applied in order and never back.

A file that was released is never edited, only followed; the digest of what was applied is stored and compared. A newer
schema must keep daemons of the previous release working, so that machines can be upgraded one after the other.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from gpukeeper.model.errors import KeeperError

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection

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
