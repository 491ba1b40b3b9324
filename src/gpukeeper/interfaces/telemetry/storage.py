"""Series of images, of what workloads wrote, and of their logs: measured rarely, in the background, while somebody
scrapes. Bounded: the LARGEST of each kind one by one, the rest as one sum. What was not measured has no series."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

import msgspec
from prometheus_client.core import GaugeMetricFamily

from gpukeeper.engine.failures import bug_words
from gpukeeper.interfaces.telemetry.series import gauge
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.ports import StorageReader
from gpukeeper.model.storage import StorageBytes
from gpukeeper.model.unknown import Unknown

LARGEST = 20
REST, SHARED = "(other)", "(shared)"  # no names of images or workloads
FACTS = ("images", "layers", "written", "logs")
FIRST = timedelta(minutes=1)  # after the first scrape: the first pass has the engine for itself
CALM = 50  # a measurement takes at most this part of the time
Place = tuple[str, str]
Numbers = dict[tuple[str, ...], float]


class StorageFacts(msgspec.Struct, frozen=True):
    """The last measurement of a place, or why there is none, and how long it took."""

    place: Place
    found: StorageBytes | Unknown
    took: timedelta = timedelta()


class StorageWatch:
    """`every`: None if nothing is measured."""

    def __init__(self, readers: Sequence[StorageReader], every: Callable[[], timedelta | None]) -> None:
        self._readers, self._every = readers, every
        self._facts: dict[Place, StorageFacts] = {}
        self._due: float | None = None  # steady time
        self._task: asyncio.Task[None] | None = None

    def facts(self) -> tuple[StorageFacts, ...]:
        """As last measured. Starts a measurement if one is due; waits for nothing."""
        every = self._every()
        if every is None:
            return ()
        steady = asyncio.get_running_loop().time()
        if self._due is None:
            self._due = steady + min(FIRST, every).total_seconds()
        if self._readers and steady >= self._due and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._measure(every))
        return tuple(self._facts.values())

    async def _measure(self, every: timedelta) -> None:
        """One place after the other."""
        steady = asyncio.get_running_loop().time
        begun = steady()
        for one in self._readers:
            place, start = (one.name, one.place), steady()
            found = await _read(one)
            self._facts[place] = StorageFacts(place, found, timedelta(seconds=steady() - start))
        self._due = steady() + max(every.total_seconds(), CALM * (steady() - begun))


async def _read(reader: StorageReader) -> StorageBytes | Unknown:
    try:
        return await reader.read_storage()
    except PlatformError as problem:
        return Unknown(str(problem))
    except Exception as bug:  # a metric must not end the program
        return Unknown(bug_words(bug))


def of_storage(places: Iterable[StorageFacts]) -> Iterator[GaugeMetricFamily]:
    images, written, logs, cache, times, spans, missing = (Numbers() for _ in range(7))
    for one in places:
        here, found = one.place, one.found
        spans[here] = one.took.total_seconds()
        if isinstance(found, Unknown):
            missing |= {(*here, fact): 1 for fact in FACTS}
            continue
        times[here] = found.at.timestamp()
        images |= _images(here, found)
        written |= _largest(here, [(item.name, item.written) for item in found.workloads])
        logs |= _largest(here, [(item.name, item.log) for item in found.workloads])
        cache |= {} if found.cache is None else {here: found.cache}
        missing |= {(*here, fact): number for fact, number in _not_measured(found).items()}
    labels = ("platform", "place")
    yield gauge("gpukeeper_image_bytes", images, *labels, "image")
    yield gauge("gpukeeper_workload_written_bytes", written, *labels, "workload")
    yield gauge("gpukeeper_workload_log_bytes", logs, *labels, "workload")
    yield gauge("gpukeeper_build_cache_bytes", cache, *labels)
    yield gauge("gpukeeper_storage_timestamp_seconds", times, *labels)
    yield gauge("gpukeeper_storage_seconds", spans, *labels)
    yield gauge("gpukeeper_storage_not_measured", missing, *labels, "what")


def _images(here: Place, found: StorageBytes) -> Numbers:
    """All of them add up to the layers, each counted once."""
    numbers = _largest(here, [(one.name, one.own) for one in found.images])
    own = sum(one.own for one in found.images if not isinstance(one.own, Unknown))
    measured = all(not isinstance(one.own, Unknown) for one in found.images)
    if measured and not isinstance(found.layers, Unknown):
        numbers[*here, SHARED] = max(found.layers - own, 0)
    return numbers


def _largest(here: Place, sizes: Iterable[tuple[str, int | Unknown | None]]) -> Numbers:
    """Those with the same name (images without one of a short id) are added."""
    known: Tally[str] = Tally()
    for name, size in sizes:
        if isinstance(size, int):
            known[name] += size
    ranked = known.most_common()
    numbers: Numbers = {(*here, name): size for name, size in ranked[:LARGEST]}
    if len(ranked) > LARGEST:
        numbers[*here, REST] = sum(size for _, size in ranked[LARGEST:])
    return numbers


def _not_measured(found: StorageBytes) -> Mapping[str, int]:
    return {
        "images": sum(isinstance(one.own, Unknown) for one in found.images),
        "layers": int(isinstance(found.layers, Unknown)),
        "written": sum(isinstance(one.written, Unknown) for one in found.workloads),
        "logs": sum(isinstance(one.log, Unknown) for one in found.workloads),
    }
