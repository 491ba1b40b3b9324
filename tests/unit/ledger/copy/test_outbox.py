"""What the outbox reads: batches without gaps, from the journal and from archives, of this ledger alone."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.ledger.archive import rotate
from gpukeeper.ledger.copy import ship as reading
from gpukeeper.ledger.copy.ship import SQLITE_ROW, Outbox, copy_row, is_plain, without_nul
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.lines import COLUMNS
from gpukeeper.ledger.meta import ensure_identity, remember_shipped, take_nonce
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import Complaint
from gpukeeper.model.policy import LedgerKeep

NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    (tmp_path / "state").mkdir(mode=0o700)
    made = open_ledger(tmp_path / "state" / "ledger.db", write=True)
    asyncio.run(ensure_identity(made))
    yield made
    made.close()


def write(ledger: SqliteLedger, count: int, at: datetime = NOW, words: str = "x") -> None:
    asyncio.run(ledger.append([Complaint(at=at, what=words) for _ in range(count)]))


def all_numbers(outbox: Outbox, after: int, lines: int) -> list[int]:
    """As the shipper asks: from the end of the last batch on."""
    numbers: list[int] = []
    while True:
        batch = outbox.batch(after, lines)
        numbers += [int(row.partition("\t")[0]) for row in batch.rows]
        if not batch.rows:
            return numbers
        assert len(batch.rows) <= lines
        assert batch.last == numbers[-1]
        after = batch.last


def test_batches_follow_each_other_without_gap(ledger: SqliteLedger) -> None:
    write(ledger, 25)
    with closing(Outbox(ledger.path)) as outbox:
        assert all_numbers(outbox, 0, 7) == list(range(1, 26))
        assert all_numbers(outbox, 20, 7) == list(range(21, 26))
        assert not outbox.batch(25).rows
        write(ledger, 1)
        assert outbox.batch(25).last == 26


def test_a_batch_is_bounded_by_its_size(ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BYTES", 10_000)
    write(ledger, 30, words="y" * 3000)
    with closing(Outbox(ledger.path)) as outbox:
        assert len(outbox.batch(0).rows) == 4
        assert all_numbers(outbox, 0, 100) == list(range(1, 31))


def test_checkpoints_are_state_and_not_shipped(ledger: SqliteLedger) -> None:
    write(ledger, 5, at=NOW - 40 * DAY)
    write(ledger, 5)
    asyncio.run(rotate(ledger, LedgerKeep(), NOW))
    write(ledger, 1)
    with closing(Outbox(ledger.path)) as outbox:
        assert outbox.newest() == 12
        assert all_numbers(outbox, 5, 100) == [6, 7, 8, 9, 10, 12]


@pytest.mark.parametrize("lines", [1, 3, 7, 100])
def test_archived_lines_come_first_and_once(ledger: SqliteLedger, lines: int) -> None:
    for days in (60, 50, 40):
        write(ledger, 10, at=NOW - days * DAY)
        asyncio.run(rotate(ledger, LedgerKeep(), NOW - (days - 31) * DAY))
    write(ledger, 5)
    with closing(Outbox(ledger.path)) as outbox:
        found = all_numbers(outbox, 4, lines)
    kept = [n for n, _ in asyncio.run(ledger.lines(LineFilter(last=None, types=("complaint",))))]
    assert len(found) == len(set(found)) == 31
    assert found == sorted(found)
    assert found[-5:] == kept[-5:]


def test_archives_of_an_earlier_ledger_are_not_of_this_one(ledger: SqliteLedger, tmp_path: Path) -> None:
    write(ledger, 10, at=NOW - 40 * DAY, words="old")
    asyncio.run(rotate(ledger, LedgerKeep(), NOW))
    (tmp_path / "again").mkdir(mode=0o700)
    shutil.copytree(ledger.path.parent / "archive", tmp_path / "again" / "archive")
    anew = open_ledger(tmp_path / "again" / "ledger.db", write=True)
    asyncio.run(ensure_identity(anew))
    write(anew, 20, at=NOW - 35 * DAY, words="new")
    asyncio.run(rotate(anew, LedgerKeep(), NOW))
    with closing(Outbox(anew.path)) as outbox:
        rows = [row for after in (0, 5) for row in outbox.batch(after).rows]
    anew.close()
    assert len(rows) == 35
    assert not [row for row in rows if "old" in row]


def test_rotation_keeps_what_was_not_shipped_within_a_bound(ledger: SqliteLedger) -> None:
    write(ledger, 10, at=NOW - 70 * DAY)
    write(ledger, 10, at=NOW - 40 * DAY)
    write(ledger, 10, at=NOW - 35 * DAY)
    asyncio.run(remember_shipped(ledger, 15))
    done = asyncio.run(rotate(ledger, LedgerKeep(), NOW, keep_unsent=30 * DAY))
    assert done.lines == 15, "shipped ones are archived, the others stay"
    asyncio.run(rotate(ledger, LedgerKeep(), NOW + 22 * DAY, keep_unsent=30 * DAY))
    assert [n for n, _ in asyncio.run(ledger.lines(LineFilter(last=None, types=("complaint",))))] == list(
        range(21, 31)
    ), "the bound"
    done = asyncio.run(rotate(ledger, LedgerKeep(), NOW + 22 * DAY))
    assert done.lines == 10, "without a fleet database nothing waits"


def test_a_ledger_without_an_identity_is_not_shipped(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    made = open_ledger(tmp_path / "state" / "ledger.db", write=True)
    with closing(Outbox(made.path)) as outbox, pytest.raises(LedgerError, match="no identity"):
        outbox.identity()
    asyncio.run(ensure_identity(made))
    with closing(Outbox(made.path)) as outbox:
        first = outbox.identity()
        asyncio.run(ensure_identity(made))
        assert outbox.identity() == first
    made.close()


def test_a_nonce_is_taken_once_until_long_after_its_request(ledger: SqliteLedger) -> None:
    async def run() -> None:
        assert await take_nonce(ledger, "a", NOW, NOW)
        assert not await take_nonce(ledger, "a", NOW, NOW)
        assert await take_nonce(ledger, "b", NOW, NOW)
        assert not await take_nonce(ledger, "a", NOW, NOW + timedelta(minutes=59))
        assert await take_nonce(ledger, "c", NOW + DAY, NOW + DAY)
        rows = await ledger.read(
            lambda c: c.execute("SELECT count(*) FROM meta WHERE name LIKE 'copy_nonce%'").fetchone()
        )
        assert rows == (1,), "expired ones are forgotten"

    asyncio.run(run())


@given(st.text(max_size=20), st.none() | st.text(max_size=20))
def test_sqlite_writes_rows_as_we_do(words: str, owner: str | None) -> None:
    """Surrogates are no text, and the ledger has none."""
    words, owner = (one if one is None else one.encode("utf-8", "replace").decode() for one in (words, owner))
    values = (1, "t", "p", None, words, words, owner, None, "r", None, "s", 0, "{}")
    with closing(sqlite3.connect(":memory:")) as c:
        c.execute(f"CREATE TABLE journal (seq INTEGER PRIMARY KEY, {', '.join(COLUMNS)})")
        c.execute(f"INSERT INTO journal VALUES (7, {', '.join('?' for _ in values)})", values)
        (row,) = c.execute(f"SELECT {SQLITE_ROW} FROM journal").fetchone()
    if is_plain(row):
        assert without_nul(row) == copy_row((7, *values))
    else:
        assert set("\t\n\r") & set(f"{words}{owner}"), "only such a row is read a second time"


@pytest.mark.parametrize(
    ("json", "expected"),
    [
        (r'"a\u0000b"', r'"a\ufffdb"'),
        (r'"\\u0000"', r'"\\u0000"'),
        (r'"\\\u0000"', r'"\\\ufffd"'),
        (r'"\\\\u0000"', r'"\\\\u0000"'),
        (r'"\u0000\u0000"', r'"\ufffd\ufffd"'),
    ],
)
def test_nul_in_json_is_replaced_and_nothing_that_looks_like_it(json: str, expected: str) -> None:
    assert without_nul(copy_row((json,))) == copy_row((expected,))
