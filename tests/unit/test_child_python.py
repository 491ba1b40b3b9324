"""Processes of our own Python: nothing that lies in the current directory runs in them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpukeeper.devices.driver import client as driver
from gpukeeper.disk import worker_pool
from gpukeeper.interfaces.daemon import web_child
from gpukeeper.notify import apprise
from gpukeeper.rayjobs import entry
from gpukeeper.wiring import demo_backtest
from tests.patience import PATIENCE

COMMANDS = {
    "driver": driver.CHILD,
    "disk": worker_pool.CHILD,
    "web": web_child.CHILD,
    "apprise": apprise.CHILD,
    "demo": demo_backtest.CHILD,
}
HOSTILE = "import pathlib; pathlib.Path({mark!r}).touch(); raise SystemExit\n"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory where another user left modules that are imported early."""
    for name in ("json", "h11", "msgspec", "uvicorn", "multiprocessing", "base64"):
        (tmp_path / f"{name}.py").write_text(HOSTILE.format(mark=str(tmp_path / "taken over")))
    package = tmp_path / "gpukeeper"
    package.mkdir()
    (package / "__init__.py").write_text(HOSTILE.format(mark=str(tmp_path / "taken over")))
    return tmp_path


def run_in(directory: Path, command: Sequence[str], **environ: str) -> str:
    """What it printed."""
    none, more = subprocess.DEVNULL, {**os.environ, **environ}
    done = subprocess.run(
        command, cwd=directory, stdin=none, capture_output=True, timeout=PATIENCE, check=False, env=more, text=True
    )
    return done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_modules_in_the_current_directory_are_not_imported(hostile: Path, name: str) -> None:
    run_in(hostile, COMMANDS[name])
    assert not (hostile / "taken over").exists()


def test_without_the_option_they_would_be(hostile: Path) -> None:
    """So that the test above can fail."""
    run_in(hostile, [word for word in COMMANDS["web"] if word != "-P"])
    assert (hostile / "taken over").exists()


def test_the_processes_of_a_backtest_do_not_import_them_either(hostile: Path) -> None:
    """multiprocessing starts its children with -c, which imports multiprocessing from the current directory."""
    program = str(Path(sys.executable).with_name("gpukeeper"))
    printed = run_in(hostile, [program, "backtest", "synthetic:1", "--workers", "2", "--json"])
    assert json.loads(printed)["schema"].startswith("gpukeeper/backtest/")
    assert not (hostile / "taken over").exists()


def test_nor_does_the_driver_of_a_ray_job(hostile: Path) -> None:
    program = base64.b64encode(zlib.compress(b"import json; print(json)")).decode()
    command = entry.entrypoint(sys.executable)
    given = json.dumps({"metadata": {entry.PROGRAM: program}})
    assert "json" in run_in(hostile, ["sh", "-c", command], RAY_JOB_CONFIG_JSON_ENV_VAR=given)
    assert not (hostile / "taken over").exists()
