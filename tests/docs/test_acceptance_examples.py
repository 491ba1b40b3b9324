"""The reports in examples/ can be read, are whole, and show what they are kept for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpukeeper.acceptance.reports.html import page_of_report
from gpukeeper.acceptance.reports.store import ReportFolder
from gpukeeper.model.gpu import Grade
from tests.docs.markdown import ROOT

FOLDER = ROOT / "examples" / "acceptance"
RUNS = ("h200-quick", "h200-5m")


@pytest.mark.parametrize("run", RUNS)
def test_a_report_is_whole_and_can_be_drawn(run: str) -> None:
    reports = ReportFolder(FOLDER)
    assert not reports.verify(run), "files do not fit the manifest"
    report = reports.load(run)
    assert (report.verdict, report.device, len(report.tallies)) == (Grade.PASS, "cuda", 1)
    assert report.timeline, "the clocks, power and temperature of the run"
    page = page_of_report(report)
    assert "NVIDIA H200" in page
    assert "accepted" in page


@pytest.mark.parametrize("words", [("show", "h200-5m"), ("compare", "h200-quick", "h200-5m")])
def test_the_commands_of_its_page_work(words: tuple[str, ...], tmp_path: Path) -> None:
    verb, *runs = words
    told = [sys.executable, "-m", "gpukeeper", "accept", verb, *(str(FOLDER / run) for run in runs)]
    done = subprocess.run(told, capture_output=True, text=True, env={"GPUKEEPER_STATE": str(tmp_path)}, check=False)
    assert done.returncode == 0, done.stderr
    assert "gemm" in done.stdout
