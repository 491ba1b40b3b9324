"""Real engines: there, or a skip that says how to get one; required (GPUKEEPER_REQUIRE=gpu,docker,…): a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HOW = {
    "gpu": "needs an NVIDIA GPU with its driver loaded: run the tests on a GPU machine",
    "tmpfs": "needs root and mount(2) for a small full disk: run the tests as root",
}


def require(engine: str, there: bool) -> None:
    """Skip with the way to get it, or fail when this run must have it."""
    if there:
        return
    words = f"{engine}: {HOW[engine]}"
    if engine in os.environ.get("GPUKEEPER_REQUIRE", "").split(","):
        pytest.fail(f"{words} (GPUKEEPER_REQUIRE asks for it)")
    pytest.skip(words)


def has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()
