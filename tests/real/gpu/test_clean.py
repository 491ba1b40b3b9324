"""On a real GPU, as root: the memory that a forked child keeps is found, ended by its pidfd, and comes back.

A bystander with work of its own on the GPU is left alone and reported. Nothing is reset here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest

from gpukeeper.devices.driver.client import inventory
from gpukeeper.devices.gpus import condition, examine
from gpukeeper.devices.holders import look_up
from gpukeeper.devices.signals import Target, end
from gpukeeper.lifecycle.cleanliness import CleanStatus, HolderKind, assess_gpu, holder_kind, new_baseline
from gpukeeper.model.decision import Accepted
from gpukeeper.model.gpu import Advice, Condition
from gpukeeper.model.unknown import Unknown
from tests.engines import has_gpu, require

GIB = 1024
PATIENCE_S = 30.0
# The child gets the open descriptors by the fork, and never makes a CUDA call.
PARENT = """
import os, signal, sys, torch
held = torch.ones(2 * 1024**3, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    signal.pause()
    os._exit(0)
print(os.getpid(), child, flush=True)
sys.stdin.read()
"""
BYSTANDER = """
import os, sys, torch
held = torch.ones(256 * 1024**2, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(os.getpid(), flush=True)
for line in sys.stdin:
    held += 1
    torch.cuda.synchronize()
    print(int(held[0]), flush=True)
"""
# By way of a shell: a child of this test would count as one of gpukeeper's own, and a tenant is not.
BY_A_SHELL = 'exec 3<&0; "$0" -c "$1" <&3 & wait'


@pytest.fixture
def uuid() -> str:
    require("gpu", has_gpu() and os.geteuid() == 0)
    gpus = inventory(timedelta(seconds=30))
    assert isinstance(gpus, tuple), gpus
    assert isinstance(gpus[0].uuid, str)
    return gpus[0].uuid


@contextmanager
def started(program: str) -> Iterator[subprocess.Popen[str]]:
    """It ends with its input."""
    command = ["sh", "-c", BY_A_SHELL, sys.executable, program]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield shell
    finally:
        shell.communicate(timeout=60)


@contextmanager
def orphaned(uuid: str) -> Iterator[tuple[int, int, bool]]:
    """The pids of a dead parent and of its child that keeps the GPU; whether the driver shows pids to us at all."""
    with started(PARENT) as shell:
        parent, child = map(int, said(shell).split())
        try:
            listed = read(uuid).listed
            shown = isinstance(listed, tuple) and parent in listed  # not from another pid namespace
            os.kill(parent, signal.SIGKILL)
            until(uuid, lambda one: parent not in [holder.pid for holder in one.holders])
            yield parent, child, shown
        finally:
            if look_up(child) is not None:
                asyncio.run(end(target_of(child)))


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def read(uuid: str) -> Condition:
    found = examine(uuid, datetime.now(UTC))
    assert isinstance(found, Condition), found
    return found


def until(uuid: str, fits: Callable[[Condition], bool]) -> Condition:
    """The first look that fits; or the last, after the patience."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = read(uuid)
        if fits(found) or time.monotonic() > deadline:
            return found


def target_of(pid: int) -> Target:
    seen = look_up(pid)
    assert seen is not None
    assert not isinstance(seen.container, Unknown)
    return Target(seen.pid, seen.starttime, seen.container)


def used(found: Condition) -> int:
    assert isinstance(found.memory_used_mib, int), found.memory_used_mib
    return found.memory_used_mib


def test_a_free_gpu_is_clean_by_its_own_baseline(uuid: str) -> None:
    found = read(uuid)
    baseline = new_baseline(found, {}, None)
    assert baseline is not None, found
    judged = assess_gpu(found, {}, baseline)
    assert judged.status is CleanStatus.CLEAN, judged
    assert found.advice is Advice.NONE or isinstance(found.advice, Unknown)


def test_the_port_answers_and_knows_no_other_gpu(uuid: str) -> None:
    assert isinstance(asyncio.run(condition(uuid, datetime.now(UTC))), Condition)
    assert isinstance(asyncio.run(condition("GPU-none", datetime.now(UTC))), Unknown)


def test_a_forked_child_keeps_the_memory_and_gives_it_back_when_it_is_ended(uuid: str) -> None:
    """C11.1"""
    baseline = used(read(uuid))
    with orphaned(uuid) as (parent, child, shown):
        found = read(uuid)
        assert [holder.pid for holder in found.holders] == [child], found
        assert used(found) > baseline + 2 * GIB, found
        if shown:
            # The driver goes on listing the dead parent; the child, which it does not list, is the holder.
            assert isinstance(found.listed, tuple)
            assert parent in found.listed, found
            assert child not in found.listed, found
        assert new_baseline(found, {}, None) is None
        assert assess_gpu(found, {}, baseline).status is not CleanStatus.CLEAN
        assert asyncio.run(end(target_of(child))) == Accepted()
        after = until(uuid, lambda one: used(one) <= baseline + 64)
        judged = assess_gpu(after, {}, baseline)
        assert judged.status is CleanStatus.CLEAN, (judged, after)


def test_a_bystander_is_left_alone_and_reported(uuid: str) -> None:
    """C11.1"""
    baseline = used(read(uuid))
    with started(BYSTANDER) as bystander:
        pid = int(said(bystander))
        with orphaned(uuid) as (_, child, _shown):
            found = read(uuid)
            assert {holder.pid for holder in found.holders} == {pid, child}, found
            tenant = next(holder for holder in found.holders if holder.pid == pid)
            # Where the test itself runs in a container, whose that is nobody could be asked.
            assert holder_kind(tenant, {}) in (HolderKind.BARE, HolderKind.UNKNOWN), tenant
            assert asyncio.run(end(target_of(child))) == Accepted()
            after = until(uuid, lambda one: used(one) < baseline + 2 * GIB)
            assert [holder.pid for holder in after.holders] == [pid], after
            if tenant.workload_id is None:
                judged = assess_gpu(after, {}, baseline)
                assert judged.status is CleanStatus.SHARED
                assert f"pid {pid}" in judged.reason
        assert bystander.stdin is not None
        bystander.stdin.write("go on\n")
        bystander.stdin.flush()
        assert said(bystander) == "2"
