"""The facts that every question needs, and those of a GPU's condition, on a driver that is not one."""

from __future__ import annotations

from typing import Any

import msgspec
import pynvml
import pytest

from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.devices.driver.nvml import ADVICE, RECOVERY_ACTION, condition, energy, gpus, utilisation
from gpukeeper.model.gpu import Advice
from gpukeeper.model.unknown import Unknown
from tests.unit.devices.driver.fake_nvml import LOST, MISMATCH, NOT_SUPPORTED, Nvml, Refuses, Values, refuse

# Every call that reads a fact of a GPU, beside its handle and its uuid.
CALLS = (
    *("Name", "MinorNumber", "PciInfo", "UtilizationRates", "RemappedRows", "Architecture", "FieldValues"),
    *("ComputeRunningProcesses", "GraphicsRunningProcesses", "MPSComputeRunningProcesses", "TotalEnergyConsumption"),
)


def every(nvml: Nvml) -> tuple[GpuFacts, ...]:
    """All facts that are read here."""

    def more(nvml: Any, handle: Any) -> dict[str, Any]:
        found = {"utilisation": utilisation(nvml, handle), "energy_mj": energy(nvml, handle)}
        return {**condition(nvml, handle), **found}

    return gpus(nvml, more)


def only(nvml: Nvml) -> GpuFacts:
    (found,) = every(nvml)
    return found


def why(fact: Any) -> Unknown:
    assert isinstance(fact, Unknown), fact
    return fact


def processes(*pids: int) -> list[Any]:
    return [Values(pid=pid) for pid in pids]


def action(number: int) -> Any:
    """The driver's advice, by its number."""

    def fields(handle: str, wanted: list[tuple[int, int]]) -> list[Any]:
        assert wanted == [(RECOVERY_ACTION, 0)]
        found = pynvml.c_nvmlFieldValue_t()
        found.valueType, found.value.uiVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, number
        return [found]

    return fields


@pytest.mark.parametrize("says", [{}, {"MemoryInfo": Refuses(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)}])
def test_what_the_driver_would_not_say_is_unknown_and_the_rest_is_there(says: dict[str, Any]) -> None:
    facts = only(Nvml(says={"MinorNumber": Refuses(NOT_SUPPORTED), **says}))
    assert (facts.uuid, facts.memory_total_mib, facts.memory_used_mib) == ("UUID-gpu0", 143_771, 4)
    assert (facts.utilisation, facts.slices) == (42.0, ())
    assert isinstance(facts.minor, Unknown)


def test_the_child_reads_what_the_driver_says() -> None:
    says = {
        "ComputeRunningProcesses": processes(4711, 12),
        "MPSComputeRunningProcesses": processes(12, 13),
        "RemappedRows": (0, 0, 1, 0),
        "FieldValues": action(0),
        "PciInfo": Values(busId=b"00000000:1B:00.0"),
    }
    assert only(Nvml(says=says)) == GpuFacts(
        index=0,
        uuid="UUID-gpu0",
        name="NVIDIA H200",
        minor=3,
        pci="00000000:1B:00.0",
        memory_total_mib=143_771,
        memory_used_mib=4,
        listed=(12, 13, 4711),
        sliced=False,
        slices=(),
        utilisation=42.0,
        advice=Advice.NONE,
        remap_pending=True,
        remap_failed=False,
        reset_alone=True,
        energy_mj=77,
    )


def test_slices_are_listed_and_empty_places_skipped() -> None:
    says = {
        "GpuInstanceId": 1,
        "ComputeInstanceId": 0,
        "ComputeRunningProcesses": processes(12, 4711),
        "Attributes": Values(multiprocessorCount=16),
    }
    facts = only(Nvml(mig={"gpu0": ["gpu0/0", None, "gpu0/2"]}, says=says))
    assert isinstance(facts.slices, tuple)
    assert [(part.uuid, part.index) for part in facts.slices] == [("UUID-gpu0/0", 0), ("UUID-gpu0/2", 2)]
    assert facts.slices[0] == SliceFacts(
        uuid="UUID-gpu0/0",
        index=0,
        name="NVIDIA H200",
        gpu_instance=1,
        compute_instance=0,
        memory_total_mib=143_771,
        memory_used_mib=4,
        listed=(12, 4711),
        sms=16,
    )
    assert why(facts.utilisation).by_design


def test_a_slice_that_does_not_say_its_instance_is_there_with_an_unknown_one() -> None:
    says = {"GpuInstanceId": Refuses(pynvml.NVML_ERROR_UNKNOWN), "ComputeInstanceId": 0}
    facts = only(Nvml(mig={"gpu0": ["gpu0/0"]}, says=says))
    assert isinstance(facts.slices, tuple)
    assert isinstance(facts.slices[0].gpu_instance, Unknown)
    assert facts.slices[0].compute_instance == 0


@pytest.mark.parametrize(("error", "sliced"), [(NOT_SUPPORTED, False), (LOST, None), (13, None)])
def test_only_a_model_that_cannot_be_cut_is_known_to_be_whole(error: int, sliced: bool | None) -> None:
    facts = only(Nvml(says={"MigMode": Refuses(error)}))
    assert facts.sliced is False if sliced is False else isinstance(facts.sliced, Unknown)
    assert facts.slices == (() if sliced is False else facts.sliced)


@pytest.mark.parametrize(
    ("number", "words"), [(0, Advice.NONE), (1, Advice.RESET), (4, Advice.DRAIN_AND_RESET), (99, Advice.OTHER)]
)
def test_the_drivers_advice_is_put_in_words(number: int, words: Advice) -> None:
    assert only(Nvml(says={"FieldValues": action(number)})).advice is words


def test_every_advice_of_the_driver_has_a_word() -> None:
    assert [*ADVICE, Advice.OTHER] == list(Advice)


@pytest.mark.parametrize(("error", "by_design"), [(3, True), (15, False)])
def test_what_the_driver_does_not_have_differs_from_what_it_would_not_say(error: int, by_design: bool) -> None:
    found = only(Nvml(says={"FieldValues": Refuses(error), "RemappedRows": Refuses(error)}))
    assert why(found.advice).by_design is by_design
    assert why(found.remap_pending).by_design is by_design
    assert found.remap_failed == found.remap_pending


def test_a_list_of_processes_that_failed_is_not_an_empty_one() -> None:
    assert not why(only(Nvml(says={"ComputeRunningProcesses": Refuses(15)})).listed).by_design
    assert not why(only(Nvml(says={"MPSComputeRunningProcesses": Refuses(15)})).listed).by_design


@pytest.mark.parametrize("call", ["GraphicsRunningProcesses", "MPSComputeRunningProcesses"])
@pytest.mark.parametrize("fails", [Refuses(MISMATCH), Refuses(pynvml.NVML_ERROR_DEPRECATED), "binding"])
def test_a_list_that_this_driver_gives_in_another_form_is_not_an_empty_one(call: str, fails: Any) -> None:
    """There is such a list, and processes may be in it."""
    assert isinstance(only(Nvml(says={call: mismatch if fails == "binding" else fails})).listed, Unknown)


def test_processes_need_the_compute_list_and_not_the_others() -> None:
    absent = {"GraphicsRunningProcesses": Refuses(NOT_SUPPORTED), "MPSComputeRunningProcesses": Refuses(NOT_SUPPORTED)}
    assert only(Nvml(says=absent)).listed == (9,)
    assert why(only(Nvml(says={"ComputeRunningProcesses": Refuses(NOT_SUPPORTED)})).listed).by_design


@pytest.mark.parametrize(
    ("architecture", "links", "alone"), [(9, [1, 1], True), (6, [0, 1], False), (6, [0, 0], True), (6, [], True)]
)
def test_linked_gpus_before_ampere_are_not_reset_alone(architecture: int, links: list[int], alone: bool) -> None:
    def link_state(handle: str, link: int) -> int:
        return links[link] if link < len(links) else refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    says = {"Architecture": architecture, "NvLinkState": link_state}
    assert only(Nvml(says=says)).reset_alone is alone


# A GPU that falls off the bus.


def test_a_lost_gpu_does_not_take_the_others_with_it() -> None:
    lost, there = every(Nvml(gpus=2, lost={"gpu0"}))
    assert "lost" in why(lost.uuid).why
    assert not why(lost.uuid).by_design
    assert there == msgspec.structs.replace(only(Nvml()), index=1, uuid="UUID-gpu1")


def _fields(facts: GpuFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__struct_fields__}


def test_a_gpu_that_is_lost_after_its_uuid_was_read_has_no_other_fact() -> None:
    """Never a value from before, never an empty list, never one that looks as if the model did not have it."""
    nvml = Nvml()
    nvml.nvmlDeviceGetUUID = lambda handle: nvml.lost.add(handle) or "GPU-0"  # type: ignore[func-returns-value,method-assign]
    found = only(nvml)
    assert (found.index, found.uuid) == (0, "GPU-0")
    for name, value in _fields(found).items():
        if name not in {"index", "uuid", "activity", "serial", "facts", "counters", "states"}:
            assert "lost" in why(value).why, name
            assert not why(value).by_design, name


# A driver that is older than its bindings.


def mismatch(*_: Any) -> Any:
    raise pynvml.NVMLLibraryMismatchError("Unversioned function called and the NVML library is too old")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fails", [Refuses(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND), mismatch])
def test_a_function_that_an_older_driver_does_not_have_is_one_unknown_fact(call: str, fails: Any) -> None:
    usual, found = _fields(only(Nvml())), _fields(only(Nvml(says={call: fails})))
    differ = {name for name in usual if usual[name] != found[name]}
    expected = {
        "Name": {"name"},
        "MinorNumber": {"minor"},
        "PciInfo": {"pci"},
        "UtilizationRates": {"utilisation"},
        "RemappedRows": {"remap_pending", "remap_failed"},
        "Architecture": {"reset_alone"},
        "FieldValues": {"advice"},
        "ComputeRunningProcesses": {"listed"},
        "GraphicsRunningProcesses": {"listed"} if fails is mismatch else set(),
        "MPSComputeRunningProcesses": {"listed"} if fails is mismatch else set(),
        "TotalEnergyConsumption": {"energy_mj"},
    }
    assert differ == expected.get(call, set())
    assert all(why(found[name]).by_design for name in differ)
