"""Reading the files of a kubelet: what is missing is reported, and nothing is published that was not read just now."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpukeeper.devices.busy import GpuUse
from gpukeeper.devices.gpus import WALLED
from gpukeeper.devices.meter import GpuMeter
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import node_use
from gpukeeper.platforms.kubernetes.node_use import KubeletFiles, PodGpu, PodName, PodUse, PodUseReader
from tests.patience import PATIENCE

UID = "1ee48fe1-0c6b-4b52-9a57-3a0d8d1f2c11"
POD = PodName("lab", "train-0", UID)
NOW = datetime(2026, 3, 2, 8, tzinfo=UTC)


class Time:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at


class Driver:
    def __init__(self, *answers: Mapping[str, GpuUse] | Unknown) -> None:
        self._answers = list(answers)

    async def read(self) -> Mapping[str, GpuUse] | Unknown:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def use(busy: float | Unknown = 0.0, *pids: int) -> dict[str, GpuUse]:
    return {"GPU-1": GpuUse(uuid="GPU-1", slice=False, busy=busy, memory_used_mib=0, pids=pids, covered_s=15.0)}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubeletFiles:
    monkeypatch.setattr(node_use.holders, "is_walled", lambda proc: False)
    (tmp_path / f"logs/lab_train-0_{UID}").mkdir(parents=True)
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text(f"0::/kubepods/pod{UID}/{'ab' * 32}\n")
    (tmp_path / "record").write_text(json.dumps({"Data": {"PodDeviceEntries": None}, "Checksum": 1}))
    return KubeletFiles(*(str(tmp_path / name) for name in ("record", "logs", "proc")))


def reader(files: KubeletFiles, *answers: Mapping[str, GpuUse] | Unknown, time: Time | None = None) -> PodUseReader:
    return PodUseReader(GpuMeter(Driver(*answers), time or Time(), ["host"]), files)  # type: ignore[arg-type]


def read(one: PodUseReader) -> PodUse:
    return asyncio.run(one.read())


def test_a_process_is_mapped_and_one_that_is_gone_is_not(files: KubeletFiles) -> None:
    seen = read(reader(files, use(3.0, 7, 8)))
    assert seen.pods.found == (PodGpu("GPU-1", POD),)
    assert (seen.pods.processes["mapped"], seen.pods.processes["gone"]) == (1, 1)
    assert (seen.busiest, seen.problems) == ({"GPU-1": 3.0}, ())


def test_an_assigned_gpu_without_a_process_has_its_pod(files: KubeletFiles) -> None:
    entry = {"PodUID": UID, "ContainerName": "m", "ResourceName": "nvidia.com/gpu", "DeviceIDs": {"0": ["GPU-1"]}}
    Path(files.record).write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}, "Checksum": 1}))
    assert read(reader(files, use())).pods.found == (PodGpu("GPU-1", POD),)


def test_files_that_are_missing_are_problems_and_the_rest_is_read(files: KubeletFiles) -> None:
    Path(files.record).unlink()
    seen = read(reader(files, use(0.0, 7)))
    assert seen.pods.found == (PodGpu("GPU-1", POD),)
    assert "record of assigned devices" in seen.problems[0]
    nowhere = KubeletFiles(files.record, f"{files.logs}/none", files.proc)
    seen = read(reader(nowhere, use(0.0, 7)))
    assert (seen.pods.found, seen.pods.processes["unnamed"], len(seen.problems)) == ((), 1, 2)


def test_pids_of_another_namespace_are_never_mapped(files: KubeletFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_use.holders, "is_walled", lambda proc: True)
    seen = read(reader(files, use(0.0, 7)))
    assert (seen.pods.found, seen.pods.processes["unreadable"], seen.problems) == ((), 1, (WALLED,))


def test_the_largest_reading_of_a_minute_counts_and_an_unknown_one_hides_it(files: KubeletFiles) -> None:
    time = Time()
    one = reader(files, use(80.0, 7), use(1.0, 7), use(Unknown("doubted"), 7), use(2.0, 7), time=time)
    found = []
    for _ in range(4):
        found.append(read(one).busiest.get("GPU-1"))
        time.at += timedelta(seconds=15)
    assert found == [80.0, 80.0, None, 2.0]


def test_the_largest_reading_is_forgotten_after_a_minute(files: KubeletFiles) -> None:
    time = Time()
    one = reader(files, use(80.0, 7), use(1.0, 7), time=time)
    found = []
    for _ in range(6):
        found.append(read(one).busiest["GPU-1"])
        time.at += timedelta(seconds=15)
    assert found == [80.0, 80.0, 80.0, 80.0, 1.0, 1.0]


def test_a_reading_that_is_too_old_is_published_no_longer(files: KubeletFiles) -> None:
    one = reader(files, use(0.0, 7))
    assert isinstance(one.latest(NOW).uses, Unknown)  # nothing was read yet
    read(one)
    assert not isinstance(one.latest(NOW + timedelta(seconds=45)).uses, Unknown)
    assert isinstance(one.latest(NOW + timedelta(seconds=46)).uses, Unknown)
    assert isinstance(one.latest(NOW - timedelta(hours=1)).uses, Unknown)  # the clock was set back


def test_a_silent_driver_is_a_problem_that_is_logged_once(files: KubeletFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Unknown("the NVIDIA driver did not answer within 10s")
    one = reader(files, silent, silent, use(), use(), time=Time())
    lines: list[str] = []
    monkeypatch.setattr(node_use, "EVERY", timedelta())

    async def run() -> None:
        both = asyncio.Event()

        def log(line: str) -> None:
            lines.append(line)
            if len(lines) == 2:
                both.set()

        task = asyncio.create_task(one.run(log))
        await both.wait()
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert lines == [f"GPU use of pods: {silent.why}", "GPU use of pods: everything is read again"]


def test_the_log_of_a_pod_is_all_its_files_and_one_that_is_kept_elsewhere_is_unknown(files: KubeletFiles) -> None:
    """C15.1: containers, earlier starts and rotated files. With Docker the kubelet has links."""
    main, other = Path(files.logs, f"lab_train-0_{UID}", "main"), UID.replace("1", "2")
    main.mkdir()
    for name, size in (("0.log", 300), ("1.log", 20), ("1.log.20261119-100000.gz", 1)):
        (main / name).write_bytes(b"x" * size)
    linked = Path(files.logs, f"lab_eval_{other}", "main")
    linked.mkdir(parents=True)
    (linked / "0.log").symlink_to(main / "0.log")
    assert read(reader(files, use())).logs == {POD: 321}
    (linked / "0.log").unlink()
    (linked / "0.log").write_bytes(b"xx")
    assert read(reader(files, use())).logs == {POD: 321, PodName("lab", "eval", other): 2}


def test_logs_beyond_a_bound_are_not_measured(files: KubeletFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_use, "LOG_FILES", 2)
    main = Path(files.logs, f"lab_train-0_{UID}", "main")
    main.mkdir()
    for number in range(3):
        (main / f"{number}.log").write_text("x")
    assert read(reader(files, use())).logs == {}
