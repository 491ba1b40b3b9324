"""The CSV has a line for every finding, and nothing in it is a formula."""

from __future__ import annotations

import csv
import io

import pytest

from gpukeeper.acceptance.reports import merge
from tests.unit.acceptance.reports import examples


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_there_is_a_line_for_every_finding(name: str) -> None:
    """C4.7"""
    report = examples.EXAMPLES[name]()
    lines = read(merge.report_csv(report))
    assert [(line["check"], line["verdict"]) for line in lines] == [(f.check, f.verdict.value) for f in report.findings]


def test_a_figure_is_written_in_full_and_a_missing_one_is_empty() -> None:
    lines = read(merge.report_csv(examples.eight_gpus()))
    slow = next(line for line in lines if line["gpu"] == "3" and line["metric"] == "bf16")
    finding = next(f for f in examples.eight_gpus().findings if f.gpu == examples.gpu(3).uuid and f.metric == "bf16")
    assert float(slow["value"]) == finding.value
    assert [float(sample) for sample in slow["samples"].split()] == list(finding.samples)
    assert slow["serial"] == "1652023000003"
    assert next(line for line in lines if line["check"] == "environment")["value"] == ""


def test_no_cell_begins_a_formula_or_a_line() -> None:
    text = merge.report_csv(examples.hostile())
    assert len(read(text)) == 1
    assert len(text.splitlines()) == 2
    assert all(not cell.startswith(("=", "+", "-", "@")) for cell in read(text)[0].values())
