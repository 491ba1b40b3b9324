"""Two trees compared: medians, the direction of a unit, and what is said of a benchmark that gave no figure."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.compare import IMPORTANT, NoFigure, Side, judged, more_is_better, result_of, row_of, spread
from benchmarks.report import Figure
from tests.benchmarks.tiny import ROOT


def figures(*values: float, unit: str = "s") -> Side:
    return Side([Figure("plan", value, unit, 1.0, "a peer") for value in values])


@pytest.mark.parametrize("unit", ["decisions/s", "GB/s", "TFLOP/s", "requests/CPU second", "trees/s", "flips"])
def test_of_a_pace_more_is_better(unit: str) -> None:
    assert more_is_better(unit)


@pytest.mark.parametrize("unit", ["s", "CPU s", "MiB", "MB", "calls", "rounds", "% of a core", "bytes/workload-day"])
def test_of_a_cost_less_is_better(unit: str) -> None:
    assert not more_is_better(unit)


@pytest.mark.parametrize(
    ("old", "new", "unit", "verdict"),
    [
        ([1.0], [1.2], "s", "loss"),
        ([1.0], [0.8], "s", "gain"),
        ([100], [80], "decisions/s", "loss"),
        ([100], [120], "decisions/s", "gain"),
        ([1.0], [1.09], "s", ""),
        ([100], [91], "decisions/s", ""),
    ],
)
def test_a_change_of_more_than_a_tenth_is_marked_in_the_direction_of_its_unit(
    old: list[float], new: list[float], unit: str, verdict: str
) -> None:
    assert judged(old, new, unit)[1] == verdict


def test_the_ratio_is_that_of_the_medians_so_that_one_disturbed_run_does_not_count() -> None:
    assert judged([1.0, 9.0, 2.0], [2.0, 3.0, 90.0], "s") == (1.5, "loss")
    assert spread([1.0, 9.0, 2.0]) == "2 (1 to 9)"


def test_without_figures_or_with_a_median_of_zero_there_is_no_ratio() -> None:
    assert judged([], [1.0], "s") == (None, "")
    assert judged([0.0], [1.0], "s") == (None, "")


def test_a_benchmark_that_fails_in_one_tree_has_the_error_in_its_row() -> None:
    broken = Side()
    broken.add(result_of(1, "load before: 1\n", "Traceback\n  …\nNameError: name 'Tally' is not defined\n"))
    row = row_of("kubernetes-scan", broken, figures(1.0, 2.0, 3.0))
    assert (row.old, row.new, row.ratio) == ([], [1.0, 2.0, 3.0], None)
    assert row.note == "old: failed: NameError: name 'Tally' is not defined"
    assert not row.failed
    assert row_of("kubernetes-scan", figures(1.0), broken).failed


def test_a_benchmark_whose_engine_is_missing_is_not_a_failure() -> None:
    assert result_of(3, "", "plan: nothing was measured. docker: needs root\n") == NoFigure(
        "plan: nothing was measured. docker: needs root"
    )
    assert result_of(0, "There is no control plane\n", "") == NoFigure("There is no control plane")


def test_the_figure_is_the_last_line() -> None:
    line = '{"name":"plan","value":2.5,"unit":"s","ratio":8,"against":"listing"}'
    assert result_of(0, f"workloads  seconds\n\n{line}\n", "") == Figure("plan", 2.5, "s", 8, "listing")


@pytest.mark.slow
def test_a_commit_is_compared_in_a_worktree_that_is_removed_afterwards() -> None:
    trees = ["git", "-C", str(ROOT), "worktree", "list"]
    before = subprocess.run(trees, capture_output=True, text=True, check=True).stdout
    command = [sys.executable, "-m", "benchmarks.compare", "HEAD", "startup", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["base"] == "HEAD"
    (row,) = found["rows"]
    assert (row["name"], len(row["old"]), len(row["new"])) == ("startup", 1, 1)
    assert subprocess.run(trees, capture_output=True, text=True, check=True).stdout == before


def test_an_unknown_commit_or_benchmark_is_an_error() -> None:
    for words in (["no-such-commit"], ["HEAD", "decision"]):
        command = [sys.executable, "-m", "benchmarks.compare", *words]
        assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 2


def test_the_important_benchmarks_exist() -> None:
    from benchmarks.__main__ import NAMES

    assert set(IMPORTANT) <= set(NAMES)
