"""Readings become samples: GPUs for every holder, counters as differences."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest

from gpukeeper.devices.busy import GpuUse
from gpukeeper.devices.counters import Counters
from gpukeeper.devices.meter import NOT_READ, SECONDARY, CounterMeter, GpuMeter, Meters
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Ref, Seen, State, Subject
from gpukeeper.model.unknown import Unknown

NOW = datetime(2026, 3, 2, 8, tzinfo=UTC)
NO_TERMINAL = Unknown("it has no terminal", by_design=True)


class Still:
    def now(self) -> datetime:
        return NOW


class Driver:
    """Stands where the reader of the driver stands."""

    def __init__(self, answer: Mapping[str, GpuUse] | Unknown) -> None:
        self.answer, self.asked = answer, 0

    async def read(self) -> Mapping[str, GpuUse] | Unknown:
        self.asked += 1
        return self.answer


def workload(name: str, *devices: str, platform: str = "docker", incarnation: str = "1") -> Subject:
    seen = Seen(Ref(platform, "here", "container", name, f"uid-{name}"), incarnation, "", NOW)
    return Subject(seen=seen, state=State.RUNNING, created=NOW, started=NOW, devices=devices)


def counted(cpu_ns: int, starttime: int = 7) -> Counters:
    return Counters(starttime=starttime, cpu_ns=cpu_ns, disk_bytes=0, network_bytes=0, typed=NO_TERMINAL)


def use(uuid: str, busy: float, *, part: bool = False, covered_s: float = 1.0) -> GpuUse:
    return GpuUse(uuid=uuid, slice=part, busy=busy, memory_used_mib=0, pids=(), parent=None, covered_s=covered_s)


def read(one: GpuMeter | CounterMeter | Meters, *subjects: Subject) -> dict[tuple[str, str, str], object]:
    found: list[Sample] = list(asyncio.run(one.read(subjects)))  # type: ignore[arg-type]
    return {(s.key.rpartition("-")[2], s.signal.value, s.device): s.value for s in found}


def test_everybody_who_shares_a_gpu_is_told_its_use() -> None:
    driver = Driver({"GPU-0": use("GPU-0", 40.0), "MIG-1": use("MIG-1", 0.2, part=True)})
    gpus = GpuMeter(driver, Still(), ["docker"])  # type: ignore[arg-type]
    found = read(gpus, workload("a", "GPU-0"), workload("b", "GPU-0", "MIG-1"))
    assert found == {("a", "gpu", "GPU-0"): 40.0, ("b", "gpu", "GPU-0"): 40.0, ("b", "gpu", "MIG-1"): 0.2}
    assert driver.asked == 1


def test_what_the_driver_does_not_name_is_unknown() -> None:
    found = read(GpuMeter(Driver({}), Still(), ["docker"]), workload("a", "GPU-9"))  # type: ignore[arg-type]
    assert found == {("a", "gpu", "GPU-9"): Unknown("the driver does not report GPU-9")}
    silent = Unknown("the driver did not answer")
    assert read(GpuMeter(Driver(silent), Still(), ["docker"]), workload("a", "GPU-9")) == {  # type: ignore[arg-type]
        ("a", "gpu", "GPU-9"): silent
    }


def test_the_driver_is_not_queried_for_workloads_of_other_machines() -> None:
    driver = Driver({})
    assert read(GpuMeter(driver, Still(), ["host"]), workload("a", "GPU-0")) == {}  # type: ignore[arg-type]
    assert driver.asked == 0


def test_a_first_reading_takes_a_window_of_its_own_and_the_next_does_not() -> None:
    """One second of CPU in two, then two in ten."""
    readings, steady = iter([0, 10**9, 3 * 10**9]), iter([100.0, 102.0, 102.0, 112.0, 112.0])
    counters = CounterMeter(
        "docker", Still(), lambda subject: counted(next(readings)), window=0.0, ticks=lambda: next(steady)
    )
    assert read(counters, workload("a"))[("a", "cpu", "")] == pytest.approx(50.0)
    assert read(counters, workload("a"))[("a", "cpu", "")] == pytest.approx(20.0)
    assert list(readings) == []


def test_another_run_is_not_compared_with_the_one_before() -> None:
    grown = iter([5, 6, 10**12, 10**12])
    counters = CounterMeter(
        "docker", Still(), lambda subject: counted(next(grown), starttime=int(subject.seen.incarnation)), window=0.0
    )
    read(counters, workload("a", incarnation="1"))
    assert read(counters, workload("a", incarnation="2"))[("a", "cpu", "")] == 0.0


def test_what_could_not_be_found_is_unknown_of_any_signal() -> None:
    found = read(CounterMeter("docker", Still(), lambda subject: None, window=0.0), workload("a"))
    assert found == {("a", signal.value, ""): NOT_READ for signal in SECONDARY}


def test_meters_speak_together() -> None:
    gpus = GpuMeter(Driver({"GPU-0": use("GPU-0", 1.0)}), Still(), ["host"])  # type: ignore[arg-type]
    both = Meters(gpus, CounterMeter("host", Still(), lambda subject: counted(0), window=0.0))
    signals = {signal for _, signal, _ in read(both, workload("a", "GPU-0", platform="host"))}
    assert signals == {signal.value for signal in Signal}


def test_a_reading_that_hangs_is_not_begun_again_until_it_ended() -> None:
    """Each would cost a thread, twice a minute, as long as a disk is dead."""
    over, begun = threading.Event(), []

    def hangs(_subject: Subject) -> Counters:
        begun.append(1)
        over.wait()
        return counted(0)

    counters = CounterMeter("docker", Still(), hangs, window=0.0, deadline=timedelta(milliseconds=50))
    for _ in range(3):
        assert all(isinstance(value, Unknown) for value in read(counters, workload("a")).values())
    assert len(begun) == 1
    over.set()
    while len(begun) == 1:
        read(counters, workload("a"))


# From when on a reading speaks


class Moving:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at


def since(samples: object) -> dict[str, float | None]:
    """In seconds from NOW on, by workload."""
    assert isinstance(samples, list)
    return {
        one.key.rpartition("-")[2]: None if one.since is None else (one.since - NOW).total_seconds()
        for one in samples
        if one.signal in (Signal.GPU, Signal.CPU)
    }


def test_a_gpu_reading_goes_on_where_the_one_before_ended() -> None:
    driver, clock = Driver({"GPU-0": use("GPU-0", 0.0, covered_s=1.0)}), Moving()
    gpus, one = GpuMeter(driver, clock, ["docker"]), workload("a", "GPU-0")  # type: ignore[arg-type]
    assert since(asyncio.run(gpus.read([one]))) == {"a": -1.0}
    clock.at, driver.answer = NOW + timedelta(seconds=30), {"GPU-0": use("GPU-0", 0.0, covered_s=29.5)}
    assert since(asyncio.run(gpus.read([one]))) == {"a": 0.0}
    clock.at, driver.answer = NOW + timedelta(seconds=60), {"GPU-0": use("GPU-0", 0.0, covered_s=1.0)}
    assert since(asyncio.run(gpus.read([one]))) == {"a": 59.0}, "the program that asks the driver was started anew"


def test_a_question_about_one_workload_leaves_no_gap_in_another() -> None:
    """It ends the window of every GPU. What it found of the others is theirs at the next tick."""
    driver, clock = Driver({"GPU-0": use("GPU-0", 0.0), "GPU-1": use("GPU-1", 0.0)}), Moving()
    gpus = GpuMeter(driver, clock, ["docker"])  # type: ignore[arg-type]
    a, b = workload("a", "GPU-0"), workload("b", "GPU-1")
    asyncio.run(gpus.read([a, b]))
    clock.at = NOW + timedelta(seconds=10)
    driver.answer = {"GPU-0": use("GPU-0", 0.0, covered_s=10), "GPU-1": use("GPU-1", 95.0, covered_s=10)}
    asyncio.run(gpus.read([a]))
    clock.at = NOW + timedelta(seconds=30)
    driver.answer = {"GPU-0": use("GPU-0", 0.0, covered_s=20), "GPU-1": use("GPU-1", 0.0, covered_s=20)}
    found = list(asyncio.run(gpus.read([a, b])))
    assert since(found) == {"a": 10.0, "b": 0.0}
    assert [one.value for one in found] == [0.0, 95.0]


def test_what_could_not_be_read_once_leaves_a_gap() -> None:
    driver, clock = Driver({"GPU-0": use("GPU-0", 0.0)}), Moving()
    gpus, one = GpuMeter(driver, clock, ["docker"]), workload("a", "GPU-0")  # type: ignore[arg-type]
    asyncio.run(gpus.read([one]))
    clock.at, driver.answer = NOW + timedelta(seconds=30), Unknown("it did not answer")
    asyncio.run(gpus.read([one]))
    clock.at, driver.answer = NOW + timedelta(seconds=60), {"GPU-0": use("GPU-0", 0.0, covered_s=1.0)}
    assert since(asyncio.run(gpus.read([one]))) == {"a": 59.0}


def test_counters_go_on_where_the_reading_before_ended() -> None:
    clock, steady = Moving(), iter([0.0, 2.0, 2.0, 62.0, 62.0])
    counters = CounterMeter("docker", clock, lambda _: counted(0), window=0.0, ticks=lambda: next(steady))
    asyncio.run(counters.read([workload("a")]))
    clock.at = NOW + timedelta(seconds=60)
    found = list(asyncio.run(counters.read([workload("a")])))
    assert since(found) == {"a": 0.0}
    assert found[0].at == clock.at


def test_a_reading_in_between_is_given_with_the_next_one() -> None:
    """The agent of a node reads more often than workloads are measured: work that it saw is not lost for them."""
    driver, clock = Driver({"GPU-0": use("GPU-0", 0.0)}), Moving()
    gpus, one = GpuMeter(driver, clock, ["docker"]), workload("a", "GPU-0")  # type: ignore[arg-type]
    asyncio.run(gpus.read([one]))
    clock.at, driver.answer = NOW + timedelta(seconds=15), {"GPU-0": use("GPU-0", 70.0, covered_s=15)}
    asyncio.run(gpus.measure())
    clock.at, driver.answer = NOW + timedelta(seconds=30), {"GPU-0": use("GPU-0", 0.0, covered_s=15)}
    found = list(asyncio.run(gpus.read([one])))
    assert ([each.value for each in found], since(found)) == ([70.0], {"a": 0.0})
