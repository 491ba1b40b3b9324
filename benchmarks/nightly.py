"""A pass over 300 workloads, every tenth of them idle, with `schedule.at`, against the same pass with `schedule.every`.

With one acting pass a night a warning counts for more than a day, so use is searched for over that time, for what was
not used lately. Measured are reading the signals from SQLite and deciding; the workloads were measured every minute for
27 hours, by five signals.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from datetime import timedelta
from itertools import product
from pathlib import Path

import msgspec

from benchmarks.plan import HOUR, POLICY, FixedClock, PagedPlatform
from benchmarks.report import Figure, fastest, met, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.reclaim import look_and_plan
from gpukeeper.ledger.database import open_for_writing, transaction
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger
from gpukeeper.ledger.signals import SqliteSignals, open_signals
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.policy import PlaceScope, Policy, Schedule
from gpukeeper.model.series import Signal
from gpukeeper.notify.messages import Messages

RUNNING, IDLE_EACH, RUNS = sized(300, tiny=10), 10, sized(3, tiny=1)
TARGET = 2.0  # times a pass without schedule.at
MEASURED = 27 * HOUR
MINUTE = timedelta(minutes=1)
_SERIES = "INSERT INTO series (id, key, signal, device, slice, newest, since, until) VALUES (?, ?, ?, ?, 0, ?, ?, ?)"
_BUCKET = "INSERT INTO buckets (series, minute, sum, count) VALUES (?, ?, ?, 1)"


def run() -> None:
    with tempfile.TemporaryDirectory(prefix="gpukeeper-bench-") as folder:
        path = Path(folder) / "ledger.sqlite3"
        asyncio.run(_measure_all(path))
        signals = open_signals(path, write=True)
        try:
            often = _seconds(signals, Schedule())
            nightly = _seconds(signals, Schedule(at="0 3 * * *"))
        finally:
            signals.close()
    rows = [("schedule.every", f"{often:.2f}", ""), ("schedule.at", f"{nightly:.2f}", "")]
    print_table((f"a pass over {RUNNING:,} workloads, {RUNNING // IDLE_EACH} idle", "seconds", ""), rows)
    print(f"ratio: target below {TARGET:g}, {met(nightly / often, TARGET, least=False)}\n")
    print_figure(Figure("nightly", round(nightly, 2), "s", round(nightly / often, 2), "a pass with schedule.every"))


def _seconds(signals: SqliteSignals, schedule: Schedule) -> float:
    policy = msgspec.structs.replace(POLICY, schedule=schedule)
    return fastest(lambda: asyncio.run(_plan(signals, policy)), RUNS)


async def _plan(signals: SqliteSignals, policy: Policy) -> None:
    platform = PagedPlatform(2 * RUNNING)
    keeper = Keeper((platform,), InMemoryLedger(), signals, InMemoryEvidence(), Messages(()), FixedClock())
    await look_and_plan(keeper, platform, Rulebook(policy))


async def _measure_all(path: Path) -> None:
    """As rows: to add 8 million samples one by one would take minutes."""
    end = int(FixedClock().now().timestamp()) // 60
    minutes = range(end - MEASURED // MINUTE, end + 1)
    keys = [
        (subject.ref.key, subject.devices[0])
        async for page in PagedPlatform(2 * RUNNING).observe(PlaceScope())
        for subject in page.subjects
        if isinstance(subject.devices, tuple) and subject.ended is None
    ]
    since, until = minutes[0] * 60_000_000, (end * 60 + 59) * 1_000_000

    def write(c: sqlite3.Connection) -> None:
        with transaction(c):
            for number, ((key, device), signal) in enumerate(product(keys, Signal)):
                named = device if signal is Signal.GPU else ""
                c.execute(_SERIES, (number, key, signal.value, named, end, since, until))
                used = 0.0 if number // len(Signal) % IDLE_EACH == 0 else 80.0
                c.executemany(_BUCKET, ((number, minute, used) for minute in minutes))

    connection = open_for_writing(path, "NORMAL")
    write(connection)
    connection.close()
