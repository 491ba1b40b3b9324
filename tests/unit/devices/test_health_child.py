"""The child that looks at GPUs, on a driver that works like NVML and is not one. It uses NVML's own structures."""

from __future__ import annotations

import io
import json
import subprocess
import threading
from typing import Any

import msgspec
import pynvml
import pytest

from gpukeeper.devices import health_child
from gpukeeper.devices.health import CHILD, Facts, Looks, Readings
from gpukeeper.devices.health_child import Sampler, Watch, spans
from gpukeeper.model.unknown import Unknown

MIB = 1024 * 1024
NOT_SUPPORTED, LOST, MISMATCH = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)


class Values:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Driver:
    """A healthy H200 by its answers. `says`: other answers by the name of the call; an int in Refuses is an error.

    A call that nobody scripted is one that the model does not support.
    """

    def __init__(
        self, gpus: int = 1, says: dict[str, Any] | None = None, mig: dict[str, list[str]] | None = None
    ) -> None:
        self.gpus, self.mig, self.opened = gpus, mig or {}, 0
        self.says: dict[str, Any] = {
            "System_GetDriverVersion": "580.95.05",
            "System_GetCudaDriverVersion_v2": 13000,
            "Name": b"NVIDIA H200",
            "Serial": "1650924011229",
            "PciInfo": Values(busId="00000000:1B:00.0"),
            "MinorNumber": 3,
            "VbiosVersion": "96.00.B9.00.01",
            "CpuAffinity": [0b1111, 0, 0b1],
            "Architecture": 9,
            "TotalEccErrors": lambda handle, kind, since: 10 * kind + since,
            "RemappedRows": (1, 2, 0, 1),
            "PcieReplayCounter": 5,
            "ViolationStatus": lambda handle, policy: Values(violationTime=1000 + policy),
            "TotalEnergyConsumption": 77,
            "NvLinkState": lambda handle, link: 1 if link < 18 else refuse(NOT_SUPPORTED),
            "NvLinkErrorCounter": lambda handle, link, counter: counter,
            "FieldValues": self.fields,
            "ClockInfo": lambda handle, kind: 1980 if kind == pynvml.NVML_CLOCK_SM else 3201,
            "MaxClockInfo": lambda handle, kind: 1980,
            "PowerUsage": 123_400,
            "EnforcedPowerLimit": 700_000,
            "Temperature": 31,
            "TemperatureThreshold": lambda handle, which: 90 + which,
            "UtilizationRates": Values(gpu=42),
            "CurrentClocksEventReasons": 0x4,
            "CurrPcieLinkGeneration": 5,
            "CurrPcieLinkWidth": 16,
            "PersistenceMode": 1,
            "EccMode": [1, 0],
            "ComputeMode": 3,
            "SramEccErrorStatus": sram,
            "GpuFabricInfoV": fabric,
            "RepairStatus": [0, 0],
            "ComputeRunningProcesses": [Values(pid=9)],
            "GraphicsRunningProcesses": [],
            "MPSComputeRunningProcesses": [],
            "TopologyCommonAncestor": 50,
            "P2PStatus": 5,
            **(says or {}),
        }

    def __getattr__(self, name: str) -> Any:
        """NVML's constants and structures need no driver; its calls are ours."""
        if not name.startswith("nvml") or name.startswith(("nvmlMemory_", "nvmlEcc", "nvmlGpuFabricInfo_")):
            return getattr(pynvml, name)
        call = name.removeprefix("nvmlDeviceGet").replace("nvmlSystem", "System_").removeprefix("nvmlDevice")

        def answer(*arguments: Any, **_: Any) -> Any:
            said = self.says.get(call, Refuses(NOT_SUPPORTED))
            if isinstance(said, Refuses):
                raise pynvml.NVMLError(said.number)
            return said(*arguments) if callable(said) else said

        return answer

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own names
        if isinstance(said := self.says.get("Init"), Refuses):
            raise pynvml.NVMLError(said.number)
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"gpu{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        if handle in self.says.get("lost", ()):
            raise pynvml.NVMLError(LOST)
        return f"UUID-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int = 0) -> Any:  # noqa: N802
        return Values(total=143_771 * MIB, used=4 * MIB)

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:  # noqa: N802
        return (1, 1) if handle in self.mig else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        if index >= len(self.mig[handle]):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.mig[handle][index]

    def fields(self, handle: str, wanted: list[tuple[int, int]]) -> list[Any]:
        """It has the number of links and PCIe's correctable errors, as 64 bits; nothing else."""
        known = {pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT: 18, pynvml.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS: 2**40}
        number = wanted[0][0] if isinstance(wanted[0], tuple) else wanted[0]
        found = pynvml.c_nvmlFieldValue_t()
        found.nvmlReturn = 0 if number in known else NOT_SUPPORTED
        found.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        found.value.ullVal = known.get(number, 0)
        return [found]


class Refuses:
    def __init__(self, number: int) -> None:
        self.number = number


def refuse(number: int) -> Any:
    raise pynvml.NVMLError(number)


def sram(handle: str, reference: Any) -> None:
    """By reference, as the driver's library needs it: the structure itself would be read as an address."""
    status = reference._obj
    assert status.version == pynvml.nvmlEccSramErrorStatus_v1
    status.aggregateUncParity, status.aggregateUncSecDed, status.bThresholdExceeded = 3, 4, 1


def fabric(handle: str, reference: Any) -> None:
    info = reference._obj
    assert info.version == pynvml.nvmlGpuFabricInfo_v3
    info.state, info.status, info.healthSummary = 3, 0, 1


def older_fabric(handle: str, reference: Any) -> None:
    info = reference._obj
    if info.version != pynvml.nvmlGpuFabricInfo_v2:
        refuse(MISMATCH)
    info.state, info.status = 2, 0


def asked(driver: Driver, question: str) -> dict[str, Any]:
    watch = Watch(driver)
    try:
        return json.loads(json.dumps(watch.answer(question)))
    finally:
        watch.close()


def look(driver: Driver, gpu: int = 0) -> dict[str, Any]:
    return asked(driver, "look")["gpus"][gpu]


def test_a_healthy_gpu_tells_its_counters() -> None:
    counters = look(Driver())["counters"]
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
    states = look(Driver())["states"]
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
    states = look(Driver(says={"PersistenceMode": Refuses(LOST)}))["states"]
    assert states["app_sm_mhz"]["by_design"] is True
    assert states["persistence"]["by_design"] is False
    assert "lost" in states["persistence"]["why"]


def test_a_driver_that_is_older_than_our_structures_does_not_have_the_fact() -> None:
    states = look(Driver(says={"SramEccErrorStatus": Refuses(MISMATCH), "GpuFabricInfoV": older_fabric}))["states"]
    assert states["sram_threshold"]["by_design"] is True
    assert states["fabric_state"] == 2
    assert states["fabric_health"]["by_design"] is True


def test_a_driver_that_is_older_than_the_binding_does_not_end_the_look() -> None:
    """The binding raises an error of its own then; the child must not die of it."""

    def mismatch(handle: str) -> Any:
        raise pynvml.NVMLLibraryMismatchError("Unversioned function called")

    found = look(Driver(says={"ComputeRunningProcesses": mismatch}))
    assert found["listed"]["by_design"] is True
    assert found["states"]["persistence"] is True


def test_a_gpu_on_no_fabric_has_no_state_of_one() -> None:
    states = look(Driver(says={"GpuFabricInfoV": lambda handle, reference: None}))["states"]
    assert states["fabric_state"]["by_design"] is True


def test_a_corrupt_inforom_is_an_answer() -> None:
    broken = Driver(says={"ValidateInforom": Refuses(pynvml.NVML_ERROR_CORRUPTED_INFOROM)})
    assert look(broken)["states"]["inforom_ok"] is False
    assert look(Driver(says={"ValidateInforom": None}))["states"]["inforom_ok"] is True
    assert look(Driver())["states"]["inforom_ok"]["by_design"] is True


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
def test_a_repair_is_needed_when_either_says_so(repair: Any, memory: Any, expected: bool | None) -> None:
    said = look(Driver(says={"RepairStatus": repair, "UnrepairableMemoryFlag_v1": memory}))["states"]["repair_needed"]
    assert (said if isinstance(said, bool) else None) == expected


def test_links_that_are_down_do_not_count_and_a_card_without_links_has_none() -> None:
    some = Driver(says={"NvLinkState": lambda handle, link: int(link % 2) if link < 18 else refuse(NOT_SUPPORTED)})
    assert look(some)["states"]["nvlinks_active"] == 9
    without = look(Driver(says={"NvLinkState": Refuses(NOT_SUPPORTED)}))
    assert without["states"]["nvlinks_active"]["by_design"] is True
    assert without["counters"]["nvlink_replay"]["by_design"] is True


def test_newer_links_count_their_recoveries_otherwise() -> None:
    def fields(handle: str, wanted: list[tuple[int, int]]) -> list[Any]:
        number, link = wanted[0] if isinstance(wanted[0], tuple) else (wanted[0], 0)
        found = pynvml.c_nvmlFieldValue_t()
        found.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        found.value.uiVal = link if number == pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS else 0
        return [found]

    counters = look(Driver(says={"NvLinkErrorCounter": Refuses(NOT_SUPPORTED), "FieldValues": fields}))["counters"]
    assert counters["nvlink_recovery"] == sum(range(18))
    assert counters["nvlink_recovery_failed"] == 0
    assert counters["nvlink_replay"]["by_design"] is True


def test_old_drivers_know_reasons_by_another_name() -> None:
    says = {
        "CurrentClocksEventReasons": Refuses(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
        "CurrentClocksThrottleReasons": 0x40,
    }
    assert look(Driver(says=says))["states"]["reasons"] == 0x40


def test_one_lost_gpu_does_not_hide_the_others() -> None:
    answer = asked(Driver(gpus=2, says={"lost": ("gpu0",)}), "look")
    assert "lost" in answer["gpus"][0]["uuid"]["why"]
    assert answer["gpus"][1]["uuid"] == "UUID-gpu1"


def test_facts_of_a_gpu_and_how_two_reach_each_other() -> None:
    says = {"P2PStatus": lambda one, two, kind: 0 if {one, two} == {"gpu0", "gpu1"} else 5}
    answer = asked(Driver(gpus=3, says=says), "facts")
    gpu = answer["gpus"][0]
    assert (gpu["name"], gpu["serial"], gpu["minor"], gpu["memory_mib"]) == ("NVIDIA H200", "1650924011229", 3, 143_771)
    assert gpu["facts"]["cpu_affinity"] == "0-3,128"
    assert gpu["facts"]["architecture"] == "Hopper"
    assert (answer["driver"], answer["cuda_driver"]) == ("580.95.05", "13.0")
    assert answer["topology"]["UUID-gpu0"] == {"UUID-gpu1": "nvlink", "UUID-gpu2": "system"}


@pytest.mark.parametrize(
    ("error", "way"), [(LOST, "not known"), (pynvml.NVML_ERROR_UNKNOWN, "not known"), (NOT_SUPPORTED, "system")]
)
def test_a_link_that_could_not_be_asked_for_is_not_a_link_that_is_not_there(error: int, way: str) -> None:
    """Over the bus would be a fault of the machine; a driver that fails to say is none."""
    answer = asked(Driver(gpus=2, says={"P2PStatus": Refuses(error)}), "facts")
    assert answer["topology"]["UUID-gpu0"] == {"UUID-gpu1": way}


def test_slices_have_memory_of_their_own() -> None:
    driver = Driver(mig={"gpu0": ["s0", "s1"]}, says={"Attributes": Values(multiprocessorCount=16)})
    gpu = asked(driver, "facts")["gpus"][0]
    assert [part["uuid"] for part in gpu["slices"]] == ["UUID-s0", "UUID-s1"]
    assert gpu["slices"][0]["sms"] == 16
    found = look(driver)
    assert found["states"]["utilisation"]["by_design"] is True
    assert [part["uuid"] for part in found["slices"]] == ["UUID-s0", "UUID-s1"]


def test_what_the_child_says_is_what_its_parent_reads() -> None:
    driver = Driver(gpus=2, mig={"gpu1": ["s0"]}, says={"lost": ("gpu2",)})
    for question, kind in (("facts", Facts), ("look", Looks), ("readings", Readings)):
        msgspec.json.decode(json.dumps(asked(driver, question)), type=kind)
    facts = msgspec.json.decode(json.dumps(asked(Driver(), "facts")), type=Facts)
    assert isinstance(facts.gpus[0].facts["firmware"], Unknown)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "no driver"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "failed"),
    ],
)
def test_a_driver_that_is_not_there_and_one_that_fails_are_told_apart(error: int, state: str) -> None:
    assert asked(Driver(says={"Init": Refuses(error)}), "look")["state"] == state


def test_the_driver_is_closed_in_the_end() -> None:
    driver = Driver()
    asked(driver, "readings")
    assert driver.opened == 0


def test_the_sampler_gives_each_reading_once_and_none_for_what_was_not_measured() -> None:
    sampler = Sampler(Driver(mig={"gpu1": ["s0", "s1"]}, gpus=2, says={"PowerUsage": Refuses(LOST)}), lambda: 12.5)
    sampler.once(sampler.gpus())
    taken = sampler.take()
    assert [one["uuid"] for one in taken] == ["UUID-gpu0", "UUID-s0", "UUID-s1"]
    assert (taken[0]["at"], taken[0]["sm_mhz"], taken[0]["power_w"], taken[0]["utilisation"]) == (
        12.5,
        1980,
        None,
        42.0,
    )
    assert taken[1]["utilisation"] is None
    assert sampler.take() == []


def test_what_nobody_asks_for_stays_bounded_and_covers_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day of stress is one question: its beginning must not be lost, and eight GPUs must fit into one line."""
    monkeypatch.setattr(health_child, "MOST_ROUNDS", 8)
    ticks = iter(range(1000))
    sampler = Sampler(Driver(), lambda: float(next(ticks)))
    for _ in range(21):
        sampler.once(sampler.gpus())
    kept = [one["at"] for one in sampler.take()]
    assert len(kept) < 8
    assert kept[0] == 0
    assert kept[-1] >= 18
    sampler.once(sampler.gpus())
    assert (len(sampler.take()), sampler._every_s) == (1, health_child.EVERY_S)


def test_the_sampler_slows_down_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_child, "MOST_READINGS", 12)
    sampler = Sampler(Driver(gpus=3), lambda: 1.0)
    for _ in range(4):
        sampler.once(sampler.gpus())
    assert sampler._every_s == 2 * health_child.EVERY_S
    assert len(sampler.take()) == 6


def test_the_sampler_goes_on_by_itself() -> None:
    seen = threading.Semaphore(0)

    def power(handle: str) -> int:
        seen.release()
        return 1000

    watch = Watch(Driver(says={"PowerUsage": power}))
    watch.answer("readings")  # begins it
    assert seen.acquire(timeout=30)
    assert seen.acquire(timeout=30)
    watch.close()
    assert all(one["power_w"] == 1.0 for one in watch._sampler.take())  # type: ignore[union-attr]


def test_cpus_are_written_as_the_kernel_writes_them() -> None:
    assert spans([]) == ""
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_it_is_a_program_that_answers_line_by_line_and_ends_with_its_input() -> None:
    done = subprocess.run(
        CHILD, input="facts\nlook\nreadings\n", capture_output=True, text=True, check=True, timeout=60
    )
    states = [json.loads(line)["state"] for line in io.StringIO(done.stdout)]
    assert len(states) == 3
    assert set(states) <= {"answered", "no driver", "failed"}
