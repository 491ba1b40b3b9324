"""Bytes on disk for a workload-day of measurements: the ledger as the daemon fills it, beside gzip CSV and Parquet.

Ten workloads of a day, each with one GPU, CPU, network, disk and terminal: GPUs every 30 seconds, the rest every
minute, all workloads in one transaction, as `serve` writes them. The values are drawn as in a synthetic trace. CSV and
Parquet have one row for each workload and minute, with all five signals. Then the same for the GPU alone. Days that
ended two days ago are packed; the year of 100 GPUs is calculated from that. Last, how long it takes to pack as many
days as 100 workloads have in one (here 20 workloads of 5 days), and the CPU to read them as a trace for `backtest`.
"""

from __future__ import annotations

import asyncio
import csv
import gzip
import io
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from random import Random

from benchmarks.report import Figure, fastest, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.ledger.database import open_for_writing, transaction
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.signals import open_signals, pack_days
from gpukeeper.model.series import Sample, Signal
from gpukeeper.traces.recorded import RecordedTrace
from gpukeeper.traces.synthetic import LEVELS, draw_pool

WORKLOADS, DAY = sized(10, tiny=1), 24 * 60
GPUS, YEAR, DAYS = sized(100, tiny=10), 365, 5
BEGIN = datetime(2026, 1, 5, tzinfo=UTC)
TICK = timedelta(seconds=30)
HOURS = ("train", "evaluate", "left")  # one after the other, an hour each
ALL = (Signal.GPU, Signal.CPU, Signal.NETWORK, Signal.DISK, Signal.TERMINAL)


def run() -> None:
    sizes = {"five signals": _measured(ALL), "the GPU alone": _measured(ALL[:1])}
    rows = []
    for what, (ledger, packed, text, columns) in sizes.items():
        rows += [
            (f"ledger, {what}, the last days", f"{ledger:,.0f}"),
            (f"ledger, {what}, packed", f"{packed:,.0f}"),
            (f"CSV with gzip, {what}", f"{text:,.0f}"),
            (f"Parquet with zstd, {what}", f"{columns:,.0f}" if columns else "not measured: pyarrow is not installed"),
        ]
    print_table(("store", "bytes a workload-day"), rows)
    for what, (ledger, packed, *_) in sizes.items():
        year = GPUS * (packed * (YEAR - 3) + ledger * 3)
        print(
            f"a year of {GPUS} GPUs, {what}: {year / 2**30:.2f} GiB; not packed {GPUS * YEAR * ledger / 2**30:.2f} GiB"
        )
    longest, total, before, after = _speed()
    print(
        f"packing a day of {GPUS} workloads with five signals: {total:.1f} s, one transaction {longest:.2f} s at most"
    )
    print(f"CPU of reading them as a trace: {before:.2f} s before, {after:.2f} s after, {after / before:.2f} times\n")
    _, packed, text, _ = sizes["five signals"]
    print_figure(Figure("signals", round(packed), "bytes/workload-day", round(packed / text, 2), "CSV with gzip"))


def _measured(signals: Sequence[Signal]) -> tuple[float, float, float, float]:
    """Of the ledger, the same packed, CSV, and Parquet (0: not measured), for each workload-day."""
    minutes = [{signal: list(_values(number, signal)) for signal in signals} for number in range(WORKLOADS)]
    table = [
        (
            f"{BEGIN + timedelta(minutes=minute):%Y-%m-%dT%H:%M:%SZ}",
            f"work-{number}",
            *(one[s][minute] for s in signals),
        )
        for number, one in enumerate(minutes)
        for minute in range(DAY)
    ]
    with tempfile.TemporaryDirectory(prefix="gpukeeper-bench-") as folder:
        ledger, packed = _ledger(Path(folder) / "ledger.db", minutes)
    names = ("at", "workload", *signals)
    return (
        ledger / WORKLOADS,
        packed / WORKLOADS,
        _csv(names, table) / WORKLOADS,
        _parquet(names, table) / WORKLOADS,
    )


def _values(number: int, signal: Signal) -> Iterator[float]:
    random = Random(f"{number}/{signal}")
    for hour in range(DAY // 60):
        low, high, share = LEVELS[HOURS[(number + hour) % len(HOURS)]][signal]
        yield from (round(value, 1) for value in draw_pool(random, low, high, share, 60))


def _ledger(path: Path, minutes: Sequence[dict[Signal, list[float]]]) -> tuple[int, int]:
    """What it grows by, before and after its days are packed: an empty one has the tables, too."""
    open_ledger(path, write=True).close()
    before = _pages(path)
    signals = open_signals(path, write=True)
    try:
        asyncio.run(_fill(signals.add, minutes))
    finally:
        signals.close()
    filled = _pages(path)
    _pack(path)
    return filled - before, _pages(path) - before


def _pack(path: Path) -> list[float]:
    """Seconds of each transaction."""
    start: int | None = 0
    seconds = []
    with closing(open_for_writing(path)) as c:
        while start is not None:
            begun = time.perf_counter()
            with transaction(c):
                start = pack_days(c, BEGIN + timedelta(days=9), start)
            seconds.append(time.perf_counter() - begun)
    return seconds


def _speed() -> tuple[float, float, float, float]:
    """Seconds: of the longest transaction, of all, of reading before, and after."""
    with tempfile.TemporaryDirectory(prefix="gpukeeper-bench-") as folder:
        path = Path(folder) / "ledger.db"
        first = int(BEGIN.timestamp()) // 60
        with closing(open_for_writing(path)) as c, transaction(c):
            for number in range(GPUS // DAYS):
                for signal in ALL:
                    names = (f"docker/this-host/container/{number:064x}", signal.value, first + DAYS * DAY - 1)
                    made = c.execute(
                        "INSERT INTO series (key, signal, device, slice, newest) VALUES (?, ?, '', 0, ?)", names
                    )
                    values = chain.from_iterable(_values(number * DAYS + day, signal) for day in range(DAYS))
                    rows = ((made.lastrowid, first + n, value) for n, value in enumerate(values))
                    c.executemany("INSERT INTO buckets VALUES (?, ?, ?, 1)", rows)

        def read() -> None:
            assert sum(1 for _run in RecordedTrace(path).runs()) == GPUS // DAYS

        before = fastest(read, 3, time.process_time)
        seconds = _pack(path)
        return max(seconds), sum(seconds), before, fastest(read, 3, time.process_time)


async def _fill(add: object, minutes: Sequence[dict[Signal, list[float]]]) -> None:
    assert callable(add)
    for tick in range(2 * DAY):
        at = BEGIN + (tick + 1) * TICK - timedelta(seconds=1)
        await add([sample for number, one in enumerate(minutes) for sample in _samples(number, one, tick, at)])


def _samples(number: int, minutes: dict[Signal, list[float]], tick: int, at: datetime) -> Iterator[Sample]:
    key = f"docker/this-host/container/{number:064x}"
    for signal, values in minutes.items():
        if signal is Signal.GPU:
            yield Sample(
                key, signal, f"GPU-{number:08x}-0000-4000-8000-{number:012x}", at, values[tick // 2], since=at - TICK
            )
        elif tick % 2:
            yield Sample(key, signal, "", at, values[tick // 2], since=at - 2 * TICK)


def _pages(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (used,), (free,), (size,) = (
            connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
        )
        return (int(used) - int(free)) * int(size)
    finally:
        connection.close()


def _csv(names: Iterable[str], table: Iterable[Sequence[object]]) -> int:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    writer.writerows(table)
    return len(gzip.compress(text.getvalue().encode(), mtime=0))


def _parquet(names: Sequence[str], table: Sequence[Sequence[object]]) -> int:
    try:
        import pyarrow  # an extra
        from pyarrow import parquet
    except ImportError:
        return 0
    columns = dict(zip(names, map(list, zip(*table, strict=True)), strict=True))
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file, compression="zstd")
    return len(file.getvalue())
