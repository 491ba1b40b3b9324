"""`gpukeeper serve` with a fleet database: what it records arrives, requests are answered, passes wait for nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.real.postgres.daemons import Daemon
from tests.real.postgres.fleet import FleetDatabase, wait_for


@pytest.fixture
def daemon(database: FleetDatabase, tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(database, tmp_path / "one", "node-1")
    with made.serving():
        yield made


@pytest.mark.smoke
def test_a_hold_through_the_fleet_counts_and_its_line_is_copied(daemon: Daemon) -> None:
    reply = daemon.ask(*daemon.signed())
    assert reply["state"] == "answered"
    assert reply["done"], reply
    assert "is held until" in reply["words"]
    (held,) = daemon.holds()
    assert held["by"] == "ann"
    question = "SELECT owner FROM gpukeeper.lines WHERE type = 'hold' AND machine = 'node-1'"
    wait_for(lambda: daemon.database.sql(question) == [("ann",)], "the line of the hold")


def test_the_daemon_decides_by_its_own_policy(daemon: Daemon) -> None:
    """bob does not own it; eve is no admin."""
    reply = daemon.ask(*daemon.signed("stop", person="bob"))
    assert (reply["state"], reply["done"]) == ("answered", False)
    assert not daemon.ask(*daemon.signed("pause", person="eve"))["done"]
    assert daemon.fleet.state_of("train") == "running"
    assert daemon.fleet.lines("pause") == []


def test_forged_replayed_expired_and_unsigned_requests_get_nothing(daemon: Daemon) -> None:
    now = datetime.now(UTC)
    expires, document, signature = daemon.signed()
    other = daemon.signed(key="k" * 64)
    late = daemon.signed(issued=now - timedelta(minutes=5), expires=now - timedelta(minutes=3))
    refused = {
        "another key": other,
        "no signature": (expires, document, ""),
        "another person": (expires, document.replace('"ann"', '"root"'), signature),
        "another workload": (expires, document.replace("train", "other"), signature),
        "for another machine": daemon.signed(machine="node-2"),
        "valid for a year": daemon.signed(expires=now + timedelta(days=365)),
        "from the future": daemon.signed(issued=now + timedelta(hours=1), expires=now + timedelta(hours=1, minutes=2)),
        "not JSON": (expires, "{", signature),
        "without a nonce": daemon.signed(nonce=""),
    }
    for words, one in refused.items():
        reply = daemon.ask(*one)
        assert (reply["state"], reply["done"]) == ("refused", False), f"{words}: {reply}"
    assert daemon.ask(*late)["state"] == "expired"
    assert daemon.holds() == []
    assert daemon.ask(expires, document, signature)["done"]
    replay = daemon.ask(expires, document, signature)
    assert (replay["state"], replay["done"]) == ("refused", False)
    assert len(daemon.holds()) == 1


def test_a_request_is_not_replayed_over_a_restart(database: FleetDatabase, tmp_path: Path) -> None:
    """Also not by a database that forgets its replies."""
    one = Daemon(database, tmp_path / "one", "node-1")
    signed = one.signed()
    with one.serving():
        assert one.ask(*signed)["done"]
    database.sql("DELETE FROM gpukeeper.replies")
    with one.serving():
        wait_for(lambda: database.sql("SELECT state FROM gpukeeper.replies") == [("refused",)], "a second reply")
        assert one.ask(*signed)["state"] == "refused"
    assert len(one.holds()) == 1


def test_a_person_of_another_machine_is_another_person(database: FleetDatabase, tmp_path: Path) -> None:
    one = Daemon(database, tmp_path / "one", "node-1", same_users=False)
    with one.serving():
        reply = one.ask(*one.signed(person="ann", realm="web-1"))
        assert not reply["done"]
        assert one.ask(*one.signed(person="ann", realm="node-1"))["done"]
    assert [held["by"] for held in one.holds()] == ["ann"]


def test_a_request_for_a_machine_that_is_off_expires(database: FleetDatabase, tmp_path: Path) -> None:
    one = Daemon(database, tmp_path / "one", "node-1")
    signed = one.signed(
        issued=datetime.now(UTC) - timedelta(minutes=5), expires=datetime.now(UTC) - timedelta(minutes=3)
    )
    reply = one.ask(*signed)
    assert reply["state"] == "expired"
    assert "did not reply" in reply["words"]


def test_passes_go_on_while_the_database_hangs(own_database: FleetDatabase, tmp_path: Path) -> None:
    one = Daemon(own_database, tmp_path / "one", "node-1")
    passes = "SELECT count(*) FROM gpukeeper.lines WHERE type = 'pass'"
    with one.serving():
        wait_for(lambda: own_database.sql(passes)[0][0] > 1, "passes in the database")
        stopped = [pid for (pid,) in own_database.sql("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()")]
        postmaster = int((own_database.server.data / "postmaster.pid").read_text().splitlines()[0])
        for pid in (postmaster, *stopped):
            os.kill(pid, signal.SIGSTOP)
        try:
            before = len(one.passes())
            wait_for(lambda: len(one.passes()) >= before + 3, "passes without the database")
            seconds = [line["seconds"] for line in one.passes()]
            assert max(seconds) < 5, "no pass waits"
        finally:
            for pid in (postmaster, *stopped):
                os.kill(pid, signal.SIGCONT)
        known = len(one.passes())
        wait_for(lambda: own_database.sql(passes)[0][0] >= known, "they arrive later")


def test_a_wrong_password_is_logged_and_nothing_else_happens(database: FleetDatabase, tmp_path: Path) -> None:
    one = Daemon(database, tmp_path / "one", "node-1")
    database.secrets["gpukeeper_machine_node-1"].write_text("not-the-one\n")
    child = one.fleet.start("serve")
    wait_for(lambda: len(one.passes()) > 1, "passes")
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert "password authentication failed" in err
    assert "not-the-one" not in err
    assert child.returncode == 0
