"""What an agent publishes of pods, as text; and what the operator's own meter makes of that text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpukeeper.devices.busy import GpuUse
from gpukeeper.interfaces.telemetry.machine import LARGEST
from gpukeeper.interfaces.telemetry.metrics import Metrics
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Ref, Seen, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.meter import ClusterMeter, RunningPod
from gpukeeper.platforms.kubernetes.node_use import PodGpu, PodGpus, PodName, PodUse

NOW = datetime(2026, 3, 2, 12, 0, 5, tzinfo=UTC)
TRAIN, EVAL = PodName("lab", "train-0", "uid-train"), PodName("lab", "eval-0", "uid-eval")
ENGINE, ENERGY = "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"


class Time:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at


def whole(uuid: str, busy: float | Unknown = 0.0, energy: int | Unknown = 1000) -> GpuUse:
    return GpuUse(uuid=uuid, slice=False, busy=busy, memory_used_mib=500, pids=(), energy_mj=energy)


def part(uuid: str, instance: int | Unknown, busy: float = 0.0) -> GpuUse:
    return GpuUse(uuid=uuid, slice=True, busy=busy, memory_used_mib=9, pids=(), parent="GPU-1", gpu_instance=instance)


def use(*uses: GpuUse, pods: dict[str, tuple[PodName, ...]], at: datetime = NOW, replica: str = "") -> PodUse:
    busiest = {one.uuid: one.busy for one in uses if not isinstance(one.busy, Unknown)}
    found = tuple(PodGpu(uuid, pod, replica) for uuid, some in pods.items() for pod in some)
    return PodUse(at=at, uses={one.uuid: one for one in uses}, busiest=busiest, pods=PodGpus(found))


def text(seen: PodUse) -> str:
    metrics = Metrics(Time(), elects=False, process=False)
    metrics.node_use = seen
    return metrics.text().decode()


def told(seen: PodUse) -> dict[tuple[str, ...], float]:
    """By name, UUID, instance, pod and what else says which it is."""
    labels = ("UUID", "GPU_I_ID", "pod", "vgpu", "what", "result")
    return {
        (sample.name, *(value for label in labels if (value := sample.labels.get(label)))): sample.value
        for family in text_string_to_metric_families(text(seen))
        for sample in family.samples
        if "pod_gpu" in sample.name or sample.name.startswith("DCGM")
    }


def series(seen: PodUse) -> set[tuple[str, ...]]:
    return {key for key in told(seen) if key[0].startswith("DCGM")}


def test_a_gpu_is_published_for_each_of_its_pods() -> None:
    found = told(use(whole("GPU-1", 40.0), pods={"GPU-1": (TRAIN, EVAL)}))
    assert found[ENGINE, "GPU-1", "train-0"] == found[ENGINE, "GPU-1", "eval-0"] == pytest.approx(0.4)
    assert found[ENERGY, "GPU-1", "train-0"] == 1000
    assert found["DCGM_FI_DEV_FB_USED", "GPU-1", "train-0"] == 500


def test_what_could_not_be_read_has_no_series_and_is_counted() -> None:
    seen = use(whole("GPU-1", Unknown("doubted")), whole("GPU-2"), pods={"GPU-1": (TRAIN,)})
    assert series(seen) == set()
    assert told(seen)["gpukeeper_pod_gpu_not_measured", "use"] == 1
    silent = PodUse(at=NOW, uses=Unknown("the driver did not answer"))
    assert told(silent) == {("gpukeeper_pod_gpu_not_measured", "driver"): 1}


def test_slices_have_the_uuid_of_their_gpu_and_its_energy() -> None:
    cut = whole("GPU-1", Unknown("split"))
    seen = use(cut, part("MIG-a", 7, 2.0), part("MIG-b", Unknown("?")), pods={"MIG-a": (TRAIN,), "MIG-b": (EVAL,)})
    assert series(seen) == {
        (ENGINE, "GPU-1", "7", "train-0"),
        ("DCGM_FI_DEV_FB_USED", "GPU-1", "7", "train-0"),
        (ENERGY, "GPU-1"),
    }
    assert told(seen)["gpukeeper_pod_gpu_not_measured", "use"] == 1  # MIG-b: its instance is unknown


def test_two_slices_of_one_instance_are_one_series_with_the_larger_value() -> None:
    """Twice the same series in one page, and Prometheus discards the page."""
    seen = use(part("MIG-a", 7, 2.0), part("MIG-b", 7, 9.0), pods={"MIG-a": (TRAIN,), "MIG-b": (TRAIN,)})
    assert told(seen)[ENGINE, "GPU-1", "7", "train-0"] == pytest.approx(0.09)


# As the operator reads it


def workload(pod: PodName, gpus: int = 1) -> Subject:
    long_ago = NOW - timedelta(days=1)
    return Subject(
        seen=Seen(Ref("kubernetes", "prod", "job", pod.name, f"job-{pod.name}", "lab"), "1", "", NOW),
        state=State.RUNNING,
        created=long_ago,
        started=long_ago,
        devices=tuple(f"{pod.name}/{number}" for number in range(gpus)),
    )


def measured(agent: Callable[[datetime], PodUse | None], *subjects: Subject) -> list[Sample]:
    """Ten minutes of an operator that scrapes an agent every 30 seconds. None: the agent is down."""
    time = Time()

    async def fetch(url: str, deadline: timedelta) -> str | Unknown:
        seen = agent(time.at)
        return Unknown("connection refused") if seen is None else text(seen)

    pods = {pod.name: RunningPod(pod.uid) for pod in (TRAIN, EVAL)}
    meter = ClusterMeter(time, exporters=["http://agent:9101/metrics"], fetch=fetch, pods=lambda subject: pods)

    async def read() -> list[Sample]:
        samples: list[Sample] = []
        while time.at < NOW + timedelta(minutes=10):
            samples += await meter.read(subjects)
            time.at += timedelta(seconds=30)
        return samples

    return [one for one in asyncio.run(read()) if one.signal is Signal.GPU]


def grown(at: datetime) -> int:
    return 1_000_000 + int((at - NOW).total_seconds()) * 80_000


def known(samples: list[Sample], pod: PodName) -> list[float]:
    return [one.value for one in samples if pod.name in one.key and not isinstance(one.value, Unknown)]


def test_the_operator_reads_idle_and_busy_pods_from_an_agent() -> None:
    def agent(at: datetime) -> PodUse:
        idle, busy = whole("GPU-1", 0.0, grown(at)), whole("GPU-2", 90.0, grown(at))
        return use(idle, busy, pods={"GPU-1": (TRAIN,), "GPU-2": (EVAL,)}, at=at)

    samples = measured(agent, workload(TRAIN), workload(EVAL))
    assert len(known(samples, TRAIN)) >= 7
    assert set(known(samples, TRAIN)) == {0.0}
    assert set(known(samples, EVAL)) == {90.0}


def test_a_slice_is_read_with_the_energy_of_its_gpu() -> None:
    def agent(at: datetime) -> PodUse:
        cut = whole("GPU-1", Unknown("split"), grown(at))
        return use(cut, part("MIG-a", 7), pods={"MIG-a": (TRAIN,)}, at=at)

    assert set(known(measured(agent, workload(TRAIN)), TRAIN)) == {0.0}


@pytest.mark.parametrize(
    "agent",
    [
        lambda at: None,
        lambda at: PodUse(at=at, uses=Unknown("the driver did not answer")),
        lambda at: use(whole("GPU-1", Unknown("doubted"), grown(at)), pods={"GPU-1": (TRAIN,)}),
        lambda at: use(whole("GPU-1", 0.0, Unknown("no counter")), pods={"GPU-1": (TRAIN,)}),
        lambda at: use(whole("GPU-1", 0.0, 1000), pods={"GPU-1": (TRAIN,)}),  # the driver repeats itself
        lambda at: use(whole("GPU-1", 0.0, grown(at)), pods={}),  # its pod is not known
        lambda at: use(
            *(whole(uuid, 0.0, grown(at)) for uuid in ("GPU-1", "GPU-2")), pods={"GPU-1": (TRAIN,), "GPU-2": (TRAIN,)}
        ),  # more than it requests
        lambda at: use(
            whole("GPU-1", 0.0, grown(at)), pods={"GPU-1": (PodName("lab", "train-0", "uid-before"),)}
        ),  # a former pod of the same name
    ],
    ids=["down", "silent", "doubted", "no-counter", "stale", "no-pod", "too-many", "namesake"],
)
def test_what_an_agent_does_not_know_is_never_idle(agent: Callable[[datetime], PodUse | None]) -> None:
    samples = measured(agent, workload(TRAIN))
    assert samples
    assert known(samples, TRAIN) == []


def test_an_agent_that_stops_is_unknown_from_then_on() -> None:
    def agent(at: datetime) -> PodUse | None:
        stopped = at > NOW + timedelta(minutes=5)
        return None if stopped else use(whole("GPU-1", 0.0, grown(at)), pods={"GPU-1": (TRAIN,)}, at=at)

    samples = measured(agent, workload(TRAIN))
    last = max(one.at for one in samples if not isinstance(one.value, Unknown))
    assert last <= NOW + timedelta(minutes=6)
    assert isinstance(samples[-1].value, Unknown)


def test_the_largest_logs_are_told_one_by_one_and_the_others_together() -> None:
    """C15.1"""
    sizes = {PodName("lab", f"run-{number}", f"uid-{number}"): number + 1 for number in range(LARGEST + 2)}
    seen = msgspec.structs.replace(use(pods={}), logs=sizes)
    found = {
        (sample.labels["namespace"], sample.labels["pod"], sample.labels["pod_uid"]): sample.value
        for family in text_string_to_metric_families(text(seen))
        for sample in family.samples
        if sample.name == "gpukeeper_pod_log_bytes"
    }
    assert len(found) == LARGEST + 1
    assert found["", "(other)", ""] == 1 + 2
    assert found["lab", f"run-{LARGEST + 1}", f"uid-{LARGEST + 1}"] == LARGEST + 2
    assert "gpukeeper_pod_log_bytes{" not in text(use(pods={})), "what is unknown is absent, not 0"
