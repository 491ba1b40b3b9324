"""What the options of a launched run become: for the engine, and for each node. C3.3"""

from __future__ import annotations

from itertools import pairwise

from gpukeeper.acceptance.fleet.launcher import command
from gpukeeper.interfaces.cli.accept_remote import _spec
from gpukeeper.interfaces.cli.accept_settings import LaunchOptions, RunOptions


def test_time_limits_namespace_and_single_checks_reach_the_engine_and_each_node() -> None:
    options = RunOptions(check=["gemm"], skip=["stress"], check_timeout="300s", within="5m")
    spec = _spec(options, LaunchOptions(on="kubernetes", timeout="20m", namespace="lab", image="i:1"))
    assert (spec.deadline_s, spec.options["namespace"]) == (1200.0, "lab")
    words = command(spec)
    assert words[:4] == ("gpukeeper", "accept", "--report-to-log", spec.run)
    pairs = set(pairwise(words))
    assert pairs >= {("--check", "gemm"), ("--skip", "stress"), ("--check-timeout", "300s"), ("--within", "5m")}


def test_several_nodes_are_one_run_only_on_request() -> None:
    """The older kit ran them together unless --skip-multinode was given."""
    assert "--together" not in command(_spec(RunOptions(), LaunchOptions(on="kubernetes")))
    spec = _spec(RunOptions(together=True), LaunchOptions(on="kubernetes"))
    assert spec.together
    assert command(spec).count("--together") == 1
