"""The wheel of this working tree and the offline bundles with it: built once in a run, by the worker that needs one
first. `tests/real/conftest.py` alone imports this: see `tests/real/kube/fixtures.py`."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines import require
from tests.package.test_build import ROOT, build

BUILD = ROOT / "deploy" / "bundle" / "build.py"
OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="session")
def bundle_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """By the version of Python, and the architecture. The file is shared: tests copy what they change."""
    shared = _of_all_workers(tmp_path_factory) / "bundles"
    shared.mkdir(exist_ok=True)

    def bundle(python: str, machine: str = platform.machine()) -> Path:
        with _locked(shared):
            made = _bundle(python, machine, shared)
        require("pypi", made is not None)
        assert made is not None
        return made

    return bundle


def _bundle(python: str, machine: str, shared: Path) -> Path | None:
    """None: pip could not download the wheels."""
    dist = shared / f"{python}-{machine}"
    if done := sorted(dist.glob("*.pyz")):
        return done[0]
    dist.mkdir(exist_ok=True)
    command = [sys.executable, BUILD, dist, python, "--machine", machine]
    shutil.copy2(_wheel(shared), dist)
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    return Path(made.stdout.strip()) if made.returncode == 0 else None


def _wheel(shared: Path) -> Path:
    wheels = shared / "wheel"
    if not wheels.exists():
        unfinished = shared / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        build(ROOT, unfinished)
        unfinished.rename(wheels)
    return next(wheels.glob("*.whl"))


def _of_all_workers(factory: pytest.TempPathFactory) -> Path:
    """Of this run: each worker of xdist has a directory of its own below it."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
