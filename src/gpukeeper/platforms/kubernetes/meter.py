"""Measurements of pods, from a Prometheus that scrapes DCGM exporters and kubelets, or from the exporters: GPUs, and
CPU, network and disk by the counters of cAdvisor. Each minute is reported once, after its end, when it is scraped;
only a busy one is reported early, so that the re-check before an act sees it. The first reading includes history.
Series are assigned to pods by labels that get lost, move and are reused: with fewer series than GPUs some are
Unknown, with more all are Unknown.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from math import isnan
from typing import TypeAlias

import msgspec

from gpukeeper.clients.prometheus import Prometheus, SeriesSelector, TimeSeries, fetch_dcgm_text
from gpukeeper.devices.busy import is_busy
from gpukeeper.model.ports import Clock
from gpukeeper.model.series import Sample, Signal, minute_of, moment_of
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.platforms.kubernetes.minutes import (
    BACK_MAX,
    LOOK_BACK,
    NAMES,
    Device,
    DeviceMinutes,
    Exporters,
    Fetch,
    Pod,
    Share,
    Trace,
    Value,
    minutes_of_devices,
    pod_of,
    source_of,
    trace,
    whole,
)

AT_ONCE, LETTERS_MAX = 64, 1500  # of names in one query: a URL must not grow too long

Run: TypeAlias = tuple[str, str]  # of which object, in which incarnation


class RunningPod(msgspec.Struct, frozen=True, gc=False):
    """A living pod. A former pod with its name had another uid and started earlier."""

    uid: str
    started: datetime | None = None


class PendingMeasurement(msgspec.Struct, frozen=True):
    """What is to be read of one workload: its GPUs by pod, and from which minute on each pod's readings are its own."""

    subject: Subject
    devices: Mapping[Pod, tuple[str, ...]]
    begins: Mapping[Pod, int]
    uids: Mapping[Pod, str]
    first: int

    @property
    def run(self) -> Run:
        return self.subject.ref.uid, self.subject.seen.incarnation


class RunProgress(msgspec.Struct):
    """What was reported for one run so far."""

    read: datetime
    done: int | None = None  # the last minute that is settled
    shares: dict[Pod, dict[Share, tuple[str, int]]] = {}  # which device each series is, and when it was last seen
    early: dict[tuple[str, int], float] = {}  # busy minutes that were reported before their end
    counted: set[tuple[Pod, Signal]] = set()  # what was ever measured of each pod


def batches(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """As many names as fit into one query."""
    batch: list[str] = []
    for name in names:
        if batch and (len(batch) >= AT_ONCE or sum(map(len, batch)) + len(name) > LETTERS_MAX):
            yield tuple(batch)
            batch = []
        batch.append(name)
    if batch:
        yield tuple(batch)


DAY, ONE_MINUTE = timedelta(days=1), timedelta(minutes=1)
ASKED_AGAIN = timedelta(minutes=10)  # whether there are such metrics at all
COUNTERS: Mapping[Signal, tuple[str, tuple[str, ...]]] = {
    # The larger of the whole pod's and its containers': some runtimes count only one of them.
    Signal.CPU: ("100 * max by ({by}) (rate({{{where}}}[2m]))", ("container_cpu_usage_seconds_total",)),
    Signal.NETWORK: (
        'sum by ({by}) (rate({{{where},interface!="lo"}}[2m]))',
        ("container_network_receive_bytes_total", "container_network_transmit_bytes_total"),
    ),
    Signal.DISK: (
        "max by ({by}) (sum by ({by}, container) (rate({{{where}}}[2m])))",
        ("container_fs_reads_bytes_total", "container_fs_writes_bytes_total"),
    ),
}
BY = "namespace, pod, exported_namespace, exported_pod"
NO_TERMINAL = Unknown("terminal input in a pod cannot be measured", by_design=True)
NO_PROMETHEUS = Unknown("needs a Prometheus that scrapes cAdvisor of the kubelets", by_design=True)


class PodCounters:
    def __init__(self, prometheus: Prometheus | None, only: tuple[tuple[str, str], ...]) -> None:
        self._prometheus, self._only = prometheus, only
        self._known: dict[str, tuple[frozenset[str], datetime]] = {}  # which labels each counter has

    async def read(
        self, group: Sequence[PendingMeasurement], progress: Mapping[Run, RunProgress], last: int, now: datetime
    ) -> list[Sample]:
        first = min(one.first for one in group)
        pods = {pod for one in group for pod in one.devices}
        found = {signal: await self._rates(signal, pods, first, last, now) for signal in COUNTERS}
        samples = []
        for one in group:
            if one.first <= last:
                samples += [
                    sample
                    for signal in COUNTERS
                    for sample in _counter_samples(one, progress[one.run], signal, found, last, now)
                ]
                samples.append(Sample(one.subject.ref.key, Signal.TERMINAL, "", now, NO_TERMINAL))
        return samples

    async def _rates(
        self, signal: Signal, pods: set[Pod], first: int, last: int, now: datetime
    ) -> dict[Pod, dict[int, float]] | Unknown:
        """By pod and minute. Unknown by design where no such counter exists at all."""
        if self._prometheus is None:
            return NO_PROMETHEUS
        rates: dict[Pod, dict[int, float]] = defaultdict(dict)
        exists = False
        words, names = COUNTERS[signal]
        for name in names:
            labels = await self._labels(name, now)
            if isinstance(labels, Unknown):
                return labels
            exists = exists or bool(labels)
            label = "exported_pod" if "exported_pod" in labels else "pod"
            for some in batches(sorted({pod for _namespace, pod in pods})) if labels else ():
                query = words.format(by=BY, where=SeriesSelector((name,), label, some, self._only).matchers())
                # Worked out at the end of each minute, for that minute and the one before.
                lines = await self._prometheus.range(
                    query, moment_of(first + 1 - LOOK_BACK), moment_of(last + 1), ONE_MINUTE
                )
                if isinstance(lines, Unknown):
                    return lines
                _add_up(rates, lines, pods)
        return rates if exists else Unknown("Prometheus has no such counters for pods", by_design=True)

    async def _labels(self, name: str, now: datetime) -> frozenset[str] | Unknown:
        """Once seen they are expected: a kubelet that is not scraped today is no design."""
        assert self._prometheus is not None
        known = self._known.get(name)
        if known is not None and (known[0] or now - known[1] < ASKED_AGAIN):
            return known[0]
        found = await self._prometheus.label_names(name, now - DAY, now)
        if not isinstance(found, Unknown):
            self._known[name] = (found, now)
        return found


def _counter_samples(
    wanted: PendingMeasurement,
    progress: RunProgress,
    signal: Signal,
    found: Mapping[Signal, dict[Pod, dict[int, float]] | Unknown],
    last: int,
    now: datetime,
) -> Iterator[Sample]:
    """The busiest of its pods counts, and each must have been measured."""
    key, rates, cpu = wanted.subject.ref.key, found[signal], found[Signal.CPU]
    if isinstance(rates, Unknown):
        yield Sample(key, signal, "", now, rates)
        return
    silent = {pod for pod in wanted.devices if not rates.get(pod)}
    # A pod that is measured and has no such counter has none by design: it wrote nothing, or has no network.
    without = set() if isinstance(cpu, Unknown) else {pod for pod in silent if cpu.get(pod)}
    without -= {pod for pod in without if (pod, signal) in progress.counted}
    if silent - without:
        without = set()
    if len(without) == len(wanted.devices):
        yield Sample(key, signal, "", now, Unknown("no such counters for its pods", by_design=True))
        return
    measured = [(pod, rates.get(pod, {})) for pod in wanted.devices if pod not in without]
    progress.counted |= {(pod, signal) for pod, mine in measured if mine}
    measured_any = False
    for minute in range(wanted.first, last + 1):
        values = [
            mine[minute] for pod, mine in measured if minute in mine and minute > wanted.begins[pod]
        ]  # the rate of a minute includes the one before
        if len(values) == len(measured):
            measured_any = True
            since, at = whole(minute)
            yield Sample(key, signal, "", at, max(values), since=since)
    if not measured_any:
        yield Sample(key, signal, "", now, Unknown("Prometheus does not have such counters for all its pods"))


def _add_up(rates: dict[Pod, dict[int, float]], lines: Sequence[TimeSeries], pods: set[Pod]) -> None:
    for line in lines:
        pod = pod_of(line.labels)
        if pod in pods and pod is not None:
            for at, value in line.points:
                minute = int(at) // 60 - 1
                if not isnan(value):
                    rates[pod][minute] = rates[pod].get(minute, 0.0) + value


PLATFORM = "kubernetes"
SETTLED = timedelta(seconds=30)  # after its end a minute is scraped and stored
SKEW_MAX = timedelta(seconds=90)  # between our clock and that of Prometheus
FORGOTTEN = timedelta(minutes=30)  # what was not read for this long starts again
MINUTE = timedelta(minutes=1)

NOT_STARTED = Unknown("its start time is unknown, so measurements cannot be assigned to it")


class ClusterMeter:
    """`pods` returns the living pods of a workload by name; without it their uids are not compared.

    `only`: labels that every series of this cluster has, if a Prometheus has several clusters.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        prometheus: Prometheus | None = None,
        exporters: Sequence[str] = (),
        pods: Callable[[Subject], Mapping[str, RunningPod]] | None = None,
        only: Mapping[str, str] | None = None,
        back: timedelta = timedelta(minutes=BACK_MAX),
        fetch: Fetch = fetch_dcgm_text,
    ) -> None:
        self._clock, self._prometheus, self._pods, self._back = clock, prometheus, pods, back // MINUTE
        self._only = tuple((only or {}).items())
        self._exporters = Exporters(exporters, fetch)
        self._progress: dict[Run, RunProgress] = {}
        self._counters = PodCounters(prometheus, self._only)
        self._one_at_a_time = asyncio.Lock()

    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]:
        mine = [one for one in subjects if one.ref.platform == PLATFORM and not isinstance(one.devices, Unknown)]
        mine = [one for one in mine if one.devices]
        if not mine:
            return ()
        async with self._one_at_a_time:
            now = self._clock.now()
            scraped = await self._exporters.scrape(now)
            samples: list[Sample] = []
            wanted = []
            for subject in mine:
                found = self._wanted(subject, now)
                if isinstance(found, Unknown):
                    samples += _unknown(subject, now, found)
                else:
                    wanted.append(found)
            # Those that are new go far back; the others must not be dragged along.
            new = [one for one in wanted if self._progress[one.run].done is None]
            known = [one for one in wanted if self._progress[one.run].done is not None]
            for group in filter(None, (new, known)):
                samples += await self._read(group, scraped, now)
            self._progress = {
                run: progress for run, progress in self._progress.items() if now - progress.read < FORGOTTEN
            }
            return samples

    def _wanted(self, subject: Subject, now: datetime) -> PendingMeasurement | Unknown:
        if not isinstance(subject.started, datetime):
            return NOT_STARTED
        devices: dict[Pod, tuple[str, ...]] = {}
        for name in subject.devices if not isinstance(subject.devices, Unknown) else ():
            short, slash, index = name.rpartition("/")
            if not slash or not index.isdecimal():
                return Unknown(f"{name} is not a GPU of a pod")
            pod = (subject.ref.namespace, short)
            devices[pod] = (*devices.get(pod, ()), name)
        living = {} if self._pods is None else self._pods(subject)
        started = dict.fromkeys(devices, subject.started)
        uids: dict[Pod, str] = {}
        for pod in devices:
            if (found := living.get(pod[1])) is not None:
                uids[pod] = found.uid
                started[pod] = max(found.started or subject.started, subject.started)
            elif self._pods is not None:
                return Unknown(f"pod {pod[1]} was not read, so measurements cannot be assigned to it")
        progress = self._progress.setdefault((subject.ref.uid, subject.seen.incarnation), RunProgress(now))
        progress.read = now
        oldest = minute_of(now) - self._back
        begins = {pod: -(-int(at.timestamp()) // 60) for pod, at in started.items()}  # the first whole minute
        first = oldest if progress.done is None else max(progress.done + 1, oldest)
        return PendingMeasurement(subject, devices, begins, uids, max(first, min(begins.values())))

    async def _read(self, group: Sequence[PendingMeasurement], scraped: Sequence[Trace], now: datetime) -> list[Sample]:
        first, last = min(one.first for one in group), minute_of(now - SETTLED) - 1
        traces = await self._traces(group, moment_of(min(first, last) - LOOK_BACK), now)
        if isinstance(traces, Unknown) and not scraped:
            return [sample for one in group for sample in _unknown(one.subject, now, traces)]
        traces = [*(() if isinstance(traces, Unknown) else traces), *scraped]
        # Two hours of a thousand GPUs take seconds, and nothing may stop the loop.
        by_device = await asyncio.to_thread(minutes_of_devices, traces, first, minute_of(now))
        by_pod: dict[Pod, list[Trace]] = defaultdict(list)
        for found in traces:
            if found.pod is not None:
                by_pod[found.pod].append(found)
        samples: list[Sample] = []
        for one in group:
            samples += self._gpu_samples(one, by_pod, by_device, last, now)
        if any(one.first <= last for one in group):
            samples += await self._counters.read(group, self._progress, last, now)
        for one in group:
            progress = self._progress[one.run]
            progress.done = max(last, one.first - 1) if progress.done is None else max(last, progress.done)
            progress.early = {key: value for key, value in progress.early.items() if key[1] > progress.done}
        return samples

    # GPUs

    async def _traces(
        self, group: Sequence[PendingMeasurement], since: datetime, now: datetime
    ) -> list[Trace] | Unknown:
        """All series of the devices of these pods, whichever pod they are labelled with."""
        if self._prometheus is None:
            return Unknown("no DCGM exporter answered")
        there = await self._prometheus.clock()
        if isinstance(there, Unknown):
            return there
        if abs(there - now) > SKEW_MAX:
            return Unknown(
                f"the clock of Prometheus differs by {in_words(abs(there - now))}, so minutes cannot be matched"
            )
        pods = {pod for one in group for pod in one.devices}
        uuids: set[str] = set()
        for names in batches(sorted({name for _namespace, name in pods})):
            wheres = [SeriesSelector(NAMES, label, names, self._only) for label in ("pod", "exported_pod")]
            found = await self._prometheus.series(wheres, since, now)
            if isinstance(found, Unknown):
                return found
            uuids |= {labels["UUID"] for labels in found if labels.get("UUID") and pod_of(labels) in pods}
        traces = await self._raw("UUID", sorted(uuids), since, now)
        if isinstance(traces, Unknown):
            return traces
        # Of a GPU that is shared its neighbours matter, too.
        more = await self._raw("instance", _sources_of_shared(traces), since, now)
        if isinstance(more, Unknown):
            return more
        whole = {one.source for one in more}
        return [*(one for one in traces if one.source not in whole), *more]

    async def _raw(self, label: str, values: Sequence[str], since: datetime, now: datetime) -> list[Trace] | Unknown:
        assert self._prometheus is not None
        traces: list[Trace] = []
        for some in batches(values):
            lines = await self._prometheus.raw(SeriesSelector(NAMES, label, some, self._only), since, now)
            if isinstance(lines, Unknown):
                return lines
            traces += await asyncio.to_thread(_traces_of, lines)
        return traces

    def _gpu_samples(
        self,
        wanted: PendingMeasurement,
        traces: Mapping[Pod, Sequence[Trace]],
        by_device: Mapping[Device, DeviceMinutes],
        last: int,
        now: datetime,
    ) -> Iterator[Sample]:
        progress, subject = self._progress[wanted.run], wanted.subject
        for pod, names in wanted.devices.items():
            begin = max(wanted.first, wanted.begins[pod])
            mine = _own(traces.get(pod, ()), wanted.uids.get(pod))
            present = _present(mine, wanted.begins[pod])
            shares = self._assign(progress, wanted, pod, present, minute_of(now))
            if isinstance(shares, Unknown) or any(one.mps for one in mine):
                why = (
                    shares
                    if isinstance(shares, Unknown)
                    else Unknown("it runs under MPS: the use of each process is unknown")
                )
                yield from _unknown(subject, now, why, names)
                continue
            share_of = {name: share for share, name in shares.items()}
            for name in names:
                share = share_of.get(name)
                if share is None:
                    why = Unknown(f"only {len(shares)} of {len(names)} GPUs of pod {pod[1]} are exported with its name")
                    yield from _unknown(subject, now, why, (name,))
                    continue
                device = by_device.get(share[:2], DeviceMinutes({}, slice=False))
                part = device.slice or name in subject.slices
                values = {
                    minute: value
                    for minute, value in device.minutes.items()
                    if minute >= begin and minute in present.get(share, ())
                }
                yield from _samples(subject, name, part, values, progress, last, now)

    def _assign(
        self, progress: RunProgress, wanted: PendingMeasurement, pod: Pod, present: Mapping[Share, set[int]], now: int
    ) -> dict[Share, str] | Unknown:
        """Which device each series is, the same at each reading. A pod keeps its GPUs as long as it lives."""
        names = sorted(wanted.devices[pod], key=lambda name: (name in wanted.subject.slices, len(name), name))
        known = {share: one for share, one in progress.shares.get(pod, {}).items() if now - one[1] < self._back}
        for share in sorted(present, key=lambda one: (one[1] is not None, one[0], one[1] or 0, one[2])):
            taken = {name for name, _seen in known.values()}
            name = known[share][0] if share in known else ""
            name = name or next((one for one in names if one not in taken), "")
            known[share] = (name, max(present[share]))
        progress.shares = {**progress.shares, pod: known}
        if len(known) > len(names):
            return Unknown(f"{len(known)} GPUs are exported with the name of pod {pod[1]}, which requests {len(names)}")
        return {share: name for share, (name, _seen) in known.items() if share in present}


def _traces_of(lines: Sequence[TimeSeries]) -> list[Trace]:
    found = (trace(one.labels, one.labels.get("__name__", ""), one.points, source_of(one.labels)) for one in lines)
    return [one for one in found if one is not None]


def _samples(
    subject: Subject,
    name: str,
    part: bool,
    values: Mapping[int, Value],
    progress: RunProgress,
    last: int,
    now: datetime,
) -> Iterator[Sample]:
    measured_any = False
    why: Unknown | None = None
    for minute, value in sorted(values.items()):
        if isinstance(value, Unknown):
            why = value
            continue
        before = progress.early.get((name, minute))
        if minute > last and (not is_busy(value, part) or before is not None):
            continue  # it is not over
        if minute > last:
            progress.early = {**progress.early, (name, minute): value}
        measured_any = True
        if before is None or value > before:
            since, at = whole(minute)
            yield Sample(subject.ref.key, Signal.GPU, name, at, value, slice=part, since=since)
    if not measured_any:
        why = Unknown("nothing was exported for it since the last measurement") if why is None else why
        yield Sample(subject.ref.key, Signal.GPU, name, now, why, slice=part)


def _unknown(subject: Subject, now: datetime, why: Unknown, names: Sequence[str] | None = None) -> Iterator[Sample]:
    all_names = () if isinstance(subject.devices, Unknown) else subject.devices
    for name in all_names if names is None else names:
        yield Sample(subject.ref.key, Signal.GPU, name, now, why, slice=name in subject.slices)


def _own(traces: Sequence[Trace], uid: str | None) -> list[Trace]:
    """Without those of a namesake. If the uid is unknown, it is the newest one that was exported."""
    named = [(one.points[-1][0], one.uid) for one in traces if one.uid and one.points]
    own = uid or max(named, default=(0.0, ""))[1]
    return [one for one in traces if not one.uid or one.uid == own]


def _present(traces: Sequence[Trace], begin: int) -> dict[Share, set[int]]:
    """In which minutes each series carried the pod's name."""
    found: dict[Share, set[int]] = defaultdict(set)
    for one in traces:
        minutes = {int(at) // 60 for at, _value in one.points}
        found[one.share] |= {minute for minute in minutes if minute >= begin}
    return {share: minutes for share, minutes in found.items() if minutes}


def _sources_of_shared(traces: Sequence[Trace]) -> list[str]:
    sharers: dict[Device, set[Pod]] = defaultdict(set)
    for one in traces:
        if one.pod is not None:
            sharers[one.device].add(one.pod)
    return sorted({one.source for one in traces if one.replica or len(sharers[one.device]) > 1} - {""})
