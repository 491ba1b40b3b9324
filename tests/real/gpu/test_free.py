"""On a real GPU, as root: a GPU that any process has open is held, not free, whoever runs it and however young it is.

What is said is what `gpukeeper observe --gpus --json` prints. In a pid namespace of its own an idle GPU is only
*perhaps free*; held is seen all the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.devices.driver.client import inventory
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.devices.holders import is_walled
from tests.engines import has_gpu, require

PATIENCE_S = 30.0
# By way of a shell: a child of this test must not count as one of gpukeeper's own.
BY_A_SHELL = 'exec 3<&0; "$0" -c "$1" <&3 & wait'
HOLDS = """
import os, sys, torch
held = torch.ones(3686 * 1024**2, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(os.getpid(), flush=True)
sys.stdin.read()
"""
# Has the device open, without a CUDA context: it uses no memory.
OPENS = """
import os, sys
held = os.open("/dev/nvidia{minor}", os.O_RDWR)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def gpu() -> GpuFacts:
    require("gpu", has_gpu() and os.geteuid() == 0)
    gpus = inventory(timedelta(seconds=30))
    assert isinstance(gpus, tuple), gpus
    return gpus[0]


@contextmanager
def started(program: str) -> Iterator[int]:
    """Its pid, once it has the GPU. It ends with its input."""
    command = ["sh", "-c", BY_A_SHELL, sys.executable, program]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    try:
        yield int(shell.stdout.readline())
    finally:
        shell.communicate(timeout=60)


def observed(uuid: str, folder: Path) -> dict[str, Any]:
    """With a ledger of its own, so nothing of this machine is touched."""
    policy = folder / "policy.yaml"
    policy.write_text("scope: {host: {}}\n")
    command = [sys.executable, "-m", "gpukeeper", "observe", "--gpus", "--json", "--policy", str(policy)]
    state = {"GPUKEEPER_STATE": str(folder / "state")}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **state}, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return next(one for one in json.loads(ran.stdout)["gpus"] if one["device"] == uuid)


def let_go(uuid: str, folder: Path) -> dict[str, Any]:
    """The first look that does not say held; the driver needs a moment after an end."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        seen = observed(uuid, folder)
        if seen["how"] != "held" or time.monotonic() > deadline:
            return seen


@pytest.mark.parametrize("program", [HOLDS, OPENS], ids=["3.6 GiB", "no memory"])
def test_what_root_has_open_for_a_moment_is_held_and_free_again_after_it(
    gpu: GpuFacts, program: str, tmp_path: Path
) -> None:
    uuid = str(gpu.uuid)
    idle = {"perhaps free"} if is_walled() else {"free"}
    before = observed(uuid, tmp_path)
    assert before["how"] in idle, f"the GPU must be idle for this test: {before}"
    with started(program.replace("{minor}", str(gpu.minor))) as pid:
        during = observed(uuid, tmp_path)
        assert during["how"] == "held", during
        assert f"pid {pid} (" in during["by"]
        assert "root)" in during["by"]
    assert let_go(uuid, tmp_path)["how"] in idle
