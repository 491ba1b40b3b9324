"""What is shipped, and that it is there once."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gpukeeper.ledger.archive import rotate
from gpukeeper.ledger.copy.connect import connect
from gpukeeper.ledger.copy.ship import Outbox, Position, UsageRow, begin
from gpukeeper.ledger.copy.shipper import View
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.meta import ensure_identity
from gpukeeper.ledger.signals import open_signals
from gpukeeper.model.event import NodeTested
from gpukeeper.model.gpu import Grade
from gpukeeper.model.policy import LedgerKeep
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Ref
from tests.real.postgres.fleet import (
    FleetDatabase,
    Machine,
    a_shipper,
    complaint,
    noticed,
    wait_for,
    wait_until_shipped,
)


@pytest.mark.smoke
def test_lines_arrive_once_with_their_columns(database: FleetDatabase, tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, "node-1")
    machine.append(noticed("train"))
    machine.write("one", "two")
    shipper = a_shipper(database.add("node-1"), machine)
    wait_until_shipped(database, machine)
    machine.write("three")
    wait_until_shipped(database, machine)
    shipper.stop()
    row = database.sql(
        "SELECT line, type, platform, workload, owner, error, body -> 'ref' ->> 'name', at FROM gpukeeper.lines "
        "WHERE type = 'noticed'"
    )
    assert row[0][:-1] == (1, "noticed", "docker", "docker/node-1/train", "ann", False, "train")
    assert row[0][-1].timestamp() == asyncio.run(machine.ledger.lines())[0][1].at.timestamp()
    assert shipper.state.unsent == 0
    assert shipper.state.last_error is None
    machine.close()


def test_any_text_arrives(database: FleetDatabase, tmp_path: Path) -> None:
    """Backslashes, tabs, line breaks, NUL, which PostgreSQL cannot store, and what only looks like an escape."""
    words = ["a\\b", "tab\there", "line\nbreak\r", "nul\0here", "\\u0000", "\\\\u0000", "\\N", "\\.", "ü€😀", "\\\0"]
    machine = Machine.create(tmp_path, "node-1")
    machine.append(noticed("tab\t\\N\0name", owner="a\\nn\n"))
    machine.write(*words)
    shipper = a_shipper(database.add("node-1"), machine)
    wait_for(lambda: len(database.lines("node-1")) == len(words), "all lines")
    assert [what for _, what in database.lines("node-1")] == [word.replace("\0", "\ufffd") for word in words]
    assert database.sql("SELECT owner, workload FROM gpukeeper.lines WHERE line = 1") == [
        ("a\\nn\n", "docker/node-1/tab\t\\N\ufffdname")
    ]
    assert shipper.state.refused_lines == 0
    shipper.stop()
    machine.close()


@pytest.mark.smoke
def test_a_shipper_continues_where_the_last_one_ended(database: FleetDatabase, tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, "node-1")
    settings = database.add("node-1")
    for round_ in range(3):
        machine.write(f"{round_}a", f"{round_}b")
        shipper = a_shipper(settings, machine)
        wait_until_shipped(database, machine)
        shipper.stop()
    assert database.sql("SELECT ledger, shipped FROM gpukeeper.ledgers") == [(1, 6)]
    machine.close()


def test_what_was_archived_meanwhile_is_read_from_the_archive(database: FleetDatabase, tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, "node-1")
    settings = database.add("node-1")
    machine.append(*[complaint(f"old {n}", timedelta(days=40)) for n in range(20)])
    machine.append(*[complaint(f"older than the bound {n}", timedelta(days=39)) for n in range(20)])
    expected = machine.written()
    shipper = a_shipper(settings, machine)
    wait_until_shipped(database, machine)
    shipper.stop()
    machine.append(*[complaint(f"unsent {n}", timedelta(days=38)) for n in range(7000)])
    machine.write("young")
    expected = expected + [one for one in machine.written() if one not in expected]
    done = asyncio.run(rotate(machine.ledger, LedgerKeep(), datetime.now(UTC), keep_unsent=timedelta()))
    assert done.lines == 7040
    shipper = a_shipper(settings, machine)
    wait_for(lambda: len(database.lines("node-1")) == len(expected), "archived lines, too")
    assert database.lines("node-1") == expected
    shipper.stop()
    machine.close()


def test_a_ledger_that_was_begun_anew_has_lines_of_its_own(database: FleetDatabase, tmp_path: Path) -> None:
    settings = database.add("node-1")
    first = Machine.create(tmp_path, "node-1")
    first.write("a", "b", "c")
    shipper = a_shipper(settings, first)
    wait_until_shipped(database, first)
    shipper.stop()
    first.close()
    shutil.rmtree(tmp_path / "node-1")
    second = Machine.create(tmp_path, "node-1")
    second.write("x")
    shipper = a_shipper(settings, second)
    expected = [(1, "a"), (2, "b"), (3, "c"), (1, "x")]
    wait_for(lambda: database.lines("node-1") == expected, "both ledgers")
    shipper.stop()
    second.close()


def test_a_ledger_restored_from_a_backup_goes_on_from_there(database: FleetDatabase, tmp_path: Path) -> None:
    settings = database.add("node-1")
    machine = Machine.create(tmp_path, "node-1")
    machine.write("a", "b")
    asyncio.run(machine.ledger.read(lambda c: c.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()))
    shutil.copy(machine.path, tmp_path / "backup")
    machine.write("lost 3", "lost 4", "lost 5")
    shipper = a_shipper(settings, machine)
    wait_until_shipped(database, machine)
    shipper.stop()
    machine.close()
    for path in (tmp_path / "node-1").glob("ledger.db*"):
        path.unlink()
    shutil.copy(tmp_path / "backup", machine.path)
    machine = Machine("node-1", open_ledger(machine.path, write=True))
    asyncio.run(ensure_identity(machine.ledger))
    machine.write("other 3", "other 4", "other 5", "other 6")
    shipper = a_shipper(settings, machine)
    lost = [(3, "lost 3"), (4, "lost 4"), (5, "lost 5")]
    other = [(3, "other 3"), (4, "other 4"), (5, "other 5"), (6, "other 6")]
    wait_for(lambda: database.lines("node-1") == [(1, "a"), (2, "b"), *lost, *other], "both futures, the past once")
    machine.write("other 7")
    wait_for(lambda: database.lines("node-1")[-1] == (7, "other 7"), "and what follows")
    shipper.stop()
    machine.close()


def test_a_line_that_the_database_refuses_does_not_hold_up_the_others(database: FleetDatabase, tmp_path: Path) -> None:
    """What it may refuse one day is not known; a constraint plays it here."""
    settings = database.add("node-1")
    database.sql("""
        CREATE FUNCTION gpukeeper.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN IF NEW.body ->> 'what' = 'poison' THEN RAISE invalid_text_representation; END IF; RETURN NEW; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON gpukeeper.lines FOR EACH ROW EXECUTE FUNCTION gpukeeper.refuse()
    """)
    machine = Machine.create(tmp_path, "node-1")
    machine.write(*[f"line {n}" for n in range(10)], "poison", *[f"more {n}" for n in range(10)])
    logged: list[str] = []
    shipper = a_shipper(settings, machine, log=logged.append)
    wait_for(lambda: len(database.lines("node-1")) == 21, "all of them")
    assert [what for _, what in database.lines("node-1")].count(None) == 1
    assert shipper.state.refused_lines == 1
    assert "line 11 was copied without its content" in logged[0]
    shipper.stop()
    machine.close()


def test_two_programs_with_one_name_do_not_both_ship(database: FleetDatabase, tmp_path: Path) -> None:
    """Nothing twice, whatever they do; each works on from what the database has."""
    settings = database.add("node-1")
    machine = Machine.create(tmp_path, "node-1")
    shippers = [a_shipper(settings, machine), a_shipper(settings, machine)]
    for n in range(30):
        machine.write(f"line {n}")
    wait_until_shipped(database, machine)
    for one in shippers:
        one.stop()
    machine.close()


def test_of_two_programs_that_begin_at_once_the_second_gets_the_cursor_of_the_first(
    database: FleetDatabase, tmp_path: Path
) -> None:
    settings = database.add("node-1")
    machine = Machine.create(tmp_path, "node-1")
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(connect(settings.address, settings.password_file))) for _ in "12")
        pool = stack.enter_context(ThreadPoolExecutor(1))
        with first.transaction(), closing(Outbox(machine.path)) as outbox:
            position = begin(first, "node-1", outbox)
            other = pool.submit(_begin, second, machine.path)
            wait_for(lambda: database.sql(waits) == [(1,)], "the second waits for the first")
        assert other.result() == position
    assert database.sql("SELECT count(*) FROM gpukeeper.ledgers") == [(1,)]
    machine.close()


def _begin(connection: psycopg.Connection[tuple[Any, ...]], ledger: Path) -> Position:
    with closing(Outbox(ledger)) as outbox:
        return begin(connection, "node-1", outbox)


def test_signals_arrive_as_buckets_of_one_minute(database: FleetDatabase, tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, "node-1")
    now = datetime.now(UTC).replace(second=10, microsecond=0)
    signals = open_signals(machine.path, write=True)
    long_key = "k" * 5000
    samples = [
        Sample("docker/node-1/uid-7", Signal.GPU, "GPU-1", now - timedelta(minutes=minute, seconds=second), 50.0)
        for minute in (1, 10, 11)
        for second in (0, 5)
    ]
    samples.append(Sample(long_key, Signal.CPU, "", now - timedelta(minutes=20), 1.0))
    asyncio.run(signals.add(samples))
    signals.close()
    shipper = a_shipper(database.add("node-1"), machine)
    question = (
        "SELECT s.key, s.signal, s.device, count(*), min(v.mean), sum(v.samples) FROM gpukeeper.signals v "
        "JOIN gpukeeper.series s USING (machine, series) GROUP BY 1, 2, 3 ORDER BY 4"
    )
    wait_for(lambda: len(database.sql(question)) == 2, "both series")
    found = database.sql(question)
    assert (found[0][0], found[0][1], found[0][3]) == (long_key, "cpu", 1)
    assert found[1] == ("docker/node-1/uid-7", "gpu", "GPU-1", 2, 50.0, 4), "the present minute is not over"
    shipper.stop()
    machine.close()


def test_acceptance_runs_arrive_with_their_report(database: FleetDatabase, tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, "node-1")
    report = tmp_path / "run-1"
    report.mkdir()
    (report / "report.json").write_text('{"verdict": "PASS", "odd": "\\u0000"}')

    def tested(run: str, folder: str) -> NodeTested:
        ref = Ref("host", "node-1", "node", "node-1", "node-1")
        gpus = {"serial-1": Grade.PASS}
        now = datetime.now(UTC)
        return NodeTested(
            at=now, ref=ref, run=run, verdict=Grade.PASS, reason="all", device="cuda", report=folder, gpus=gpus
        )

    machine.append(tested("run-1", str(report)), tested("run-2", str(tmp_path / "gone")))
    shipper = a_shipper(database.add("node-1"), machine)
    question = "SELECT run, node, verdict, gpus ->> 'serial-1', report ->> 'verdict', problem FROM gpukeeper.runs"
    wait_for(lambda: len(database.sql(question)) == 2, "both runs")
    first, second = sorted(database.sql(question))
    assert first == ("run-1", "node-1", Grade.PASS.value, Grade.PASS.value, "PASS", None)
    assert second[4] is None
    assert "could not be read" in second[5]
    shipper.stop()
    machine.close()


class Present:
    def __init__(self) -> None:
        self.seq = 1
        self.hour = datetime(2026, 11, 1, 10, tzinfo=UTC)

    def view(self) -> View:
        return View(self.seq, b'{"machine": "node-1", "seq": %d}' % self.seq)

    def usage(self, since: datetime | None) -> tuple[UsageRow, ...]:
        return (UsageRow(self.hour, "GPU-1", "ann", b'{"active": 30}'),) if since is None else ()


def test_a_view_that_does_not_change_is_confirmed_without_being_written_again(
    database: FleetDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpukeeper.ledger.copy.shipper.CONFIRMED_EVERY", 0.1)
    monkeypatch.setattr("gpukeeper.ledger.copy.shipper.VIEW_EVERY", 0.1)
    machine = Machine.create(tmp_path, "node-1")
    shipper = a_shipper(database.add("node-1"), machine, sources=Present())
    question = "SELECT at, seq FROM gpukeeper.views"
    wait_for(lambda: database.sql(question), "the view")
    ((at, seq),) = database.sql(question)
    wait_for(lambda: database.sql(question)[0][0] > at, "a confirmation")
    assert database.sql(question)[0][1] == seq
    shipper.stop()
    machine.close()


def test_the_present_view_and_usage_arrive(database: FleetDatabase, tmp_path: Path) -> None:
    machine = Machine.create(tmp_path, "node-1")
    sources = Present()
    shipper = a_shipper(database.add("node-1"), machine, sources=sources)
    question = "SELECT seq, body ->> 'seq' FROM gpukeeper.views"
    wait_for(lambda: database.sql(question) == [(1, "1")], "the view")
    sources.seq = 2
    wait_for(lambda: database.sql(question) == [(2, "2")], "the changed view")
    usage = database.sql("SELECT machine, hour, device, holder, body ->> 'active' FROM gpukeeper.usage")
    assert usage == [("node-1", sources.hour, "GPU-1", "ann", "30")]
    assert database.sql("SELECT seen IS NOT NULL, version IS NOT NULL FROM gpukeeper.machines") == [(True, True)]
    shipper.stop()
    machine.close()
