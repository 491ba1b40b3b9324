"""The child that measures, on a driver that works like NVML and is not one. It uses NVML's own structures."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import pynvml
import pytest

from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.devices.driver.nvml import ActivityMonitor, UtilisationSamples
from gpukeeper.model.unknown import Unknown

MIB = 1024 * 1024


class Process:
    def __init__(self, pid: int) -> None:
        self.pid = pid


class Driver:
    """GPUs that are busy by a script: percent of each second, by handle, or by (handle, GPU instance).

    Time passes only when the child sleeps or the test says so. A sample remembers when it was taken.
    """

    def __init__(self, gpus: int = 1, mig: dict[str, list[int]] | None = None, gpm: bool = True) -> None:
        self.gpus, self.mig, self.has_gpm = gpus, mig or {}, gpm
        self.now = 100.0
        self.opened = 0
        self.busy: dict[Any, float] = {}
        self.refuses: dict[str, int] = {}
        self.nan = False
        self.taken: dict[int, tuple[Any, float]] = {}
        self.alive: set[int] = set()
        self.lost: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        """NVML's constants and structures, which need no driver. Never its functions."""
        if name.startswith("nvml") and name != "nvmlMemory_v2":
            raise AssertionError(f"{name} is not scripted")
        return getattr(pynvml, name)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def _may(self, name: str) -> None:
        if name in self.refuses:
            raise pynvml.NVMLError(self.refuses[name])

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802 - NVML's own names
        return "NVIDIA H200"

    def nvmlDeviceGetMinorNumber(self, handle: str) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:  # noqa: N802
        return type("Pci", (), {"busId": "00000000:1B:00.0"})()

    def nvmlDeviceGetAttributes(self, handle: str) -> Any:  # noqa: N802
        return type("Attributes", (), {"multiprocessorCount": 16})()

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own names
        self._may("init")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._may("count")
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index in self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return f"gpu{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return f"UUID-{handle}"

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:  # noqa: N802
        self._may("mig")
        return (1, 1) if handle in self.mig else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        if index >= len(self.mig[handle]):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"{handle}/{self.mig[handle][index]}"

    def nvmlDeviceGetGpuInstanceId(self, part: str) -> int:  # noqa: N802
        return int(part.split("/")[1])

    def nvmlDeviceGetComputeInstanceId(self, part: str) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int = 0) -> Any:  # noqa: N802
        return type("Memory", (), {"total": 100 * MIB, "used": 615 * MIB})()

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        self._may("energy")
        return int(self.now * 80_000)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Process]:  # noqa: N802
        self._may("compute")
        return [Process(9), Process(3)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Process]:  # noqa: N802
        self._may("graphics")
        return [Process(3)]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: str) -> list[Process]:  # noqa: N802
        return []

    def nvmlDeviceGetSamples(self, handle: str, _kind: int, since_us: int) -> tuple[int, list[Any]]:  # noqa: N802
        """The buffer of an H200: one each 0.2 s, 14 s of them."""
        self._may("samples")
        assert handle not in self.mig
        newest = int(self.now * 5)
        found = [
            self._utilisation(n * 200_000, handle) for n in range(newest - 70, newest + 1) if n * 200_000 > since_us
        ]
        if not found:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, found

    def _utilisation(self, at_us: int, handle: str) -> Any:
        sample = pynvml.c_nvmlSample_t()
        sample.timeStamp, sample.sampleValue.uiVal = at_us, int(self.busy.get(handle, 0))
        return sample

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:  # noqa: N802
        self._may("support")
        return type("Support", (), {"isSupportedDevice": int(self.has_gpm)})()

    def nvmlGpmSampleAlloc(self) -> Any:  # noqa: N802
        sample = ctypes.pointer(pynvml.struct_c_nvmlGpmSample_t())
        self.alive.add(address(sample))
        self.keep = [*getattr(self, "keep", []), sample]
        return sample

    def nvmlGpmSampleFree(self, sample: Any) -> None:  # noqa: N802
        self.alive.remove(address(sample))

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> Any:  # noqa: N802
        self._may("gpm")
        assert handle not in self.mig
        self.taken[address(sample)] = (handle, self.now)

    def nvmlGpmMigSampleGet(self, handle: str, gi: int, sample: Any) -> Any:  # noqa: N802
        self._may("gpm")
        assert gi in self.mig[handle]
        self.taken[address(sample)] = ((handle, gi), self.now)

    def nvmlGpmMetricsGet(self, ask: Any) -> None:  # noqa: N802
        assert (ask.version, ask.numMetrics) == (1, 1)
        (one, began), (other, ended) = self.taken[address(ask.sample1)], self.taken[address(ask.sample2)]
        assert one == other
        assert {address(ask.sample1), address(ask.sample2)} <= self.alive
        assert ended - began > 0.1
        assert ask.metrics[0].metricId == 1
        ask.metrics[0].nvmlReturn = self.refuses.get("metric", 0)
        ask.metrics[0].value = float("nan") if self.nan else self.busy.get(one, 0.0)


def address(sample: Any) -> int:
    return ctypes.addressof(sample.contents)


def watching(driver: Driver) -> ActivityMonitor:
    return ActivityMonitor(driver, clock=lambda: driver.now, sleep=driver.sleep)


def only(gpus: tuple[GpuFacts, ...]) -> GpuFacts:
    """As its parent reads it."""
    (found,) = msgspec.json.decode(msgspec.json.encode(gpus), type=tuple[GpuFacts, ...])
    return found


def parts(gpu: GpuFacts) -> tuple[SliceFacts, ...]:
    assert isinstance(gpu.slices, tuple), gpu.slices
    return gpu.slices


def why(fact: Any) -> Unknown:
    assert isinstance(fact, Unknown), fact
    return fact


def test_who_asks_once_gets_the_mean_of_a_second() -> None:
    driver = Driver()
    driver.busy["gpu0"] = 42.0
    record = only(watching(driver).read())
    assert driver.now == 101.0
    assert (record.activity.gpm, record.activity.utilisation) == (42.0, 42.0)
    assert record.energy_mj - record.activity.energy_before_mj == 80_000
    assert (record.memory_used_mib, record.listed) == (615, (3, 9))
    assert (record.sliced, record.slices) == (False, ())


def test_the_next_question_is_about_the_time_since_the_last_and_waits_for_nothing() -> None:
    driver = Driver()
    watch = watching(driver)
    watch.read()
    driver.now += 10
    asked = driver.now
    driver.busy["gpu0"] = 7.0
    record = only(watch.read())
    assert driver.now == asked
    assert (record.activity.window_s, record.activity.gpm) == (10.0, 7.0)
    assert record.activity.utilisation_covered_s == pytest.approx(10.0, abs=0.3)


def test_two_questions_at_once_are_kept_apart() -> None:
    driver = Driver()
    watch = watching(driver)
    watch.read()
    assert only(watch.read()).activity.gpm == 0.0
    assert driver.now == pytest.approx(102.0)


def test_between_questions_the_buffer_is_emptied_before_it_overflows() -> None:
    driver = Driver()
    watch = watching(driver)
    watch.read()
    for busy in (0, 0, 100, 0, 0, 0):  # 5 s of 30 fully busy; the buffer alone would show the last 14
        driver.now += 5
        driver.busy["gpu0"] = busy
        watch.collect()
    record = only(watch.read())
    assert record.activity.utilisation == pytest.approx(100 / 6, abs=1)
    assert record.activity.utilisation_peak == 100.0
    assert record.activity.utilisation_covered_s == pytest.approx(30.0, abs=0.3)


def test_without_that_the_hole_shows() -> None:
    driver = Driver()
    watch = watching(driver)
    watch.read()
    driver.now += 30
    record = only(watch.read())
    assert record.activity.utilisation_covered_s < 17
    assert record.activity.window_s == 30.0


def test_samples_that_are_old_empty_or_impossible_do_not_count() -> None:
    samples = UtilisationSamples()
    for at, value in ((0, 5.0), (1_000_000, 10.0), (1_000_000, 90.0), (2_000_000, 4e9), (3_000_000, 20.0)):
        samples.add(at, value)
    assert samples.take() == {"utilisation": 15.0, "utilisation_peak": 20.0, "utilisation_covered_s": 2.0}
    assert isinstance(samples.take()["utilisation"], Unknown)
    assert isinstance(UtilisationSamples().take()["utilisation"], Unknown)


def test_slices_are_measured_by_themselves_and_the_whole_is_not() -> None:
    driver = Driver(mig={"gpu0": [7, 9]})
    driver.busy[("gpu0", 9)] = 33.0
    record = only(watching(driver).read())
    assert record.sliced is True
    assert why(record.activity.gpm).by_design
    assert why(record.activity.utilisation).by_design
    assert [(part.uuid, part.gpu_instance, part.compute_instance, part.activity.gpm) for part in parts(record)] == [
        ("UUID-gpu0/7", 7, 0, 0.0),
        ("UUID-gpu0/9", 9, 0, 33.0),
    ]


def test_a_slice_that_comes_gets_a_window_and_one_that_goes_is_forgotten() -> None:
    driver = Driver(mig={"gpu0": [7]})
    watch = watching(driver)
    watch.read()
    driver.now, driver.mig = 200.0, {"gpu0": [9]}
    driver.busy[("gpu0", 9)] = 50.0
    assert parts(only(watch.read()))[0].activity.gpm == 50.0
    assert len(driver.alive) == 1
    driver.mig = {}
    assert only(watch.read()).activity.gpm == 0.0
    assert len(driver.alive) == 1


def test_a_gpu_that_is_cut_is_not_queried_for_utilisation_any_more() -> None:
    driver = Driver()
    watch = watching(driver)
    watch.read()
    driver.mig = {"gpu0": [7]}
    watch.read()
    watch.collect()  # the driver here insists on it
    driver.mig = {}
    assert only(watch.read()).activity.utilisation == 0.0


def test_samples_of_the_driver_do_not_pile_up() -> None:
    driver = Driver(gpus=2)
    watch = watching(driver)
    for _ in range(5):
        driver.now += 30
        watch.read()
    assert len(driver.alive) == 2


def test_an_older_model_has_no_gpm_by_design() -> None:
    record = only(watching(Driver(gpm=False)).read())
    assert record.activity.gpm == Unknown("this model has no performance monitoring (GPM)", by_design=True)
    assert record.activity.utilisation == 0.0


@pytest.mark.parametrize(
    ("call", "field"),
    [("gpm", "gpm"), ("support", "gpm"), ("metric", "gpm"), ("samples", "utilisation"), ("energy", "energy_mj")],
)
@pytest.mark.parametrize(
    ("error", "by_design"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, True),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, True),
        (pynvml.NVML_ERROR_UNKNOWN, False),
        (pynvml.NVML_ERROR_NO_PERMISSION, False),
    ],
)
def test_a_refusal_gives_the_reason_and_whether_it_is_for_ever(
    call: str, field: str, error: int, by_design: bool
) -> None:
    driver = Driver()
    driver.refuses[call] = error
    record = only(watching(driver).read())
    refused = why(record.energy_mj if field == "energy_mj" else getattr(record.activity, field))
    assert refused.by_design is by_design
    assert "NVIDIA driver returned an error" in refused.why


def test_after_a_refusal_the_next_window_is_measured() -> None:
    driver = Driver()
    watch = watching(driver)
    driver.refuses["gpm"] = pynvml.NVML_ERROR_UNKNOWN
    watch.read()
    driver.refuses.clear()
    driver.now += 30
    assert only(watch.read()).activity.gpm == 0.0
    assert len(driver.alive) == 1


def test_no_number_is_reported_in_words() -> None:
    driver = Driver()
    driver.nan = True
    assert "no number" in why(only(watching(driver).read()).activity.gpm).why


def test_processes_need_the_compute_list_and_not_the_other() -> None:
    driver = Driver()
    driver.refuses["graphics"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert only(watching(driver).read()).listed == (3, 9)
    driver.refuses = {"compute": pynvml.NVML_ERROR_NOT_SUPPORTED}
    assert isinstance(only(watching(driver).read()).listed, Unknown)


def test_a_lost_gpu_does_not_take_the_others_with_it() -> None:
    driver = Driver(gpus=2)
    driver.lost = {0}
    lost, there = watching(driver).read()
    assert isinstance(lost.uuid, Unknown)
    assert there.activity.gpm == 0.0


def test_a_gpu_that_does_not_say_whether_it_is_cut_gives_the_reason() -> None:
    driver = Driver()
    driver.refuses["mig"] = pynvml.NVML_ERROR_UNKNOWN
    assert isinstance(only(watching(driver).read()).sliced, Unknown)


def test_a_gpu_that_is_lost_between_two_questions_has_no_value_and_the_other_goes_on() -> None:
    driver = Driver(gpus=2)
    watch = watching(driver)
    watch.read()
    driver.now += 30
    driver.lost = {0}
    lost, there = watch.read()
    assert lost == GpuFacts(index=0, uuid=lost.uuid)
    assert isinstance(lost.uuid, Unknown)
    assert (there.activity.gpm, there.activity.window_s) == (0.0, 30.0)
    driver.lost = set()
    driver.now += 30
    back, _ = watch.read()
    assert back.activity.gpm_s == 1.0, "it begins anew"
    assert len(driver.alive) == 2


@pytest.mark.parametrize(("call", "field"), [("gpm", "gpm"), ("support", "gpm"), ("samples", "utilisation")])
def test_a_driver_that_is_older_than_the_binding_does_not_end_the_measuring(call: str, field: str) -> None:
    driver = Driver()

    def may(name: str) -> None:
        if name == call:
            raise pynvml.NVMLLibraryMismatchError("Unversioned function called")

    driver._may = may  # type: ignore[method-assign]
    record = only(watching(driver).read())
    assert why(getattr(record.activity, field)).by_design
    other = {"gpm": "utilisation", "utilisation": "gpm"}[field]
    assert getattr(record.activity, other) == 0.0


def test_a_slice_that_does_not_say_its_instance_is_not_measured() -> None:
    driver = Driver(mig={"gpu0": [7, 9]})

    def instance(part: str) -> int:
        if part == "gpu0/7":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return 9

    driver.nvmlDeviceGetGpuInstanceId = instance  # type: ignore[method-assign]
    first, second = parts(only(watching(driver).read()))
    assert isinstance(first.activity.gpm, Unknown)
    assert not first.activity.gpm.by_design
    assert second.activity.gpm == 0.0
