"""The child that looks at GPUs, on a driver that works like NVML and is not one. It uses NVML's own structures."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

import msgspec
import pynvml
import pytest

from gpukeeper.devices.driver import health as sampling
from gpukeeper.devices.driver.child import DriverSession
from gpukeeper.devices.driver.client import health_of
from gpukeeper.devices.driver.facts import SUBJECTS, DriverReply, DriverRequest, GpuFacts
from gpukeeper.devices.driver.health import Sampler, spans
from gpukeeper.model.gpu import Health
from gpukeeper.model.unknown import Unknown
from tests.patience import PATIENCE
from tests.unit.devices.driver.fake_nvml import (
    LOST,
    MISMATCH,
    NOT_SUPPORTED,
    Nvml,
    Refuses,
    Values,
    older_fabric,
    refuse,
)


def asked(nvml: Nvml, about: str) -> DriverReply:
    """As its parent reads it."""
    session = DriverSession(nvml, sleep=lambda _: None)
    try:
        answer = session.answer(msgspec.json.encode(DriverRequest(1, about)))
        return msgspec.json.decode(msgspec.json.encode(answer), type=DriverReply)
    finally:
        session.close()


def read(nvml: Nvml, gpu: int = 0) -> GpuFacts:
    return asked(nvml, "health").gpus[gpu]


def health(nvml: Nvml) -> Health:
    """As the acceptance run gets it."""
    (found,) = health_of((read(nvml),), datetime(2026, 3, 2, tzinfo=UTC), lambda *_: (), {}).values()
    return found


def why(fact: Any) -> Unknown:
    assert isinstance(fact, Unknown), fact
    return fact


def test_a_healthy_gpu_tells_its_counters() -> None:
    counters = health(Nvml()).counters
    assert counters["ecc_corrected_volatile"] == 0
    assert counters["ecc_uncorrected_volatile"] == 10
    assert counters["ecc_uncorrected_aggregate"] == 11
    assert counters["sram_uncorrected_aggregate"] == 7
    assert (counters["remapped_correctable"], counters["remapped_uncorrectable"]) == (1, 2)
    assert counters["pcie_correctable"] == 2**40
    assert counters["nvlink_crc_flit"] == 18 * pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT
    assert counters["violation_thermal_ns"] == 1000 + pynvml.NVML_PERF_POLICY_THERMAL
    assert counters["energy_mj"] == 77


def test_a_healthy_gpu_tells_its_states() -> None:
    states = health(Nvml()).states
    expected = {
        "persistence": True,
        "ecc_enabled": True,
        "ecc_pending": False,
        "remap_pending": False,
        "remap_failed": True,
        "sram_threshold": True,
        "repair_needed": False,
        "compute_mode": "exclusive process",
        "nvlinks_active": 18,
        "nvlinks_total": 18,
        "power_w": 123.4,
        "power_limit_w": 700.0,
        "slowdown_c": 91,
        "reasons": 4,
        "fabric_state": 3,
        "fabric_status": 0,
        "fabric_health": 1,
        "memory_used_mib": 4,
        "mig": False,
    }
    assert {key: states[key] for key in expected} == expected


def test_what_the_model_does_not_have_is_unknown_by_design_and_what_failed_is_not() -> None:
    """Unknown keeps: a GPU that is lost must not look like one that has no such counter."""
    states = read(Nvml(says={"PersistenceMode": Refuses(LOST)})).states
    assert why(states["app_sm_mhz"]).by_design
    assert not why(states["persistence"]).by_design
    assert "lost" in why(states["persistence"]).why


def test_a_driver_that_is_older_than_our_structures_does_not_have_the_fact() -> None:
    states = read(Nvml(says={"SramEccErrorStatus": Refuses(MISMATCH), "GpuFabricInfoV": older_fabric})).states
    assert why(states["sram_threshold"]).by_design
    assert states["fabric_state"] == 2
    assert why(states["fabric_health"]).by_design


def test_a_driver_that_is_older_than_the_binding_does_not_end_the_read() -> None:
    """The binding raises an error of its own then; the child must not die of it."""

    def mismatch(handle: str) -> Any:
        raise pynvml.NVMLLibraryMismatchError("Unversioned function called")

    found = read(Nvml(says={"ComputeRunningProcesses": mismatch}))
    assert why(found.listed).by_design
    assert found.states["persistence"] is True


def test_a_gpu_on_no_fabric_has_no_state_of_one() -> None:
    states = read(Nvml(says={"GpuFabricInfoV": lambda handle, reference: None})).states
    assert why(states["fabric_state"]).by_design


def test_a_corrupt_inforom_is_an_answer() -> None:
    broken = Nvml(says={"ValidateInforom": Refuses(pynvml.NVML_ERROR_CORRUPTED_INFOROM)})
    assert read(broken).states["inforom_ok"] is False
    assert read(Nvml(says={"ValidateInforom": None})).states["inforom_ok"] is True
    assert why(read(Nvml()).states["inforom_ok"]).by_design


@pytest.mark.parametrize(
    ("repair", "memory", "expected"),
    [
        ([0, 1], Refuses(NOT_SUPPORTED), True),
        ([0, 0], 1, True),
        ([0, 0], Refuses(NOT_SUPPORTED), False),
        (Refuses(LOST), 0, None),
        (Refuses(NOT_SUPPORTED), Refuses(NOT_SUPPORTED), None),
    ],
)
def test_a_repair_is_needed_when_either_reports_it(repair: Any, memory: Any, expected: bool | None) -> None:
    said = read(Nvml(says={"RepairStatus": repair, "UnrepairableMemoryFlag_v1": memory})).states["repair_needed"]
    assert (said if isinstance(said, bool) else None) == expected


def test_links_that_are_down_do_not_count_and_a_card_without_links_has_none() -> None:
    some = Nvml(says={"NvLinkState": lambda handle, link: int(link % 2) if link < 18 else refuse(NOT_SUPPORTED)})
    assert read(some).states["nvlinks_active"] == 9
    without = read(Nvml(says={"NvLinkState": Refuses(NOT_SUPPORTED)}))
    assert why(without.states["nvlinks_active"]).by_design
    assert why(without.counters["nvlink_replay"]).by_design


def test_newer_links_count_their_recoveries_otherwise() -> None:
    def fields(handle: str, wanted: list[tuple[int, int]]) -> list[Any]:
        number, link = wanted[0] if isinstance(wanted[0], tuple) else (wanted[0], 0)
        found = pynvml.c_nvmlFieldValue_t()
        found.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        found.value.uiVal = link if number == pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS else 0
        return [found]

    counters = read(Nvml(says={"NvLinkErrorCounter": Refuses(NOT_SUPPORTED), "FieldValues": fields})).counters
    assert counters["nvlink_recovery"] == sum(range(18))
    assert counters["nvlink_recovery_failed"] == 0
    assert why(counters["nvlink_replay"]).by_design


def test_old_drivers_know_reasons_by_another_name() -> None:
    says = {
        "CurrentClocksEventReasons": Refuses(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
        "CurrentClocksThrottleReasons": 0x40,
    }
    assert read(Nvml(says=says)).states["reasons"] == 0x40


def test_one_lost_gpu_does_not_hide_the_others() -> None:
    answer = asked(Nvml(gpus=2, lost={"gpu0"}), "health")
    assert "lost" in why(answer.gpus[0].uuid).why
    assert answer.gpus[1].uuid == "UUID-gpu1"


def test_facts_of_a_gpu_and_how_two_reach_each_other() -> None:
    says = {"P2PStatus": lambda one, two, kind: 0 if {one, two} == {"gpu0", "gpu1"} else 5}
    answer = asked(Nvml(gpus=3, says=says), "identity")
    gpu = answer.gpus[0]
    assert (gpu.name, gpu.serial, gpu.minor, gpu.memory_total_mib) == ("NVIDIA H200", "1650924011229", 3, 143_771)
    assert gpu.facts["cpu_affinity"] == "0-3,128"
    assert gpu.facts["architecture"] == "Hopper"
    assert (answer.driver, answer.cuda_driver) == ("580.95.05", "13.0")
    assert answer.topology["UUID-gpu0"] == {"UUID-gpu1": "nvlink", "UUID-gpu2": "system"}


@pytest.mark.parametrize(
    ("error", "way"), [(LOST, "not known"), (pynvml.NVML_ERROR_UNKNOWN, "not known"), (NOT_SUPPORTED, "system")]
)
def test_a_link_that_could_not_be_queried_is_not_a_link_that_is_not_there(error: int, way: str) -> None:
    """Over the bus would be a fault of the machine; a driver that fails to say is none."""
    answer = asked(Nvml(gpus=2, says={"P2PStatus": Refuses(error)}), "identity")
    assert answer.topology["UUID-gpu0"] == {"UUID-gpu1": way}


def test_slices_have_memory_of_their_own() -> None:
    driver = Nvml(mig={"gpu0": ["s0", "s1"]}, says={"Attributes": Values(multiprocessorCount=16)})
    gpu = asked(driver, "identity").gpus[0]
    assert isinstance(gpu.slices, tuple)
    assert [part.uuid for part in gpu.slices] == ["UUID-s0", "UUID-s1"]
    assert gpu.slices[0].sms == 16
    found = read(driver)
    assert why(found.states["utilisation"]).by_design
    assert [part.uuid for part in found.slices] == ["UUID-s0", "UUID-s1"]


def test_what_the_child_says_is_what_its_parent_reads() -> None:
    driver = Nvml(gpus=3, mig={"gpu1": ["s0"]}, lost={"gpu2"})
    for about in SUBJECTS:
        assert asked(driver, about).state == "answered"
    assert isinstance(asked(Nvml(), "identity").gpus[0].facts["firmware"], Unknown)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "no driver"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "failed"),
    ],
)
def test_a_driver_that_is_not_there_and_one_that_fails_are_distinguished(error: int, state: str) -> None:
    assert asked(Nvml(says={"Init": Refuses(error)}), "health").state == state


def test_the_driver_is_closed_in_the_end() -> None:
    driver = Nvml()
    asked(driver, "readings")
    assert driver.opened == 0


def test_the_sampler_gives_each_reading_once_and_none_for_what_was_not_measured() -> None:
    sampler = Sampler(Nvml(mig={"gpu1": ["s0", "s1"]}, gpus=2, says={"PowerUsage": Refuses(LOST)}), lambda: 12.5)
    sampler.once(sampler.gpus())
    taken = sampler.take()
    assert [one.uuid for one in taken] == ["UUID-gpu0", "UUID-s0", "UUID-s1"]
    assert (taken[0].at, taken[0].sm_mhz, taken[0].power_w, taken[0].utilisation) == (
        12.5,
        1980,
        None,
        42.0,
    )
    assert taken[1].utilisation is None
    assert sampler.take() == ()


def test_what_nobody_asks_for_stays_bounded_and_covers_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day of stress is one question: its beginning must not be lost, and eight GPUs must fit into one line."""
    monkeypatch.setattr(sampling, "MOST_ROUNDS", 8)
    ticks = iter(range(1000))
    sampler = Sampler(Nvml(), lambda: float(next(ticks)))
    for _ in range(21):
        sampler.once(sampler.gpus())
    kept = [one.at for one in sampler.take()]
    assert len(kept) < 8
    assert kept[0] == 0
    assert kept[-1] >= 18
    sampler.once(sampler.gpus())
    assert (len(sampler.take()), sampler._every_s) == (1, sampling.SAMPLED_EVERY_S)


def test_the_sampler_slows_down_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_READINGS", 12)
    sampler = Sampler(Nvml(gpus=3), lambda: 1.0)
    for _ in range(4):
        sampler.once(sampler.gpus())
    assert sampler._every_s == 2 * sampling.SAMPLED_EVERY_S
    assert len(sampler.take()) == 6


def test_the_sampler_goes_on_by_itself() -> None:
    seen = threading.Semaphore(0)

    def power(handle: str) -> int:
        seen.release()
        return 1000

    watch = DriverSession(Nvml(says={"PowerUsage": power}))
    watch.answer(msgspec.json.encode(DriverRequest(1, "readings")))  # begins it
    assert seen.acquire(timeout=PATIENCE)
    assert seen.acquire(timeout=PATIENCE)
    sampler = watch._sampler
    assert sampler is not None
    watch.close()
    assert all(one.power_w == 1.0 for one in sampler.take())


def test_cpus_are_written_as_the_kernel_writes_them() -> None:
    assert spans([]) == ""
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
