"""Every benchmark still runs: those without an engine at tiny size, and the others say what is missing."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.__main__ import NAMES, main
from tests.benchmarks.tiny import ENGINES, assert_reports, run_tiny

pytestmark = pytest.mark.slow

# What a benchmark asks for its engine: a module and a function in it.
QUESTIONS = {
    "fleet-ship": ("fleet_ship", "has_postgres"),
    "fleet-deploy": ("fleet_deploy", "has_sshd"),
    "disk-sweep": ("disk_sweep", "os.geteuid"),
    "ray-sweep": ("ray_sweep", "os.geteuid"),
    "docker-plan": ("docker_plan", "has_docker"),
    "docker-idle": ("docker_idle", "has_docker"),
    "docker-outcome": ("docker_outcome", "has_docker"),
    "kubernetes-scan": ("kubernetes_scan", "has_kube"),
    "kubernetes-lag": ("kubernetes_lag", "has_kube"),
    "kubernetes-reclaim": ("kubernetes_reclaim", "has_kube"),
    "accept-launch": ("accept_launch", "has_kube"),
    "accept-gemm": ("accept_bed", "has_gpu"),
    "accept-copy": ("accept_bed", "has_gpu"),
    "accept-flips": ("accept_bed", "has_gpu"),
}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ENGINES])
def test_a_benchmark_without_an_engine_runs_at_tiny_size_and_ends_with_its_figure(name: str) -> None:
    assert_reports(run_tiny(name), name)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_benchmark_whose_engine_is_missing_says_so_in_one_sentence_and_ends_with_code_3(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, question = QUESTIONS[name]
    importlib.import_module(f"benchmarks.{module}")
    monkeypatch.setattr(f"benchmarks.{module}.{question}", lambda: 1 if question == "os.geteuid" else False)
    assert main([name]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"{name}: nothing was measured. {ENGINES[name][0]}: needs ")
    assert said.err.count("\n") == 1


def test_the_table_of_engines_names_only_benchmarks_that_exist() -> None:
    assert ENGINES.keys() <= set(NAMES)
    assert QUESTIONS.keys() == ENGINES.keys() - {"install"}  # which finds out when pip fails


def test_an_unknown_name_is_reported_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decision", "--tiny"]) == 2
    assert '"decision" is not one of: decisions, ' in capsys.readouterr().err
