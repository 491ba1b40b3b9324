"""Row level security: what the credentials of one machine, and those of the web server, can do."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from psycopg import errors

from tests.real.postgres.fleet import FleetDatabase, Machine, a_shipper, wait_until_shipped

NODE_1, NODE_2, WEB = "gpukeeper_machine_node-1", "gpukeeper_machine_node-2", "gpukeeper_web"
TABLES = ("ledgers", "lines", "series", "signals", "usage", "runs", "views", "requests", "replies")
LINE = (
    "INSERT INTO gpukeeper.lines (machine, ledger, line, at, type, error, body) "
    "VALUES (%s, 9, 9, now(), 'complaint', false, '{}')"
)


@pytest.fixture
def two(database: FleetDatabase, tmp_path: Path) -> FleetDatabase:
    """Two machines that have shipped one line, one view and one open request each."""
    for name in ("node-1", "node-2"):
        machine = Machine.create(tmp_path, name)
        machine.write(f"of {name}")
        shipper = a_shipper(database.add(name), machine)
        wait_until_shipped(database, machine)
        shipper.stop()
        machine.close()
        database.sql("INSERT INTO gpukeeper.views (machine, seq, body) VALUES (%s, 1, '{}')", name)
        database.sql(
            "INSERT INTO gpukeeper.requests (machine, expires, document, signature) VALUES (%s, now(), 'x', 'y')", name
        )
    return database


@pytest.mark.smoke
def test_a_machine_reads_its_own_rows_only(two: FleetDatabase) -> None:
    with two.connect(NODE_1) as connection:
        for table in TABLES:
            found = connection.execute(f"SELECT DISTINCT machine FROM gpukeeper.{table}").fetchall()
            assert found in ([], [("node-1",)]), table
        assert connection.execute("SELECT name FROM gpukeeper.machines").fetchall() == [("node-1",)]
        assert connection.execute("SELECT count(*) FROM gpukeeper.lines").fetchall() == [(1,)]
        assert connection.execute("SELECT machine FROM gpukeeper.requests").fetchall() == [("node-1",)]


def test_partitions_cannot_be_read_past_the_policies(two: FleetDatabase) -> None:
    parts = two.sql("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'gpukeeper.lines'::regclass")
    assert parts
    with two.connect(NODE_1) as connection:
        for (name,) in parts:
            with pytest.raises(errors.InsufficientPrivilege):
                connection.execute(f"SELECT 1 FROM {name} LIMIT 1")


@pytest.mark.parametrize(
    "statement",
    [
        LINE,
        "INSERT INTO gpukeeper.views (machine, seq, body) VALUES (%s, 2, '{}') "
        "ON CONFLICT (machine) DO UPDATE SET body = excluded.body",
        "INSERT INTO gpukeeper.ledgers (machine, ledger, id, shipped) VALUES (%s, 7, 'x', 0)",
        "INSERT INTO gpukeeper.runs VALUES (%s, 'r', now(), 'n', 'PASS', '', '{}', NULL, NULL)",
        "INSERT INTO gpukeeper.usage VALUES (%s, now(), 'd', 'h', '{}')",
        "INSERT INTO gpukeeper.series VALUES (%s, gen_random_uuid(), 'k', 's', 'd', false)",
        "INSERT INTO gpukeeper.signals VALUES (%s, gen_random_uuid(), now(), 1, 1)",
        "INSERT INTO gpukeeper.replies (request, machine, state, body) "
        "SELECT 2, m, 'answered', '{}' FROM (VALUES (%s)) v(m)",
    ],
)
def test_a_machine_writes_no_row_of_another(two: FleetDatabase, statement: str) -> None:
    with two.connect(NODE_1) as connection, pytest.raises(errors.InsufficientPrivilege):
        connection.execute(statement, ("node-2",))


def test_a_machine_cannot_answer_the_request_of_another_under_its_own_name(two: FleetDatabase) -> None:
    (number,) = two.sql("SELECT id FROM gpukeeper.requests WHERE machine = 'node-2'")[0]
    with two.connect(NODE_1) as connection, pytest.raises(errors.ForeignKeyViolation):
        connection.execute(
            "INSERT INTO gpukeeper.replies (request, machine, state, body) VALUES (%s, 'node-1', 'answered', '{}')",
            (number,),
        )


def test_updates_do_not_reach_rows_of_others(two: FleetDatabase) -> None:
    with two.connect(NODE_1) as connection:
        assert connection.execute("UPDATE gpukeeper.ledgers SET shipped = 0 WHERE machine = 'node-2'").rowcount == 0
        assert connection.execute("UPDATE gpukeeper.views SET seq = 9 WHERE machine = 'node-2'").rowcount == 0
        assert connection.execute("UPDATE gpukeeper.machines SET seen = now() WHERE name = 'node-2'").rowcount == 0


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM gpukeeper.lines",
        "UPDATE gpukeeper.lines SET owner = 'eve'",
        "TRUNCATE gpukeeper.lines",
        "UPDATE gpukeeper.machines SET role = 'gpukeeper_machine_node-2'",
        "UPDATE gpukeeper.ledgers SET machine = 'node-2'",
        "INSERT INTO gpukeeper.machines (name, role) VALUES ('node-3', 'eve')",
        "INSERT INTO gpukeeper.requests (machine, expires, document, signature) VALUES ('node-1', now(), 'x', 'y')",
        "UPDATE gpukeeper.settings SET retention = '1 day'",
        "DROP TABLE gpukeeper.lines_other",
        "CREATE TABLE gpukeeper.mine (a int)",
        "SELECT gpukeeper.make_partition('lines', 'at', now())",
        "SET ROLE gpukeeper_web",
        "SET SESSION AUTHORIZATION postgres",
        "ALTER ROLE gpukeeper_web PASSWORD 'x'",
        "DELETE FROM gpukeeper.migrations",
        "ALTER TABLE gpukeeper.lines DISABLE ROW LEVEL SECURITY",
    ],
)
def test_a_machine_changes_nothing_that_is_recorded_or_configured(two: FleetDatabase, statement: str) -> None:
    with two.connect(NODE_1) as connection, pytest.raises(errors.InsufficientPrivilege):
        connection.execute(statement)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["timestamptz", "regclass", "text", "bool", "interval"])
def test_a_machine_cannot_slip_its_own_types_into_functions_of_the_owner(two: FleetDatabase, name: str) -> None:
    with two.connect(NODE_1) as connection:
        connection.execute("""
            CREATE FUNCTION pg_temp.evil(pg_catalog.text) RETURNS pg_catalog.bool LANGUAGE plpgsql AS
            $$ BEGIN RAISE 'ran as %', current_user; END $$
        """)
        connection.execute(f'CREATE DOMAIN pg_temp."{name}" AS pg_catalog.text CHECK (pg_temp.evil(VALUE))')
        assert connection.execute("SELECT gpukeeper.this_machine()").fetchone() == ("node-1",)
        assert connection.execute("SELECT gpukeeper.keep_partitions()").fetchone() == (0,)


def test_the_web_role_reads_everything_and_writes_requests_only(two: FleetDatabase) -> None:
    with two.connect(WEB) as connection:
        found = connection.execute("SELECT machine FROM gpukeeper.lines ORDER BY 1").fetchall()
        assert found == [("node-1",), ("node-2",)]
        made = connection.execute(
            "INSERT INTO gpukeeper.requests (machine, expires, document, signature) "
            "VALUES ('node-2', now(), 'x', 'y') RETURNING id"
        ).fetchone()
        assert made is not None
        for statement in (
            LINE.replace("%s", "'node-1'"),
            "DELETE FROM gpukeeper.requests",
            "UPDATE gpukeeper.requests SET document = 'other'",
            f"INSERT INTO gpukeeper.replies VALUES ({made[0]}, 'node-2', now(), 'answered', '{{}}')",
            "UPDATE gpukeeper.views SET seq = 3",
            "SELECT gpukeeper.keep_partitions()",
        ):
            with pytest.raises(errors.InsufficientPrivilege):
                connection.execute(statement)  # type: ignore[call-overload]


def test_without_the_password_there_is_no_connection(two: FleetDatabase) -> None:
    with pytest.raises(psycopg.OperationalError):
        two.server.connect(NODE_1, two.name)
    with pytest.raises(psycopg.OperationalError, match="authentication failed"):
        two.server.connect(NODE_1, two.name, password=two.secrets[NODE_2].read_text().strip())


def test_another_role_of_the_server_sees_nothing(two: FleetDatabase) -> None:
    two.sql("CREATE ROLE stranger LOGIN PASSWORD 'x'")
    try:
        with two.server.connect("stranger", two.name, password="x") as connection:
            with pytest.raises(errors.InsufficientPrivilege):
                connection.execute("SELECT 1 FROM gpukeeper.lines")
            with pytest.raises(errors.InsufficientPrivilege):
                connection.execute("SELECT gpukeeper.this_machine()")
    finally:
        two.sql("DROP ROLE stranger")


ENDLESS = ("infinity", "-infinity", "294000-01-01 00:00+00")


@pytest.mark.parametrize("time", ENDLESS)
def test_when_a_machine_was_seen_is_the_time_of_the_server(two: FleetDatabase, time: str) -> None:
    """One row that cannot be represented made every query for the whole fleet fail."""
    with two.connect(NODE_1) as connection:
        connection.execute("UPDATE gpukeeper.machines SET seen = %s WHERE name = 'node-1'", (time,))
        connection.execute("UPDATE gpukeeper.views SET at = %s WHERE machine = 'node-1'", (time,))
    heads = two.sql(
        "SELECT abs(extract(epoch FROM now() - m.seen)) < 60, abs(extract(epoch FROM now() - v.at)) < 60 "
        "FROM gpukeeper.machines m JOIN gpukeeper.views v ON v.machine = m.name"
    )
    assert heads == [(True, True), (True, True)]


@pytest.mark.parametrize("time", ENDLESS)
@pytest.mark.parametrize(
    "statement",
    [
        LINE.replace("now()", "%s"),
        "INSERT INTO gpukeeper.runs VALUES (%s, 'r', %s, 'n', 'PASS', '', '{}', NULL, NULL)",
        "INSERT INTO gpukeeper.usage VALUES (%s, %s, 'd', 'h', '{}')",
        "INSERT INTO gpukeeper.signals VALUES (%s, gen_random_uuid(), %s, 1, 1)",
        "INSERT INTO gpukeeper.ledgers (machine, ledger, id, shipped, signals_until) VALUES (%s, 7, 'x', 0, %s)",
        "INSERT INTO gpukeeper.ledgers (machine, ledger, id, shipped, begun) VALUES (%s, 7, 'x', 0, %s)",
    ],
)
def test_a_time_that_readers_cannot_represent_is_refused(two: FleetDatabase, statement: str, time: str) -> None:
    with two.connect(NODE_1) as connection, pytest.raises(errors.CheckViolation):
        connection.execute(statement, ("node-1", time))


def test_a_machine_cannot_keep_others_from_making_partitions(two: FleetDatabase) -> None:
    two.sql("DROP TABLE gpukeeper.usage_" + two.sql("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMM')")[0][0])
    with two.connect(NODE_1) as connection, two.connect(NODE_2) as other:
        connection.execute("SELECT pg_advisory_lock(hashtext('gpukeeper.keep_partitions'))")
        with pytest.raises(errors.InsufficientPrivilege):
            connection.execute("SELECT FROM gpukeeper.settings FOR UPDATE")
        assert other.execute("SELECT gpukeeper.keep_partitions()").fetchall() == [(1,)]
