"""On a real GPU: a busy process shows, an idle one does not, and both are known. What they run needs PyTorch."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from gpukeeper.devices.busy import GpuUse
from gpukeeper.devices.driver.facts import resolve_names
from gpukeeper.devices.gpus import LocalGpus
from gpukeeper.devices.meter import GpuUsage
from gpukeeper.model.unknown import Unknown
from tests.engines import has_gpu, require

PATIENCE_S = 120.0
IDLE = """
import sys, torch
x = torch.zeros(1 << 28, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""
BUSY = """
import torch
x = torch.rand(8192, 8192, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
while True:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
"""


class Now:
    def now(self) -> datetime:
        return datetime.now(UTC)


@contextmanager
def usage() -> Iterator[GpuUsage]:
    reader = GpuUsage(Now())
    try:
        yield reader
    finally:
        reader.close()


def python_with_torch() -> str:
    for program in (sys.executable, shutil.which("python3")):
        if (
            program
            and subprocess.run([program, "-c", "import torch"], capture_output=True, check=False).returncode == 0
        ):
            return program
    pytest.skip("PyTorch is not installed here: nothing can keep the GPU busy")


@contextmanager
def running(program: str) -> Iterator[int]:
    command = [python_with_torch(), "-c", program]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def the_gpu(uses: dict[str, GpuUse] | Unknown) -> GpuUse:
    """The one that a program gets which asks for none in particular."""
    assert not isinstance(uses, Unknown), uses
    inventory = asyncio.run(LocalGpus().inventory())
    assert not isinstance(inventory, Unknown), inventory
    first = resolve_names("0", inventory)
    assert not isinstance(first, Unknown), first
    return uses[first[0]]


def read(reader: GpuUsage) -> GpuUse:
    return the_gpu(asyncio.run(reader.read()))  # type: ignore[arg-type]


def test_two_readings_are_in_range_and_every_gpu_is_in_them() -> None:
    require("gpu", has_gpu())
    with usage() as reader:
        for _ in range(2):
            uses = asyncio.run(reader.read())
            assert not isinstance(uses, Unknown), uses
            assert uses
            for use in uses.values():
                assert isinstance(use.busy, Unknown) or 0.0 <= use.busy <= 100.0
                assert not isinstance(use.memory_used_mib, Unknown)
                assert use.memory_used_mib >= 0
                assert not isinstance(use.pids, Unknown)
        shares = asyncio.run(LocalGpus().shares())
        assert not isinstance(shares, Unknown), shares
        assert set(shares) <= set(uses)


def test_one_question_alone_is_answered() -> None:
    """A command that looks once must get a value, not "no earlier reading"."""
    require("gpu", has_gpu())
    with usage() as reader:
        use = read(reader)
    assert not isinstance(use.busy, Unknown), use.busy


def test_a_busy_process_shows() -> None:
    require("gpu", has_gpu())
    with running(BUSY), usage() as reader:
        until, seen = time.monotonic() + PATIENCE_S, [read(reader).busy]
        while isinstance(seen[-1], Unknown) or seen[-1] <= 50.0:
            assert time.monotonic() < until, seen
            seen.append(read(reader).busy)


def test_an_idle_context_is_known_to_be_idle() -> None:
    """It draws more power than an empty GPU and holds memory; it does nothing."""
    require("gpu", has_gpu())
    with running(IDLE), usage() as reader:
        read(reader)  # its start was work
        seen = [read(reader) for _ in range(5)]
    for use in seen:
        assert not isinstance(use.busy, Unknown), use.busy
        assert use.busy < 5.0
        assert isinstance(use.memory_used_mib, int)
        assert use.memory_used_mib > 1024
