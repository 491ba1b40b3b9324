"""How much a pass writes about a root full of small folders: changes, not states."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.engines import require
from tests.real.host.machine import Host, held_open, sees_everybody
from tests.real.host.test_apply import TREES

FOLDERS = 500
YOUNG = TREES.replace("older_than: 0s", "older_than: 30d").replace("under_pressure: 0s", "under_pressure: 30d")


@pytest.fixture(autouse=True)
def everybody_is_seen() -> None:
    require("root", sees_everybody())


def written(host: Host) -> tuple[int, int]:
    """Rows and bytes of the journal."""
    with closing(sqlite3.connect(f"file:{host.state / 'ledger.db'}?mode=ro", uri=True)) as ledger:
        found: tuple[int, int] = ledger.execute("SELECT count(*), sum(length(line)) FROM journal").fetchone()
    return found


def test_directories_that_stay_add_one_line_to_the_journal_with_each_pass(tmp_path: Path) -> None:
    host = Host(tmp_path, YOUNG)
    for number in range(FOLDERS):
        (host.root / f"tmp-{number}").mkdir()
    used = host.root / "tmp-1" / "file"
    used.touch()
    rows, sizes = [0], [0]
    for number in range(3):
        if number == 1:
            with held_open(used):  # what is in use now and not later makes no lines either
                ran = host.apply()
        else:
            ran = host.apply()
        assert ran.code == 0, (ran.out, ran.err)
        row, size = written(host)
        rows.append(row)
        sizes.append(size)
    assert rows[1] <= 5, "the pass, and what this machine has besides the folders"
    assert (rows[2] - rows[1], rows[3] - rows[2]) == (1, 1)
    assert sizes[3] - sizes[2] < 1000
