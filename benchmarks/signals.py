"""Bytes on disk for a workload-day of measurements: the ledger as the daemon fills it, beside gzip CSV and Parquet.

Ten workloads of a day, each with one GPU, CPU, network, disk and terminal: GPUs every 30 seconds, the rest every
minute, all workloads in one transaction, as `serve` writes them. The values are drawn as in a synthetic trace. CSV and
Parquet have one row for each workload and minute, with all five signals. Then the same for the GPU alone.
"""

from __future__ import annotations

import asyncio
import csv
import gzip
import io
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

from benchmarks.report import Figure, print_figure, print_table
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.signals import open_signals
from gpukeeper.model.series import Sample, Signal
from gpukeeper.traces.synthetic_lives import LEVELS, pool

WORKLOADS, DAY = 10, 24 * 60
BEGIN = datetime(2026, 1, 5, tzinfo=UTC)
TICK = timedelta(seconds=30)
HOURS = ("train", "evaluate", "left")  # one after the other, an hour each
ALL = (Signal.GPU, Signal.CPU, Signal.NETWORK, Signal.DISK, Signal.TERMINAL)


def run() -> None:
    sizes = {"five signals": _measured(ALL), "the GPU alone": _measured(ALL[:1])}
    rows = []
    for what, (ledger, text, columns) in sizes.items():
        rows += [
            (f"ledger, {what}", f"{ledger:,.0f}"),
            (f"CSV with gzip, {what}", f"{text:,.0f}"),
            (f"Parquet with zstd, {what}", f"{columns:,.0f}" if columns else "not measured: pyarrow is not installed"),
        ]
    print_table(("store", "bytes a workload-day"), rows)
    ledger, text, _ = sizes["five signals"]
    print_figure(Figure("signals", round(ledger), "bytes/workload-day", round(ledger / text, 1), "CSV with gzip"))


def _measured(signals: Sequence[Signal]) -> tuple[float, float, float]:
    """Of the ledger, CSV, and Parquet (0: not measured), for each workload-day."""
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
        ledger = _ledger(Path(folder) / "ledger.db", minutes)
    names = ("at", "workload", *signals)
    return ledger / WORKLOADS, _csv(names, table) / WORKLOADS, _parquet(names, table) / WORKLOADS


def _values(number: int, signal: Signal) -> Iterator[float]:
    random = Random(f"{number}/{signal}")
    for hour in range(DAY // 60):
        low, high, share = LEVELS[HOURS[(number + hour) % len(HOURS)]][signal]
        yield from (round(value, 1) for value in pool(random, low, high, share, 60))


def _ledger(path: Path, minutes: Sequence[dict[Signal, list[float]]]) -> int:
    """What it grows by: an empty one has the tables and the reserve for a full disk, too."""
    open_ledger(path, write=True).close()
    before = _pages(path)
    signals = open_signals(path, write=True)
    try:
        asyncio.run(_fill(signals.add, minutes))
    finally:
        signals.close()
    return _pages(path) - before


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
