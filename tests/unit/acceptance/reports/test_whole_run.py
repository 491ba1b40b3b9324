"""A report as the engine makes it, from simulated GPUs: every view can be written, read back, and has its pictures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench
from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports import legacy
from gpukeeper.acceptance.reports.store import ReportFolder
from gpukeeper.acceptance.run import RunConfig, accept
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.reports import test_html, test_junit, test_textfile


@pytest.fixture(scope="module")
def report() -> Report:
    """Half an hour on eight GPUs, one of them 10 % slow."""
    bench = SimulatedWorkbench(gpus=8, seed=7, slow={3: 0.1})
    wish = RunRequest(device="simulated", within_s=1800.0, profile="30m", expected=8)
    order = RunConfig(
        run="simulated-1", version="0", wish=wish, checks=CHECKS, limits=reference.limits, history=lambda gpus: {}
    )
    return asyncio.run(accept(bench, order, bench.clock))


def test_all_views_of_a_whole_run_are_written_and_read_back(report: Report, tmp_path: Path) -> None:
    """C4.7: value, unit and verdict agree."""
    folder = ReportFolder(tmp_path)
    path = folder.write(report, with_legacy=True)
    assert folder.verify("simulated") == []
    read = folder.load("simulated")
    assert (read.verdict, read.findings, read.timeline) == (Grade.INCONCLUSIVE, report.findings, report.timeline)
    test_junit.cases((path / "junit.xml").read_text())
    series = test_textfile.samples((path / "metrics.prom").read_text())
    told = {
        (labels["test"], labels["gpu"]): value for name, labels, value in series if name == "gpukeeper_acceptance_value"
    }
    slow = next(f for f in report.findings if f.verdict is Grade.FAIL and f.metric == "bf16" and f.check == "gemm")
    assert told["gemm.bf16", "3"] == slow.value


def test_the_page_of_a_whole_run_has_its_pictures(report: Report, tmp_path: Path) -> None:
    text = test_html.Page((ReportFolder(tmp_path).write(report) / "report.html").read_text()).text
    for picture in ("gemm.bf16", "Bus bandwidth", "Between GPUs", "Steps by rank", "GPU 3 over time"):
        assert picture in text
    assert "no value was measured on a real GPU" in text


def test_the_files_of_older_kits_are_filled_by_what_probes_really_say(report: Report) -> None:
    """C4.4, C4.5: a probe that says it by another name would leave null behind."""
    written = {name: json.loads(text) for name, text in legacy.files(report).items()}
    for name in (legacy.DDP_TESTS, legacy.DDP_TRAINING, legacy.THROUGHPUT):
        may_be_null = {"nccl_overhead_ms", "gpu_utilization_pct"}
        assert not {field for field, value in written[name].items() if value is None} - may_be_null, name
    assert written[legacy.DDP_TESTS]["ok"] is True
    assert written[legacy.DDP_TRAINING]["improved"] is True
