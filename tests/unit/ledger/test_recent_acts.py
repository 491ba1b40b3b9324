"""How many steps were begun lately: every line is read once, whichever process wrote it."""

from __future__ import annotations

import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.ledger import journal
from gpukeeper.ledger.journal import RecentActs, SqliteLedger, open_ledger
from gpukeeper.model.errors import LedgerError
from tests.unit.ledger.examples import NOW, intended, run

HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)
TREES = frozenset({"temporary_tree"})


async def counts(ledger: SqliteLedger, now: timedelta) -> tuple[int, int]:
    since = NOW + now - HOUR
    return await ledger.acts_since(since, TREES), await ledger.acts_since(since, TREES, but=True)


def test_what_another_process_writes_is_counted(tmp_path: Path) -> None:
    one, other = (open_ledger(tmp_path / "ledger.db", write=True) for _ in range(2))

    async def story() -> None:
        assert await counts(one, SECOND) == (0, 0)
        await one.append([intended("a", rule="idle"), intended("b", rule="temporary_tree")])
        await other.append([intended("c", rule="idle")])
        assert await counts(one, SECOND) == await counts(other, SECOND) == (1, 2)
        await other.append([intended("d", rule="temporary_tree")])
        assert await counts(one, SECOND) == (2, 2)

    run(story())
    one.close()
    other.close()


def test_the_hour_moves_on_and_back(tmp_path: Path) -> None:
    """Back: the clock was set."""
    ledger = open_ledger(tmp_path / "ledger.db", write=True)

    async def story() -> None:
        await ledger.append([intended(f"s{n}", at=NOW + n * timedelta(minutes=10), rule="idle") for n in range(12)])
        for minutes, expected in ((59, 12), (119, 6), (65, 11), (59, 12), (170, 1), (59, 12)):
            assert await counts(ledger, timedelta(minutes=minutes)) == (0, expected), minutes
            await ledger.append([intended(f"t{minutes}", at=NOW - 2 * HOUR, rule="idle")])

    run(story())
    ledger.close()


def test_the_lines_of_the_hour_are_not_read_again(tmp_path: Path) -> None:
    """By the number of the line alone: by any other index the whole hour would be searched before every step."""
    ledger = open_ledger(tmp_path / "ledger.db", write=True)
    plan = run(ledger.read(lambda c: c.execute("EXPLAIN QUERY PLAN " + journal._NEWER, (7,)).fetchall()))
    ledger.close()
    assert [row[-1] for row in plan] == ["SEARCH journal USING INTEGER PRIMARY KEY (rowid>?)"]


def test_a_read_that_failed_forgets_no_step(tmp_path: Path) -> None:
    """Otherwise the budget of the hour would begin again after an error of the disk."""
    ledger = open_ledger(tmp_path / "ledger.db", write=True)
    acts = RecentActs()

    def count(c: Any, since: timedelta) -> int:
        return acts.count(c, NOW + since, TREES, but=True)

    class Fails:
        def __init__(self, c: sqlite3.Connection) -> None:
            self._c = c

        def execute(self, words: str, *given: Any) -> Any:
            if words == journal._FIRST:
                raise sqlite3.OperationalError("disk I/O error")
            return self._c.execute(words, *given)

    run(ledger.append([intended("a", rule="idle")]))
    with pytest.raises(LedgerError):
        run(ledger.read(lambda c: count(Fails(c), -HOUR)))
    assert run(ledger.read(lambda c: count(c, -HOUR + SECOND))) == 1
    ledger.close()
