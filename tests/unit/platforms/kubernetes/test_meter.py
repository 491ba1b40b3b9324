"""What exporters say of pods becomes samples, and samples become idle or kept: one row for each known trap."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpukeeper.clients.prometheus import SeriesSelector, TimeSeries
from gpukeeper.ledger.database import open_for_writing
from gpukeeper.ledger.signals import open_signals
from gpukeeper.lifecycle.activity import Use, UseAssessment, assess_use
from gpukeeper.model.policy import Activity
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Ref, Seen, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.meter import ClusterMeter, RunningPod

NOW = datetime(2026, 3, 2, 12, 0, 40, tzinfo=UTC)
MINUTE, WINDOW = timedelta(minutes=1), timedelta(minutes=30)
LONG_AGO = NOW - timedelta(days=1)
ENGINE, UTIL = "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_GPU_UTIL"
ENERGY, POWER = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_POWER_USAGE"
MEMORY = "DCGM_FI_DEV_FB_USED"
BLANK = 9.2e18
Level = float | Callable[[datetime], float]


class Time:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at


class Recorded:
    """A Prometheus in memory: series are selected as the real one does; rates are given as they would be worked out."""

    def __init__(
        self, *lines: TimeSeries, clock: Time, counters: Mapping[str, Sequence[TimeSeries]] | None = None
    ) -> None:
        self.lines, self.time, self.counters = list(lines), clock, counters or {}
        self.skew = timedelta()
        self.silent: Unknown | None = None
        self.spans: list[timedelta] = []

    async def clock(self) -> datetime | Unknown:
        return self.time.now() + self.skew if self.silent is None else self.silent

    async def label_names(self, name: str, since: datetime, until: datetime) -> frozenset[str] | Unknown:
        return frozenset(label for line in self.counters.get(name, ()) for label in line.labels)

    async def series(
        self, wheres: Sequence[SeriesSelector], since: datetime, until: datetime
    ) -> list[Mapping[str, str]] | Unknown:
        return [one.labels for where in wheres for one in self._selected(where, since, until)]

    async def raw(self, where: SeriesSelector, since: datetime, until: datetime) -> list[TimeSeries] | Unknown:
        self.spans.append(until - since)
        return self._selected(where, since, until)

    async def range(self, query: str, since: datetime, until: datetime, step: timedelta) -> list[TimeSeries] | Unknown:
        (found,) = (lines for name, lines in self.counters.items() if f'"{name}"' in query)
        return [TimeSeries(one.labels, _between(one, since, until)) for one in found]

    def _selected(self, where: SeriesSelector, since: datetime, until: datetime) -> list[TimeSeries]:
        fits = [
            line
            for line in self.lines
            if line.labels["__name__"] in where.names
            and line.labels.get(where.label, "") in where.values
            and all(line.labels.get(name) == value for name, value in where.also)
        ]
        cut = [TimeSeries(line.labels, _between(line, since, until)) for line in fits]
        return [line for line in cut if line.points]


def _between(line: TimeSeries, since: datetime, until: datetime) -> list[tuple[float, float]]:
    return [point for point in line.points if since.timestamp() <= point[0] <= until.timestamp()]


def points(level: Level, since: datetime, until: datetime, every: float = 30) -> list[tuple[float, float]]:
    found, at = [], since
    while at <= until:
        found.append((at.timestamp(), level(at) if callable(level) else level))
        at += timedelta(seconds=every)
    return found


def minute_of(sample: Sample) -> datetime:
    return sample.at.replace(second=0, microsecond=0)


def gpu(
    uuid: str,
    pod: str = "train-0",
    *,
    engine: Level | None = 0.0,
    util: Level | None = 0.0,
    energy: Level | None = lambda at: at.timestamp() * 60_000,
    power: Level = 70.0,
    memory: Level = 40_000.0,
    since: datetime = NOW - timedelta(hours=3),
    until: datetime = NOW,
    every: float = 30,
    node: str = "node-1",
    **labels: str,
) -> list[TimeSeries]:
    """The lines of one GPU, scraped every 30 seconds, its labels honoured."""
    named = {"UUID": uuid, "instance": f"{node}:9400", "Hostname": node, "namespace": "lab", "pod": pod} | labels
    named = {name: value for name, value in named.items() if value}
    fields = {ENGINE: engine, UTIL: util, ENERGY: energy, POWER: power, MEMORY: memory}
    return [
        TimeSeries({"__name__": name, **named}, points(level, since, until, every))
        for name, level in fields.items()
        if level is not None
    ]


def workload(
    *devices: str, slices: Sequence[str] = (), started: datetime | Unknown | None = LONG_AGO, generation: str = "1"
) -> Subject:
    ref = Ref("kubernetes", "prod", "job", "train", "uid-1", "lab")
    return Subject(
        seen=Seen(ref, generation, "", NOW),
        state=State.RUNNING,
        created=LONG_AGO,
        started=started,
        devices=devices,
        slices=tuple(slices),
    )


def meter(
    *lines: TimeSeries, counters: Mapping[str, Sequence[TimeSeries]] | None = None
) -> tuple[ClusterMeter, Recorded, Time]:
    time = Time()
    recorded = Recorded(*lines, clock=time, counters=counters)
    return ClusterMeter(time, prometheus=recorded), recorded, time


def read(one: ClusterMeter, subject: Subject) -> list[Sample]:
    return list(asyncio.run(one.read([subject])))


def judged(tmp_path: Path, samples: Sequence[Sample], subject: Subject, now: datetime = NOW) -> UseAssessment:
    """Through the ledger's buckets, as a pass does it."""
    path = tmp_path / "ledger.sqlite"
    open_for_writing(path, "NORMAL").close()
    signals = open_signals(path, write=True)

    async def fold() -> UseAssessment:
        await signals.add(samples)
        found = await signals.series([subject.ref.key], now - 2 * WINDOW, now)
        assert not isinstance(subject.devices, Unknown)
        return assess_use(found.get(subject.ref.key, ()), subject.devices, Activity(), WINDOW, now)

    try:
        return asyncio.run(fold())
    finally:
        signals.close()


def whys(samples: Sequence[Sample]) -> str:
    return " | ".join(sorted({s.value.why for s in samples if s.signal is Signal.GPU and isinstance(s.value, Unknown)}))


def once(minutes_ago: float, level: float) -> Level:
    """Quiet but for one scrape."""
    moment = NOW - minutes_ago * MINUTE
    return lambda at: level if abs((at - moment).total_seconds()) < 16 else 0.0


def until(minutes_ago: float, before: float, after: float) -> Level:
    return lambda at: before if at < NOW - minutes_ago * MINUTE else after


EIGHT = [f"train-0/{n}" for n in range(8)]
MIG = {"GPU_I_ID": "3", "GPU_I_PROFILE": "1g.10gb"}
STUCK = until(20, 5.0, 7.0)  # the counter stood still long before
TRAPS: dict[str, tuple[list[TimeSeries], Subject, Use, str]] = {
    "idle": (gpu("A"), workload("train-0/0"), Use.QUIET, ""),
    "busy": (gpu("A", engine=0.8, util=90.0), workload("train-0/0"), Use.ACTIVE, ""),
    "one busy scrape three minutes ago": (gpu("A", engine=once(3, 0.2)), workload("train-0/0"), Use.ACTIVE, ""),
    "one busy GPU of eight": (
        [line for n in range(8) for line in gpu(f"G{n}", engine=0.5 if n == 7 else 0.0)],
        workload(*EIGHT),
        Use.ACTIVE,
        "",
    ),
    "all eight idle": ([line for n in range(8) for line in gpu(f"G{n}")], workload(*EIGHT), Use.QUIET, ""),
    "one series of eight missing": (
        [line for n in range(7) for line in gpu(f"G{n}")],
        workload(*EIGHT),
        Use.UNKNOWN,
        "only 7 of 8 GPUs",
    ),
    "one busy pod of two": (
        [*gpu("A"), *gpu("B", "train-1", engine=0.5)],
        workload("train-0/0", "train-1/0"),
        Use.ACTIVE,
        "",
    ),
    "one pod of two is not exported": (gpu("A"), workload("train-0/0", "train-1/0"), Use.UNKNOWN, "only 0 of 1"),
    "one sample in half an hour": (
        gpu("A", every=1800),
        workload("train-0/0"),
        Use.UNKNOWN,
        "",
    ),
    "labels not honoured": (
        gpu("A", "dcgm-x", exported_pod="train-0", exported_namespace="lab", namespace="monitoring"),
        workload("train-0/0"),
        Use.QUIET,
        "",
    ),
    "labels not honoured, busy": (
        gpu("A", "dcgm-x", exported_pod="train-0", exported_namespace="lab", namespace="monitoring", engine=0.3),
        workload("train-0/0"),
        Use.ACTIVE,
        "",
    ),
    "the exporter has a pod's name, not ours": (
        gpu("A", "train-0", exported_pod="other-0", exported_namespace="lab"),
        workload("train-0/0"),
        Use.UNKNOWN,
        "only 0 of 1",
    ),
    "same name in another namespace": (gpu("A", namespace="prod"), workload("train-0/0"), Use.UNKNOWN, "only 0 of 1"),
    "labels vanished ten minutes ago": (
        [*gpu("A", until=NOW - 10 * MINUTE), *gpu("A", "", since=NOW - 10 * MINUTE, namespace="")],
        workload("train-0/0"),
        Use.UNKNOWN,
        "",
    ),
    "no labels at all": (gpu("A", "", namespace=""), workload("train-0/0"), Use.UNKNOWN, "only 0 of 1"),
    "host label renamed in mid-window": (
        [
            *gpu("A", until=NOW - 15 * MINUTE),
            *gpu("A", since=NOW - 14.5 * MINUTE, Hostname="", hostname="node-1"),
        ],
        workload("train-0/0"),
        Use.QUIET,
        "",
    ),
    "fields under their new names": (
        [
            TimeSeries({**line.labels, "__name__": new}, line.points)
            for line in gpu("A", engine=0.4)
            for new in [
                {
                    ENGINE: "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO",
                    UTIL: "DCGM_FI_DEV_GPU_UTIL_RATIO",
                    ENERGY: "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL",
                    POWER: "DCGM_FI_DEV_BOARD_POWER_WATTS",
                    MEMORY: MEMORY,
                }[line.labels["__name__"]]
            ]
        ],
        workload("train-0/0"),
        Use.ACTIVE,
        "",
    ),
    "slice: engine alone, utilisation 0 by design": (
        gpu("A", **MIG),
        workload("train-0/0", slices=["train-0/0"]),
        Use.QUIET,
        "",
    ),
    "slice: only the utilisation that it does not have": (
        gpu("A", engine=None, **MIG),
        workload("train-0/0", slices=["train-0/0"]),
        Use.UNKNOWN,
        "nothing was exported",
    ),
    "slice: a little use is use": (
        gpu("A", engine=0.01, **MIG),
        workload("train-0/0", slices=["train-0/0"]),
        Use.ACTIVE,
        "",
    ),
    "slice asked for as a whole GPU (single strategy): a little use is use": (
        gpu("A", engine=0.01, **MIG),
        workload("train-0/0"),
        Use.ACTIVE,
        "",
    ),
    "slice: power is that of the whole GPU": (
        gpu("A", power=600.0, **MIG),
        workload("train-0/0", slices=["train-0/0"]),
        Use.QUIET,
        "",
    ),
    "slice: energy only of the whole GPU": (
        [*gpu("A", energy=None, **MIG), *gpu("A", "", namespace="", engine=None, util=None)],
        workload("train-0/0", slices=["train-0/0"]),
        Use.QUIET,
        "",
    ),
    "labels used again after a re-partition": (
        [*gpu("A", until=NOW - 20 * MINUTE, **MIG), *gpu("A", since=NOW - 20 * MINUTE, **{**MIG, "GPU_I_ID": "5"})],
        workload("train-0/0", slices=["train-0/0"]),
        Use.UNKNOWN,
        "2 GPUs are exported with the name of pod train-0, which requests 1",
    ),
    "more series than asked": (
        [*gpu("A"), *gpu("B")],
        workload("train-0/0"),
        Use.UNKNOWN,
        "2 GPUs are exported",
    ),
    "MPS by the node's label": (
        gpu("A", nvidia_com_gpu_sharing_strategy="mps"),
        workload("train-0/0"),
        Use.UNKNOWN,
        "MPS",
    ),
    "MPS without a label: the work is shown on the neighbour": (
        [*gpu("A", vgpu="0"), *gpu("B", "other-0", engine=0.4, util=38.0, vgpu="1")],
        workload("train-0/0"),
        Use.UNKNOWN,
        "another GPU of its node is busy",
    ),
    "time slicing: the other sharer works": (
        [*gpu("A", vgpu="0", engine=0.6), *gpu("A", "other-0", vgpu="1", engine=0.6)],
        workload("train-0/0", slices=["train-0/0"]),
        Use.ACTIVE,
        "",
    ),
    "time slicing: both rest": (
        [*gpu("A", vgpu="0"), *gpu("A", "other-0", vgpu="1")],
        workload("train-0/0", slices=["train-0/0"]),
        Use.QUIET,
        "",
    ),
    "time slicing: only the other sharer has the label": (
        gpu("A", "other-0"),
        workload("train-0/0", slices=["train-0/0"]),
        Use.UNKNOWN,
        "only 0 of 1",
    ),
    "engine activity stuck at 0 under load": (gpu("A", engine=0.0, util=97.0), workload("train-0/0"), Use.ACTIVE, ""),
    "both stuck at 0, power says load": (gpu("A", power=612.0), workload("train-0/0"), Use.UNKNOWN, "draws 612 W"),
    "memory in use changes all the time": (
        gpu("A", memory=lambda at: 40_000.0 + at.minute % 2 * 900),
        workload("train-0/0"),
        Use.UNKNOWN,
        "memory in use changed by 900 MiB",
    ),
    "a little use, and power and memory say the same": (
        gpu("A", engine=0.2, power=500.0, memory=lambda at: 40_000.0 + at.minute % 2 * 900),
        workload("train-0/0"),
        Use.ACTIVE,
        "",
    ),
    "memory in use varies a little": (
        gpu("A", memory=lambda at: 40_000.0 + at.minute % 2 * 30),
        workload("train-0/0"),
        Use.QUIET,
        "",
    ),
    "old values of a little use, which another policy may call idle": (
        gpu("A", engine=0.2, energy=5.0),
        workload("train-0/0"),
        Use.UNKNOWN,
        "does not increase",
    ),
    "blanks among a little use": (
        gpu("A", engine=lambda at: 0.2 if at.second < 30 else BLANK),
        workload("train-0/0"),
        Use.UNKNOWN,
        "blank",
    ),
    "surely busy, whatever else is wrong": (
        gpu("A", engine=0.9, util=BLANK, energy=5.0),
        workload("train-0/0"),
        Use.ACTIVE,
        "",
    ),
    "old values for ever": (gpu("A", energy=5.0), workload("train-0/0"), Use.UNKNOWN, "does not increase"),
    "old values since 20 minutes": (gpu("A", energy=STUCK), workload("train-0/0"), Use.UNKNOWN, ""),
    "the driver was loaded again every minute": (
        gpu("A", energy=lambda at: float(at.second)),
        workload("train-0/0"),
        Use.UNKNOWN,
        "was reset",
    ),
    "old values after a gap that hides when the counter grew": (
        gpu("A", energy=lambda at: at.timestamp() // 600, every=600),
        workload("train-0/0"),
        Use.UNKNOWN,
        "does not increase",
    ),
    "no energy counter": (gpu("A", energy=None), workload("train-0/0"), Use.UNKNOWN, "no energy counter"),
    "no profiling on this GPU": (gpu("A", engine=None), workload("train-0/0"), Use.QUIET, ""),
    "profiling paused for ten minutes": (
        [
            *(line for line in gpu("A") if line.labels["__name__"] != ENGINE),
            *(line for line in gpu("A", until=NOW - 10 * MINUTE) if line.labels["__name__"] == ENGINE),
        ],
        workload("train-0/0"),
        Use.UNKNOWN,
        "",
    ),
    "blanks": (gpu("A", engine=BLANK), workload("train-0/0"), Use.UNKNOWN, "blank"),
    "blanks of the second source": (gpu("A", util=BLANK), workload("train-0/0"), Use.UNKNOWN, "blank"),
    "a ratio above 1": (gpu("A", engine=1.02), workload("train-0/0"), Use.ACTIVE, ""),
    "all GPUs of a node turned idle in one minute": (
        [line for n in range(8) for line in gpu(f"G{n}", engine=until(8, 0.9, 0.0), util=until(8, 95.0, 0.0))],
        workload(*EIGHT),
        Use.UNKNOWN,
        "",
    ),
    "exporter gone for ten minutes": (gpu("A", until=NOW - 10 * MINUTE), workload("train-0/0"), Use.UNKNOWN, ""),
    "two exporters, one of them stuck at idle": (
        [*gpu("A", engine=0.7), *gpu("A", node="node-1b", energy=5.0)],
        workload("train-0/0"),
        Use.ACTIVE,
        "",
    ),
    "two live exporters, one of them wrong: busy wins": (
        [*gpu("A", engine=0.0), *gpu("A", engine=0.7, node="node-0"), *gpu("A", engine=0.0, node="node-2")],
        workload("train-0/0"),
        Use.ACTIVE,
        "",
    ),
    "two exporters that stand still do not make one that grows": (
        [*gpu("A", energy=5.0), *gpu("A", node="node-1b", energy=7.0)],
        workload("train-0/0"),
        Use.UNKNOWN,
        "does not increase",
    ),
    "start not known": (gpu("A"), workload("train-0/0", started=None), Use.UNKNOWN, "its start time is unknown"),
    "a device that is no pod's": (gpu("A"), workload("GPU-1"), Use.UNKNOWN, "is not a GPU of a pod"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str, tmp_path: Path) -> None:
    lines, subject, expected, why = TRAPS[name]
    one, _recorded, _time = meter(*lines)
    samples = read(one, subject)
    found = judged(tmp_path, samples, subject)
    assert found.use is expected, found
    assert why in whys(samples)


def test_quiet_time_begins_with_the_pod(tmp_path: Path) -> None:
    subject = workload("train-0/0", started=NOW - 10 * MINUTE)
    one, _recorded, _time = meter(*gpu("A"))
    found = judged(tmp_path, read(one, subject), subject)
    assert found.since is not None
    assert found.since >= NOW - 10 * MINUTE


@pytest.mark.parametrize("lost", [80, 150])
def test_readings_that_are_missing_begin_a_new_quiet_time(lost: int, tmp_path: Path) -> None:
    """The exporter was not scraped for a while, and every minute has a reading all the same (with 80 s)."""
    begin = NOW.replace(second=0) - 12 * MINUTE + timedelta(seconds=10)
    end = begin + timedelta(seconds=lost)
    lines = gpu("A")
    kept = [
        TimeSeries(line.labels, tuple(one for one in line.points if not begin.timestamp() < one[0] < end.timestamp()))
        for line in lines
    ]
    one, _recorded, _time = meter(*kept)
    found = judged(tmp_path, read(one, workload("train-0/0")), workload("train-0/0"))
    assert found.use is Use.QUIET
    assert found.since is not None
    assert found.since >= end - timedelta(seconds=1)


def test_two_hours_of_history_come_at_once_and_each_minute_only_once() -> None:
    one, recorded, time = meter(*gpu("A", until=NOW + 5 * MINUTE))
    first = [s for s in read(one, workload("train-0/0")) if s.signal is Signal.GPU]
    assert len(first) == 120
    assert recorded.spans[0] > timedelta(hours=2)
    time.at += timedelta(seconds=20)  # the minute that ended is not settled yet
    assert all(isinstance(s.value, Unknown) for s in read(one, workload("train-0/0")))
    time.at = NOW + 2 * MINUTE
    after = [s for s in read(one, workload("train-0/0")) if s.signal is Signal.GPU]
    assert [minute_of(s) for s in after] == [NOW.replace(minute=0, second=0), NOW.replace(minute=1, second=0)]
    assert (after[0].since, after[0].at) == (first[-1].at, after[1].since), "without a gap"
    assert recorded.spans[-1] < timedelta(minutes=15)


@pytest.mark.parametrize(("rest", "corrected"), [(0.0, []), (0.9, [90.0])])
def test_a_busy_minute_is_reported_before_it_is_over_and_never_lowered(rest: float, corrected: list[float]) -> None:
    minute = NOW.replace(second=0)
    quiet = gpu("A", until=minute - timedelta(seconds=30))
    one, recorded, time = meter(*quiet, *gpu("A", engine=0.2, since=minute, until=minute))
    said = [s.value for s in read(one, workload("train-0/0")) if s.signal is Signal.GPU and minute_of(s) == minute]
    assert said == [20.0]
    assert isinstance(read(one, workload("train-0/0"))[0].value, Unknown)  # once is enough
    time.at += 2 * MINUTE
    recorded.lines += gpu("A", engine=lambda at: rest if at < minute + MINUTE else 0.0, since=NOW, until=time.at)
    later = [s.value for s in read(one, workload("train-0/0")) if s.signal is Signal.GPU and minute_of(s) == minute]
    assert later == corrected


def test_an_idle_minute_is_not_said_before_it_is_over() -> None:
    one, _recorded, _time = meter(*gpu("A"))
    said = [s for s in read(one, workload("train-0/0")) if s.signal is Signal.GPU]
    assert max(map(minute_of, said)) == NOW.replace(hour=11, minute=59, second=0)


def test_a_silent_prometheus_loses_no_minute() -> None:
    one, recorded, time = meter(*gpu("A", until=NOW + 30 * MINUTE))
    read(one, workload("train-0/0"))
    recorded.silent = Unknown("it is restarting")
    time.at = NOW + 10 * MINUTE
    assert "restarting" in whys(read(one, workload("train-0/0")))
    recorded.silent = None
    time.at = NOW + 12 * MINUTE
    assert len([s for s in read(one, workload("train-0/0")) if s.signal is Signal.GPU]) == 12


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_prometheus_with_another_clock_is_not_accepted(minutes: int, tmp_path: Path) -> None:
    one, recorded, _time = meter(*gpu("A"))
    recorded.skew = minutes * MINUTE
    samples = read(one, workload("train-0/0"))
    assert "clock" in whys(samples)
    assert judged(tmp_path, samples, workload("train-0/0")).use is Use.UNKNOWN


def test_a_pod_does_not_inherit_its_namesakes_readings() -> None:
    """By uid where the exporter says it, otherwise by its start."""
    started = NOW - 10 * MINUTE
    old = gpu("A", until=started, pod_uid="old")
    new = gpu("A", engine=0.0, since=started, pod_uid="new")
    time = Time()
    one = ClusterMeter(
        time,
        prometheus=Recorded(*old, *new, clock=time),
        pods=lambda _subject: {"train-0": RunningPod("new", started)},
    )
    said = [s for s in read(one, workload("train-0/0")) if s.signal is Signal.GPU]
    assert min(s.at for s in said) >= started
    one, _recorded, _time = meter(*gpu("B", until=started, pod_uid="old"), *gpu("A", since=started, pod_uid="new"))
    said = [s for s in read(one, workload("train-0/0")) if s.signal is Signal.GPU]
    assert min(s.at for s in said) >= started - MINUTE
    assert whys(said) == ""


def test_a_pod_that_was_not_read_is_unknown() -> None:
    time = Time()
    one = ClusterMeter(time, prometheus=Recorded(*gpu("A"), clock=time), pods=lambda _subject: {})
    assert "was not read" in whys(read(one, workload("train-0/0")))


def test_devices_keep_their_names_from_reading_to_reading() -> None:
    """The series that comes back late must not take the name of another."""
    one, recorded, time = meter(*gpu("B", until=NOW + 5 * MINUTE))
    two = workload("train-0/0", "train-0/1")
    assert {s.device for s in read(one, two) if not isinstance(s.value, Unknown)} == {"train-0/0"}
    time.at = NOW + 3 * MINUTE
    recorded.lines += gpu("A", engine=0.9, since=NOW, until=NOW + 5 * MINUTE)
    said = {s.device: s.value for s in read(one, two) if s.signal is Signal.GPU}
    assert said == {"train-0/0": 0.0, "train-0/1": 90.0}


def test_a_series_that_appears_too_many_spoils_the_next_hours() -> None:
    one, recorded, time = meter(*gpu("A", until=NOW + timedelta(hours=3)))
    read(one, workload("train-0/0"))
    recorded.lines += gpu("B", since=NOW, until=NOW + 2 * MINUTE)
    for minutes in (3, 30):
        time.at = NOW + minutes * MINUTE
        assert "2 GPUs are exported" in whys(read(one, workload("train-0/0")))
    time.at = NOW + 140 * MINUTE
    for minutes in range(31, 140, 10):  # read on, so that it is not forgotten
        time.at = NOW + minutes * MINUTE
        last = read(one, workload("train-0/0"))
    assert whys(last) == ""


def test_only_the_labels_of_this_cluster_count() -> None:
    time = Time()
    lines = [*gpu("A", cluster="a"), *gpu("B", cluster="b", engine=0.9)]
    one = ClusterMeter(time, prometheus=Recorded(*lines, clock=time), only={"cluster": "a"})
    assert {s.value for s in read(one, workload("train-0/0")) if s.signal is Signal.GPU} == {0.0}


def test_workloads_of_other_platforms_are_not_spoken_of() -> None:
    one, _recorded, _time = meter()
    elsewhere = Subject(
        seen=Seen(Ref("docker", "here", "container", "x", "uid"), "1", "", NOW),
        state=State.RUNNING,
        created=NOW,
        started=NOW,
        devices=("GPU-1",),
    )
    assert read(one, elsewhere) == []
    assert read(one, workload()) == []


# CPU, network and disk


def rates(name: str, level: Level, *pods: str, **labels: str) -> dict[str, list[TimeSeries]]:
    begin = NOW.replace(second=0) - timedelta(hours=3)
    lines = [
        TimeSeries({"namespace": "lab", "pod": pod, **labels}, points(level, begin, NOW, 60))
        for pod in pods or ("train-0",)
    ]
    return {name: lines}


CPU = "container_cpu_usage_seconds_total"
RECEIVED, SENT = "container_network_receive_bytes_total", "container_network_transmit_bytes_total"
READ, WRITTEN = "container_fs_reads_bytes_total", "container_fs_writes_bytes_total"
ALL_QUIET = rates(CPU, 0.4) | rates(RECEIVED, 10.0) | rates(SENT, 10.0) | rates(READ, 0.0) | rates(WRITTEN, 0.0)


def test_without_cadvisor_nothing_else_is_read_by_design(tmp_path: Path) -> None:
    one, _recorded, _time = meter(*gpu("A"))
    samples = read(one, workload("train-0/0"))
    found = judged(tmp_path, samples, workload("train-0/0"))
    assert found.use is Use.QUIET
    assert [words.partition(" ")[0] for words in sorted(found.skipped)] == ["cpu", "disk", "network", "terminal"]


def test_quiet_counters_leave_it_idle(tmp_path: Path) -> None:
    one, _recorded, _time = meter(*gpu("A"), counters=ALL_QUIET)
    samples = read(one, workload("train-0/0"))
    found = judged(tmp_path, samples, workload("train-0/0"))
    assert found.use is Use.QUIET
    assert [words.partition(" ")[0] for words in found.skipped] == ["terminal"]


@pytest.mark.parametrize(
    "busy", [rates(CPU, 40.0), rates(RECEIVED, 9e6), rates(SENT, 9e6), rates(READ, 9e6), rates(WRITTEN, 9e6)]
)
def test_each_counter_can_veto(busy: dict[str, list[TimeSeries]], tmp_path: Path) -> None:
    one, _recorded, _time = meter(*gpu("A"), counters=ALL_QUIET | busy)
    found = judged(tmp_path, read(one, workload("train-0/0")), workload("train-0/0"))
    assert found.use is Use.ACTIVE


def test_the_busiest_pod_counts_and_each_must_be_measured(tmp_path: Path) -> None:
    lines = [*gpu("A"), *gpu("B", "train-1")]
    both = workload("train-0/0", "train-1/0")
    two = {CPU: [*rates(CPU, 0.5)[CPU], *rates(CPU, 80.0, "train-1")[CPU]]}
    one, _recorded, _time = meter(*lines, counters=two)
    assert judged(tmp_path, read(one, both), both).use is Use.ACTIVE
    one, _recorded, _time = meter(*lines, counters=rates(CPU, 0.5))
    (tmp_path / "other").mkdir(mode=0o700)
    found = judged(tmp_path / "other", read(one, both), both)
    assert found.use is Use.UNKNOWN
    assert "cpu use was not measured" in found.reason


def test_a_kubelet_that_is_not_scraped_any_more_is_no_design(tmp_path: Path) -> None:
    old = {name: [TimeSeries(one.labels, one.points[:60]) for one in lines] for name, lines in ALL_QUIET.items()}
    one, _recorded, _time = meter(*gpu("A"), counters=old)
    found = judged(tmp_path, read(one, workload("train-0/0")), workload("train-0/0"))
    assert found.use is Use.UNKNOWN


def test_counters_that_were_there_are_expected(tmp_path: Path) -> None:
    """Both of a whole signal and of one pod's disk: what vanishes later is not by design."""
    one, recorded, time = meter(*gpu("A", until=NOW + 90 * MINUTE), counters=ALL_QUIET)
    read(one, workload("train-0/0"))
    recorded.counters = rates(CPU, 0.4) | {READ: [], WRITTEN: [], RECEIVED: [], SENT: []}
    recorded.counters[CPU][0].points.extend(points(0.4, NOW.replace(second=0), NOW + 90 * MINUTE, 60))  # type: ignore[attr-defined]
    samples = []
    for minutes in range(10, 90, 10):
        time.at = NOW + minutes * MINUTE
        samples += read(one, workload("train-0/0"))
    found = judged(tmp_path, samples, workload("train-0/0"), time.at)
    assert found.use is Use.UNKNOWN
    assert "network use was not measured" in found.reason


def test_a_rate_that_is_no_number_is_not_measured(tmp_path: Path) -> None:
    one, _recorded, _time = meter(*gpu("A"), counters=ALL_QUIET | rates(CPU, float("nan")))
    found = judged(tmp_path, read(one, workload("train-0/0")), workload("train-0/0"))
    assert found.use is Use.UNKNOWN


def test_a_measured_pod_without_disk_counters_has_none_by_design(tmp_path: Path) -> None:
    counters = ALL_QUIET | rates(READ, 0.0, "other-0") | rates(WRITTEN, 0.0, "other-0")
    one, _recorded, _time = meter(*gpu("A"), counters=counters)
    found = judged(tmp_path, read(one, workload("train-0/0")), workload("train-0/0"))
    assert found.use is Use.QUIET
    assert any(words.startswith("disk (no such counters for its pods") for words in found.skipped)


# Exporters without a Prometheus


def exporter_text(lines: Sequence[TimeSeries], at: datetime) -> str:
    found = []
    for line in lines:
        labels = {name: value for name, value in line.labels.items() if name not in {"__name__", "instance"}}
        named = ",".join(f'{name}="{value}"' for name, value in labels.items())
        value = dict(line.points)[at.timestamp()]
        found.append(f"{line.labels['__name__']}{{{named}}} {value}\n")
    return "".join(found)


def direct(lines: Sequence[TimeSeries], minutes: int, broken: Sequence[int] = ()) -> list[Sample]:
    """Asked every 30 seconds."""
    time = Time()
    time.at = NOW - minutes * MINUTE
    asked = 0

    async def fetch(_url: str, _deadline: timedelta) -> str | Unknown:
        return Unknown("refused") if asked in broken else exporter_text(lines, time.at)

    one = ClusterMeter(time, exporters=("http://node-1:9400/metrics",), fetch=fetch)
    samples: list[Sample] = []
    while time.at <= NOW:
        samples += read(one, workload("train-0/0"))
        time.at += timedelta(seconds=30)
        asked += 1
    return samples


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (gpu("A", since=NOW - 40 * MINUTE), Use.QUIET),
        (gpu("A", engine=0.4, since=NOW - 40 * MINUTE), Use.ACTIVE),
        (gpu("A", energy=5.0, since=NOW - 40 * MINUTE), Use.UNKNOWN),
        (gpu("A", "other-0", since=NOW - 40 * MINUTE), Use.UNKNOWN),
    ],
)
def test_exporters_are_queried_directly(lines: list[TimeSeries], expected: Use, tmp_path: Path) -> None:
    samples = direct(lines, 40)
    found = judged(tmp_path, samples, workload("train-0/0"))
    assert found.use is expected
    by_design = {s.signal: s.value for s in samples if s.signal is not Signal.GPU}
    assert by_design.keys() == {Signal.CPU, Signal.NETWORK, Signal.DISK, Signal.TERMINAL}
    assert all(isinstance(value, Unknown) and value.by_design for value in by_design.values())


def test_an_exporter_that_refuses_for_long_leaves_it_unmeasured(tmp_path: Path) -> None:
    samples = direct(gpu("A", since=NOW - 40 * MINUTE), 40, broken=range(40, 60))
    found = judged(tmp_path, samples, workload("train-0/0"))
    assert found.since is not None
    assert found.since >= NOW - 10 * MINUTE, "asked every 30 seconds, it answered again ten minutes ago"


def test_no_exporter_at_all_is_reported() -> None:
    samples = direct(gpu("A", since=NOW - MINUTE), 1, broken=range(10))
    assert "no DCGM exporter answered" in whys(samples)
