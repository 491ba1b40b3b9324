"""On a real GPU: the driver answers, the sampler sees load, a neighbour is named, and nothing of ours stays behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpukeeper.acceptance.bench.probing import find_python
from gpukeeper.acceptance.bench.supervisor import descendants
from gpukeeper.acceptance.bench.workbench import LocalWorkbench
from gpukeeper.acceptance.record import Machine, ProbeRequest, ProbeResult
from gpukeeper.devices.holders import is_walled
from gpukeeper.model.gpu import Health
from gpukeeper.model.unknown import Unknown
from tests.engines import has_gpu, require

HOLDS = """
import sys, torch
held = torch.ones(2 * 1024**3, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""
BROKEN_WORDS = ("Unknown Error", "lost", "Uninitialized")


def on_bench(use: Callable[[LocalWorkbench], Awaitable[Any]]) -> Any:
    require("gpu", has_gpu())

    async def run() -> Any:
        async with LocalWorkbench(find_python()) as bench:
            return await use(bench)

    return asyncio.run(run())


def need_torch() -> str:
    require("gpu", has_gpu())
    python = find_python()
    if isinstance(python, Unknown):
        pytest.skip(f"nothing can be computed here: {python.why}")
    return python


def whole(seen: Machine) -> list[str]:
    assert isinstance(seen.gpus, tuple), seen.gpus
    assert seen.gpus
    return [gpu.uuid for gpu in seen.gpus]


async def looked(bench: LocalWorkbench) -> dict[str, Health]:
    found = await bench.health()
    assert not isinstance(found, Unknown), found
    return dict(found)


def test_the_driver_shows_what_is_here() -> None:
    """C1.1"""
    seen = on_bench(lambda bench: bench.machine())
    assert whole(seen)
    for gpu in seen.gpus:
        assert isinstance(gpu.name, str), gpu.name
        assert isinstance(gpu.pci, str), gpu.pci
        assert isinstance(gpu.memory_mib, int), gpu.memory_mib
    assert seen.silent == ()
    assert isinstance(seen.environment["driver"], str)
    if isinstance(seen.on_bus, int):
        assert seen.on_bus >= len({gpu.part_of or gpu.uuid for gpu in seen.gpus})


def test_every_signal_is_a_value_or_one_that_this_model_does_not_have() -> None:
    """A structure that we fill wrongly shows as an error of the driver that is not by design."""
    found = on_bench(looked)
    for one in found.values():
        unread = {
            key: fact.why
            for key, fact in {**one.counters, **one.states}.items()
            if isinstance(fact, Unknown) and not fact.by_design
        }
        assert not [key for key, why in unread.items() if any(word in why for word in BROKEN_WORDS)], unread
        for key in ("energy_mj", "pcie_replays"):
            assert isinstance(one.counters[key], int), (key, one.counters[key])
        for key in ("sm_mhz", "power_w", "temperature_c", "reasons", "persistence", "memory_used_mib"):
            assert not isinstance(one.states[key], Unknown), (key, one.states[key])


def test_counters_only_rise() -> None:
    async def twice(bench: LocalWorkbench) -> Any:
        return await looked(bench), await looked(bench)

    before, after = on_bench(twice)
    for uuid, one in after.items():
        for key, value in one.counters.items():
            was = before[uuid].counters[key]
            if isinstance(value, int) and isinstance(was, int):
                assert value >= was, key


def test_the_sampler_sees_what_a_probe_does() -> None:
    """C1.10: clocks, power and temperature while it runs."""
    need_torch()

    async def load(bench: LocalWorkbench) -> Any:
        uuids = whole(await bench.machine())
        await looked(bench)  # begins the sampling
        await bench.readings()
        job = ProbeRequest(probe="stress", params={"seconds": 6.0}, deadline_s=120.0)
        return await bench.each(dict.fromkeys(uuids, job)), await bench.readings()

    answers, readings = on_bench(load)
    assert all(isinstance(one, ProbeResult) for one in answers.values()), answers
    for uuid in answers:
        mine = [one for one in readings if one.uuid == uuid]
        assert len(mine) >= 6
        busiest = max(mine, key=lambda one: one.power_w or 0.0)
        assert (busiest.utilisation or 0.0) > 50.0
        assert (busiest.power_w or 0.0) > min(one.power_w or 0.0 for one in mine)


def test_our_own_worker_is_no_neighbour_and_nothing_is_left_of_it() -> None:
    need_torch()
    before = descendants(os.getpid())

    async def load(bench: LocalWorkbench) -> Any:
        uuids = whole(await bench.machine())
        job = ProbeRequest(probe="memory_bandwidth", params={"seconds": 0.2})
        await bench.each({uuids[0]: job})
        return (await looked(bench))[uuids[0]].foreign

    foreign = on_bench(load)
    assert isinstance(foreign, Unknown) or foreign == ()
    assert descendants(os.getpid()) <= before


def test_a_neighbour_that_computes_is_named() -> None:
    """Foreign processes leave a run open."""
    python = need_torch()
    if os.geteuid() != 0 or is_walled():
        pytest.skip("other processes cannot be seen from here: not root, or a pid namespace")
    program = f"import subprocess, sys\nsubprocess.Popen([{python!r}, '-c', {HOLDS!r}], start_new_session=True)"
    shell = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        shell.wait(60)  # it leaves its child to init: a stranger to us
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n"
        found = on_bench(looked)
        assert any(isinstance(one.foreign, tuple) and one.foreign for one in found.values()), found
    finally:
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.close()
        shell.stdout.close()
