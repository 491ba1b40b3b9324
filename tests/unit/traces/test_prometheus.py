"""History of a Prometheus as a trace, with a history that answers from a list of series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import isnan

import pytest

from gpukeeper.clients.prometheus import SeriesSelector, TimeSeries
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.series import MINUTE
from gpukeeper.model.unknown import Unknown
from gpukeeper.traces.prometheus import SLICE, TRIES, read_prometheus
from gpukeeper.traces.spool import SpooledTrace
from tests.unit.ledger.examples import run

BEGIN = datetime(2026, 1, 5, tzinfo=UTC)
HOURS = timedelta(hours=8)  # more than one slice
UTIL, ENERGY = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"


def series(name: str, values: Mapping[int, float], **labels: str) -> TimeSeries:
    """Every 30 seconds in each of these minutes."""
    begin = BEGIN.timestamp()
    points = [(begin + 60 * minute + second, value) for minute, value in values.items() for second in (5, 35)]
    return TimeSeries({"__name__": name, "instance": "n1:9400", **labels}, points)


def gpu(uuid: str, use: Mapping[int, float], **labels: str) -> list[TimeSeries]:
    energy = {minute: 1e6 + 1000.0 * minute for minute in use}
    line = series(ENERGY, energy, UUID=uuid, **labels)
    grows = [(at, value + number) for number, (at, value) in enumerate(line.points)]
    return [series(UTIL, use, UUID=uuid, **labels), TimeSeries(line.labels, grows)]


class FakeHistory:
    """`fails`: how many of the next queries are not answered."""

    def __init__(self, lines: Sequence[TimeSeries], fails: int = 0) -> None:
        self.lines, self.fails, self.queries = lines, fails, 0

    async def series(
        self, wheres: Sequence[SeriesSelector], since: datetime, until: datetime
    ) -> list[Mapping[str, str]] | Unknown:
        return [one.labels for one in self._cut(wheres[0], since, until)]

    async def raw(self, where: SeriesSelector, since: datetime, until: datetime) -> list[TimeSeries] | Unknown:
        assert until - since <= SLICE + 10 * MINUTE
        self.queries += 1
        if self.fails:
            self.fails -= 1
            return Unknown("Prometheus at http://p did not answer")
        return self._cut(where, since, until)

    def _cut(self, where: SeriesSelector, since: datetime, until: datetime) -> list[TimeSeries]:
        first, last = since.timestamp(), until.timestamp()
        cut = [
            TimeSeries(one.labels, [point for point in one.points if first < point[0] <= last])
            for one in self.lines
            if one.labels["__name__"] in where.names and one.labels.get(where.label, "") in where.values
        ]
        return [one for one in cut if one.points]


def read(lines: Sequence[TimeSeries], fails: int = 0, pauses: list[float] | None = None) -> SpooledTrace:
    async def sleep(seconds: float) -> None:
        if pauses is not None:
            pauses.append(seconds)

    return run(read_prometheus(FakeHistory(lines, fails), "http://p", BEGIN, BEGIN + HOURS, sleep=sleep))


def test_minutes_of_workloads_over_several_slices() -> None:
    use = {minute: 80.0 if minute < 400 else 0.0 for minute in range(480) if not 100 <= minute < 110}
    trace = read(gpu("GPU-1", use, namespace="lab", pod="train-0"))
    (found,) = trace.runs()
    assert (found.name, found.namespace, found.platform, found.kind) == ("lab/train-0", "lab", "kubernetes", "pod")
    assert (found.devices, found.started, found.ended) == (("GPU-1",), BEGIN, None)
    minutes = found.series[0].minutes
    assert (len(minutes), set(minutes[:100]), set(minutes[402:])) == (480, {80.0}, {0.0})
    assert all(isnan(value) for value in minutes[100:110]), "no sample: not measured"


def test_a_namesake_with_another_uid_is_another_workload() -> None:
    first = gpu("GPU-1", dict.fromkeys(range(20), 90.0), exported_namespace="lab", exported_pod="a", pod_uid="u1")
    second = gpu("GPU-2", dict.fromkeys(range(20, 40), 60.0), exported_namespace="lab", exported_pod="a", pod_uid="u2")
    assert [(one.name, one.devices) for one in read([*first, *second]).runs()] == [
        ("lab/a", ("GPU-1",)),
        ("lab/a#2", ("GPU-2",)),
    ]


def test_an_idle_reading_without_a_growing_energy_counter_is_not_measured() -> None:
    stale = [series(UTIL, dict.fromkeys(range(30), 0.0), UUID="GPU-1", namespace="lab", pod="a")]
    (found,) = read(stale).runs()
    assert all(isnan(value) for value in found.series[0].minutes)


def test_without_them_gpus_of_hosts_that_we_exported() -> None:
    use = dict.fromkeys(range(10), 0.25)
    trace = read([series("gpukeeper_gpu_use_ratio", use, place="node-3", gpu="0", uuid="GPU-7")])
    (found,) = trace.runs()
    assert (found.name, found.platform, found.devices) == ("node-3/0", "host", ("GPU-7",))
    assert list(found.series[0].minutes) == [25.0] * 10


def test_a_query_is_repeated_and_then_given_up() -> None:
    pauses: list[float] = []
    lines = gpu("GPU-1", dict.fromkeys(range(480), 80.0), namespace="lab", pod="a")
    assert len(list(read(lines, TRIES - 1, pauses).runs())) == 1
    assert pauses == [1.0, 2.0, 4.0]
    with pytest.raises(PlatformError, match=r"did not answer. It was asked 4 times. Nothing was replayed. Try again"):
        read(lines, TRIES)


def test_a_prometheus_without_gpus_says_what_to_check() -> None:
    with pytest.raises(UsageError, match="has no use of GPUs between 2026-01-05 00:00 and 2026-01-05 08:00 UTC"):
        read([])
