"""`gpukeeper accept` from end to end with real probes, on the CPU: a run, an interruption, the self-test.

C1.1, C1.2, C2.1, C4.1, C4.2
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fleet import Fleet, Ran
from tests.engines import has_gpu
from tests.real.torch import installation

LONGEST_S = 280  # beside other tests on two cores


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def accept(fleet: Fleet, *words: str) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "gpukeeper", "accept", *words],
        env=environment(fleet),
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def environment(fleet: Fleet) -> dict[str, str]:
    return fleet.env(GPUKEEPER_PYTHON=installation.python(), OMP_NUM_THREADS="1")


def test_the_whole_way_on_the_cpu(fleet: Fleet, tmp_path: Path) -> None:
    """Two ranks stand in for two GPUs: every check computes, every report is written, and nobody is accepted."""
    folder = tmp_path / "out"
    checks = "environment,gemm,exact,training,memory_pattern,collectives"
    ran = accept(fleet, "--device", "cpu", "--ranks", "2", "--check", checks, "--report-dir", str(folder), "--legacy")
    assert ran.code == 5, ran.out + ran.err
    assert "This ran on the CPU, so no GPU was tested." in ran.out
    for words in ("[ENV] ", "[COMPUTE] PASS 2 CPUs exact.bf16", "[TRAIN] PASS 2 CPUs", "[DDP] PASS", "[SUMMARY]"):
        assert words in ran.out
    assert "FAIL " not in ran.out
    line = fleet.lines("acceptance")[0]
    assert (line["verdict"], line["device"]) == ("INCONCLUSIVE", "cpu")
    report = json.loads(Path(line["report"], "report.json").read_text())
    passed = {one["check"] for one in report["findings"] if one["verdict"] == "PASS"}
    assert {"exact", "training", "memory_pattern", "collectives"} <= passed
    assert {one["gpu"] for one in report["findings"] if one["check"] == "training"} == {"cpu-0", "cpu-1"}
    assert json.loads((folder / "ddp_tests_result.json").read_text())["world"] == 2
    assert_nothing_runs(fleet)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_a_partial_report_and_nothing_that_runs(fleet: Fleet, number: signal.Signals) -> None:
    words = ("--device", "cpu", "--check", "exact,stress", "--set", "stress.seconds=600", "--verbose")
    with subprocess.Popen(
        [sys.executable, "-m", "gpukeeper", "accept", *words],
        env=environment(fleet),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            assert running.stdout is not None
            for line in running.stdout:
                if line.startswith("[RUN] stress: "):
                    break
            running.send_signal(number)
            rest, errors = running.communicate(timeout=LONGEST_S)
        finally:
            running.kill()
    assert running.returncode == 130, rest + errors
    assert "Interrupted: stopping the checks" in errors
    assert "INCONCLUSIVE" in rest
    line = fleet.lines("acceptance")[0]
    report = json.loads(Path(line["report"], "report.json").read_text())
    assert report["interrupted"]
    assert [(one["check"], one["why"]) for one in report["coverage"] if "interrupted" in one["why"]] == [
        ("stress", "the run was interrupted")
    ]
    assert any(one["check"] == "exact" for one in report["findings"])
    assert_nothing_runs(fleet)


def test_every_planted_fault_is_found(fleet: Fleet) -> None:
    """On simulated machines, and in real probes: a flipped bit in every kind of number, a wrong rank."""
    ran = accept(fleet, "--self-test", "--device", "cpu", "--json")
    told: dict[str, Any] = json.loads(ran.out)
    assert (ran.code, told["verdict"]) == (0, "PASS"), told["reason"]
    here = [one for one in told["attempts"] if one["where"] != "simulated"]
    flips = {one["injected"].rpartition(" ")[2] for one in here if "lowest bit" in one["injected"]}
    assert {"fp32", "bf16", "fp16", "int8"} <= flips
    assert {"FAIL by training", "FAIL by collectives", "FAIL by ddp"} <= {one["expected"] for one in here}
    assert_nothing_runs(fleet)


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_a_self_test_of_gpus_that_are_not_there_is_never_a_pass(fleet: Fleet) -> None:
    """Planted in the CPU's probes instead, it would look like one of this machine's GPUs."""
    ran = accept(fleet, "--self-test")
    assert ran.code == 5, ran.out + ran.err
    assert "there is no GPU to run them on" in ran.out
    assert "--device cpu" in ran.out
    assert_nothing_runs(fleet)


def assert_nothing_runs(fleet: Fleet) -> None:
    """Everything that a run starts inherits where its ledger is."""
    mark = f"GPUKEEPER_STATE={fleet.state}".encode()
    left = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                left.append((folder / "cmdline").read_bytes())
        except OSError:  # it ended, or is somebody else's
            continue
    assert not left
