"""Migrations from every released schema, partitions made ahead, retention."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gpukeeper.ledger.copy.admin import check_schema, fleet_status, migrate, migrations, schema_of, set_retention
from gpukeeper.model.errors import KeeperError, UsageError
from tests.real.postgres.fleet import FleetDatabase
from tests.real.postgres.server import Server

# Of migrations that were released; a file that is in this list is never edited. A new one is added when it is released.
RELEASED: dict[str, str] = {}
CATALOG = """
SELECT c.relname, c.relkind, c.relrowsecurity, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull
FROM pg_class c LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
WHERE c.relnamespace = 'gpukeeper'::regnamespace ORDER BY 1, a.attnum
"""


@pytest.mark.parametrize("known", range(len(migrations()) + 1))
def test_every_earlier_schema_becomes_the_newest(shared: Server, database: FleetDatabase, known: int) -> None:
    """The same tables, columns and rights as a new database has; lines that were there stay."""
    name = f"{database.name}_old"
    shared.sql(f'CREATE DATABASE "{name}"', database="postgres")
    old = FleetDatabase(shared, database.folder, name)
    with old.connect() as connection:
        migrate(connection, migrations()[:known])
        assert schema_of(connection) == known
        if known:
            connection.execute("INSERT INTO gpukeeper.machines (name, role) VALUES ('node-1', 'r')")
            with pytest.raises(KeeperError, match="fleet-db migrate") if known < len(migrations()) else nullcontext():
                check_schema(connection)
        assert len(migrate(connection)) == len(migrations()) - known
        assert migrate(connection) == ()
        check_schema(connection)
    assert old.sql(CATALOG) == database.sql(CATALOG)
    policies = "SELECT tablename, policyname, roles::text, cmd, qual, with_check FROM pg_policies ORDER BY 1, 2"
    assert old.sql(policies) == database.sql(policies)
    assert len(old.sql("SELECT name FROM gpukeeper.machines")) == bool(known)


def test_released_migrations_are_as_they_were_released() -> None:
    for one in migrations():
        name = f"{one.number:04}_{one.name}"
        assert RELEASED.get(name, one.digest) == one.digest, f"{name} was released: add a new file instead"


def test_a_newer_or_another_schema_is_not_touched(database: FleetDatabase) -> None:
    with database.connect() as connection:
        with pytest.raises(KeeperError, match="knows 1"):
            migrate(connection, migrations()[:1])
        changed = (*migrations()[:-1], msgspec.structs.replace(migrations()[-1], sql="SELECT 1"))
        with pytest.raises(KeeperError, match="is not the one of this version"):
            migrate(connection, changed)


def test_a_migration_that_fails_changes_nothing(database: FleetDatabase) -> None:
    next_ = msgspec.structs.replace(
        migrations()[-1], number=len(migrations()) + 1, name="broken", sql="CREATE TABLE gpukeeper.x (); SELECT 1/0"
    )
    with database.connect() as connection:
        with pytest.raises(Exception, match="division by zero"):
            migrate(connection, (*migrations(), next_))
        assert schema_of(connection) == len(migrations())
        assert connection.execute("SELECT to_regclass('gpukeeper.x')").fetchone() == (None,)


def test_another_encoding_is_refused(shared: Server, database: FleetDatabase) -> None:
    shared.sql(
        f"CREATE DATABASE \"{database.name}_latin\" ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'",
        database="postgres",
    )
    other = FleetDatabase(shared, database.folder, f"{database.name}_latin")
    with other.connect() as connection, pytest.raises(KeeperError, match="UTF8"):
        migrate(connection)


def partitions(database: FleetDatabase, table: str = "lines") -> set[str]:
    found = database.sql(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        f"WHERE i.inhparent = 'gpukeeper.{table}'::regclass"
    )
    return {str(name) for (name,) in found}


def insert(database: FleetDatabase, line: int, at: datetime) -> None:
    database.sql(
        "INSERT INTO gpukeeper.lines (machine, ledger, line, at, type, error, body) "
        "VALUES ('node-1', 1, %s, %s, 'complaint', false, '{}')",
        line,
        at,
    )


def test_partitions_are_made_ahead(database: FleetDatabase) -> None:
    now = datetime.now(UTC)
    ahead = [(now.replace(day=1) + timedelta(days=32 * n)).strftime("%Y%m") for n in range(3)]
    for table in ("lines", "signals", "usage"):
        assert {f"{table}_{month}" for month in ahead} <= partitions(database, table)


def test_rows_of_a_wrong_clock_move_into_their_month_when_it_comes(database: FleetDatabase) -> None:
    """They must not keep that month's partition from being made."""
    month = sorted(partitions(database))[-2]
    assert month != "lines_other"
    middle = datetime.strptime(month[-6:], "%Y%m").replace(day=15, tzinfo=UTC)
    database.sql(f"DROP TABLE gpukeeper.{month}")
    insert(database, 1, middle)
    assert database.sql("SELECT count(*) FROM gpukeeper.lines_other") == [(1,)]
    database.sql("SELECT gpukeeper.keep_partitions()")
    assert database.sql("SELECT count(*) FROM gpukeeper.lines_other") == [(0,)]
    assert database.sql(f"SELECT line FROM gpukeeper.{month}") == [(1,)]
    assert database.sql("SELECT count(*) FROM gpukeeper.lines WHERE at = %s", middle) == [(1,)]


def test_what_is_past_the_retention_is_dropped(database: FleetDatabase) -> None:
    now = datetime.now(UTC)
    for line, days in enumerate((0, 20, 100, 300, 2000), start=1):
        insert(database, line, now - timedelta(days=days))
    with database.connect() as connection:
        set_retention(connection, timedelta(days=60))
        assert fleet_status(connection).retention == timedelta(days=60)
    assert database.sql("SELECT line FROM gpukeeper.lines ORDER BY 1") == [(1,), (2,)]
    assert len(partitions(database)) < 10
    with database.connect() as connection, pytest.raises(UsageError):
        set_retention(connection, timedelta(hours=1))
