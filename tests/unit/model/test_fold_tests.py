"""What the ledger remembers of acceptance runs: the history that a GPU is held against (C2.5)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec

from gpukeeper.model.event import NodeTested
from gpukeeper.model.fold import RUNS_KEPT, remember
from gpukeeper.model.gpu import Grade
from gpukeeper.model.subject import EMPTY, Memory, Ref

NODE = Ref("host", "lab-1", "node", "lab-1", "lab-1")
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def ran(number: int, device: str = "cuda", **gpus: float) -> NodeTested:
    return NodeTested(
        at=BEGAN + timedelta(days=number),
        ref=NODE,
        run=f"run-{number}",
        verdict=Grade.PASS,
        reason="all good",
        device=device,
        gpus=dict.fromkeys(gpus, Grade.PASS),
        values={serial: {"gemm.bf16 mm": value} for serial, value in gpus.items()},
    )


def folded(*lines: NodeTested) -> Memory:
    memory = EMPTY
    for line in lines:
        memory = remember(memory, line) or EMPTY
    return memory


def test_the_newest_runs_of_each_gpu_are_kept_oldest_first() -> None:
    lines = [ran(number, old=700.0 + number) for number in range(RUNS_KEPT + 5)]
    memory = folded(ran(0, moved=1.0), *lines)
    assert [one.values["gemm.bf16 mm"] for one in memory.tested if one.identity == "old"] == [
        700.0 + number for number in range(5, RUNS_KEPT + 5)
    ]
    assert [one.run for one in memory.tested if one.identity == "moved"] == ["run-0"], "another GPU's runs do not count"


def test_what_ran_on_a_cpu_is_no_history_of_a_gpu() -> None:
    assert folded(ran(1, device="cpu", cpu=1.0), ran(2, device="simulated", fake=1.0)) == EMPTY


def test_a_gpu_without_a_figure_is_still_remembered_with_its_verdict() -> None:
    line = NodeTested(
        at=BEGAN, ref=NODE, run="r", verdict=Grade.FAIL, reason="lost", device="cuda", gpus={"s": Grade.FAIL}
    )
    (past,) = folded(line).tested
    assert (past.identity, past.verdict, dict(past.values)) == ("s", Grade.FAIL, {})


def test_runs_without_a_figure_do_not_make_anybody_forget_it() -> None:
    """A GPU that is too slow shows no figure that counts; after many such runs its slowness must not look normal."""
    slow = [msgspec.structs.replace(ran(number, old=1.0), values={}) for number in range(1, 3 * RUNS_KEPT)]
    memory = folded(ran(0, old=800.0), *slow)
    assert [one.values for one in memory.tested if one.values] == [{"gemm.bf16 mm": 800.0}]
    assert len(memory.tested) == RUNS_KEPT + 1
