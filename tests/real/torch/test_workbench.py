"""The workbench with the real probes and the real torchrun, on the CPU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpukeeper.acceptance.bench.probing import find_python
from gpukeeper.acceptance.bench.supervisor import descendants
from gpukeeper.acceptance.bench.workbench import LocalWorkbench
from gpukeeper.acceptance.record import ProbeFailure, ProbeRequest, ProbeResult
from tests.engines import has_torch, require
from tests.real.torch import installation

GEMM = {"dtypes": ["fp32"], "n": 64, "seconds": 0.01, "repeats": 2}
COLLECTIVE = {"ops": ["all_reduce"], "sizes": [65_536], "rounds": 2}


@pytest.fixture(autouse=True)
def torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch", has_torch())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def on_bench(use: Callable[[LocalWorkbench], Awaitable[Any]]) -> Any:
    """Nothing that was started may be left afterwards."""
    before = descendants(os.getpid())

    async def run() -> Any:
        async with LocalWorkbench(find_python(installation.python()), "cpu", count=2) as bench:
            return await use(bench)

    answer = asyncio.run(run())
    assert descendants(os.getpid()) <= before
    return answer


def test_probes_answer_and_nothing_of_them_is_left() -> None:
    """C1.1, C1.2: a worker for each, then ranks over both; the same bench, one after the other."""

    async def use(bench: LocalWorkbench) -> Any:
        machine = await bench.machine()
        each = await bench.each(dict.fromkeys(("cpu-0", "cpu-1"), ProbeRequest(probe="gemm", params=GEMM)))
        return (
            machine,
            each,
            await bench.together(["cpu-0", "cpu-1"], ProbeRequest(probe="collectives", params=COLLECTIVE)),
        )

    machine, each, together = on_bench(use)
    assert str(machine.environment["torch"]).startswith(installation.VERSION)
    assert machine.environment["torch_why"] is None
    for answer in each.values():
        assert isinstance(answer, ProbeResult), answer
        assert len(answer.result["dtypes"]["fp32"]["tflops"]) == 2
    assert {rank: answer.result["world"] for rank, answer in together.items()} == {"0": 2, "1": 2}


def test_a_rank_that_is_killed_is_blamed_and_no_rank_is_left() -> None:
    params = {**COLLECTIVE, "inject": {"die": 1}}
    answers = on_bench(
        lambda bench: bench.together(["cpu-0", "cpu-1"], ProbeRequest(probe="collectives", params=params))
    )
    assert isinstance(answers["1"], ProbeFailure)
    assert (answers["1"].kind, "by signal 9" in answers["1"].words) == ("crashed", True)
    assert isinstance(answers["0"], ProbeFailure)
