"""On a real GPU: `serve` watches an idle, a bursty and a busy program, and says of each what it does. About 9 minutes.

Programs on the bare host are only ever reported, so nothing here can be stopped by it. They share one GPU: while one
of them works, none is idle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines import has_gpu, require

POLICY = """
preset: shared-host
scope: {host: {}}
temporary: []
activity: {tick: 10s, settle: 1m}
schedule: {every: 10s}
classes: {bare: {idle: 2m, start_grace: 0s}}
"""
SOMEBODY = "23456"  # a person's uid, whoever that is
HELD = "import torch, sys, time\nx = torch.randn(8192, 8192, device='cuda')\nprint('ready', flush=True)\n"
IDLE = HELD + "sys.stdin.read()\n"
BURSTY = HELD + (
    "while True:\n    end = time.monotonic() + 2\n    while time.monotonic() < end:\n        x @ x\n"
    "        torch.cuda.synchronize()\n    time.sleep(18)\n"
)
BUSY = HELD + "while True:\n    x @ x\n    torch.cuda.synchronize()\n"
LISTED_AFTER = 70.0  # seconds: younger ones are not shown


@contextmanager
def program(text: str, folder: Path) -> Iterator[int]:
    command = ["setpriv", "--reuid", SOMEBODY, "--clear-groups", sys.executable, "-c", text]
    environ = {**os.environ, "HOME": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def gpukeeper(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "gpukeeper", *arguments, "--policy", str(folder / "policy.yaml")]


def answer(folder: Path, pid: int) -> dict[str, Any]:
    """What a plan says of the program now, from what `serve` measured."""
    environ = os.environ | {"GPUKEEPER_STATE": str(folder / "state")}
    ran = subprocess.run(
        gpukeeper(folder, "plan", "--json"), capture_output=True, text=True, env=environ, timeout=60, check=True
    )
    decisions = [one for place in json.loads(ran.stdout)["places"] for one in place["decisions"]]
    mine: list[dict[str, Any]] = [one for one in decisions if one["seen"]["ref"]["name"].endswith(f"-{pid}")]
    return mine[0] if mine else {"rule": "", "verdict": "", "reason": f"pid {pid} is not in the plan yet"}


def until(folder: Path, pid: int, verdict: str, words: str, deadline: float) -> None:
    """The idle rule gives this verdict, and its reason contains the words."""
    ends = time.monotonic() + deadline
    while True:
        decision = answer(folder, pid)
        if (decision["rule"], decision["verdict"]) == ("idle", verdict) and words in decision["reason"]:
            return
        assert time.monotonic() < ends, decision
        time.sleep(0.5)


@pytest.mark.timeout(700)
def test_serve_tells_idle_bursty_and_busy_apart(tmp_path: Path) -> None:
    require("gpu", has_gpu() and os.geteuid() == 0)
    tmp_path.chmod(0o755)
    (tmp_path / "policy.yaml").write_text(POLICY)
    environ = os.environ | {"GPUKEEPER_STATE": str(tmp_path / "state")}
    with (tmp_path / "serve.log").open("w") as log, program(IDLE, tmp_path) as idle:
        serve = subprocess.Popen(gpukeeper(tmp_path, "serve"), env=environ, stdout=log, stderr=log)
        try:
            until(tmp_path, idle, "report", "idle for", LISTED_AFTER + 175)
            with program(BURSTY, tmp_path) as bursty:
                for pid in (bursty, idle):
                    until(tmp_path, pid, "wait", "in use", LISTED_AFTER + 60)
            with program(BUSY, tmp_path) as busy:
                until(tmp_path, busy, "wait", "in use", LISTED_AFTER + 60)
                assert answer(tmp_path, idle)["verdict"] == "wait"
            until(tmp_path, idle, "report", "idle for", 210)
        finally:
            serve.terminate()
            assert serve.wait(timeout=30) == 0, (tmp_path / "serve.log").read_text()[-2000:]
