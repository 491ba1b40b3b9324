"""The workbench of this machine: a driver that is a small program, and probes that need no PyTorch."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.acceptance.bench import workbench as workbench_module
from gpukeeper.acceptance.bench.probing import ProbeLauncher
from gpukeeper.acceptance.bench.workbench import LocalWorkbench, OtherProcesses
from gpukeeper.acceptance.record import ProbeFailure, ProbeRequest, ProbeResult
from gpukeeper.devices.driver.client import HealthMonitor
from gpukeeper.devices.holders import Holder
from gpukeeper.model.unknown import Unknown
from tests.patience import PATIENCE
from tests.unit.devices.driver.programs import answering, program

PROGRAM = str(Path(__file__).with_name("probe_program.py"))


def gpu(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H200",
        "serial": f"s{index}",
        "pci": f"00000000:{index}B:00.0",
        "minor": 200 + index,  # no process of this machine has such a node open
        "memory_total_mib": 143_771,
        "facts": {"vbios": "96.00", "inforom": {"why": "no", "by_design": True}},
        "sliced": False,
    }


ANSWERS = {
    "identity": {
        "state": "answered",
        "gpus": [gpu(0), gpu(1), {"index": 2, "uuid": {"why": "the GPU is lost"}}],
        "topology": {"GPU-0": {"GPU-1": "nvlink"}, "GPU-1": {"GPU-0": "nvlink"}},
        "driver": "580.95.05",
        "cuda_driver": "13.0",
    },
    "health": {
        "state": "answered",
        "gpus": [
            {
                "index": n,
                "uuid": f"GPU-{n}",
                "counters": {"pcie_replays": n},
                "energy_mj": 70 + n,
                "sliced": False,
                "listed": [],
            }
            for n in (0, 1)
        ],
    },
    "readings": {
        "state": "answered",
        "readings": [{"uuid": f"GPU-{n}", "at": 1e9 + n, "power_w": 70.0} for n in (0, 1)],
    },
}


def refusing(state: str, why: str) -> dict[str, Any]:
    return {question: {"state": state, "why": why} for question in ANSWERS}


def driver(answers: dict[str, Any]) -> HealthMonitor:
    return HealthMonitor(answering(answers), timedelta(minutes=1))


def on_bench(
    use: Callable[[LocalWorkbench], Awaitable[Any]],
    device: str = "cuda",
    *,
    answers: dict[str, Any] = ANSWERS,
    python: str | Unknown = sys.executable,
    count: int = 1,
) -> Any:
    async def run() -> Any:
        bench = ProbeLauncher(sys.executable, device, PROGRAM, to_start_s=60.0, ranks_to_start_s=60.0)
        async with LocalWorkbench(python, device, count=count, driver=driver(answers), bench=bench) as workbench:
            return await use(workbench)

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def nothing_narrows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_machine_is_what_driver_pytorch_and_kernel_say() -> None:
    """C1.1"""
    found = on_bench(lambda bench: bench.machine())
    assert [(one.uuid, one.identity) for one in found.gpus] == [("GPU-0", "s0"), ("GPU-1", "s1")]
    assert found.silent == ("GPU 2 does not report its uuid: the GPU is lost",)
    assert found.gpus[0].facts["sms"] == 132  # by its own worker
    assert isinstance(found.gpus[0].facts["numa"], Unknown)
    assert found.topology["GPU-0"] == {"GPU-1": "nvlink"}
    facts = ("driver", "cuda_driver", "torch", "cuda", "torch_why")
    assert [found.environment[key] for key in facts] == ["580.95.05", "13.0", "9.9", "13.0", None]
    assert found.environment["interpreter"] == sys.executable


def test_no_driver_is_an_answer_and_no_gpus() -> None:
    """C17.2"""
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a driver here")
    found = on_bench(lambda bench: bench.machine(), answers=refusing("no driver", "NVML Shared Library Not Found"))
    assert found.gpus == ()
    assert found.environment["driver"] is None
    assert found.environment["torch"] == "9.9"


def test_a_driver_that_fails_leaves_the_gpus_unknown() -> None:
    failing = refusing("failed", "Driver/library version mismatch")
    found = on_bench(lambda bench: bench.machine(), answers=failing)
    assert found.gpus == Unknown("Driver/library version mismatch")
    assert on_bench(lambda bench: bench.health(), answers=failing) == Unknown("Driver/library version mismatch")


def test_health_names_every_gpu_with_what_kernel_and_processes_say() -> None:
    found = on_bench(lambda bench: bench.health())
    assert {uuid: one.counters for uuid, one in found.items()} == {
        "GPU-0": {"pcie_replays": 0, "energy_mj": 70},
        "GPU-1": {"pcie_replays": 1, "energy_mj": 71},
    }
    assert all(one.foreign == () or isinstance(one.foreign, Unknown) for one in found.values())
    assert all(one.xids == () or isinstance(one.xids, Unknown) for one in found.values())


def test_who_was_there_before_our_first_worker_is_not_hidden_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container memory alone tells of others, and from our first worker on it is also ours."""
    ours = Holder(pid=os.getpid(), starttime=1, uid=0, comm="python", stopped=False, minors=(200,))
    walled = OtherProcesses((ours,), frozenset({os.getpid()}), {}, walled=True)
    monkeypatch.setattr(workbench_module, "scan_processes", lambda **_: walled)
    python, started = tmp_path / "python", tmp_path / "started"
    python.write_text(f'#!/bin/sh\n: > "{started}"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    used = f"""
import os
answers = {ANSWERS!r}
for question in asked():
    for one in answers["health"]["gpus"]:
        one["memory_used_mib"] = 700 if os.path.exists({str(started)!r}) else 3000
    give(question, answers[question["about"]])
"""

    async def run() -> Any:
        asked = HealthMonitor(program(used), timedelta(minutes=1))
        bench = ProbeLauncher(str(python), "cuda", PROGRAM, to_start_s=60.0)
        async with LocalWorkbench(str(python), driver=asked, bench=bench) as workbench:
            await workbench.machine()
            await workbench.machine()  # a second question changes nothing
            return await workbench.health()

    found = asyncio.run(run())["GPU-0"].foreign
    assert isinstance(found, Unknown)
    assert not found.by_design
    assert "3000 MiB" in found.why


def test_a_process_that_came_and_went_while_a_probe_ran_is_told_by_the_next_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = Holder(pid=1, starttime=1, uid=0, comm="python", stopped=False, minors=(200,))
    nobody, somebody = (OtherProcesses(found, frozenset(), {}) for found in ((), (there,)))
    monkeypatch.setattr(workbench_module, "WATCH_S", 0.0)

    async def run(bench: LocalWorkbench) -> Any:
        await bench.machine()
        loop, gone, scans = asyncio.get_running_loop(), asyncio.Event(), []

        def scan(**_: object) -> OtherProcesses:
            scans.append(None)
            if len(scans) > 1:
                loop.call_soon_threadsafe(gone.set)  # what the scan before this one saw is remembered
            return somebody if len(scans) == 1 else nobody

        monkeypatch.setattr(workbench_module, "scan_processes", scan)
        await bench._watched(asyncio.wait_for(gone.wait(), PATIENCE))
        return await bench.health(), await bench.health()

    first, second = on_bench(run)
    assert first["GPU-0"].foreign == (1,)
    assert first["GPU-0"].named[1].startswith("pid 1 (")
    assert (first["GPU-1"].foreign, second["GPU-0"].foreign) == ((), ())


def test_gpus_of_another_user_are_neither_tested_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    async def use(bench: LocalWorkbench) -> Any:
        return await bench.machine(), await bench.health(), await bench.readings()

    machine, health, readings = on_bench(use)
    assert [one.uuid for one in machine.gpus] == ["GPU-1"]
    assert isinstance(machine.on_bus, Unknown)
    assert list(health) == ["GPU-1"]
    assert [one.uuid for one in readings] == ["GPU-1"]


def test_readings_count_from_when_the_bench_was_opened() -> None:
    first, second = on_bench(lambda bench: bench.readings())
    assert second.at - first.at == 1.0
    assert first.at < 1e9


def test_the_time_under_load_counts_from_there_too() -> None:
    bench = LocalWorkbench(sys.executable)
    now = bench._opened_ticks + 5
    loaded = bench._since_opened(ProbeResult(result={"loaded": [now, now + 10], "n": 1}, seconds=1, busy_s=1))
    assert isinstance(loaded, ProbeResult)
    assert loaded.result == {"loaded": [5, 15], "n": 1}
    other = ProbeResult(result={"n": 1}, seconds=1, busy_s=1)
    assert bench._since_opened(other) is other


def test_without_pytorch_there_is_an_answer_for_everything_and_none_is_a_measurement() -> None:
    """C17.2"""
    why = Unknown("No module named 'torch' in any of /usr/bin/python3.")

    async def use(bench: LocalWorkbench) -> Any:
        job = ProbeRequest(probe="echo")
        return await bench.machine(), await bench.each({"GPU-0": job}), await bench.together(["GPU-0", "GPU-1"], job)

    machine, each, together = on_bench(use, python=why)
    assert machine.environment["torch"] == why
    assert machine.environment["torch_why"] == why.why
    assert len(machine.gpus) == 2
    assert each == {"GPU-0": ProbeFailure(kind="no_torch", words=why.why)}
    assert set(together) == {"0", "1"}


@pytest.mark.parametrize(("hello", "torch"), [("broken", Unknown), ("dies", Unknown)])
def test_a_pytorch_that_cannot_begin_is_unknown_with_its_words(
    hello: str, torch: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELLO", hello)
    found = on_bench(lambda bench: bench.machine())
    assert isinstance(found.environment["torch"], torch)
    assert found.environment["torch_why"]
    assert len(found.gpus) == 2


def test_the_first_worker_stays_for_the_first_probe() -> None:
    async def use(bench: LocalWorkbench) -> Any:
        await bench.machine()
        pid = bench._workers._workers["GPU-0"]._hello["pid"]
        answers = await bench.each({"GPU-0": ProbeRequest(probe="echo"), "GPU-1": ProbeRequest(probe="echo")})
        return pid, answers

    pid, answers = on_bench(use)
    assert answers["GPU-0"].result["pid"] == pid
    assert isinstance(answers["GPU-1"], ProbeResult)


def test_before_ranks_start_the_workers_are_gone_and_what_was_reported_is_kept() -> None:
    async def use(bench: LocalWorkbench) -> Any:
        await bench.each({"GPU-0": ProbeRequest(probe="fail", params={"words": "x"})})
        await bench.each({"GPU-0": ProbeRequest(probe="echo")})
        assert bench._workers._workers["GPU-0"].pid is not None
        answers = await bench.together(["GPU-0"], ProbeRequest(probe="ddp"))
        return bench._workers._workers["GPU-0"].pid, answers, bench.logs

    pid, answers, logs = on_bench(use)
    assert pid is None
    assert answers["0"].kind == "no_torch"  # this interpreter has none
    assert "torch" in logs["ranks-1-ddp/torchrun"]


def test_on_the_cpu_there_is_nothing_to_look_at() -> None:
    async def use(bench: LocalWorkbench) -> Any:
        return (
            await bench.machine(),
            await bench.health(),
            await bench.readings(),
            await bench.each({"cpu-1": ProbeRequest(probe="echo")}),
        )

    machine, health, readings, answers = on_bench(use, "cpu", count=2)
    assert [(one.uuid, one.name) for one in machine.gpus] == [("cpu-0", "CPU"), ("cpu-1", "CPU")]
    assert machine.gpus[0].identity == "cpu-0"
    assert health == {}
    assert list(readings) == []
    assert answers["cpu-1"].result["env"]["CUDA_VISIBLE_DEVICES"] == ""
