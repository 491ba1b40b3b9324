"""The GPUs of this machine for the benchmarks of acceptance, through the workbench that `accept` uses."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from gpukeeper.acceptance.bench.interpreter import find_python
from gpukeeper.acceptance.bench.workbench import LocalWorkbench
from gpukeeper.acceptance.record import ProbeFailure, ProbeRequest
from gpukeeper.model.unknown import Unknown


def ask(jobs: Sequence[ProbeRequest]) -> list[Any]:
    """What the first GPU answers to each. Without a GPU or PyTorch: a sentence, and the end."""
    return asyncio.run(_ask(jobs))


async def _ask(jobs: Sequence[ProbeRequest]) -> list[Any]:
    async with LocalWorkbench(find_python(), "cuda") as bench:
        machine = await bench.machine()
        if isinstance(machine.gpus, Unknown) or not machine.gpus:
            sys.exit("This benchmark needs a GPU, and there is none here that the driver names.")
        first = machine.gpus[0].uuid
        return [await _one(bench, first, job) for job in jobs]


async def _one(bench: LocalWorkbench, uuid: str, job: ProbeRequest) -> Any:
    answer = (await bench.each({uuid: job}))[uuid]
    if isinstance(answer, ProbeFailure):
        sys.exit(f"The probe {job.probe} gave no figure: {answer.words}")
    return answer.result
