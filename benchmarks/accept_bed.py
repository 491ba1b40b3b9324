"""The GPUs of this machine for the benchmarks of acceptance, through the workbench that `accept` uses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.needs import CannotMeasure, need
from gpukeeper.acceptance.bench.probing import find_python
from gpukeeper.acceptance.bench.workbench import LocalWorkbench
from gpukeeper.acceptance.record import ProbeFailure, ProbeRequest
from gpukeeper.model.unknown import Unknown
from tests.engines import has_gpu


def ask(jobs: Sequence[ProbeRequest]) -> list[Any]:
    """What the first GPU answers to each. Without a GPU or PyTorch: CannotMeasure."""
    return asyncio.run(_ask(jobs))


async def _ask(jobs: Sequence[ProbeRequest]) -> list[Any]:
    need("gpu", has_gpu())
    python = find_python()
    if isinstance(python, Unknown):
        raise CannotMeasure(python.why)
    async with LocalWorkbench(python, "cuda") as bench:
        machine = await bench.machine()
        if isinstance(machine.gpus, Unknown) or not machine.gpus:
            raise CannotMeasure("There is no GPU here that the driver names.")
        first = machine.gpus[0].uuid
        return [await _one(bench, first, job) for job in jobs]


async def _one(bench: LocalWorkbench, uuid: str, job: ProbeRequest) -> Any:
    answer = (await bench.each({uuid: job}))[uuid]
    if isinstance(answer, ProbeFailure):
        raise CannotMeasure(f"The probe {job.probe} gave no figure: {answer.words}")
    return answer.result
