"""Series of images, workloads and logs: bounded, absent where not measured, and measured in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

from gpukeeper.interfaces.telemetry import machine
from gpukeeper.interfaces.telemetry.machine import CALM, FACTS, FIRST, LARGEST, StorageFacts, StorageWatch, of_storage
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.ports import ImageBytes, StorageBytes, WorkloadBytes
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.world import VirtualLoop, run_virtually

T = TypeVar("T")
NOW = datetime(2026, 11, 16, 9, tzinfo=UTC)
HERE = ("docker", "node-1")
EVERY = timedelta(minutes=30)
NOT_MEASURED = Unknown("not measured")


def facts(**more: object) -> StorageFacts:
    known: dict[str, object] = {"at": NOW, "layers": 0}
    return StorageFacts(HERE, StorageBytes(**(known | more)), timedelta(seconds=2))  # type: ignore[arg-type]


def series(*places: StorageFacts) -> dict[str, dict[str, float]]:
    """By name: values by the last label."""
    return {
        family.name.removeprefix("gpukeeper_"): {list(one.labels.values())[-1]: one.value for one in family.samples}
        for family in of_storage(places)
    }


def workloads(sizes: Iterable[int]) -> tuple[WorkloadBytes, ...]:
    return tuple(WorkloadBytes(f"w{number}", size, size * 2) for number, size in enumerate(sizes))


def test_images_add_up_to_all_layers_each_once() -> None:
    found = series(facts(layers=1150, images=(ImageBytes("torch", 300), ImageBytes("jax", 200), ImageBytes("c", 50))))
    assert found["image_bytes"] == {"torch": 300, "jax": 200, "c": 50, "(shared)": 600}
    assert sum(found["image_bytes"].values()) == 1150
    assert found["storage_not_measured"] == dict.fromkeys(FACTS, 0)


def test_only_the_largest_have_a_series_of_their_own() -> None:
    found = series(facts(workloads=workloads(range(100))))
    written, logs = found["workload_written_bytes"], found["workload_log_bytes"]
    assert len(written) == len(logs) == LARGEST + 1
    assert (written["w99"], written["(other)"]) == (99, sum(range(100 - LARGEST)))
    assert sum(logs.values()) == 2 * sum(range(100))


def test_what_was_not_measured_is_absent_and_counted() -> None:
    found = series(
        facts(
            layers=NOT_MEASURED,
            images=(ImageBytes("torch", 300), ImageBytes("jax", NOT_MEASURED)),
            workloads=(WorkloadBytes("a", NOT_MEASURED, 7), WorkloadBytes("b", 3, NOT_MEASURED)),
        )
    )
    assert found["image_bytes"] == {"torch": 300}
    assert (found["workload_written_bytes"], found["workload_log_bytes"]) == ({"b": 3}, {"a": 7})
    assert found["storage_not_measured"] == {"images": 1, "layers": 1, "written": 1, "logs": 1}


def test_with_an_image_that_was_not_measured_the_shared_layers_are_unknown() -> None:
    found = series(facts(layers=900, images=(ImageBytes("torch", 300), ImageBytes("jax", NOT_MEASURED))))
    assert found["image_bytes"] == {"torch": 300}


def test_a_workload_without_a_log_is_neither_measured_nor_missing() -> None:
    found = series(facts(workloads=(WorkloadBytes("a", 1, None),)))
    assert found["workload_log_bytes"] == {}
    assert found["storage_not_measured"]["logs"] == 0


def test_a_place_that_could_not_be_read_has_no_values_and_no_time() -> None:
    found = series(StorageFacts(HERE, NOT_MEASURED, timedelta(seconds=180)))
    assert found.pop("storage_not_measured") == dict.fromkeys(FACTS, 1)
    assert found.pop("storage_seconds") == {"node-1": 180}
    assert set(found) >= {"image_bytes", "storage_timestamp_seconds"}
    assert not any(found.values())


def test_the_build_cache_and_when_it_was_measured() -> None:
    found = series(facts(cache=9))
    assert found["build_cache_bytes"] == {"node-1": 9}
    assert found["storage_timestamp_seconds"] == {"node-1": NOW.timestamp()}


def virtual(work: Coroutine[Any, Any, T]) -> T:
    return run_virtually(work, VirtualLoop())


class Reader:
    name, place = HERE

    def __init__(self, took: timedelta = timedelta(), problem: Exception | None = None) -> None:
        self.took, self.problem, self.reads = took, problem, 0

    async def read_storage(self) -> StorageBytes:
        self.reads += 1
        await asyncio.sleep(self.took.total_seconds())
        if self.problem is not None:
            raise self.problem
        return StorageBytes(at=NOW, layers=1)


async def scraped(watch: StorageWatch, span: timedelta) -> None:
    """Every minute."""
    for _ in range(int(span / timedelta(minutes=1))):
        watch.facts()
        await asyncio.sleep(60)


def test_nothing_is_measured_unless_somebody_scrapes_and_a_scrape_waits_for_nothing() -> None:
    reader = Reader(timedelta(minutes=2))
    watch = StorageWatch([reader], lambda: EVERY)

    async def run() -> None:
        await asyncio.sleep(7200)
        assert reader.reads == 0
        begun = asyncio.get_running_loop().time()
        assert watch.facts() == ()
        await asyncio.sleep(FIRST.total_seconds())
        assert watch.facts() == ()  # starts it
        assert asyncio.get_running_loop().time() - begun == FIRST.total_seconds()
        await asyncio.sleep(121)
        (found,) = watch.facts()
        assert found.took == timedelta(minutes=2)

    virtual(run())


def test_it_is_measured_as_often_as_configured() -> None:
    reader = Reader(timedelta(seconds=10))
    virtual(scraped(StorageWatch([reader], lambda: EVERY), timedelta(hours=5)))
    assert reader.reads == 10


def test_a_slow_measurement_is_repeated_less_often() -> None:
    """At most a fiftieth of the time, whatever is configured."""
    reader = Reader(timedelta(minutes=3))
    virtual(scraped(StorageWatch([reader], lambda: EVERY), timedelta(hours=24)))
    assert reader.reads * reader.took * CALM <= timedelta(hours=24) + CALM * reader.took
    assert reader.reads >= 9


def test_none_turns_it_off() -> None:
    reader, every = Reader(), [EVERY, None]
    watch = StorageWatch([reader], lambda: every[-1])
    virtual(scraped(watch, timedelta(hours=2)))
    assert reader.reads == 0
    every.pop()
    virtual(scraped(watch, timedelta(hours=2)))
    assert reader.reads


@pytest.mark.parametrize("problem", [PlatformError("the engine did not answer"), RuntimeError("a bug")])
def test_a_failure_is_not_measured_and_tried_again(problem: Exception) -> None:
    reader = Reader(problem=problem)
    watch = StorageWatch([reader], lambda: EVERY)

    async def run() -> tuple[StorageFacts, ...]:
        await scraped(watch, timedelta(hours=1))
        return watch.facts()

    (found,) = virtual(run())
    assert isinstance(found.found, Unknown)
    assert reader.reads == 2


def test_the_names_of_sums_are_no_names_of_images() -> None:
    for word in (machine.REST, machine.SHARED):
        assert not word[0].isalnum()
