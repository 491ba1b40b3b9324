"""The child that measures, on a driver that works like NVML and is not one. It uses NVML's own structures."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpukeeper.devices import usage_child
from gpukeeper.devices.usage import CHILD
from gpukeeper.devices.usage_child import Opening, Samples, Watch, serve

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


def watching(driver: Driver) -> Watch:
    return Watch(driver, clock=lambda: driver.now, sleep=driver.sleep)


def only(records: list[dict[str, Any]]) -> dict[str, Any]:
    (record,) = json.loads(json.dumps(records, allow_nan=False))
    return record  # type: ignore[no-any-return]


def test_who_asks_once_gets_the_mean_of_a_second() -> None:
    driver = Driver()
    driver.busy["gpu0"] = 42.0
    record = only(watching(driver).read())
    assert driver.now == 101.0
    assert (record["gpm"], record["utilisation"]) == (42.0, 42.0)
    assert record["energy_mj"] - record["energy_before_mj"] == 80_000
    assert (record["memory_used_mib"], record["pids"]) == (615, [3, 9])
    assert (record["sliced"], record["slices"]) == (False, [])


def test_the_next_question_is_about_the_time_since_the_last_and_waits_for_nothing() -> None:
    driver = Driver()
    watch = watching(driver)
    watch.read()
    driver.now += 10
    asked = driver.now
    driver.busy["gpu0"] = 7.0
    record = only(watch.read())
    assert driver.now == asked
    assert (record["window_s"], record["gpm"]) == (10.0, 7.0)
    assert record["utilisation_covered_s"] == pytest.approx(10.0, abs=0.3)


def test_two_questions_at_once_are_kept_apart() -> None:
    driver = Driver()
    watch = watching(driver)
    watch.read()
    assert only(watch.read())["gpm"] == 0.0
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
    assert record["utilisation"] == pytest.approx(100 / 6, abs=1)
    assert record["utilisation_peak"] == 100.0
    assert record["utilisation_covered_s"] == pytest.approx(30.0, abs=0.3)


def test_without_that_the_hole_shows() -> None:
    driver = Driver()
    watch = watching(driver)
    watch.read()
    driver.now += 30
    record = only(watch.read())
    assert record["utilisation_covered_s"] < 17
    assert record["window_s"] == 30.0


def test_samples_that_are_old_empty_or_impossible_do_not_count() -> None:
    samples = Samples()
    for at, value in ((0, 5.0), (1_000_000, 10.0), (1_000_000, 90.0), (2_000_000, 4e9), (3_000_000, 20.0)):
        samples.add(at, value)
    assert samples.facts() == {"utilisation": 15.0, "utilisation_peak": 20.0, "utilisation_covered_s": 2.0}
    assert "why" in Samples().facts()["utilisation"]


def test_slices_are_measured_by_themselves_and_the_whole_is_not() -> None:
    driver = Driver(mig={"gpu0": [7, 9]})
    driver.busy[("gpu0", 9)] = 33.0
    record = only(watching(driver).read())
    assert record["sliced"] is True
    assert record["gpm"]["by_design"]
    assert record["utilisation"]["by_design"]
    assert [(part["uuid"], part["gi"], part["ci"], part["gpm"]) for part in record["slices"]] == [
        ("UUID-gpu0/7", 7, 0, 0.0),
        ("UUID-gpu0/9", 9, 0, 33.0),
    ]


def test_a_slice_that_comes_gets_a_window_and_one_that_goes_is_forgotten() -> None:
    driver = Driver(mig={"gpu0": [7]})
    watch = watching(driver)
    watch.read()
    driver.now, driver.mig = 200.0, {"gpu0": [9]}
    driver.busy[("gpu0", 9)] = 50.0
    assert only(watch.read())["slices"][0]["gpm"] == 50.0
    assert len(driver.alive) == 1
    driver.mig = {}
    assert only(watch.read())["gpm"] == 0.0
    assert len(driver.alive) == 1


def test_a_gpu_that_is_cut_is_not_asked_for_utilisation_any_more() -> None:
    driver = Driver()
    watch = watching(driver)
    watch.read()
    driver.mig = {"gpu0": [7]}
    watch.read()
    watch.collect()  # the driver here insists on it
    driver.mig = {}
    assert only(watch.read())["utilisation"] == 0.0


def test_samples_of_the_driver_do_not_pile_up() -> None:
    driver = Driver(gpus=2)
    watch = watching(driver)
    for _ in range(5):
        driver.now += 30
        watch.read()
    assert len(driver.alive) == 2


def test_an_older_model_has_no_gpm_by_design() -> None:
    record = only(watching(Driver(gpm=False)).read())
    assert record["gpm"] == {"why": "this model has no performance monitoring (GPM)", "by_design": True}
    assert record["utilisation"] == 0.0


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
def test_a_refusal_says_why_and_whether_it_is_for_ever(call: str, field: str, error: int, by_design: bool) -> None:
    driver = Driver()
    driver.refuses[call] = error
    record = only(watching(driver).read())
    assert record[field]["by_design"] is by_design
    assert "NVIDIA driver answered" in record[field]["why"]


def test_after_a_refusal_the_next_window_is_measured() -> None:
    driver = Driver()
    watch = watching(driver)
    driver.refuses["gpm"] = pynvml.NVML_ERROR_UNKNOWN
    watch.read()
    driver.refuses.clear()
    driver.now += 30
    assert only(watch.read())["gpm"] == 0.0
    assert len(driver.alive) == 1


def test_no_number_is_said_in_words() -> None:
    driver = Driver()
    driver.nan = True
    assert "no number" in only(watching(driver).read())["gpm"]["why"]


def test_processes_need_the_compute_list_and_not_the_other() -> None:
    driver = Driver()
    driver.refuses["graphics"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert only(watching(driver).read())["pids"] == [3, 9]
    driver.refuses = {"compute": pynvml.NVML_ERROR_NOT_SUPPORTED}
    assert "why" in only(watching(driver).read())["pids"]


def test_a_lost_gpu_does_not_take_the_others_with_it() -> None:
    driver = Driver(gpus=2)
    driver.lost = {0}
    lost, there = watching(driver).read()
    assert "why" in lost["uuid"]
    assert there["gpm"] == 0.0


def test_a_gpu_that_does_not_say_whether_it_is_cut_says_why() -> None:
    driver = Driver()
    driver.refuses["mig"] = pynvml.NVML_ERROR_UNKNOWN
    assert "why" in only(watching(driver).read())["sliced"]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "no driver"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no driver"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "failed"),
    ],
)
@pytest.mark.parametrize("call", ["init", "count"])
def test_after_a_failure_the_driver_is_opened_anew(call: str, error: int, state: str) -> None:
    driver = Driver()
    opening = Opening(driver, lambda _nvml: watching(driver))
    opening.collect()
    driver.refuses[call] = error
    assert opening.record()["state"] == state
    assert driver.opened == 0
    driver.refuses.clear()
    assert opening.record()["state"] == "answered"
    opening.collect()
    assert opening.record()["state"] == "answered"
    assert driver.opened == 1


# The program.


def test_each_line_is_answered_and_the_end_of_input_ends_it() -> None:
    reading, writing = os.pipe()
    answers: list[str] = []
    server = threading.Thread(target=serve, args=(reading, lambda: answers.append("yes"), lambda: None))
    server.start()
    for written in (b"?\n?", b"\n", b"half"):
        os.write(writing, written)
    os.close(writing)
    server.join()
    os.close(reading)
    assert answers == ["yes", "yes"]


def test_without_questions_it_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_child, "COLLECT_EVERY_S", 0.0)
    reading, writing = os.pipe()
    collected: list[int] = []

    def collect() -> None:
        collected.append(1)
        if len(collected) == 3:
            os.close(writing)

    serve(reading, lambda: None, collect)
    os.close(reading)
    assert len(collected) == 3


def test_the_real_child_answers_every_question_with_one_record() -> None:
    printed = subprocess.run(CHILD, input=b"?\n?\n", capture_output=True, check=True).stdout.splitlines()
    assert [json.loads(line)["state"] in {"answered", "no driver", "failed"} for line in printed] == [True, True]


def test_the_real_child_imports_nothing_from_the_folder_it_is_started_in(tmp_path: Path) -> None:
    (tmp_path / "select.py").write_text("raise SystemExit('taken over')")
    (tmp_path / "json.py").write_text("raise SystemExit('taken over')")
    assert subprocess.run(CHILD, cwd=tmp_path, input=b"", capture_output=True, check=False).returncode == 0
