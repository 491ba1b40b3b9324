"""An acceptance run as a line of the ledger, and back as history. C2.5"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec

from gpukeeper.acceptance.record import history_of, line_of, ref_of
from gpukeeper.acceptance.reports.wording import gpus_of
from gpukeeper.ledger.in_memory import InMemoryLedger
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.accept_bench import FLOOR, Bench, figure_check, run


def test_figures_are_remembered_by_serial_number_and_method() -> None:
    report, _ = run(Bench(), [figure_check("gemm")])
    line = line_of(report, "/reports/r-1")
    assert (line.ref, line.run, line.verdict, line.report) == (ref_of("node-1"), "r-1", Grade.PASS, "/reports/r-1")
    assert line.gpus == {"S0": Grade.PASS, "S1": Grade.PASS}
    assert line.values == {"S0": {"gemm.x m": FLOOR * 1.2}, "S1": {"gemm.x m": FLOOR * 1.2}}
    judged = tuple(msgspec.structs.replace(one, floor=FLOOR) for one in report.findings)
    floors = line_of(msgspec.structs.replace(report, findings=judged), "").floors
    assert floors == {"S0": {"gemm.x m": FLOOR}, "S1": {"gemm.x m": FLOOR}}
    assert line.not_passed == {}
    assert set(line.models) == {"S0", "S1"}


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


def test_only_figures_that_passed_are_what_later_ones_are_held_against() -> None:
    """C2.5, A13: else a GPU that gets slower by and by is its own yardstick."""
    report, _ = run(Bench(), [figure_check("gemm")])
    slow, good = report.findings
    for grade in (Grade.WARN, Grade.FAIL, Grade.INCONCLUSIVE):
        found = (msgspec.structs.replace(slow, verdict=grade), good)
        line = line_of(msgspec.structs.replace(report, findings=found), "")
        assert list(line.values) == ["S1"]
        assert line.not_passed == {"S0": {"gemm.x m": FLOOR * 1.2}}, "shown, and never compared with"


def test_a_run_that_was_interrupted_accepted_nobody() -> None:
    report, _ = run(Bench(), [figure_check("gemm")])
    line = line_of(msgspec.structs.replace(report, interrupted=True), "")
    assert (line.gpus, line.values) == ({"S0": Grade.INCONCLUSIVE, "S1": Grade.INCONCLUSIVE}, {})
    assert line_of(msgspec.structs.replace(report, self_test=True), "").values == {}


def test_gpus_of_one_board_are_distinguished_by_uuid() -> None:
    """A12: one serial number for several GPUs; the verdict on one must not be taken for that on another."""
    bench = Bench(gpus=3, script={("gemm", 0): [FLOOR * 0.5]})
    assert not isinstance(bench.gpus, Unknown)
    bench.gpus = (*(msgspec.structs.replace(one, serial="board") for one in bench.gpus[:2]), bench.gpus[2])
    report, _ = run(bench, [figure_check("gemm")])
    line = line_of(report, "")
    assert line.gpus == {"GPU-0": Grade.FAIL, "GPU-1": Grade.PASS, "S2": Grade.PASS}
    assert line.values.keys() == {"GPU-1", "S2"}
    # The report itself goes by the same names: --gpus, compare and history do not differ from the ledger.
    assert [one.identity for one in gpus_of(report.machine)] == list(line.gpus)
