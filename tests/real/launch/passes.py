"""What a launcher does with a run, as a process that kills itself at a named point; and the next pass, which finds what
was left.

The process is forked, so that it starts at once: a test that does it often has to pay for no import. Reports
go to a directory, one file for each node, complete or not at all.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from gpukeeper.acceptance.fleet.collect import decode_frames
from gpukeeper.acceptance.fleet.launcher import Launcher, Phase, RunSpec, Target
from gpukeeper.model.unknown import Unknown

T = TypeVar("T")
OVER = (Phase.ENDED, Phase.GONE)


def a_spec(run: str, engine: str, **changes: object) -> RunSpec:
    made = {"run": run, "owner": "ann", "created": datetime(2026, 1, 1, tzinfo=UTC), "engine": engine, **changes}
    return RunSpec(**made)  # type: ignore[arg-type]


async def launch(launcher: Launcher, spec: RunSpec, into: Path, nodes: Sequence[str] = ()) -> None:
    """From beginning to end, as `gpukeeper accept --on` does it: start, wait, collect, remove."""
    targets = tuple(Target(node=node) for node in nodes) or await launcher.targets(spec)
    await launcher.start(spec, targets)
    await finish(launcher, spec.run, into)
    await launcher.close()


async def finish(launcher: Launcher, run: str, into: Path) -> None:
    while (summary := await launcher.run(run)) is not None:
        if all(node.phase in OVER for node in summary.nodes):
            break
        await asyncio.sleep(0.3)
    if summary is None:
        return
    for node in summary.nodes:
        output = await launcher.output(summary.spec, node.node)
        if not isinstance(output, Unknown):
            keep(into, run, node.node, output)
    await launcher.remove(run)


async def next_pass(make: Callable[[], Launcher], into: Path) -> list[str]:
    """Every run that the engine still has is brought to its end. Their ids."""
    launcher = make()
    runs = await launcher.runs()
    assert not isinstance(runs, Unknown), runs
    for one in runs:
        await finish(launcher, one.spec.run, into)
    await launcher.close()
    return [one.spec.run for one in runs]


def keep(into: Path, run: str, node: str, output: bytes) -> None:
    made = into / f".{run}-{node}-{os.getpid()}"
    made.write_bytes(output)
    made.rename(into / f"{run}-{node}-{os.getpid()}")


def reports(into: Path, run: str, node: str) -> set[bytes]:
    """All complete ones, of whichever process collected them."""
    logs = [path.read_bytes() for path in into.glob(f"{run}-{node}-*")]
    return {report for log in logs for report in decode_frames(log, run, node).reports}


class Moment(StrEnum):
    BEFORE = "before"  # the first request of an operation
    DURING = "during"  # its last request, a seeded time after it began; at its last reply at the latest
    AFTER = "after"  # its last reply


@dataclass
class Point:
    """Where a launcher ends its own process with SIGKILL. `requests`: of the operation, in the first round of it."""

    operation: str
    moment: Moment
    requests: int
    seed: int = 0
    begun: int = 0
    replied: int = 0

    async def around(self, operation: str, request: Callable[[], Awaitable[T]]) -> T:
        if operation != self.operation:
            return await request()
        self.begun += 1
        if self.moment is Moment.BEFORE:
            kill_self()
        if self.moment is Moment.DURING and self.begun == self.requests:
            asyncio.get_running_loop().call_later(random.Random(self.seed).uniform(0, 0.3), kill_self)
        reply = await request()
        self.replied += 1
        if self.replied == self.requests:  # for DURING as well: the reply may come before the timer
            kill_self()
        return reply


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kills_itself(work: Callable[[], object]) -> None:
    """In a child, which has to come to its point: a launcher that ends before, or fails, fails the test."""
    was_killed(forked(work))


def forked(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child


def was_killed(child: int) -> None:
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the launcher did not come to its point; see the output of this test"
    assert os.WTERMSIG(status) == signal.SIGKILL
