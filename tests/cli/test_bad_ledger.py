"""A damaged, foreign or newer ledger, and a folder that cannot be used: a clear sentence, and nothing is acted on."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from tests.cli.fleet import Fleet


def damage(fleet: Fleet) -> None:
    (fleet.state / "ledger.db").write_bytes(b"this was a ledger once\n" * 100)


def foreign(fleet: Fleet) -> None:
    with sqlite3.connect(fleet.state / "ledger.db") as other:
        other.execute("CREATE TABLE recipes (name TEXT)")
    other.close()


def folder(fleet: Fleet) -> None:
    (fleet.state / "ledger.db").mkdir()


@pytest.mark.parametrize("break_it", [damage, foreign, folder])
def test_a_ledger_that_cannot_be_used_stops_everything(fleet: Fleet, break_it: object) -> None:
    fleet.state.mkdir(mode=0o700)
    assert callable(break_it)
    break_it(fleet)
    fleet.ended("old", days=2)
    ran = fleet.run("apply", "--yes")
    assert ran.code == 1
    assert "ledger.db" in ran.err
    assert "Traceback" not in ran.err
    assert fleet.names() == {"old"}


def test_status_shows_how_large_it_is_and_what_is_in_it(fleet: Fleet) -> None:
    """C15.7"""
    assert "lines     0" in fleet.run("ledger", "status").out
    fleet.ended("old", days=2)
    fleet.run("apply", "--yes")
    said = fleet.run("ledger", "status").out
    lines = len(fleet.lines())
    for words in (
        str(fleet.state / "ledger.db"),
        f"lines     {lines}",
        "ledger.db (",
        "archives  0 (0 B)",
        "paused    no",
    ):
        assert words in said
    found = fleet.run("ledger", "status", "--json").json()["ledger"]
    assert (found["status"]["lines"], found["schema"] > 0) == (lines, True)
    assert "ledger.db" in [one["name"] for one in found["files"]]


def test_verify_reads_everything_and_names_the_line_that_cannot_be_read(fleet: Fleet) -> None:
    """C15.7: a line that was changed by hand, past the triggers that forbid it."""
    fleet.ended("old", days=2)
    fleet.run("apply", "--yes")
    whole = fleet.run("ledger", "verify")
    assert whole.code == 0, whole.err
    assert (
        f"{len(fleet.lines())} lines and 0 archives of {fleet.state / 'ledger.db'} were read: no damage found"
        in whole.out
    )
    with closing(sqlite3.connect(fleet.state / "ledger.db")) as connection:
        connection.execute("DROP TRIGGER journal_is_append_only")
        connection.execute('UPDATE journal SET line = \'{"type": "nothing"}\' WHERE seq = 2')
        connection.commit()
    damaged = fleet.run("ledger", "verify")
    assert damaged.code == 1
    assert "Line 2 of" in damaged.err
    told = fleet.run("ledger", "verify", "--json")
    assert told.code == 1
    assert len(told.json()["verified"]["problems"]) == 1
