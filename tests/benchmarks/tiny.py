"""A benchmark at tiny size in a process of its own, and which of them need an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines import has_docker, has_gpu, has_kube, has_postgres, has_sshd

ROOT = Path(__file__).resolve().parents[2]


def is_root() -> bool:
    return os.geteuid() == 0


# Name: the engine by its name in tests/engines.py, and whether it is here. All others need none.
ENGINES: dict[str, tuple[str, Callable[[], bool]]] = {
    "install": ("pypi", lambda: True),  # pip tells
    "fleet-ship": ("postgres", has_postgres),
    "fleet-deploy": ("ssh", has_sshd),
    "disk-sweep": ("root", is_root),
    "ray-sweep": ("root", is_root),
    "docker-plan": ("docker", has_docker),
    "docker-idle": ("docker", has_docker),
    "docker-outcome": ("docker", has_docker),
    "kubernetes-scan": ("kubernetes", has_kube),
    "kubernetes-lag": ("kubernetes", has_kube),
    "kubernetes-reclaim": ("kubernetes", has_kube),
    "accept-launch": ("kubernetes", has_kube),
    "accept-gemm": ("gpu", has_gpu),
    "accept-copy": ("gpu", has_gpu),
    "accept-flips": ("gpu", has_gpu),
}


def run_tiny(name: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", name, "--tiny"]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=500, check=False
    )


def assert_reports(done: subprocess.CompletedProcess[str], name: str) -> None:
    """Its last line is the figure."""
    assert done.returncode == 0, done.stdout + done.stderr
    figure: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(figure) == {"name", "value", "unit", "ratio", "against"}
    assert figure["name"] == name
    assert isinstance(figure["value"], int | float)
    assert isinstance(figure["ratio"], int | float)
    assert figure["unit"]
    assert figure["against"]
