"""Asking the driver through a child. The children here are small programs that print, fail or hang."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from gpukeeper.devices import nvml_child
from gpukeeper.devices.nvml import CHILD, GpuFacts, SliceFacts, gpu_note, inventory, read
from gpukeeper.model.unknown import Unknown

MINUTE = timedelta(minutes=1)
H200 = {
    "index": 0,
    "uuid": "GPU-1",
    "name": "NVIDIA H200",
    "minor": 0,
    "memory_total_mib": 143771,
    "memory_used_mib": 615,
    "utilisation": 0.0,
    "slices": [],
}


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_driver_that_never_answers_is_given_up() -> None:
    began = monotonic()
    answer = inventory(timedelta(milliseconds=50), program("import time; time.sleep(600)"))
    assert isinstance(answer, Unknown)
    assert "did not answer within" in answer.why
    assert monotonic() - began < 30


def test_a_child_that_fails_is_unknown_with_its_last_words() -> None:
    answer = inventory(MINUTE, program("raise SystemExit('libc is too old')"))
    assert answer == Unknown("asking the NVIDIA driver failed (exit 1): libc is too old")


@pytest.mark.parametrize("printed", ["", "hello", '{"state": "odd"}', '{"state": "answered", "gpus": [{}]}'])
def test_a_child_that_prints_no_record_is_unknown(printed: str) -> None:
    assert isinstance(inventory(MINUTE, program(f"print({printed!r})")), Unknown)


def test_a_child_that_cannot_be_started_is_unknown(tmp_path: Path) -> None:
    assert isinstance(inventory(MINUTE, [str(tmp_path / "nothing")]), Unknown)


def test_gpus_and_slices_are_read() -> None:
    part = {"uuid": "MIG-1", "index": 0, "gpu_instance": 7, "compute_instance": 0, "memory_total_mib": 16384}
    no_utilisation = nvml_child.NO_SLICE_UTILISATION
    record = {"state": "answered", "gpus": [H200, H200 | {"slices": [part], "utilisation": no_utilisation}]}
    answer = read(json.dumps(record).encode(), driver_loaded=True)
    assert isinstance(answer, tuple)
    whole, cut = answer
    assert whole == GpuFacts(
        uuid="GPU-1",
        index=0,
        name="NVIDIA H200",
        minor=0,
        memory_total_mib=143771,
        memory_used_mib=615,
        utilisation=0.0,
    )
    assert isinstance(cut.utilisation, Unknown)
    assert cut.utilisation.by_design
    assert cut.slices == (
        SliceFacts(uuid="MIG-1", index=0, gpu_instance=7, compute_instance=0, memory_total_mib=16384),
    )


def test_a_gpu_that_fell_off_the_bus_is_there_with_an_unknown_uuid() -> None:
    record = {"state": "answered", "gpus": [{"index": 3, "uuid": {"why": "GPU is lost"}}]}
    assert read(json.dumps(record).encode(), True) == (GpuFacts(uuid=Unknown("GPU is lost"), index=3),)


def test_no_driver_is_no_gpus_unless_the_driver_is_loaded() -> None:
    printed = b'{"state": "no driver", "why": "NVML Shared Library Not Found"}'
    assert read(printed, driver_loaded=False) == ()
    assert read(printed, driver_loaded=True) == Unknown("NVML Shared Library Not Found")


def test_a_driver_that_refuses_is_unknown() -> None:
    assert read(b'{"state": "failed", "why": "Driver/library version mismatch"}', False) == Unknown(
        "Driver/library version mismatch"
    )


def test_the_real_child_prints_one_record() -> None:
    printed = subprocess.check_output(CHILD)
    assert json.loads(printed)["state"] in {"answered", "no driver", "failed"}
    assert printed.count(b"\n") == 1


def test_the_real_child_imports_nothing_from_the_folder_it_is_started_in(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('taken over')")
    assert subprocess.run(CHILD, cwd=tmp_path, capture_output=True, check=False).returncode == 0


def test_the_note_says_why_no_gpu_is_shown(tmp_path: Path) -> None:
    driver, pci = tmp_path / "driver", tmp_path / "pci"
    note = gpu_note(str(driver), str(pci))
    assert note is not None
    assert "no NVIDIA driver" in note
    (pci / "0000:01:00.0").mkdir(parents=True)
    (pci / "0000:01:00.0/vendor").write_text("0x10de\n")
    (pci / "0000:01:00.0/class").write_text("0x030200\n")
    note = gpu_note(str(driver), str(pci))
    assert note is not None
    assert "on the PCI bus" in note
    driver.mkdir()
    assert gpu_note(str(driver), str(pci)) is None


# The child's own reading, on a driver that works like NVML and is not one.


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Memory:
    total, used = 16 * 1024**3, 1024**2


class Utilisation:
    gpu = 12


class Driver:
    """Two whole GPUs, the second lost; or one cut into slices 0 and 2 of at most 3."""

    NVMLError = NvmlError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND, LOST = 3, 6, 15
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlMemory_v2 = 1  # noqa: N815 - NVML's own name

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[object]:  # noqa: N802
        return []

    nvmlDeviceGetGraphicsRunningProcesses = nvmlDeviceGetComputeRunningProcesses  # noqa: N815
    nvmlDeviceGetMPSComputeRunningProcesses = nvmlDeviceGetComputeRunningProcesses  # noqa: N815

    def __init__(self, mig: int | None = None, old: bool = False) -> None:
        self.mig, self.old = mig, old

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index == 1:
            raise NvmlError(self.LOST)
        return f"gpu{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:  # noqa: N802
        return f"UUID-{handle}".encode()

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return "NVIDIA Test"

    def nvmlDeviceGetMinorNumber(self, handle: str) -> int:  # noqa: N802
        raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Utilisation:  # noqa: N802
        return Utilisation()

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:  # noqa: N802
        if self.mig is None:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return self.mig, self.mig

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        if index == 1:
            raise NvmlError(self.NVML_ERROR_NOT_FOUND)
        return f"{handle}/{index}"

    def nvmlDeviceGetGpuInstanceId(self, part: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetComputeInstanceId(self, part: str) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int = 0) -> Memory:  # noqa: N802
        if version and self.old:
            raise NvmlError(self.NVML_ERROR_NOT_FOUND)
        return Memory()


def record_of(driver: Driver, index: int = 0) -> dict[str, Any]:
    return nvml_child.gpu(driver, index)


def decoded(gpu: dict[str, Any]) -> GpuFacts:
    answer = read(json.dumps({"state": "answered", "gpus": [gpu]}).encode(), True)
    assert isinstance(answer, tuple)
    return answer[0]


@pytest.mark.parametrize("old", [False, True])
def test_what_the_driver_would_not_say_is_unknown_and_the_rest_is_there(old: bool) -> None:
    facts = decoded(record_of(Driver(old=old)))
    assert (facts.uuid, facts.memory_total_mib, facts.memory_used_mib) == ("UUID-gpu0", 16384, 1)
    assert (facts.utilisation, facts.slices) == (12.0, ())
    assert isinstance(facts.minor, Unknown)


def test_a_lost_gpu_does_not_take_the_others_with_it() -> None:
    assert isinstance(decoded(record_of(Driver(), 1)).uuid, Unknown)


def test_slices_are_listed_and_empty_places_skipped() -> None:
    facts = decoded(record_of(Driver(mig=1)))
    assert isinstance(facts.slices, tuple)
    assert [part.uuid for part in facts.slices] == ["UUID-gpu0/0", "UUID-gpu0/2"]
    assert isinstance(facts.utilisation, Unknown)
    assert facts.utilisation.by_design
