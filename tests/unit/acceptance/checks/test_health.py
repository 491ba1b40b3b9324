"""Health: what is not a case of one sick GPU (those are data files below tests/cases/acceptance/health)."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.check import CheckRun, CheckSize, RunRequest
from gpukeeper.acceptance.checks import health as check
from gpukeeper.model.gpu import Grade, Reading
from tests.unit.acceptance.machines import context, gpus, health

LOOK = CheckRun(serving=CheckSize(depth=0, seconds=0, worth=0, what=""))


def test_every_gpu_gets_its_own_finding() -> None:
    both = {f"GPU-{i}": health(f"GPU-{i}") for i in range(2)}
    found = check.interpret(LOOK, context(gpus(2), before=both, after=both))
    assert [(one.gpu, one.verdict) for one in found] == [("GPU-0", Grade.PASS), ("GPU-1", Grade.PASS)]


def test_without_a_gpu_it_is_skipped() -> None:
    (found,) = check.interpret(LOOK, context(gpus(1), wish=RunRequest(device="cpu")))
    assert found.verdict is Grade.SKIPPED


def test_a_driver_that_is_silent_after_the_run_leaves_it_open() -> None:
    (found,) = check.interpret(LOOK, context(gpus(1), before={"GPU-0": health()}, after={}))
    assert (found.verdict, found.code) == (Grade.INCONCLUSIVE, "health-after-not-known")


def test_changes_are_tied_to_the_check_that_ran() -> None:
    here = context(
        gpus(1),
        before={"GPU-0": health(pcie_replays=5)},
        at_check={
            "gemm": {"GPU-0": health(seconds=10, pcie_replays=5, energy_mj=4000)},
            "copies": {"GPU-0": health(seconds=20, pcie_replays=8, energy_mj=4000)},
        },
        after={"GPU-0": health(seconds=30, pcie_replays=8, energy_mj=4000)},
        readings=(Reading(uuid="GPU-0", at=1.0),),
    )
    (found,) = check.interpret(LOOK, here)
    assert (found.code, found.value, found.evidence) == ("health-pcie-replays", 3, {"during": "copies"})


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("NVIDIA H200", 18),
        ("NVIDIA H100 80GB HBM3", 18),
        ("NVIDIA B200", 18),
        ("NVIDIA A100-SXM4-80GB", 12),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA H20", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L4", None),
    ],
)
def test_only_boards_with_known_links_are_queried_for_them(name: str, links: int | None) -> None:
    assert check.links_expected(gpus(1, name=name)[0]) == links


def test_a_slice_is_not_queried_for_nvlinks() -> None:
    parts = gpus(1, part_of="GPU-9", profile="1g.18gb")
    both = {"GPU-0": health(nvlinks_active=0)}
    (found,) = check.interpret(LOOK, context(parts, before=both, after=both))
    assert found.verdict is Grade.PASS


def test_a_day_of_which_few_readings_are_kept_is_judged_as_one_of_which_all_are() -> None:
    """Held back for a twentieth of the time: whether it is sampled twice a second or every eight seconds."""
    both = {"GPU-0": health()}
    for apart in (0.5, 8.0):
        seen = [Reading(uuid="GPU-0", at=apart * n, reasons=0 if n % 20 else 0x8) for n in range(round(86400 / apart))]
        (found,) = check.interpret(LOOK, context(gpus(1), before=both, after=both, readings=tuple(seen)))
        assert (found.code, found.verdict) == ("health-clocks-slowed", Grade.FAIL)
