"""Opening a ledger: what is ours is opened, what is not is left alone, and the sentence says what to do."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpukeeper.ledger.database import APPLICATION_ID, MIGRATIONS, Schema, open_for_writing
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.signals import open_signals
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.errors import LedgerError
from tests.unit.ledger.examples import NOW, intended, noticed, run


def test_a_missing_directory_is_made_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "ledger.db"
    open_ledger(path, write=True).close()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))
def test_a_ledger_of_an_older_gpukeeper_is_read_and_not_changed(tmp_path: Path, version: int) -> None:
    """After an upgrade, before the daemon was restarted: its older process still writes here."""
    tmp_path.chmod(0o700)
    path = tmp_path / "ledger.db"
    older = open_for_writing(path, schema=Schema(APPLICATION_ID, MIGRATIONS[:version]))
    daemon = SqliteLedger(path, older, write=True)
    run(daemon.append([noticed()]))
    reader = open_ledger(path, write=False)
    assert [line for _, line in run(reader.lines())] == [noticed()]
    reader.close()
    assert older.execute("PRAGMA user_version").fetchone()[0] == version
    daemon.close()
    assert not [one.name for one in tmp_path.iterdir() if "schema" in one.name]


def test_a_ledger_that_another_process_is_making_reads_as_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    maker = sqlite3.connect(path, isolation_level=None)
    maker.execute("PRAGMA journal_mode = WAL")
    maker.execute("BEGIN IMMEDIATE")
    maker.execute("CREATE TABLE lines (a)")
    assert path.stat().st_size > 0
    reader = open_ledger(path, write=False)
    assert run(reader.lines()) == []
    reader.close()
    maker.close()


def test_the_file_shows_whose_it_is_and_survives_power_cuts(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path / "ledger.db", write=True)

    async def pragma(name: str) -> object:
        return await ledger.read(lambda c: c.execute(f"PRAGMA {name}").fetchone()[0])

    assert run(pragma("application_id")) == APPLICATION_ID
    assert run(pragma("user_version")) == len(MIGRATIONS)
    assert run(pragma("journal_mode")) == "wal"
    assert run(pragma("synchronous")) == 2  # FULL
    ledger.close()


def _no_sqlite(path: Path) -> None:
    path.write_text("idle_after: 30m\n" * 100)


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as c:
        c.execute("CREATE TABLE songs (name)")
    c.close()


def _foreign_id(path: Path) -> None:
    with sqlite3.connect(path) as c:
        c.execute("PRAGMA application_id = 77")
        c.execute("CREATE TABLE songs (name)")
    c.close()


def _newer(path: Path) -> None:
    open_ledger(path, write=True).close()
    with sqlite3.connect(path) as c:
        c.execute("PRAGMA user_version = 99")
    c.close()


def _damaged_header(path: Path) -> None:
    open_ledger(path, write=True).close()
    content = bytearray(path.read_bytes())
    content[100:4096] = os.urandom(3996)
    path.write_bytes(content)


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("write", [True, False], ids=["writing", "reading"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_no_sqlite, "is not a ledger: it is not a SQLite file"),
        (_foreign, "is a database of another program"),
        (_foreign_id, "is a database of another program"),
        (_newer, "written by a newer gpukeeper"),
        (_damaged_header, "is damaged"),
        (_folder, "Is a directory"),
    ],
)
def test_what_is_no_ledger_of_ours_is_left_as_it_is(
    tmp_path: Path, make: Callable[[Path], None], words: str, write: bool
) -> None:
    path = tmp_path / "ledger.db"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    for opening in (open_ledger, open_signals):
        with pytest.raises(LedgerError, match=words) as raised:
            opening(path, write=write)
        assert str(path) in str(raised.value)
        assert "Nothing was" in str(raised.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_damage_inside_is_a_sentence_wherever_it_is_met(tmp_path: Path) -> None:
    async def story() -> None:
        path = tmp_path / "ledger.db"
        ledger = open_ledger(path, write=True)
        await ledger.append([noticed(at=NOW)] * 3000)
        assert await ledger.damage() == []
        ledger.close()
        content = bytearray(path.read_bytes())
        content[4096 * 20 : 4096 * 60] = os.urandom(4096 * 40)
        path.write_bytes(content)
        ledger = open_ledger(path, write=True)
        assert await ledger.damage() != []
        with pytest.raises(LedgerError, match=r"damaged|cannot be read"):
            await ledger.lines(LineFilter(last=None))
        with pytest.raises(LedgerError, match=r"damaged|cannot be read"):
            await ledger.rebuild()
        ledger.close()

    run(story())


def test_a_line_of_an_unknown_type_is_a_sentence_with_its_number(tmp_path: Path) -> None:
    async def story() -> None:
        ledger = open_ledger(tmp_path / "ledger.db", write=True)
        row = "INSERT INTO journal (at, type, error, line) VALUES (1, 'dance', 0, '{\"type\":\"dance\"}')"
        await ledger.change(lambda c: c.execute(row))
        with pytest.raises(LedgerError, match="Line 1 of"):
            await ledger.lines()
        ledger.close()

    run(story())


@pytest.mark.parametrize("empty_file", [True, False])
def test_a_ledger_that_is_not_there_reads_as_an_empty_one_and_is_not_made(tmp_path: Path, empty_file: bool) -> None:
    async def story() -> None:
        path = tmp_path / "no" / "ledger.db"
        if empty_file:
            path.parent.mkdir()
            path.touch()
        ledger = open_ledger(path, write=False)
        assert await ledger.lines() == []
        assert await ledger.last_line_at() is None
        assert await ledger.present("docker", "node-3") == {}
        with pytest.raises(LedgerError, match="opened for reading"):
            await ledger.append([intended()])
        ledger.close()
        assert path.exists() == empty_file

    run(story())


def test_many_can_make_a_new_ledger_at_the_same_moment(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from gpukeeper.ledger.journal import open_ledger\n"
        "ledger = open_ledger(Path(sys.argv[1]), write=True)\n"
        "print(asyncio.run(ledger.next_pass())); ledger.close()\n"
    )

    def child(_: int) -> int:
        done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
        return int(done.stdout)

    with ThreadPoolExecutor(6) as many:
        assert sorted(many.map(child, range(6))) == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everyone can reach. Not below tmp_path: its parents are private, and not ours to change."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


_READER = """
import asyncio, os, sys
from pathlib import Path
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.model.errors import LedgerError
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ledger = open_ledger(Path(sys.argv[1]), write=False)
print(len(asyncio.run(ledger.lines()))); ledger.close()
try: open_ledger(Path(sys.argv[1]), write=True)
except LedgerError as error: print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can become somebody else")
def test_someone_who_may_only_read_can_read(open_folder: Path) -> None:
    path = open_folder / "state" / "ledger.db"
    ledger = open_ledger(path, write=True)
    run(ledger.append([noticed()]))
    ledger.close()
    path.parent.chmod(0o755)
    path.chmod(0o644)
    done = subprocess.run([sys.executable, "-c", _READER, path], capture_output=True, text=True, check=True)
    count, sentence = done.stdout.splitlines()
    assert count == "1"
    assert "Nothing was changed. Check the permissions" in sentence
