"""Every benchmark that needs an engine still runs, at tiny size, on a real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from benchmarks.needs import EXIT_CODE
from tests.benchmarks.tiny import ENGINES, ROOT, assert_reports, run_tiny
from tests.engines import has_ansible, has_ray, require
from tests.real.ansible import installation

pytestmark = pytest.mark.timeout(600)  # peers are installed first
PACKAGES = {"install", "docker-plan", "kubernetes-scan", "kubernetes-reclaim"}  # peers that pip installs
# They delete on this machine itself, and nothing is deleted beside work that runs: a Ray of another test, for example.
SWEEPS = {"disk-sweep", "ray-sweep"}
NAMES = [
    pytest.param(name, marks=pytest.mark.alone) if name in SWEEPS else name
    for name in ENGINES
    if name != "fleet-deploy"
]


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_at_tiny_size_on_its_engine_and_ends_with_its_figure(name: str) -> None:
    engine, there = ENGINES[name]
    require(engine, there())
    done = run_tiny(name)
    if name in PACKAGES:
        require("pypi", done.returncode != EXIT_CODE)
    if engine == "gpu":
        require("torch", done.returncode != EXIT_CODE)
    assert_reports(done, name)


def test_deployments_are_compared_with_ansible_at_tiny_size() -> None:
    require("ssh", ENGINES["fleet-deploy"][1]())
    require("ansible", has_ansible())
    programs = f"{installation.lint().parent}:{os.environ['PATH']}"
    assert_reports(run_tiny("fleet-deploy", PATH=programs), "fleet-deploy")


def test_the_part_of_backtest_that_needs_ray_runs_at_tiny_size() -> None:
    require("ray", has_ray())
    program = "from benchmarks.backtest_parallel import parallel; parallel(ray=True)"
    environ = {**os.environ, "BENCHMARKS_TINY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Ray [\d.]+, two workers +[\d.]+ s", done.stdout, re.MULTILINE), done.stdout
