"""An acceptance run as a line of the ledger, and back as history. C2.5"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec

from gpukeeper.engine.tested import history_of, line_of, ref_of
from gpukeeper.ledger.in_memory import InMemoryLedger
from gpukeeper.model.acceptance import Grade
from tests.unit.engine.accept_bench import FLOOR, Bench, figure_check, run


def test_figures_are_remembered_by_serial_number_and_method() -> None:
    report, _ = run(Bench(), [figure_check("gemm")])
    line = line_of(report, "/reports/r-1")
    assert (line.ref, line.run, line.verdict, line.report) == (ref_of("node-1"), "r-1", Grade.PASS, "/reports/r-1")
    assert line.gpus == {"S0": Grade.PASS, "S1": Grade.PASS}
    assert line.values == {"S0": {"gemm.x m": FLOOR * 1.2}, "S1": {"gemm.x m": FLOOR * 1.2}}


def test_what_the_ledger_remembers_comes_back_oldest_first() -> None:
    report, _ = run(Bench(gpus=1), [figure_check("gemm")])
    later = msgspec.structs.replace(report, run="r-2", ended=report.ended + timedelta(days=1))
    on_cpu = msgspec.structs.replace(report, run="r-3", device="cpu")

    async def remembered() -> list[str]:
        ledger = InMemoryLedger()
        await ledger.append([line_of(one, "") for one in (report, later, on_cpu)])
        key = ref_of("node-1").key
        history = history_of((await ledger.memories([key]))[key].tested)
        assert list(history) == ["S0"]
        return [one.run for one in history["S0"]]

    # What a CPU showed says nothing about a GPU.
    assert asyncio.run(remembered()) == ["r-1", "r-2"]
