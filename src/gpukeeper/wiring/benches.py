"""Machines whose GPUs can be tested: this one, and simulated ones. What an acceptance run needs is imported when it is
needed: every other command starts without it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpukeeper.acceptance.run import Workbench
from gpukeeper.blocking import SystemClock
from gpukeeper.model.errors import UsageError
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown

if TYPE_CHECKING:
    from gpukeeper.acceptance.bench.workbench import LocalWorkbench
    from gpukeeper.acceptance.check import RunRequest
    from gpukeeper.acceptance.self_test import Attempt, FaultTarget, SelfTestOutcome

SIMULATED_GPUS = 8
SIMULATED_SEED = 7


@dataclass(frozen=True)
class Bench:
    """A machine whose GPUs can be tested, and the clock that its time passes on."""

    workbench: Workbench
    clock: Clock
    logs: Callable[[], Mapping[str, str]] = dict  # output of its programs, by the name of a file


def open_bench(wish: RunRequest, *, python: str | None = None, count: int | None = None) -> Bench:
    """`python`: the configured interpreter; without it one is searched for, and without any nothing is computed."""
    from gpukeeper.acceptance.bench.workbench import LocalWorkbench

    if wish.device == "simulated":
        return simulated_bench(count or SIMULATED_GPUS, {})
    workbench = LocalWorkbench(interpreter(python), wish.device, count=count or 1)
    return Bench(workbench, SystemClock(), lambda: workbench.logs)


def simulated_bench(gpus: int, faults: Mapping[str, Any]) -> Bench:
    from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench

    workbench = SimulatedWorkbench(gpus=gpus, seed=SIMULATED_SEED, **faults)
    return Bench(workbench, workbench.clock)


def node_name() -> str:
    """What this machine is called in reports."""
    from gpukeeper.acceptance.bench import machine

    return machine.node_name()


async def try_detectors(
    *, python: str | None, device: str, tell: Callable[[Attempt], None] = lambda attempt: None
) -> SelfTestOutcome:
    """The self-test: on simulated machines, and on this one as far as it can run probes."""
    from gpukeeper.acceptance.judging import reference
    from gpukeeper.acceptance.self_test import SelfTestSetup, self_test
    from gpukeeper.acceptance.suite import CHECKS

    found = interpreter(python)
    opened: list[LocalWorkbench] = []
    try:
        alone, together = await _places(found, device, opened)
        return await self_test(SelfTestSetup(_simulated_place, alone, together, CHECKS, reference.limits, tell))
    finally:
        for one in opened:
            await one.close()


def interpreter(wanted: str | None) -> str | Unknown:
    """One that was named and cannot be used is a mistake; none at all is a finding of the run."""
    from gpukeeper.acceptance.bench.probing import find_python

    found = find_python(wanted)
    if isinstance(found, Unknown) and (wanted is not None or os.environ.get("GPUKEEPER_PYTHON")):
        raise UsageError(f"{found.why} Nothing was run.")
    return found


async def _places(
    python: str | Unknown, device: str, opened: list[LocalWorkbench]
) -> tuple[FaultTarget | Unknown, FaultTarget | Unknown]:
    """Two ranks need two GPUs, else the CPU is used instead; if a CPU was requested, it is used for all."""
    from gpukeeper.acceptance.bench.workbench import LocalWorkbench
    from gpukeeper.acceptance.self_test import FaultTarget

    if isinstance(python, Unknown):
        return python, python

    def place(kind: str, count: int, words: str) -> FaultTarget:
        opened.append(LocalWorkbench(python, kind, count=count))
        return FaultTarget(opened[-1], SystemClock(), kind, words)

    if device != "cuda":
        return place("cpu", 1, "this CPU"), place("cpu", 2, "two ranks on this CPU")
    alone = place("cuda", 1, "this machine's GPUs")
    seen = await alone.workbench.machine()
    why = seen.gpus.why if isinstance(seen.gpus, Unknown) else seen.environment.get("torch_why")
    if why or isinstance(seen.gpus, Unknown) or not seen.gpus:
        # A result on a CPU proves nothing about the detectors on GPUs.
        none = Unknown(f"there is no GPU to run them on ({why or 'none found'}). To run them on the CPU: --device cpu")
        return none, none
    return alone, alone if len(seen.gpus) > 1 else place("cpu", 2, "two ranks on this CPU")


def _simulated_place(faults: Mapping[str, Any]) -> FaultTarget:
    from gpukeeper.acceptance.self_test import FaultTarget

    bench = simulated_bench(SIMULATED_GPUS, faults)
    return FaultTarget(bench.workbench, bench.clock, "simulated", "simulated")
