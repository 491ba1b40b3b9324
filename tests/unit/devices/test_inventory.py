"""Asking the driver through a child. The children here are small programs that print, fail or hang."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from time import monotonic

import msgspec
import pytest

from gpukeeper.devices.driver.client import gpu_note, inventory
from gpukeeper.devices.driver.facts import NO_SLICE_UTILISATION, GpuFacts, SliceFacts
from gpukeeper.model.unknown import Unknown
from tests.patience import PATIENCE, PATIENT
from tests.unit.devices.driver.programs import answering, program

H200 = {
    "index": 0,
    "uuid": "GPU-1",
    "name": "NVIDIA H200",
    "minor": 0,
    "memory_total_mib": 143771,
    "memory_used_mib": 615,
    "utilisation": 0.0,
    "sliced": False,
    "slices": [],
}


def test_a_driver_that_never_answers_is_given_up() -> None:
    began = monotonic()
    answer = inventory(timedelta(milliseconds=50), program("import time; time.sleep(600)"))
    assert isinstance(answer, Unknown)
    assert "did not answer within" in answer.why
    assert monotonic() - began < PATIENCE


def test_a_child_that_fails_is_unknown_with_its_last_words() -> None:
    answer = inventory(PATIENT, program("raise SystemExit('libc is too old')"))
    assert answer == Unknown("querying the NVIDIA driver failed (exit 1): libc is too old")


@pytest.mark.parametrize(
    "printed", ["", "hello", "[1]", '{"id": 1, "state": "odd"}', '{"id": 1, "state": "answered", "gpus": [{}]}']
)
def test_a_child_that_prints_no_record_is_unknown(printed: str) -> None:
    assert isinstance(inventory(PATIENT, program(f"print({printed!r})")), Unknown)


def test_a_child_that_cannot_be_started_is_unknown(tmp_path: Path) -> None:
    assert isinstance(inventory(PATIENT, [str(tmp_path / "nothing")]), Unknown)


def test_gpus_and_slices_are_read() -> None:
    part = {"uuid": "MIG-1", "index": 0, "gpu_instance": 7, "compute_instance": 0, "memory_total_mib": 16384}
    no_utilisation = msgspec.to_builtins(NO_SLICE_UTILISATION)
    gpus = [H200, H200 | {"sliced": True, "slices": [part], "utilisation": no_utilisation}]
    answer = inventory(PATIENT, answering({"state": "answered", "gpus": gpus}))
    assert isinstance(answer, tuple)
    whole, cut = answer
    assert whole == GpuFacts(
        uuid="GPU-1",
        index=0,
        name="NVIDIA H200",
        minor=0,
        memory_total_mib=143771,
        memory_used_mib=615,
        sliced=False,
        utilisation=0.0,
    )
    assert isinstance(cut.utilisation, Unknown)
    assert cut.utilisation.by_design
    assert cut.slices == (
        SliceFacts(uuid="MIG-1", index=0, gpu_instance=7, compute_instance=0, memory_total_mib=16384),
    )


def test_a_gpu_that_fell_off_the_bus_is_there_with_an_unknown_uuid() -> None:
    record = {"state": "answered", "gpus": [{"index": 3, "uuid": {"why": "GPU is lost"}}]}
    assert inventory(PATIENT, answering(record)) == (GpuFacts(uuid=Unknown("GPU is lost"), index=3),)


def test_no_driver_is_no_gpus_unless_the_driver_is_loaded(tmp_path: Path) -> None:
    child = answering({"state": "no driver", "why": "NVML Shared Library Not Found"})
    assert inventory(PATIENT, child, driver=str(tmp_path / "none")) == ()
    assert inventory(PATIENT, child, driver=str(tmp_path)) == Unknown("NVML Shared Library Not Found")


def test_a_driver_that_refuses_is_unknown() -> None:
    child = answering({"state": "failed", "why": "Driver/library version mismatch"})
    assert inventory(PATIENT, child, driver="/nowhere") == Unknown("Driver/library version mismatch")


def test_the_note_gives_the_reason_no_gpu_is_shown(tmp_path: Path) -> None:
    driver, pci = tmp_path / "driver", tmp_path / "pci"
    note = gpu_note(str(driver), str(pci))
    assert note is not None
    assert "No NVIDIA driver" in note
    (pci / "0000:01:00.0").mkdir(parents=True)
    (pci / "0000:01:00.0/vendor").write_text("0x10de\n")
    (pci / "0000:01:00.0/class").write_text("0x030200\n")
    note = gpu_note(str(driver), str(pci))
    assert note is not None
    assert "on the PCI bus" in note
    driver.mkdir()
    assert gpu_note(str(driver), str(pci)) is None
