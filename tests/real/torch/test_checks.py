"""Checks and probes of one GPU together: each asks what its probe understands, and reads what it really says."""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, RunRequest
from gpukeeper.acceptance.checks import copies, exact, gemm, memory_bandwidth, memory_pattern, stress, training
from gpukeeper.acceptance.record import Finding, Machine, ProbeResult, Thresholds
from gpukeeper.model.gpu import Gpu, Grade
from tests.real.torch import installation

ALL = [one.CHECK for one in (gemm, memory_bandwidth, copies, exact, training, memory_pattern, stress)]
CPU = Gpu(uuid="cpu-0", index=0, name="CPU")
FAST = Thresholds(floor=1e-9, reference=1e-9, source="anything that moves")


def context(**wish: Any) -> CheckContext:
    machine = Machine(node="here", gpus=(CPU,))
    return CheckContext(wish=RunRequest(device="cpu", **wish), machine=machine, gpus=(CPU,), limits=lambda *_: FAST)


def tried(worker: installation.Worker, check: Check, depth: int = 0, **wish: Any) -> tuple[Finding, ...]:
    given = context(**wish)
    serving = check.servings[min(depth, len(check.servings) - 1)]
    assert check.request is not None
    job = check.request(serving, given)
    done = ProbeResult(result=worker.run(job.probe, **job.params))
    return check.interpret(CheckRun(serving=serving, answers={"cpu-0": done}), given)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("check", ALL, ids=lambda check: check.name)
def test_a_clean_run_has_a_finding_for_everything_and_no_fault(
    worker: installation.Worker, check: Check, depth: int
) -> None:
    """Speed may be told as too noisy: this machine is shared. Nothing is wrong, and nothing is missing."""
    findings = tried(worker, check, depth)
    assert findings
    speeds = {"steadiness", "step_time"}  # of a machine that does other things beside
    assert not [one for one in findings if one.verdict is Grade.FAIL and one.metric not in speeds]
    assert not [one.message for one in findings if one.code.endswith("-missing")]


@pytest.mark.parametrize(
    ("check", "inject", "code"),
    [
        (memory_bandwidth.CHECK, {"flip": True}, "memory-bandwidth-wrong-data"),
        (copies.CHECK, {"flip": True}, "copies-wrong-data"),
        (memory_pattern.CHECK, {"flip": True}, "memory-pattern-errors"),
        (exact.CHECK, {"flip": "bf16"}, "exact-mismatch"),
        (exact.CHECK, {"nan": "fp32"}, "exact-mismatch"),
        (exact.CHECK, {"lie": "int8"}, "exact-mismatch"),
        (training.CHECK, {"flip": True}, "training-not-deterministic"),
        (stress.CHECK, {"flip": True}, "stress-mismatch"),
        (stress.CHECK, {"slow": 6.0}, "stress-slows-down"),
    ],
    ids=lambda value: value.name if isinstance(value, Check) else str(value),
)
def test_a_planted_fault_fails_the_check(
    worker: installation.Worker, check: Check, inject: dict[str, Any], code: str
) -> None:
    findings = tried(worker, check, inject={check.name: inject})
    assert code in {one.code for one in findings if one.verdict is Grade.FAIL}
