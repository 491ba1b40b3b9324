"""A damaged, foreign or newer ledger, and a folder that cannot be used: a clear sentence, and nothing is acted on."""

from __future__ import annotations

import sqlite3

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
