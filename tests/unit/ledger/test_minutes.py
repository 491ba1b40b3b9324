"""Minutes in `buckets` and packed days in `days` read the same, also when a write is interrupted."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from math import nan
from pathlib import Path

import pytest

from gpukeeper.ledger.archive import inspect, pack_signals
from gpukeeper.ledger.copy.ship import Outbox
from gpukeeper.ledger.database import APPLICATION_ID, MIGRATIONS, open_for_reading, open_for_writing, transaction
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.signals import DAY, first_minute, open_signals, pack_days, read_minutes, unreadable_days
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.series import MINUTE, Sample, Signal
from gpukeeper.traces.recorded import RecordedTrace
from tests.unit.ledger.examples import run

KEY = "docker/a/1"
MIDNIGHT = datetime(2026, 3, 1, tzinfo=UTC)
FIRST = int(MIDNIGHT.timestamp()) // 60
LATER = MIDNIGHT + timedelta(days=30)


def gpu(minute: int, value: float = 1.0, device: str = "0", part: bool = False) -> Sample:
    """In minutes from midnight UTC on."""
    return Sample(KEY, Signal.GPU, device, MIDNIGHT + minute * MINUTE, value, part)


def filled(folder: Path, samples: list[Sample]) -> Path:
    folder.chmod(0o700)
    signals = open_signals(folder / "ledger.db", write=True)
    run(signals.add(samples))
    signals.close()
    return folder / "ledger.db"


def pack(path: Path, now: datetime = LATER, most: int = 1000) -> int | None:
    with closing(open_for_writing(path)) as c, transaction(c):
        return pack_days(c, now, most=most)


def stored(path: Path) -> tuple[int, int]:
    """Minutes with a row of their own, and packed days."""
    with closing(open_for_reading(path)) as c:
        count = "SELECT (SELECT count(*) FROM buckets), (SELECT count(*) FROM days)"
        return tuple(c.execute(count).fetchone())


def test_days_begin_at_midnight_utc_and_windows_end_where_they_end(tmp_path: Path) -> None:
    path = filled(tmp_path, [gpu(minute, minute) for minute in (-1, 0, 1439, 1440, 1441)])
    assert pack(path) is None
    assert stored(path) == (0, 3)
    with closing(open_for_reading(path)) as c:
        for first, last in ((-1, 1441), (0, 1439), (1, 1438), (1439, 1440), (-9, -1), (1441, 9000), (-9, 9000)):
            found = [minute - FIRST for minute, _sum, _count in read_minutes(c, 1, FIRST + first, FIRST + last)]
            assert found == [minute for minute in (-1, 0, 1439, 1440, 1441) if first <= minute <= last]
        for since, expected in ((-5, -1), (0, 0), (1, 1439), (1440, 1440), (1441, 1441)):
            assert first_minute(c, 1, FIRST + since) == FIRST + expected
        assert first_minute(c, 1, FIRST + 1442) is None


@pytest.mark.parametrize(("now", "packed"), [(timedelta(days=3), 1), (timedelta(days=3) - MINUTE, 0)])
def test_a_day_is_packed_when_it_ended_two_days_ago(tmp_path: Path, now: timedelta, packed: int) -> None:
    path = filled(tmp_path, [gpu(1439)])
    pack(path, MIDNIGHT + now)
    assert stored(path) == (1 - packed, packed)


def test_a_late_reading_is_added_as_if_its_day_had_never_been_packed(tmp_path: Path) -> None:
    """0.1 + 0.2 + 0.3 + 0.4 depends on the order: the late two must not be added to each other first."""
    path = filled(tmp_path, [gpu(5, 0.1), gpu(5, 0.2), gpu(6, 0.5), gpu(DAY, 1.0)])
    pack(path)
    filled(tmp_path, [gpu(5, 0.3), gpu(5, 0.4)])
    assert stored(path) == (2, 1)
    for _ in range(2):
        with closing(open_for_reading(path)) as c:
            found = sorted(read_minutes(c, 1, FIRST, FIRST + DAY - 1))
        assert found == [(FIRST + 5, 0.1 + 0.2 + 0.3 + 0.4, 4), (FIRST + 6, 0.5, 1)]
        pack(path)
        assert stored(path) == (0, 2)


def test_a_minute_with_a_reading_that_is_no_number_stays_one(tmp_path: Path) -> None:
    path = filled(tmp_path, [gpu(1, 5.0), gpu(1, nan), gpu(2, 5.0)])
    pack(path)
    filled(tmp_path, [gpu(1, 7.0), gpu(2, nan)])
    pack(path)
    with closing(open_for_reading(path)) as c:
        assert read_minutes(c, 1, FIRST, FIRST + 9) == [(FIRST + 1, None, 3), (FIRST + 2, None, 2)]


def test_a_slice_is_bounded_and_the_next_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = filled(tmp_path, [gpu(day * DAY, 1.0, device) for day in range(4) for device in ("0", "1", "2")])
    start: int | None = 0
    left = []
    while start is not None:
        with closing(open_for_writing(path)) as c, transaction(c):
            start = pack_days(c, LATER, start, most=5)
        left.append(stored(path))
    assert left == [(7, 5), (2, 10), (0, 12)]


def test_the_daemon_packs_all_and_stops_between_two_transactions(tmp_path: Path) -> None:
    path = filled(tmp_path, [gpu(day * DAY) for day in range(12)])

    async def story() -> None:
        ledger, stop = open_ledger(path, write=True), asyncio.Event()
        stop.set()
        await pack_signals(ledger, LATER, stop)
        assert stored(path) == (12, 0)
        await pack_signals(ledger, LATER, asyncio.Event())
        assert stored(path) == (0, 12)
        ledger.close()

    run(story())


def test_free_pages_are_given_back(tmp_path: Path) -> None:
    path = filled(tmp_path, [gpu(minute, 1.5) for minute in range(10 * DAY)])
    before = path.stat().st_size
    pack(path)
    with closing(sqlite3.connect(path)) as c:
        assert c.execute("PRAGMA freelist_count").fetchone() == (0,)
    assert path.stat().st_size < before - 200_000


# Deleting


@pytest.mark.parametrize("before", [0, 1, 2, 720, 1439, 1440, 1441, 2879, 2880, 2881])
def test_expired_minutes_are_deleted_and_counted_also_within_a_day(tmp_path: Path, before: int) -> None:
    minutes = [0, 1, 719, 720, 1439, 1440, 1441, 2879, 2880]
    for packs in (True, False):
        folder = tmp_path / str(packs)
        folder.mkdir()
        path = filled(folder, [gpu(minute, minute) for minute in minutes])
        if packs:
            pack(path)
        signals = open_signals(path, write=True)
        assert run(signals.prune(MIDNIGHT + before * MINUTE)) == sum(minute < before for minute in minutes)
        signals.close()
        with closing(open_for_reading(path)) as c:
            left = [minute - FIRST for minute, _sum, _count in read_minutes(c, 1, FIRST, FIRST + 9000)]
            assert left == [minute for minute in minutes if minute >= before]
            assert c.execute("SELECT count(*) FROM series").fetchone() == (int(before <= 2880),)
        assert before <= 2880 or stored(path) == (0, 0)


def test_a_series_takes_its_days_with_it(tmp_path: Path) -> None:
    """Its number is given to the next one. An older gpukeeper that still runs deletes series, and knows no days."""
    path = filled(tmp_path, [gpu(0)])
    pack(path)
    with closing(sqlite3.connect(path)) as c:
        c.execute("DELETE FROM series")
        c.commit()
    assert stored(path) == (0, 0)


# Everyone who reads


def test_traces_and_the_copy_are_the_same_before_and_after(tmp_path: Path) -> None:
    samples = [gpu(minute, minute / 7, device) for minute in range(-3, 3 * DAY, 7) for device in ("0", "1")]
    samples += [gpu(10, nan), gpu(17, 3.0, "MIG-1", part=True), Sample(KEY, Signal.CPU, "", MIDNIGHT, 1e9)]
    path = filled(tmp_path, samples)

    def everything() -> list[object]:
        trace, outbox = RecordedTrace(path), Outbox(path)
        runs = [
            [(one.signal, one.device, one.start, one.minutes.tobytes(), one.slice) for one in found.series]
            for found in trace.runs()
        ]
        since = outbox.first_minute(0)
        assert since is not None
        rows = [sorted(outbox.signals(since + n, since + n + 500), key=repr) for n in range(0, 4 * DAY, 500)]
        firsts = [outbox.first_minute(FIRST + minute) for minute in range(-10, 3 * DAY + 10, 90)]
        outbox.close()
        return [runs, trace.begin, trace.end, trace.rows, trace.signals, since, rows, firsts]

    before = everything()
    pack(path, MIDNIGHT + timedelta(days=4))
    assert stored(path)[1] == 8, "three days of two GPUs, a part of one, a CPU; the last day is young"
    assert everything() == before
    pack(path)
    assert stored(path)[0] == 0
    assert everything() == before


def test_a_damaged_day_is_named_and_not_used(tmp_path: Path) -> None:
    path = filled(tmp_path, [gpu(0), gpu(DAY)])
    pack(path)
    with closing(sqlite3.connect(path)) as c:
        c.execute("UPDATE days SET minutes = substr(minutes, 1, 12) WHERE day = ?", (FIRST // DAY,))
        c.commit()
    with closing(open_for_reading(path)) as c:
        with pytest.raises(LedgerError, match=r"series 1 on 2026-03-01 .*They were not used.*ledger restore"):
            read_minutes(c, 1, FIRST, FIRST)
        assert len(read_minutes(c, 1, FIRST + DAY, FIRST + DAY)) == 1
        assert len(unreadable_days(c)) == 1

    async def story() -> None:
        ledger = open_ledger(path, write=False)
        (problem,) = (await inspect(ledger)).problems
        assert "2026-03-01" in problem
        ledger.close()

    run(story())
    signals = open_signals(path, write=True)
    assert run(signals.prune(MIDNIGHT + timedelta(days=1))) == 1, "it expires like all others"
    signals.close()


# Interrupted

_KILLED = """
import os, signal, sys
from datetime import datetime
from pathlib import Path
from gpukeeper.ledger.database import open_for_writing, transaction
from gpukeeper.ledger.signals import pack_days
c = open_for_writing(Path(sys.argv[1]))
left = int(sys.argv[2])
def count(statement):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
c.set_trace_callback(count)
with transaction(c):
    pack_days(c, datetime.fromisoformat(sys.argv[3]))
"""


def test_a_kill_before_any_statement_loses_nothing(tmp_path: Path) -> None:
    path = filled(tmp_path, [gpu(day * DAY + minute, minute) for day in range(2) for minute in range(50)])
    with closing(open_for_reading(path)) as c:
        before = sorted(read_minutes(c, 1, FIRST, FIRST + 9000))
    for statements in range(100):
        command = [sys.executable, "-c", _KILLED, path, str(statements), LATER.isoformat()]
        done = subprocess.run(command, check=False).returncode
        with closing(open_for_reading(path)) as c:
            assert sorted(read_minutes(c, 1, FIRST, FIRST + 9000)) == before
        assert stored(path) == ((0, 2) if done == 0 else (100, 0))
        if done == 0:
            break
        assert done == -signal.SIGKILL
    assert done == 0
    assert statements > 8


# Versions


def test_a_ledger_of_schema_2_keeps_its_minutes_and_a_copy(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "ledger.db"
    with closing(sqlite3.connect(path)) as c:
        for statements in MIGRATIONS[:2]:
            for statement in statements:
                c.execute(statement)
        c.execute("INSERT INTO series (key, signal, device, slice, newest) VALUES (?, 'gpu', '0', 0, ?)", (KEY, FIRST))
        c.executemany("INSERT INTO buckets VALUES (1, ?, ?, 2)", [(FIRST - n, n / 3) for n in range(3000)])
        c.execute("INSERT INTO buckets VALUES (1, ?, NULL, 1)", (FIRST - 5000,))
        c.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        c.execute("PRAGMA user_version = 2")
        c.commit()
        before = c.execute("SELECT minute, sum, count FROM buckets ORDER BY minute").fetchall()
    pack(path)
    assert stored(path) == (0, 5)
    with closing(open_for_reading(path)) as c:
        assert sorted(read_minutes(c, 1, FIRST - 9000, FIRST)) == before
        assert c.execute("PRAGMA user_version").fetchone() == (3,)
    with closing(sqlite3.connect(tmp_path / "ledger-schema-2.db")) as c:
        assert c.execute("SELECT minute, sum, count FROM buckets ORDER BY minute").fetchall() == before
