"""Journal lines a second into PostgreSQL, beside COPY of the same rows into a plain table in the same run.

A private server (as the tests start it), a ledger with lines as passes write them, and the shipper as the daemon runs
it: row level security, partitions, primary key and indexes, a cursor in each transaction. The peer: psycopg's COPY of
the prepared text into a table without a key. fsync is off on both sides: what is measured is the work, not the disk.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.needs import need
from benchmarks.report import Figure, fastest, met, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.ledger.copy.admin import add_machine, initialize
from gpukeeper.ledger.copy.connect import connect
from gpukeeper.ledger.copy.ship import Outbox
from gpukeeper.ledger.copy.shipper import CopySettings, Shipper
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.meta import ensure_identity
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Event, Intended
from gpukeeper.model.subject import Ref
from tests.engines import has_postgres
from tests.real.postgres.server import Server, a_server

LINES, RUNS, GOAL = sized(100_000, tiny=2_000), sized(3, tiny=1), 20_000
SECOND = timedelta(seconds=1)
_PLAIN = """
CREATE TABLE plain (
    line bigint, at bigint, type text, platform text, place text, workload text, key text, owner text, rule text,
    result text, pass_id bigint, step text, error integer, body jsonb
)
"""


def run() -> None:
    need("postgres", has_postgres())
    with tempfile.TemporaryDirectory(prefix="gpukeeper-bench-") as name, a_server() as server:
        folder = Path(name)
        path = folder / "state" / "ledger.db"
        path.parent.mkdir(mode=0o700)
        _write(path)
        rows = _rows(path)
        with server.connect() as connection:
            initialize(connection, folder / "web", None)
        times, copies = [], []
        for number in range(RUNS):  # in turn: both meet the same neighbours
            times.append(_ship(server, folder, path, f"node-{number}"))
            copies.append(fastest(lambda: _copy(server, rows), 1))
    ours, peer = LINES / min(times), LINES / min(copies)
    size = sum(map(len, rows)) / LINES
    print_table(
        ("fleet-ship", "lines a second", ""),
        [
            ("shipped, exactly once", f"{ours:,.0f}", f"goal {GOAL:,}: {met(ours, GOAL, least=True)}"),
            ("COPY of the same rows into a plain table", f"{peer:,.0f}", ""),
        ],
    )
    print(f"fastest of {RUNS} runs of {LINES:,} lines of {size:.0f} bytes\n")
    print_figure(Figure("fleet-ship", round(ours), "lines/s", round(ours / peer, 2), "COPY into a plain table"))


def _ship(server: Server, folder: Path, path: Path, machine: str) -> float:
    """From the start of the shipper, connecting included, until the last line is committed."""
    secret = folder / machine
    with server.connect() as connection:
        role = add_machine(connection, machine, secret)
    settings = CopySettings(address=server.address(role), machine=machine, password_file=str(secret), signals=False)
    shipper = Shipper(settings, path)
    begun = time.perf_counter()
    shipper.start()
    while shipper.state.shipped != LINES:
        time.sleep(0.005)
        assert shipper.state.last_error is None, shipper.state.last_error
    needed = time.perf_counter() - begun
    shipper.stop()
    with closing(connect(server.address())) as connection:
        found = connection.execute("SELECT count(*) FROM gpukeeper.lines WHERE machine = %s", (machine,)).fetchone()
    assert found == (LINES,)
    return needed


def _copy(server: Server, rows: list[str]) -> None:
    with server.connect() as connection:
        connection.execute("DROP TABLE IF EXISTS plain")
        connection.execute(_PLAIN)
        with connection.cursor() as cursor, cursor.copy("COPY plain FROM STDIN WITH (NULL E'\\x01')") as copy:
            for first in range(0, len(rows), 5_000):
                copy.write("\n".join(rows[first : first + 5_000]) + "\n")


def _rows(path: Path) -> list[str]:
    with closing(Outbox(path)) as outbox:
        rows: list[str] = []
        last = 0
        while batch := outbox.batch(last).rows:
            rows += batch
            last = int(batch[-1].partition("\t")[0])
    return rows


def _write(path: Path) -> None:
    ledger = open_ledger(path, write=True)
    try:
        asyncio.run(ensure_identity(ledger))
        begun = datetime.now(UTC) - timedelta(days=20)
        for first in range(0, LINES, 2_000):
            lines = [line for n in range(first // 2, first // 2 + 1_000) for line in _step(n, begun + n * SECOND)]
            asyncio.run(ledger.append(lines))
    finally:
        ledger.close()


def _step(number: int, at: datetime) -> tuple[Event, Event]:
    ref = Ref("docker", "node-3", "container", f"run-{number}", f"uid-{number:09d}")
    step, why = f"1.{number}", "succeeded 2d ago, kept for 1d"
    shared = {"ref": ref, "owner": "ann", "step": step, "action": Action.REMOVE, "rule": "retention"}
    return (
        Intended(at=at, pass_id=1, reason=why, incarnation="run-1", **shared),  # type: ignore[arg-type]
        Closed(at=at + SECOND, result=Result.RECLAIMED, reason=f"{why}; verified: gone", **shared),  # type: ignore[arg-type]
    )
