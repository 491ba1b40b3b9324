"""What a node sends besides its report."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet.collect import (
    MESSAGE_MAX,
    NCCL_MAX,
    nccl_lines,
    read_message,
    termination_message,
    without_result,
)
from gpukeeper.acceptance.launchers.story import RunArchive
from gpukeeper.acceptance.reports.formats import read_report, report_json
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.reports import examples


def test_a_termination_message_is_read_back() -> None:
    report = examples.one_good_gpu(run="r-1", node="gpu-1")
    found = read_message(termination_message(report, b"text").decode())
    assert found is not None
    assert (found.verdict, found.run, found.node) == (report.verdict, "r-1", "gpu-1")


def test_a_termination_message_never_exceeds_what_engines_keep() -> None:
    for reason, node in (("\u1234" * 9000, "n"), ('"' * 9000, "n"), ("\x00" * 9000, "\x00" * 2000)):
        report = examples.one_good_gpu(reason=reason, node=node)
        text = termination_message(report, b"")
        assert len(text) <= MESSAGE_MAX
        assert read_message(text.decode()) is not None


def test_other_words_are_no_termination_message() -> None:
    for words in ("", "Error: exit 1", "{}", '{"verdict":"GOOD"}', "[" * 3000, "x" * 5000):
        assert read_message(words) is None


def test_a_run_without_a_result_accepts_nothing_even_when_it_is_read_again() -> None:
    at = examples.one_good_gpu().started
    made = without_result(
        run="r-1",
        node="gpu-1",
        version="1",
        wish=RunRequest(),
        started=at,
        ended=at,
        why="PyTorch is missing.",
        interrupted=False,
    )
    for report in (made, read_report(report_json(made), "log")):
        assert report.verdict is Grade.INCONCLUSIVE
        assert report.reason == "The run ended without a result: PyTorch is missing."
    better = msgspec.structs.replace(made, verdict=Grade.PASS)
    assert read_report(report_json(better), "log").verdict is Grade.INCONCLUSIVE


def test_nccls_logs_are_sent_as_lines_and_kept_apart(tmp_path: Path) -> None:
    """C1.9: the beginning of each, where its version and its choices are; what is longer says how much is missing."""
    logs = {
        "ranks-1-collectives/nccl-a.log": "NCCL INFO NET/IB : mlx5_0\nNCCL INFO Ring 00\x1b[0m\n",
        "ranks-1-collectives/nccl-b.log": "x" * NCCL_MAX,
        "ranks-1-collectives/rank-0.stderr.log": "a warning",
    }
    lines = list(nccl_lines(logs))
    assert lines[0] == "[NCCL ranks-1-collectives/nccl-a.log] NCCL INFO NET/IB : mlx5_0"
    assert "\x1b" not in lines[1]
    assert lines[-1].endswith(f"{NCCL_MAX // 2} more characters were not sent")
    assert not [one for one in lines if "a warning" in one]
    report = examples.eight_gpus()
    log = "\n".join(["[ENV] here", *lines, "[RESULT] SUCCESS", ""]).encode()
    folder = RunArchive(tmp_path, report.run).add(report, report_json(report), log)
    assert (folder / "log.txt").read_text() == "[ENV] here\n[RESULT] SUCCESS\n"
    assert (folder / "nccl.log").read_text().splitlines() == lines
