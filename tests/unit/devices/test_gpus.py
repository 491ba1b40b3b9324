"""What each GPU or slice weighs. Profile names as NVIDIA's MIG guide lists them."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest

from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.devices.gpus import LocalGpus, shares_of
from gpukeeper.engine.ports import Gpus
from gpukeeper.model.unknown import Unknown


def cut(model: str, *profiles: str) -> tuple[GpuFacts, ...]:
    parts = tuple(SliceFacts(uuid=f"MIG-{n}", index=n, name=f"{model} MIG {one}") for n, one in enumerate(profiles))
    return (GpuFacts(uuid="GPU-1", index=0, name=model, slices=parts),)


@pytest.mark.parametrize(
    ("model", "profile", "share"),
    [
        ("NVIDIA A100-SXM4-40GB", "1g.5gb", 1 / 7),
        ("NVIDIA A100-SXM4-40GB", "1g.5gb+me", 1 / 7),
        ("NVIDIA A100-SXM4-40GB", "1c.2g.10gb", 1 / 7),
        ("NVIDIA A100-SXM4-40GB", "3g.20gb", 3 / 7),
        ("NVIDIA H200", "7g.141gb", 1.0),
        ("NVIDIA H100 80GB HBM3", "2g.20gb", 2 / 7),
        ("NVIDIA A30", "1g.6gb", 1 / 4),
        ("NVIDIA A30", "4g.24gb", 1.0),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "1g.24gb+gfx", 1 / 4),
        ("NVIDIA RTX PRO 5000 Blackwell", "1g.24gb", 1 / 2),
        ("NVIDIA A300 of the future", "1g.50gb", 1 / 7),
    ],
)
def test_a_slice_weighs_its_part_of_the_model(model: str, profile: str, share: float) -> None:
    assert shares_of(cut(model, profile)) == {"MIG-0": pytest.approx(share)}


def test_whole_gpus_weigh_one_and_cut_ones_are_not_listed_themselves() -> None:
    gpus = (GpuFacts(uuid="GPU-0", index=1, name="NVIDIA H200"), *cut("NVIDIA H200", "3g.71gb", "4g.71gb"))
    assert shares_of(gpus) == {"GPU-0": 1.0, "MIG-0": pytest.approx(3 / 7), "MIG-1": pytest.approx(4 / 7)}


@pytest.mark.parametrize(
    "gpu",
    [
        GpuFacts(uuid=Unknown("GPU is lost"), index=0),
        GpuFacts(uuid="GPU-1", index=0, slices=Unknown("driver")),
        GpuFacts(uuid="GPU-1", index=0, slices=(SliceFacts(uuid="MIG-1", index=0),)),
        GpuFacts(uuid="GPU-1", index=0, slices=(SliceFacts(uuid="MIG-1", index=0, name="NVIDIA A100"),)),
    ],
)
def test_one_that_cannot_be_weighed_makes_the_sum_unknown(gpu: GpuFacts) -> None:
    assert isinstance(shares_of((GpuFacts(uuid="GPU-0", index=1), gpu)), Unknown)


class Driver:
    """Answers as the test says, and counts how often it was asked."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked, self.now = answer, 0, 0.0

    def inventory(self, _deadline: timedelta) -> Any:
        self.asked += 1
        return self.answer

    def gpus(self) -> LocalGpus:
        return LocalGpus(inventory=self.inventory, ticks=lambda: self.now)


def test_an_answer_is_remembered_for_half_a_minute() -> None:
    driver = Driver((GpuFacts(uuid="GPU-0", index=0),))
    gpus: Gpus = (local := driver.gpus())
    assert asyncio.run(gpus.shares()) == {"GPU-0": 1.0}
    driver.now, driver.answer = 29.9, ()
    assert asyncio.run(local.inventory()) != ()
    driver.now = 30.0
    assert asyncio.run(local.inventory()) == ()
    assert driver.asked == 2


def test_a_failure_is_not_remembered() -> None:
    driver = Driver(Unknown("the NVIDIA driver did not answer within 10s"))
    gpus = driver.gpus()
    assert asyncio.run(gpus.shares()) == driver.answer
    driver.answer = ()
    assert asyncio.run(gpus.shares()) == {}


def test_a_driver_that_hangs_beyond_its_own_deadline_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpukeeper.devices.gpus.A_MOMENT", timedelta(milliseconds=50))
    gpus = LocalGpus(timedelta(milliseconds=50), inventory=lambda _deadline: time.sleep(600) or ())
    assert isinstance(asyncio.run(gpus.inventory()), Unknown)
