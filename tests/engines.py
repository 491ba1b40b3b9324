"""Real engines: there, or a skip that says how to get one; required (GPUKEEPER_REQUIRE=gpu,docker,…): a failure."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

HOW = {
    "docker": "needs root and a dockerd of its own: apt-get install docker.io iptables busybox-static, run as root",
    "gpu": "needs an NVIDIA GPU with its driver loaded: run the tests on a GPU machine",
    "podman": "needs root and podman: apt-get install podman busybox-static, run as root",
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


def has_docker() -> bool:
    """The programs for a private engine, and the rights; the host's own engine is never used."""
    return _root_with("dockerd", "busybox", "ip", "setpriv")


def has_podman() -> bool:
    return _root_with("podman", "busybox", "setpriv")


def _root_with(*programs: str) -> bool:
    return os.geteuid() == 0 and all(shutil.which(program) for program in programs)
