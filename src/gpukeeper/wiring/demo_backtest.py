"""A backtest for the dashboard of the demo: a synthetic trace under its policy and other idle limits. It runs in a
process of its own with low priority, so that the demo starts as soon as without it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import msgspec

from gpukeeper.backtest.comparison import compare
from gpukeeper.config.load import Loaded, load_text
from gpukeeper.config.sections import deciding_digest
from gpukeeper.ledger.journal import SqliteLedger
from gpukeeper.ledger.meta import BacktestRecord, record_backtest
from gpukeeper.lifecycle.replay import GIVEN, grid
from gpukeeper.lifecycle.replay_outcome import Judging
from gpukeeper.model import reading
from gpukeeper.model.policy import Policy
from gpukeeper.model.ports import Clock
from gpukeeper.processes import DIRECTORY, environment, module_command
from gpukeeper.traces.synthetic import SyntheticTrace
from gpukeeper.views.backtest import TraceFacts, record_of, report

SEED, WORKLOADS, DAYS = 7, 48, 14
HOURS = (1, 2, 5, 12)
NICE = 10
CHILD = module_command("gpukeeper.wiring.demo_backtest")


async def record_in_background(ledger: SqliteLedger, clock: Clock, loaded: Loaded, text: str) -> None:
    """Cancelled: its process is ended, and nothing is recorded. `text`: of the policy."""
    child = _start(text)
    try:
        found, _ = await asyncio.to_thread(child.communicate)
    finally:
        child.kill()
    if child.returncode == 0:
        record = reading.decode(found, BacktestRecord)
        record = msgspec.structs.replace(record, at=clock.now())  # the demo has a time of its own
        await record_backtest(ledger, deciding_digest(loaded.policy), record)


def _start(text: str) -> subprocess.Popen[bytes]:
    none, out = subprocess.DEVNULL, subprocess.PIPE
    command = [*CHILD, text]
    return subprocess.Popen(command, stdin=none, stdout=out, stderr=none, env=environment(), cwd=DIRECTORY)


def computed(policy: Policy, workloads: int = WORKLOADS, hours: tuple[int, ...] = HOURS) -> BacktestRecord:
    trace = SyntheticTrace(SEED, workloads, DAYS)
    judging = Judging(threshold=policy.activity.gpu, slice_threshold=policy.activity.gpu_slice)
    variants = (GIVEN, *grid([timedelta(hours=one) for one in hours], ()))
    judged = compare(trace, policy, variants, judging)
    facts = TraceFacts(
        source=trace.source,
        begin=trace.begin,
        end=trace.end,
        runs=len(judged[GIVEN]),
        rows=trace.rows,
        bad_rows=0,
        bad=(),
        not_recorded=(),
    )
    return record_of(report("", policy.digest, facts, judging, judged), datetime.now(UTC))


if __name__ == "__main__":
    os.nice(NICE)
    sys.stdout.buffer.write(msgspec.json.encode(computed(load_text(sys.argv[1], "the demo's policy").policy)))
