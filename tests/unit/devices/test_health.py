"""Asking the program that keeps the driver open. The programs here are small ones that answer, hang, babble or die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from gpukeeper.devices.driver.client import HealthMonitor, gpus_of, health_of
from gpukeeper.devices.driver.facts import NO_SLICE_UTILISATION, GpuFacts, SliceFacts
from gpukeeper.model.gpu import Advice, Xid
from gpukeeper.model.unknown import Unknown
from tests.patience import PATIENT
from tests.unit.devices.driver.programs import program

NOW = datetime(2026, 3, 2, tzinfo=UTC)
GPU = {
    "index": 0,
    "uuid": "GPU-0",
    "sliced": False,
    "advice": {"why": "no"},
    "counters": {"pcie_replays": 3},
    "states": {"persistence": True, "inforom_ok": {"why": "no"}},
}
HEALTH = {"state": "answered", "gpus": [GPU]}
READINGS = {"state": "answered", "readings": [{"uuid": "GPU-0", "at": 7.5, "power_w": 88.0, "sm_mhz": None}]}
ANSWERS = f"""
for question in asked():
    give(question, {{"health": {HEALTH!r}, "readings": {READINGS!r}}}[question["about"]])
"""
HANGS_ONCE = """
import pathlib, time
seen = pathlib.Path({file!r})
for question in asked():
    if not seen.exists():
        seen.touch()
        time.sleep(600)
    give(question, {answer!r})
"""


def driven(text: str, use: Callable[[HealthMonitor], Awaitable[Any]], deadline: timedelta = PATIENT) -> Any:
    async def run() -> Any:
        driver = HealthMonitor(program(text), deadline)
        try:
            return await use(driver)
        finally:
            await driver.close()

    return asyncio.run(run())


def test_a_read_gives_values_and_unknowns() -> None:
    (found,) = driven(ANSWERS, lambda driver: driver.health())
    assert found.counters == {"pcie_replays": 3}
    assert found.states == {"persistence": True, "inforom_ok": Unknown("no")}
    assert (found.sliced, found.advice) == (False, Unknown("no"))


def test_readings_keep_what_was_not_measured_apart_from_zero() -> None:
    (found,) = driven(ANSWERS, lambda driver: driver.readings())
    assert (found.at, found.power_w, found.sm_mhz, found.reasons) == (7.5, 88.0, None, None)


def test_a_driver_that_is_stuck_is_given_up_and_the_next_read_begins_again(tmp_path: Any) -> None:
    async def twice(driver: HealthMonitor) -> tuple[Any, Any]:
        return await driver.health(), await driver.health()

    text = HANGS_ONCE.format(file=str(tmp_path / "seen"), answer=HEALTH)
    first, second = driven(text, twice, timedelta(seconds=1))
    assert isinstance(first, Unknown)
    assert "did not answer within" in first.why
    assert [one.uuid for one in second] == ["GPU-0"]


def test_a_question_that_is_given_up_does_not_get_its_answer_later() -> None:
    """An interrupted run: whoever asks next must not read the old answer."""

    async def interrupted(driver: HealthMonitor) -> Any:
        await driver.health()
        asking = asyncio.ensure_future(driver.health())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return await driver.readings()

    (found,) = driven(ANSWERS, interrupted)
    assert found.power_w == 88.0


def test_whatever_is_wrong_with_the_program_is_unknown_and_gives_the_reason() -> None:
    for text, why in (
        ("sys.stderr.write('Segmentation fault'); sys.exit(1)", "Segmentation fault"),
        ("next(asked()); print('hello')", "invalid reply"),
        ("give(next(asked()), {'state': 'failed', 'why': 'GPU is lost'})", "GPU is lost"),
    ):
        found = driven(text, lambda driver: driver.health())
        assert isinstance(found, Unknown)
        assert why in found.why


def test_after_a_failure_the_driver_is_opened_again(tmp_path: Any) -> None:
    """What was open when the driver was reloaded, or a GPU was lost, answers for ever with the same error."""
    text = f"""
import pathlib
seen = pathlib.Path({str(tmp_path / "seen")!r})
answer = {HEALTH!r} if seen.exists() else {{"state": "failed", "why": "GPU is lost"}}
seen.touch()
for question in asked(): give(question, answer)
"""

    async def twice(driver: HealthMonitor) -> tuple[Any, Any]:
        return await driver.health(), await driver.health()

    first, second = driven(text, twice)
    assert first == Unknown("GPU is lost")
    assert [one.uuid for one in second] == ["GPU-0"]


def test_without_a_driver_there_are_no_readings() -> None:
    assert driven("raise SystemExit(1)", lambda driver: driver.readings()) == ()


def test_slices_stand_in_the_place_of_the_gpu_that_is_cut() -> None:
    """C1.10: a slice has its own memory and no serial number: its history is its own."""
    part = SliceFacts(
        uuid="MIG-1",
        index=0,
        name="NVIDIA H200 MIG 1g.18gb",
        gpu_instance=7,
        compute_instance=0,
        memory_total_mib=16_384,
    )
    cut = GpuFacts(index=1, uuid="GPU-1", name="NVIDIA H200", serial="s1", sliced=True, slices=(part,))
    gpus, silent = gpus_of((GpuFacts(index=0, uuid="GPU-0", serial="s0"), cut))
    assert not silent
    assert [(gpu.uuid, gpu.identity, gpu.part_of, gpu.profile) for gpu in gpus] == [
        ("GPU-0", "s0", None, None),
        ("MIG-1", "MIG-1", "GPU-1", "1g.18gb"),
    ]
    assert gpus[1].memory_mib == 16_384


def test_gpus_that_cannot_be_tested_give_the_reason() -> None:
    gpus, silent = gpus_of(
        (
            GpuFacts(index=0, uuid=Unknown("GPU is lost")),
            GpuFacts(index=1, uuid="GPU-1", sliced=True, slices=()),
            GpuFacts(index=2, uuid="GPU-2", sliced=True, slices=Unknown("no permission")),
        )
    )
    assert gpus == ()
    assert ["lost" in silent[0], "has no slices" in silent[1], "no permission" in silent[2]] == [True] * 3


def test_health_of_a_slice_is_that_of_its_gpu_with_its_own_memory() -> None:
    part = SliceFacts(uuid="MIG-1", index=0, memory_used_mib=5, listed=(44,))
    gpus = (
        GpuFacts(
            index=0,
            uuid="GPU-0",
            memory_used_mib=900,
            listed=(4,),
            sliced=True,
            slices=(part,),
            advice=Advice.RESET,
            remap_pending=True,
            remap_failed=False,
            energy_mj=77,
            counters={"pcie_replays": 1},
            states={"persistence": True, "utilisation": 12.0},
        ),
        GpuFacts(index=1, uuid=Unknown("lost")),
    )
    found = health_of(gpus, NOW, lambda uuid, listed, memory: listed, {"GPU-0": (Xid(48, "x"),)})
    assert list(found) == ["MIG-1"]
    one = found["MIG-1"]
    assert one.states == {
        "memory_used_mib": 5,
        "persistence": True,
        "mig": True,
        "utilisation": NO_SLICE_UTILISATION,
        "advice": "reset",
        "remap_pending": True,
        "remap_failed": False,
    }
    assert (one.counters, one.foreign, one.xids) == ({"pcie_replays": 1, "energy_mj": 77}, (44,), (Xid(48, "x"),))


def test_a_gpu_without_an_address_has_unknown_xids() -> None:
    found = health_of((GpuFacts(index=0, uuid="GPU-0"),), NOW, lambda *_: (), {})
    assert isinstance(found["GPU-0"].xids, Unknown)
