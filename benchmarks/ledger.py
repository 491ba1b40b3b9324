"""Durable intents and outcomes a second in the ledger, against plain inserts of SQLite with the same durability.

Every line is its own transaction with synchronous=FULL on both sides. Then: memories read a second.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from benchmarks.report import Figure, fastest, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Event, Intended, Noticed
from gpukeeper.model.subject import Ref, State

STEPS, RUNS = sized(500, tiny=10), sized(3, tiny=1)
KNOWN, PAGE = sized(10_000, tiny=500), 500
NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
TIME = timedelta(seconds=1)


def run() -> None:
    with tempfile.TemporaryDirectory(prefix="gpukeeper-bench-") as folder:
        ledger = open_ledger(Path(folder) / "ledger.sqlite3", write=True)
        try:
            ours = 2 * STEPS / fastest(lambda: asyncio.run(_write(ledger)), RUNS)
            asyncio.run(ledger.append([_noticed(n) for n in range(KNOWN)]))
            read = KNOWN / fastest(lambda: asyncio.run(_read(ledger)), RUNS)
        finally:
            ledger.close()
        peer = 2 * STEPS / fastest(lambda: _plain(Path(folder) / "plain.sqlite3"), RUNS)
    rows = [
        ("intents and outcomes, durable", f"{ours:,.0f}", ""),
        ("plain sqlite3 inserts, durable", f"{peer:,.0f}", ""),
        (f"memories read, {PAGE} at a time of {KNOWN:,}", f"{read:,.0f}", ""),
    ]
    print_table(("ledger", "a second", ""), rows)
    print(f"fastest of {RUNS} runs of {STEPS} steps, two lines each; in the folder for temporary files\n")
    print_figure(Figure("ledger", round(ours), "lines/s", round(ours / peer, 2), "plain sqlite3 inserts"))


async def _write(ledger: SqliteLedger) -> None:
    for number in range(STEPS):
        for line in _step(number):
            await ledger.append([line])


async def _read(ledger: SqliteLedger) -> None:
    for first in range(0, KNOWN, PAGE):
        found = await ledger.memories([_ref(n).key for n in range(first, first + PAGE)])
        assert len(found) == PAGE


def _plain(path: Path) -> None:
    """The same bytes as JSON, one row a transaction: the least that durable lines can cost."""
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE lines (seq INTEGER PRIMARY KEY, line TEXT)")
    for number in range(STEPS):
        for line in _step(number):
            connection.execute("INSERT INTO lines (line) VALUES (?)", (msgspec.json.encode(line).decode(),))
    connection.close()


def _step(number: int) -> tuple[Event, Event]:
    ref, step, at = _ref(number), f"1.{number}", NOW + number * TIME
    why = "succeeded 2d ago, kept for 1d"
    intent = Intended(
        at=at,
        ref=ref,
        owner="ann",
        step=step,
        pass_id=1,
        action=Action.REMOVE,
        rule="retention",
        reason=why,
        incarnation="run-1",
    )
    outcome = Closed(
        at=at + TIME,
        ref=ref,
        owner="ann",
        step=step,
        action=Action.REMOVE,
        rule="retention",
        result=Result.RECLAIMED,
        reason=f"{why}; verified: gone",
        incarnation="run-1",
    )
    return intent, outcome


def _noticed(number: int) -> Noticed:
    return Noticed(at=NOW, ref=_ref(number), owner="ann", incarnation="run-1", state=State.RUNNING, started=NOW)


def _ref(number: int) -> Ref:
    return Ref("docker", "node-3", "container", f"run-{number}", f"uid-{number:09d}")
