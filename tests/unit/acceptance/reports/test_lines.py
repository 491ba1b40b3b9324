"""The lines of the older kits: the same tags, and SUCCESS only for an accepted node."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.reports.legacy import (
    closing_lines,
    finding_line,
    grade_by_check,
    parameters_line,
    result_line,
    running_line,
)
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.reports import examples


@pytest.mark.parametrize(
    ("check", "metric", "tag"),
    [
        ("environment", "", "ENV"),
        ("health", "", "ENV"),
        ("gemm", "bf16", "COMPUTE"),
        ("gemm", "fp32", "COMPUTE/SGEMM"),
        ("gemm", "batched", "COMPUTE/BATCHED"),
        ("memory-bandwidth", "copy", "BW/HBM"),
        ("copies", "h2d", "BW/H2D"),
        ("copies", "d2h", "BW/D2H"),
        ("copies", "d2d", "BW/D2D"),
        ("training", "loss", "TRAIN"),
        ("collectives", "all_reduce", "NCCL/AR"),
        ("collectives", "latency", "DDP"),
        ("ddp", "loss", "DDP-TRAIN"),
        ("a check of next year", "", "COMPUTE"),
    ],
)
def test_a_finding_has_the_tag_that_log_readers_look_for(check: str, metric: str, tag: str) -> None:
    """C4.2, C4.6"""
    assert finding_line(examples.finding(check, None, metric=metric)).startswith(f"[{tag}] PASS ")


def test_a_line_shows_where_what_and_how_much() -> None:
    report = examples.eight_gpus()
    slow = next(f for f in report.findings if f.gpu == examples.gpu(3).uuid and f.metric == "bf16")
    assert finding_line(slow, report).startswith("[COMPUTE] FAIL GPU 3 gemm.bf16 683.9 TFLOP/s: ")


def test_success_is_reported_of_an_accepted_node_alone() -> None:
    """C4.6"""
    assert result_line(examples.one_good_gpu()) == "[RESULT] SUCCESS"
    failed = result_line(examples.eight_gpus())
    assert failed.startswith("[RESULT] FAILURE: GPU ")
    assert not set("[]'") & set(failed.partition("] ")[2])
    assert "GPU 5 exact-mismatch" in failed
    assert "GPU 6" not in failed, "a warning is no failure"
    assert result_line(examples.empty()).startswith("[RESULT] SKIPPED: ")
    for make in (examples.on_the_cpu, examples.interrupted):
        assert result_line(make()).startswith("[RESULT] SKIPPED: not accepted, INCONCLUSIVE: ")


def test_the_summary_has_a_line_for_every_check() -> None:
    told = closing_lines(examples.one_good_gpu(), "reports/1")
    assert "[SUMMARY] gemm: PASS" in told
    assert "[SUMMARY] report saved: reports/1" in told
    assert told[-1] == "[RESULT] SUCCESS"


def test_verbose_lines_have_their_tags() -> None:
    """C4.6"""
    assert parameters_line({"n": 8192}, "gemm") == "[MUL] gemm n=8192"
    assert parameters_line({"samples": 4000}, "training") == "[DATASET] training samples=4000"
    assert parameters_line({"model": "resnet50"}, "throughput") == "[MODEL] throughput model=resnet50"
    assert running_line("gemm", "bf16") == "[RUN] gemm: bf16"


def test_a_name_from_outside_cannot_make_a_line_of_its_own() -> None:
    report = examples.hostile()
    for line in (finding_line(report.findings[0], report), *closing_lines(report)):
        assert len(line.splitlines()) == 1
        assert line.isprintable()


def test_a_skipped_check_is_skipped_in_the_summary() -> None:
    found = [examples.finding("links", None, Grade.SKIPPED)]
    assert grade_by_check(found) == {"links": Grade.SKIPPED}
