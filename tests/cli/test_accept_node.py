"""`gpukeeper accept --report-to-log RUN`, as an engine starts it on a node. Its report is read from its output.

C4.1, C17.2
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpukeeper.acceptance.fleet.collect import FRAME_MARK, decode_frames, read_message
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports import legacy
from gpukeeper.acceptance.reports.formats import read_report
from gpukeeper.model.gpu import Grade
from tests.cli.fleet import Fleet
from tests.engines import has_gpu
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

RUN = "r-20261117"
SMALL = ("accept", "--report-to-log", RUN, "--device", "simulated", "--ranks", "2", "--check", "gemm,exact")


def sent(out: str, node: str = "gpu-1") -> Report:
    found = decode_frames(out.encode(), RUN, node)
    assert (len(found.reports), found.problems) == (1, ()), out
    return read_report(found.reports[0], "log")


def test_the_report_is_in_the_log_and_the_verdict_in_the_termination_message(fleet: Fleet, tmp_path: Path) -> None:
    message = tmp_path / "termination-log"
    ran = fleet.run(*SMALL, GPUKEEPER_NODE="gpu-1", GPUKEEPER_TERMINATION_LOG=str(message))
    assert ran.code == 5, "a simulation accepts no GPU"
    report = sent(ran.out)
    assert (report.run, report.node, report.machine.node, len(report.tallies)) == (RUN, "gpu-1", "gpu-1", 2)
    assert "[COMPUTE] PASS 2 GPUs gemm.bf16" in ran.out.partition(FRAME_MARK)[0], "the normal log comes first"
    told = read_message(message.read_text())
    assert told is not None
    assert (told.verdict, told.run, told.node, told.reason) == (report.verdict, RUN, "gpu-1", report.reason)
    assert not (fleet.state / "reports").exists(), "nothing is left on the node"


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_without_a_gpu_the_report_that_is_sent_teaches(fleet: Fleet) -> None:
    """C17.2: a node without a GPU used to end in exit 0."""
    ran = fleet.run("accept", "--report-to-log", RUN, GPUKEEPER_NODE="gpu-1")
    assert ran.code == 5
    assert "request nvidia.com/gpu (Kubernetes)" in sent(ran.out).reason


def test_a_run_that_could_not_begin_is_reported_too(fleet: Fleet) -> None:
    ran = fleet.run("accept", "--report-to-log", RUN, "--check", "gem", GPUKEEPER_NODE="gpu-1")
    assert ran.code == 2
    report = sent(ran.out)
    assert report.verdict is Grade.INCONCLUSIVE
    assert 'unknown check "gem". Did you mean "gemm"?' in report.reason


def test_a_state_directory_that_cannot_be_written_does_not_prevent_the_test(fleet: Fleet) -> None:
    fleet.state.write_text("a file")
    ran = fleet.run(*SMALL, GPUKEEPER_NODE="gpu-1")
    assert ran.code == 5
    assert len(sent(ran.out).tallies) == 2
    assert "This run is not compared with earlier ones" in ran.err


@pytest.mark.parametrize(
    "variables",
    [
        {"GPUKEEPER_GROUP_SIZE": "2", "GPUKEEPER_GROUP_INDEX": "0", "MASTER_ADDR": "gpu-1"},
        {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "gpu-1"},
        {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "gpu-1"},
    ],
)
def test_one_node_of_a_run_over_several_is_not_tested_alone_in_silence(fleet: Fleet, variables: dict[str, str]) -> None:
    """A manifest set the variables of a group and not --together: each node passed without a byte on the network."""
    ran = fleet.run(*SMALL, GPUKEEPER_NODE="gpu-1", **variables)
    assert ran.code == 2
    assert "--together is missing, so only this node would be tested" in ran.err
    report = sent(ran.out)
    assert (report.verdict, len(report.tallies)) == (Grade.INCONCLUSIVE, 0)
    alone = fleet.run(*SMALL, GPUKEEPER_NODE="gpu-1", **variables | {"GPUKEEPER_GROUP_SIZE": "1"})
    assert len(sent(alone.out).tallies) == 2


def test_what_older_kits_wrote_can_be_made_from_what_is_sent(fleet: Fleet) -> None:
    """C4.1: `--legacy` of a launched run: with the replies of the probes, which are left out otherwise."""
    words = ("--check", "collectives,ddp", "--ranks", "2")
    plain, whole = (
        sent(fleet.run(*SMALL[:-2], *words, *more, GPUKEEPER_NODE="gpu-1").out) for more in ((), ("--legacy",))
    )
    assert "ddp_tests_result.json" not in legacy.files(plain)
    assert json.loads(legacy.files(whole)["ddp_tests_result.json"])["world"] == 2


def test_started_again_it_prints_the_report_that_it_has(fleet: Fleet, tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    first = fleet.run(*SMALL, "--report-dir", str(folder), GPUKEEPER_NODE="gpu-1")
    again = fleet.run(*SMALL, "--report-dir", str(folder), GPUKEEPER_NODE="gpu-1")
    assert sent(again.out) == sent(first.out)
    assert again.code == first.code
    assert "already reported" in again.err
    assert "[COMPUTE]" not in again.out
    assert [path.name for path in folder.iterdir()] == [f"{RUN}.gpu-1"]
    other = fleet.run(*SMALL, "--report-dir", str(folder), GPUKEEPER_NODE="gpu-2")
    assert sent(other.out, "gpu-2").node == "gpu-2", "a directory that several nodes share"


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--report-to-log", "../x"), "not a valid run id"), (("--report-to-log", RUN, "--json"), "cannot be combined")],
)
def test_refused(fleet: Fleet, words: tuple[str, ...], said: str) -> None:
    ran = fleet.run("accept", *words)
    assert (ran.code, said in ran.err) == (2, True), ran.err


def test_it_stays_until_it_is_ended(fleet: Fleet, tmp_path: Path) -> None:
    message = tmp_path / "termination-log"
    program = fleet.start(*SMALL, GPUKEEPER_NODE="gpu-1", GPUKEEPER_STAY="1", GPUKEEPER_TERMINATION_LOG=str(message))
    try:
        _wait(lambda: message.exists() and bool(message.read_text()), program)
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.3)
        program.send_signal(signal.SIGTERM)
        out, _ = program.communicate(timeout=PATIENCE)
    finally:
        program.kill()
    assert program.returncode == 5
    assert len(sent(out).tallies) == 2


def test_ended_in_the_middle_it_still_reports(fleet: Fleet) -> None:
    """SIGTERM at any time after the interpreter has started: also before the first check."""
    words = ("accept", "--report-to-log", RUN, "--device", "cpu", "--ranks", "1", "--python", sys.executable)
    program = fleet.start(*words, GPUKEEPER_NODE="gpu-1")
    try:
        _wait(lambda: _handles_sigterm(program.pid), program)
        program.send_signal(signal.SIGTERM)
        out, err = program.communicate(timeout=PATIENCE)
    finally:
        program.kill()
    assert program.returncode in (2, 5, 130), err
    assert sent(out).verdict is Grade.INCONCLUSIVE


def _wait(ready: object, program: subprocess.Popen[str]) -> None:
    assert callable(ready)
    end = time.monotonic() + PATIENCE
    while not ready():
        assert program.poll() is None, "it ended"
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


def _handles_sigterm(pid: int) -> bool:
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1))
