"""The machine that was promised (C1.1: the expected count is an input; C17.2: no GPU is no success)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpukeeper.acceptance.check import CheckContext, CheckRun, CheckSize, RunRequest
from gpukeeper.acceptance.checks import environment
from gpukeeper.acceptance.record import Finding, Machine, Remedy
from gpukeeper.model.gpu import Gpu, Grade
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.machines import context, gpus

FINE: Mapping[str, Any] = {
    "torch": "2.11.0",
    "cuda": "13.0",
    "driver": "580.65",
    "nccl": "2.27.7",
    "shm_bytes": 64 << 30,
    "memlock": "unlimited",
    "fabric_manager": True,
}
LOOK = CheckRun(serving=CheckSize(depth=0, seconds=0, worth=0, what=""))


def read(here: CheckContext) -> dict[str, Finding]:
    return {
        finding.code: finding for finding in environment.interpret(LOOK, here) if finding.verdict is not Grade.SKIPPED
    }


def of(
    n: int = 8, expected: int | None = 8, machine: Mapping[str, Any] | None = None, **facts: Any
) -> dict[str, Finding]:
    return read(
        context(gpus(n), environment={**FINE, **facts}, wish=RunRequest(expected=expected), machine=machine or {})
    )


def test_all_is_well() -> None:
    found = of()
    assert list(found) == ["environment-ok"]
    assert found["environment-ok"].message == "8 GPUs, driver 580.65, cuda 13.0, torch 2.11.0, nccl 2.27.7."


@pytest.mark.parametrize(("n", "code", "verdict"), [(7, "gpus-missing", "FAIL"), (9, "gpus-more", "WARN")])
def test_another_count_than_expected(n: int, code: str, verdict: str) -> None:
    found = of(n)
    assert list(found) == [code]
    assert (found[code].verdict, found[code].value) == (verdict, n)


def test_without_an_expectation_the_count_is_told_and_how_to_expect_it() -> None:
    here = context(gpus(8), environment=FINE, wish=RunRequest())
    told = [finding for finding in environment.interpret(LOOK, here) if finding.verdict is Grade.SKIPPED]
    assert "--expect 8" in told[0].message


def test_slices_are_counted_by_their_gpu() -> None:
    parts = tuple(
        Gpu(uuid=f"MIG-{i}", index=0, name="NVIDIA H200", part_of="GPU-0", profile="1g.18gb") for i in range(7)
    )
    assert list(read(context(parts, environment=FINE, wish=RunRequest(expected=1)))) == ["environment-ok"]


def test_no_gpu_is_inconclusive_and_teaches() -> None:
    found = of(0, expected=None)["no-gpu"]
    assert found.verdict is Grade.INCONCLUSIVE
    assert "--gpus all" in found.message


def test_no_gpu_where_some_were_expected_fails_too() -> None:
    assert of(0)["gpus-missing"].verdict is Grade.FAIL


def test_a_driver_that_does_not_answer_is_quoted() -> None:
    machine = Machine(
        node="n", gpus=Unknown("Failed to initialize NVML: Driver/library version mismatch"), environment=FINE
    )
    here = CheckContext(wish=RunRequest(expected=8), machine=machine, gpus=(), limits=context(gpus(1)).limits)
    found = read(here)["no-gpu"]
    assert found.verdict is Grade.INCONCLUSIVE
    assert found.action is Remedy.REBOOT
    assert "version mismatch" in found.message


def test_a_gpu_on_the_bus_that_the_driver_does_not_name_fails() -> None:
    found = of(7, expected=None, machine={"on_bus": 8})
    assert found["gpu-unnamed"].verdict is Grade.FAIL


def test_a_gpu_that_does_not_answer_fails_and_is_not_counted_twice() -> None:
    found = of(7, expected=None, machine={"on_bus": 8, "silent": ("GPU 3 does not report its uuid: GPU is lost",)})
    assert list(found) == ["gpu-silent"]
    assert "GPU 3" in found["gpu-silent"].message


def test_a_bus_that_cannot_be_read_accuses_nobody() -> None:
    assert list(of(machine={"on_bus": Unknown("inside a workload", by_design=True)})) == ["environment-ok"]


@pytest.mark.parametrize(
    ("why", "code"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "no-torch"),
        ("AssertionError: Torch not compiled with CUDA enabled", "cuda-mismatch"),
        ("The NVIDIA driver on your system is too old (found version 11040)", "driver-too-old"),
        ("nobody asked", "no-torch"),
    ],
)
def test_without_torch_nothing_can_be_tested(why: str, code: str) -> None:
    found = of(torch=Unknown(why))[code]
    assert found.verdict is Grade.INCONCLUSIVE
    assert why in found.message


def test_a_torch_that_is_there_and_cannot_use_the_gpu_gives_the_reason() -> None:
    found = of(torch_why="RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable")
    assert list(found) == ["busy-gpu"]
    assert found["busy-gpu"].verdict is Grade.INCONCLUSIVE


def test_one_gpu_alone_needs_no_locked_memory() -> None:
    assert list(of(1, expected=1, memlock=65536)) == ["environment-ok"]


def test_versions_that_differ_warn() -> None:
    odd = (
        *gpus(7, facts={"vbios": "96.00.A5"}),
        Gpu(uuid="GPU-7", index=7, name="NVIDIA H200", facts={"vbios": "96.00.B1"}),
    )
    found = read(context(odd, environment=FINE))
    assert found["environment-vbios-mixed"].verdict is Grade.WARN
    assert "7× 96.00.A5, 1× 96.00.B1" in found["environment-vbios-mixed"].message


def test_several_models_warn() -> None:
    mixed = (*gpus(7), Gpu(uuid="GPU-7", index=7, name="NVIDIA L4"))
    assert read(context(mixed, environment=FINE))["environment-models-mixed"].verdict is Grade.WARN


@pytest.mark.parametrize(
    ("fact", "value", "code"),
    [
        ("shm_bytes", 64 << 20, "environment-shm-small"),
        ("memlock", 65536, "environment-memlock-low"),
    ],
)
def test_limits_that_will_hurt_warn_with_the_fix(fact: str, value: int, code: str) -> None:
    found = of(**{fact: value})[code]
    assert found.verdict is Grade.WARN
    assert "--" in found.message


def test_a_switch_without_its_manager_warns() -> None:
    sxm = gpus(8, name="NVIDIA H100 80GB HBM3")
    found = read(context(sxm, environment={**FINE, "fabric_manager": False}))
    assert found["environment-fabric-manager"].verdict is Grade.WARN


def test_on_a_cpu_only_torch_and_limits_are_queried() -> None:
    here = context(gpus(0), environment=FINE, wish=RunRequest(device="cpu", expected=8))
    assert list(read(here)) == ["environment-ok"]
