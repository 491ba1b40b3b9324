"""CPU of a monthly report of 1,000 GPUs, beside a plain read of the same rows in the same run.

30 days: of each GPU and hour one workload with some minutes of use, in every tenth hour a change of workload with free
minutes between. The report is the one behind `gpukeeper report` and the dashboard, sums by owner, class, group, model,
day and hour of the week included. The peer: sqlite3 returns each row as a tuple, and nothing is done with it.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.report import Figure, met, print_figure, print_table, timed
from benchmarks.size import sized
from gpukeeper.interfaces.terminal.usage import read_report
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.usage import SqliteUsage, open_usage
from gpukeeper.model.policy import Prices
from gpukeeper.model.series import WHOLE_HOUR, minute_of
from gpukeeper.views.usage_report import ReportQuery, UsageReport

GPUS, DAYS, RUNS = sized((1_000, 30, 2), tiny=(20, 2, 1))
GOAL = 4.0  # seconds: a fifth of the time that the daemon gives a report
BEGIN = datetime(2026, 9, 1, tzinfo=UTC)
FIRST = minute_of(BEGIN) // 60
OWNERS, CLASSES = 50, ("docker", "managed", "devcontainer")
FREE = 1  # id of the holder that is none


def run() -> None:
    with tempfile.TemporaryDirectory(prefix="gpukeeper-bench-") as name:
        folder = Path(name)
        folder.chmod(0o700)
        rows = _write(folder / "usage.db")
        ours, peer, report = [], [], None
        for _ in range(RUNS):  # in turn: both meet the same neighbours
            seconds, report = timed(lambda: asyncio.run(_report(folder)), time.process_time)
            ours.append(seconds)
            peer.append(timed(lambda: _plain(folder / "usage.db"), time.process_time)[0])
    assert report is not None
    assert round(report.total.all) == GPUS * DAYS * 24
    value, plain = min(ours), min(peer)
    print_table(
        ("usage-report", "CPU s", ""),
        [
            (
                f"report of {GPUS:,} GPUs and {DAYS} days",
                f"{value:.2f}",
                f"goal {GOAL:.0f}: {met(value, GOAL, least=False)}",
            ),
            (f"plain read of the same {rows:,} rows", f"{plain:.2f}", ""),
        ],
    )
    print(f"least of {RUNS} runs; {value / (GPUS * DAYS * 24) * 1e6:.1f} microseconds for a GPU and hour\n")
    print_figure(Figure("usage-report", round(value, 2), "s", round(value / plain, 2), "plain read of the same rows"))


async def _report(folder: Path) -> UsageReport:
    query = ReportQuery(since=BEGIN, until=BEGIN + timedelta(days=DAYS), zone="Europe/Berlin")
    ledger, usage = open_ledger(folder / "ledger.db", write=True), open_usage(folder / "usage.db", write=False)
    try:
        return await read_report(ledger, usage, query, Prices(), BEGIN + timedelta(days=DAYS))
    finally:
        usage.close()
        ledger.close()


def _plain(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for _ in connection.execute("SELECT * FROM hours ORDER BY hour, device, holder"):
            pass


def _write(path: Path) -> int:
    """Into the tables themselves: a month of records would take an hour."""
    usage: SqliteUsage = open_usage(path, write=True)
    usage.close()
    holders = [(FREE, "", "", "", "", "")]
    holders += [
        (number + 2, f"k{number}", f"docker/n1/w{number}", f"user{number % OWNERS}", CLASSES[number % 3], "")
        for number in range(GPUS * 2)
    ]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany("INSERT INTO holders VALUES (?, ?, ?, ?, ?, ?)", holders)
        connection.executemany(
            "INSERT INTO devices VALUES (?, ?, ?, ?, 1.0, 1, ?, ?, 1)",
            [
                (gpu + 1, f"node-{gpu // 8}", f"GPU-{gpu}", "H200", FIRST * 60, (FIRST + DAYS * 24) * 60)
                for gpu in range(GPUS)
            ],
        )
        connection.executemany("INSERT INTO hours VALUES (?, ?, ?, ?, ?, ?, ?)", _hours())
        return int(connection.execute("SELECT count(*) FROM hours").fetchone()[0])


def _hours() -> Iterator[tuple[int, ...]]:
    chance = random.Random(7)
    for hour in range(FIRST, FIRST + DAYS * 24):
        for gpu in range(GPUS):
            active = chance.getrandbits(60)
            if (hour + gpu) % 10:
                yield hour, gpu + 1, gpu + 2, active, WHOLE_HOUR & ~active, 0, 0
            else:
                before, after = (1 << 20) - 1, WHOLE_HOUR & ~((1 << 40) - 1)
                yield hour, gpu + 1, FREE, 0, 0, 0, WHOLE_HOUR & ~(before | after)
                yield hour, gpu + 1, gpu + 2, active & before, before & ~active, 0, 0
                yield hour, gpu + 1, gpu + 2 + GPUS, active & after, after & ~active, 0, 0
