"""How busy the GPUs of pods were, minute by minute, from DCGM exporters, read directly if there is no Prometheus
between. Independent of the policy. The value of a minute is its largest reading: one busy reading makes it busy. An
idle minute must be plausible: the energy counter, which grows even at rest, grew; both utilization fields agree if
they exist; power and memory do not contradict it; not all GPUs of an exporter became idle at once; no reading is
missing. Otherwise it is Unknown, which is never idle.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TypeAlias

import msgspec

from gpukeeper.clients.prometheus import DCGM_FIELDS, parse_export
from gpukeeper.devices.busy import STALE_AFTER, STEADY_MIB, AllIdle, is_busy
from gpukeeper.model.series import moment_of
from gpukeeper.model.unknown import Unknown, larger

Device: TypeAlias = tuple[str, int | None]  # uuid of the GPU; GPU instance of a slice
Share: TypeAlias = tuple[str, int | None, str]  # the same, and which replica of a GPU that is shared
Pod: TypeAlias = tuple[str, str]  # namespace and name
Value: TypeAlias = float | Unknown
Point: TypeAlias = tuple[float, Value]  # seconds since the epoch

MINUTE, ONE_MINUTE = 60, timedelta(minutes=1)
MOMENT = timedelta(microseconds=1)
LOOK_BACK = 8  # minutes before the first one that is judged: for the energy counter and for doubts
BACK_MAX = 120  # minutes of history that the first reading requests
PAIR_MAX = 5 * MINUTE  # seconds between two readings of a counter that are compared
NEVER_IDLE_WATTS = 250.0  # no GPU rests at that
SURELY_BUSY = 50.0  # percent: no policy calls that idle, so it need not be plausible
APART = 1.5  # times the usual time between two readings: farther apart, one is missing
APART_MIN, APART_MAX = 45.0, 90.0  # seconds
SIGNALS = {"engine", "utilisation", "energy_mj", "power_watts", "memory_used_mib"}
NAMES = tuple(sorted(name for name, (field, _read) in DCGM_FIELDS.items() if field in SIGNALS))

GAP = Unknown("a measurement is missing in that minute, so it may have been busy")
ALL_AT_ONCE = Unknown("all GPUs of its node became idle at once; the source may be wrong")
ELSEWHERE = Unknown(
    "it is shared and another GPU of its node is busy: under MPS, use may be reported for the wrong GPU"
)


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One field of one device, as exported by one exporter for one pod."""

    field: str
    device: Device
    source: str  # which exporter
    pod: Pod | None
    uid: str = ""  # of the pod, if the exporter has it
    replica: str = ""  # of a GPU that several share
    mps: bool = False
    points: tuple[Point, ...]

    @property
    def share(self) -> Share:
        return (*self.device, self.replica)


def trace(labels: Mapping[str, str], name: str, points: Iterable[tuple[float, float]], source: str) -> Trace | None:
    """None: not of a GPU, or nothing that is judged here."""
    field, read = DCGM_FIELDS.get(name, ("", None))
    instance = labels.get("GPU_I_ID", "")
    if field not in SIGNALS or read is None or not labels.get("UUID") or not (not instance or instance.isdecimal()):
        return None
    if instance and field == "utilisation":
        return None  # slices have none: a 0 there means "not supported"
    return Trace(
        field=field,
        device=(labels["UUID"], int(instance) if instance else None),
        source=source,
        pod=pod_of(labels),
        uid=labels.get("exported_pod_uid") or labels.get("pod_uid", ""),
        replica=labels.get("vgpu", ""),
        mps=_is_mps(labels),
        points=tuple((at, read(value)) for at, value in points),
    )


def pod_of(labels: Mapping[str, str]) -> Pod | None:
    """Where the scraper does not honour the labels it reads, `pod` and `namespace` may be the exporter's own."""
    name = labels.get("exported_pod") or labels.get("pod")
    return (labels.get("exported_namespace") or labels.get("namespace", ""), name) if name else None


def source_of(labels: Mapping[str, str]) -> str:
    return labels.get("instance") or labels.get("Hostname") or labels.get("hostname", "")


def _is_mps(labels: Mapping[str, str]) -> bool:
    """By labels of the node that a scraper copies."""
    return any(
        (name.endswith("sharing_strategy") and value == "mps") or (name.endswith("mps_capable") and value == "true")
        for name, value in labels.items()
    )


class DeviceMinutes(msgspec.Struct, frozen=True):
    """The value of one device in each minute with readings."""

    minutes: Mapping[int, Value]
    slice: bool


def minutes_of_devices(traces: Sequence[Trace], first: int, last: int) -> dict[Device, DeviceMinutes]:
    """The minutes `first` to `last`, numbered since the epoch. The traces should begin LOOK_BACK minutes earlier."""
    by_source: dict[str, dict[Device, list[Trace]]] = defaultdict(lambda: defaultdict(list))
    for one in traces:
        by_source[one.source][one.device].append(one)
    merged: dict[Device, dict[int, Value]] = defaultdict(dict)
    for devices in by_source.values():
        by_device = {device: _minutes_of(device, devices, first - LOOK_BACK, last) for device in tuple(devices)}
        _doubt_all_at_once(by_device, first - LOOK_BACK, last)
        _doubt_shared(by_device, devices)
        for device, values in by_device.items():
            for minute, value in values.items():
                if minute >= first:
                    other = merged[device].get(minute)  # of another exporter of the same device
                    merged[device][minute] = value if other is None else larger(value, other)
    return {device: DeviceMinutes(values, device[1] is not None) for device, values in merged.items()}


def _minutes_of(device: Device, traces: Mapping[Device, Sequence[Trace]], first: int, last: int) -> dict[int, Value]:
    """Of one device by one exporter; the readings belong to the device, whichever pod they are labelled with."""
    fields: dict[str, list[Point]] = defaultdict(list)
    for one in traces[device]:
        fields[one.field] += one.points
    if not fields["energy_mj"]:  # of a slice: the counter of its whole GPU
        whole = traces.get((device[0], None), ())
        fields["energy_mj"] = [point for one in whole if one.field == "energy_mj" for point in one.points]
    engine, use = _by_minute(fields["engine"]), _by_minute(fields["utilisation"])
    exists = {name for name in ("engine", "utilisation") if fields[name]}
    life = _Plausibility(fields, whole=device[1] is None)
    covered = _covered([at for name in exists for at, _value in fields[name]])
    found: dict[int, Value] = {}
    for minute in sorted({*engine, *use}):
        if first <= minute <= last:
            value = _of_fields(engine.get(minute, ()), use.get(minute, ()), exists)
            found[minute] = value
            if not isinstance(value, Unknown) and value < SURELY_BUSY:
                busy = is_busy(value, device[1] is not None)
                old, contradiction = life.staleness(minute), None if busy else life.contradiction(minute)
                gap = None if busy or covered(minute) else GAP
                found[minute] = next((one for one in (old, contradiction, gap) if one is not None), value)
    return found


def _covered(times: Iterable[float]) -> Callable[[int], bool]:
    """Whether no reading is missing in a minute: a reading is a point in time, not an average."""
    order = sorted(set(times))
    steps = sorted(later - earlier for earlier, later in pairwise(order))
    apart = min(max(APART * steps[len(steps) // 2], APART_MIN), APART_MAX) if steps else APART_MIN

    def covered(minute: int) -> bool:
        begin, end = minute * MINUTE, (minute + 1) * MINUTE
        first, last = bisect_right(order, begin), bisect_left(order, end)
        around = [*(order[first - 1 : first] or [begin]), *order[first:last]]
        # The reading after it may not be there yet.
        around += order[last : last + 1] or [end]
        return all(later - earlier <= apart for earlier, later in pairwise(around))

    return covered


def _of_fields(engine: Sequence[Value], use: Sequence[Value], exists: set[str]) -> Value:
    """The larger of the two. One alone is used if the other never exists, or if it is surely busy."""
    readings = [*engine, *use]
    largest = max((one for one in readings if not isinstance(one, Unknown)), default=None)
    if largest is not None and largest >= SURELY_BUSY:
        return largest
    blank = next((one for one in readings if isinstance(one, Unknown)), None)
    if blank is not None:  # it may hide a busy reading
        return blank
    for name, values in (("engine", engine), ("utilisation", use)):
        if name in exists and not values:
            return Unknown(f"its {name} was not exported in that minute, and one source alone may be wrong")
    return _NOTHING if largest is None else largest


class _Plausibility:
    """Other fields of one device: whether its readings are fresh, and what contradicts an idle reading."""

    def __init__(self, fields: Mapping[str, Sequence[Point]], *, whole: bool) -> None:
        self._counts, (self._grown, self._fallen) = bool(fields["energy_mj"]), _energy(fields["energy_mj"])
        # The power of a slice is that of its whole GPU.
        self._power = _by_minute(fields["power_watts"]) if whole else {}
        self._memory = _by_minute(fields["memory_used_mib"])

    def staleness(self, minute: int) -> Unknown | None:
        """Why the readings of a minute may be stale."""
        if not self._counts:
            return Unknown("the exporter has no energy counter, so its values may be stale")
        if minute in self._fallen:
            return Unknown("its energy counter was reset: the driver was just loaded")
        if not any(minute - back in self._grown for back in range(STALE_AFTER // ONE_MINUTE)):
            return Unknown("its energy counter does not increase, so the exporter's values are stale")
        return None

    def contradiction(self, minute: int) -> Unknown | None:
        """Why it cannot have been idle."""
        watts = max(_known(self._power.get(minute, ())), default=0.0)
        if watts >= NEVER_IDLE_WATTS:
            return Unknown(f"it is reported as idle but draws {watts:.0f} W; one of the two is wrong")
        memory = [*_known(self._memory.get(minute - 1, ()))[-1:], *_known(self._memory.get(minute, ()))]
        if memory and max(memory) - min(memory) > STEADY_MIB:
            return Unknown(f"its memory in use changed by {max(memory) - min(memory):.0f} MiB, so it is in use")
        return None


def _known(values: Sequence[Value]) -> list[float]:
    return [one for one in values if not isinstance(one, Unknown)]


def _energy(points: Sequence[Point]) -> tuple[set[int], set[int]]:
    """The minutes in which the counter was seen to grow, and those in which it fell."""
    known = sorted((at, value) for at, value in points if not isinstance(value, Unknown))
    grown: set[int] = set()
    fallen: set[int] = set()
    for (earlier, before), (at, value) in pairwise(known):
        if value > before and at - earlier <= PAIR_MAX:
            grown.add(int(at) // MINUTE)
        elif value < before and at > earlier:
            fallen.add(int(at) // MINUTE)
    return grown, fallen


def _by_minute(points: Sequence[Point]) -> dict[int, list[Value]]:
    found: dict[int, list[Value]] = defaultdict(list)
    for at, value in points:
        found[int(at) // MINUTE].append(value)
    return found


def _doubt_all_at_once(by_device: Mapping[Device, dict[int, Value]], first: int, last: int) -> None:
    all_idle = AllIdle[Device]()
    for minute in range(first, last + 1):
        known = {
            device: is_busy(value, device[1] is not None)
            for device, values in by_device.items()
            if not isinstance(value := values.get(minute, _NOTHING), Unknown)
        }
        if all_idle.doubts(known, minute * MINUTE):
            for device in known:
                by_device[device][minute] = ALL_AT_ONCE


_NOTHING = Unknown("no measurement in that minute")


def _doubt_shared(by_device: Mapping[Device, dict[int, Value]], traces: Mapping[Device, Sequence[Trace]]) -> None:
    """Of several sharers MPS may show one on a GPU that it does not use (dcgm-exporter#568)."""
    busiest: dict[int, float] = defaultdict(float)
    for device, values in by_device.items():
        for minute, value in values.items():
            if not isinstance(value, Unknown) and is_busy(value, device[1] is not None):
                busiest[minute] = max(busiest[minute], value)
    for device, mine in traces.items():
        for minute in _shared(mine):
            value = by_device[device].get(minute, _NOTHING)
            if not isinstance(value, Unknown) and value < min(busiest[minute], SURELY_BUSY):
                by_device[device][minute] = ELSEWHERE


def _shared(traces: Sequence[Trace]) -> set[int]:
    sharers: dict[int, set[tuple[Pod | None, str]]] = defaultdict(set)
    for one in traces:
        for at, _value in one.points:
            sharers[int(at) // MINUTE].add((one.pod, one.replica))
    return {minute for minute, who in sharers.items() if len(who) > 1 or any(replica for _pod, replica in who)}


def whole(minute: int) -> tuple[datetime, datetime]:
    """The interval that a value of this minute covers, so that it is kept with this minute and not with the next."""
    return moment_of(minute) - MOMENT, moment_of(minute + 1) - MOMENT


SCRAPE_DEADLINE = timedelta(seconds=10)

Fetch: TypeAlias = Callable[[str, timedelta], Awaitable[str | Unknown]]


class Exporters:
    """DCGM exporters scraped at every reading; keeps the points that an evaluation needs."""

    def __init__(self, urls: Sequence[str], fetch: Fetch) -> None:
        self._urls, self._fetch = tuple(urls), fetch
        self._points: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}

    async def scrape(self, now: datetime) -> list[Trace]:
        answers = await asyncio.gather(*(self._fetch(url, SCRAPE_DEADLINE) for url in self._urls))
        for url, text in zip(self._urls, answers, strict=True):
            if not isinstance(text, Unknown):
                self._store(url, text, now.timestamp())
        oldest = (now - (2 * LOOK_BACK) * ONE_MINUTE).timestamp()
        kept = ((series, [one for one in points if one[0] >= oldest]) for series, points in self._points.items())
        self._points = {series: points for series, points in kept if points}
        found = (trace(dict(labels), name, points, url) for (url, name, labels), points in self._points.items())
        return [one for one in found if one is not None]

    def _store(self, url: str, text: str, at: float) -> None:
        try:
            metrics = list(parse_export(text))
        except ValueError:
            return  # a truncated response looks like missing GPUs
        for one in metrics:
            if one.name in NAMES:
                series = (url, one.name, tuple(sorted(one.labels.items())))
                self._points.setdefault(series, []).append((at, one.value))
