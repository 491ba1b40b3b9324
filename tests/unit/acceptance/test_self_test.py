"""The self-test of the detectors: it passes when all are found, and fails when a detector is blind or sees ghosts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench
from gpukeeper.acceptance.check import Check
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.record import Finding
from gpukeeper.acceptance.self_test import (
    FAULTS,
    NOTHING,
    PROBE_FAULTS,
    Attempt,
    FaultTarget,
    SelfTestOutcome,
    SelfTestSetup,
    self_test,
)
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown

NO_TORCH = Unknown("there is no PyTorch")


def simulated(faults: Mapping[str, Any]) -> FaultTarget:
    bench = SimulatedWorkbench(gpus=8, seed=7, **faults)
    return FaultTarget(bench, bench.clock, "simulated", "simulated")


def stand_in(gpus: int) -> FaultTarget:
    """In the place of this machine: its probes understand injected faults, too."""
    bench = SimulatedWorkbench(gpus=gpus, seed=3)
    return FaultTarget(bench, bench.clock, "cpu", f"{gpus} stand-ins")


def outcome(
    checks: tuple[Check, ...] = CHECKS,
    alone: FaultTarget | Unknown = NO_TORCH,
    together: FaultTarget | Unknown = NO_TORCH,
) -> tuple[SelfTestOutcome, list[Attempt]]:
    told: list[Attempt] = []
    bed = SelfTestSetup(simulated, alone, together, checks, reference.limits, told.append)
    return asyncio.run(self_test(bed)), told


def with_check(name: str, **changes: Any) -> tuple[Check, ...]:
    assert any(one.name == name for one in CHECKS)
    return tuple(replace(one, **changes) if one.name == name else one for one in CHECKS)


def test_every_fault_is_found_and_a_clean_machine_passes() -> None:
    found, told = outcome(alone=stand_in(1), together=stand_in(2))
    assert found.verdict is Grade.PASS, found.reason
    assert list(found.attempts) == told
    assert all(one.caught for one in told)
    planted = [one.injected for one in told if one.where == "simulated"]
    assert planted == [NOTHING, *(one.words for one in FAULTS)]
    here = [one for one in told if one.where != "simulated"]
    # Each detector is tried clean, then with the fault; and every kind of number has a flipped bit of its own.
    assert sum(one.injected == NOTHING for one in here) == 1 + len(PROBE_FAULTS)
    flips = [one.injected.rpartition(" ")[2] for one in here if "lowest bit" in one.injected]
    assert flips == ["fp32", "bf16", "fp16", "int8"]


def test_without_probes_it_is_inconclusive_and_never_a_pass() -> None:
    found, _ = outcome()
    assert found.verdict is Grade.INCONCLUSIVE
    assert "there is no PyTorch" in found.reason


@pytest.mark.parametrize("check", ["gemm", "exact", "collectives", "environment", "health"])
def test_a_detector_that_sees_nothing_is_noticed(check: str) -> None:
    fine = Finding(check=check, verdict=Grade.PASS, code="fine", message="Everything is fine.", samples=(1.0,))
    found, told = outcome(with_check(check, interpret=lambda trial, context: (fine,)))
    assert found.verdict is Grade.FAIL
    missed = [one for one in told if not one.caught]
    assert missed
    assert all(check in one.expected for one in missed)


def test_a_detector_that_sees_ghosts_is_noticed() -> None:
    ghost = Finding(check="exact", gpu=None, verdict=Grade.FAIL, code="exact-mismatch", message="A ghost.")
    found, told = outcome(with_check("exact", interpret=lambda trial, context: (ghost,)), stand_in(1), stand_in(2))
    assert found.verdict is Grade.FAIL
    assert not told[0].caught
    clean = [one for one in told if one.expected == "no FAIL by exact"]
    assert [one.caught for one in clean] == [False]


def test_a_check_that_measures_nothing_does_not_count_as_clean() -> None:
    found, told = outcome(with_check("training", interpret=lambda trial, context: ()), stand_in(1), stand_in(2))
    assert found.verdict is Grade.FAIL
    assert [one.caught for one in told if one.expected == "no FAIL by training"] == [False]


def test_the_wrong_gpu_blamed_is_not_found() -> None:
    original = next(one for one in CHECKS if one.name == "exact").interpret

    def swapped(trial: Any, context: Any) -> tuple[Finding, ...]:
        first = context.gpus[0].uuid
        found = original(trial, context)
        return tuple(
            one if one.verdict is not Grade.FAIL else Finding(**{**_fields(one), "gpu": first}) for one in found
        )

    found, told = outcome(with_check("exact", interpret=swapped))
    assert found.verdict is Grade.FAIL
    assert [one.injected for one in told if not one.caught] == ["bit flip on GPU 2 in bf16"]


def _fields(finding: Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in finding.__struct_fields__}


@pytest.mark.parametrize(
    ("check", "code", "missed"),
    [
        ("environment", "gpus-missing", "one GPU of eight is missing"),
        ("health", "health-clocks-slowed", "GPU 5 overheats and throttles"),
    ],
)
def test_another_finding_about_the_same_fault_does_not_make_up_for_a_blind_detector(
    check: str, code: str, missed: str
) -> None:
    original = next(one for one in CHECKS if one.name == check).interpret

    def blind(trial: Any, context: Any) -> tuple[Finding, ...]:
        return tuple(one for one in original(trial, context) if one.code != code)

    found, told = outcome(with_check(check, interpret=blind))
    assert found.verdict is Grade.FAIL
    assert [one.injected for one in told if not one.caught] == [missed]
