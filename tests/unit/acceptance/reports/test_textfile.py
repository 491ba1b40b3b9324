"""Metrics: the names that were promised, one series for a test, nothing for what was not measured."""

from __future__ import annotations

import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpukeeper.acceptance.reports import formats
from gpukeeper.model.gpu import Grade
from tests import engines
from tests.unit.acceptance.reports import examples


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    found = [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]
    keys = [(name, tuple(sorted(labels.items()))) for name, labels, _ in found]
    assert len(keys) == len(set(keys)), "a series stands twice"
    return found


def values(text: str, series: str, **labels: str) -> list[float]:
    name = f"gpukeeper_acceptance_{series}"
    return [v for n, had, v in samples(text) if n == name and labels.items() <= had.items()]


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_prometheus_can_read_it(name: str) -> None:
    """C4.7"""
    report = examples.EXAMPLES[name]()
    assert values(formats.metrics(report), "last_run_timestamp_seconds", node=report.node) == [report.ended.timestamp()]


def test_verdicts_are_the_agreed_numbers() -> None:
    text = formats.metrics(examples.eight_gpus())
    assert values(text, "verdict", gpu="3", test="gemm.bf16", serial="1652023000003") == [2]
    assert values(text, "verdict", gpu="0", test="gemm.bf16") == [0]
    assert values(text, "verdict", gpu="6", test="health") == [1]
    assert values(text, "gpu_verdict", gpu="5") == [2]
    assert values(text, "node_verdict", node="node-07") == [2]
    assert values(formats.metrics(examples.on_the_cpu()), "node_verdict") == [3]


def test_figures_have_their_unit_and_floor() -> None:
    text = formats.metrics(examples.eight_gpus())
    assert values(text, "floor", gpu="0", test="gemm.bf16", unit="TFLOP/s") == [690]
    assert 760 < values(text, "value", gpu="0", test="gemm.bf16", unit="TFLOP/s")[0] < 800
    assert values(text, "peer_z", gpu="3", test="gemm.bf16")[0] < -3.5
    assert values(text, "run_duration_seconds") == [56]


def test_what_was_skipped_or_not_measured_has_no_series() -> None:
    only = examples.gpu(0)
    found = [
        examples.finding("links", None, Grade.SKIPPED),
        examples.finding("exact", only.uuid),
        examples.finding("gemm", only.uuid, value=float("nan"), unit="TFLOP/s"),
    ]
    text = formats.metrics(examples.report([only], found))
    assert not values(text, "verdict", test="links")
    assert values(text, "verdict", test="exact") == [0]
    assert not values(text, "value")


def test_a_name_from_outside_cannot_break_the_line() -> None:
    text = formats.metrics(examples.hostile())
    assert values(text, "verdict", node=examples.hostile().node) == [2]


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_promtool_finds_nothing_to_mend(name: str) -> None:
    engines.require("promtool", engines.has_promtool())
    text = formats.metrics(examples.EXAMPLES[name]())
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_several_findings_of_one_test_are_one_series_and_the_worst_counts() -> None:
    only = examples.gpu(0)
    found = [examples.finding("health", only.uuid, grade) for grade in (Grade.PASS, Grade.WARN, Grade.PASS)]
    assert values(formats.metrics(examples.report([only], found)), "verdict", test="health") == [1]
