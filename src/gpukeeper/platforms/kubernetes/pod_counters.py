"""CPU, network and disk of pods, from the counters of cAdvisor in a Prometheus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from math import isnan

from gpukeeper.devices.prometheus import SeriesSelector, TimeSeries
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.measurements import History, PendingMeasurement, Run, RunProgress, batches
from gpukeeper.platforms.kubernetes.minutes import LOOK_BACK, Pod, begin_of, pod_of, whole

DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)
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
    def __init__(self, prometheus: History | None, only: tuple[tuple[str, str], ...]) -> None:
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
                    for sample in _samples(one, progress[one.run], signal, found, last, now)
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
                lines = await self._prometheus.range(query, begin_of(first + 1 - LOOK_BACK), begin_of(last + 1), MINUTE)
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


def _samples(
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
