"""What acceptance runs show, as values."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.record import Finding, GpuSummary, Machine, NotTested, Report
from gpukeeper.acceptance.reports.merge import merge
from gpukeeper.acceptance.suite import CHECKS, NOT_SELECTED
from gpukeeper.model.gpu import Gpu, Grade
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.acceptance import (
    acceptance_document,
    check_facts,
    coverage_lines,
    finding_lines,
    gpu_rows,
    machine_words,
    next_steps,
    node_verdicts,
    provisional,
    verdict_line,
)
from tests.unit.lifecycle.examples import MINUTE, NOW

GPUS = tuple(Gpu(uuid=f"GPU-{n}", index=n, name="NVIDIA H200", serial=f"16500{n}") for n in range(2))
MACHINE = Machine(node="node-3", gpus=GPUS, environment={"driver": "570.1", "torch": Unknown("not installed")})


def report(**facts: Any) -> Report:
    known = msgspec.structs.replace(
        provisional(MACHINE, RunRequest()),
        started=NOW,
        ended=NOW + 2 * MINUTE,
        verdict=Grade.PASS,
        reason="All findings passed.",
        tallies=tuple(GpuSummary(gpu=one.uuid, verdict=Grade.PASS, reason="good", busy=None) for one in GPUS),
    )
    return msgspec.structs.replace(known, **facts)


def finding(gpu: str, verdict: Grade = Grade.PASS, value: float = 100.0) -> Finding:
    return Finding(
        check="gemm", metric="tflops", gpu=gpu, verdict=verdict, code="ok", message="good", value=value, unit="T"
    )


def test_a_machine_in_words_leaves_out_what_is_unknown() -> None:
    assert machine_words(MACHINE, RunRequest()) == "node-3: 2 × NVIDIA H200; driver 570.1"
    silent = msgspec.structs.replace(MACHINE, gpus=Unknown("the driver is silent"))
    assert machine_words(silent, RunRequest()) == "node-3: the GPUs could not be read (the driver is silent)"


def test_what_holds_for_several_gpus_is_one_line_and_a_fault_stands_alone() -> None:
    alike = [finding("GPU-0", value=98.0), finding("GPU-1", value=100.0)]
    (line,) = finding_lines(alike, report(), verbose=False)
    assert "PASS 2 GPUs gemm.tflops 98 to 100 T" in line
    assert len(finding_lines(alike, report(), verbose=True)) == 2
    faults = [finding("GPU-0", Grade.FAIL), finding("GPU-1", Grade.FAIL), finding("GPU-1", Grade.SKIPPED)]
    assert len(finding_lines(faults, report(), verbose=False)) == 2


def test_each_gpu_has_its_verdict() -> None:
    first, _ = gpu_rows(report())
    assert (first[0], *first[2:5]) == ("PASS", "NVIDIA H200", "165000", "-")


def test_what_was_left_out_by_reason_and_the_shortest_span_that_adds_something() -> None:
    left = (
        NotTested(check="links", why="needs two GPUs"),
        NotTested(check="ddp", why="needs two GPUs"),
        NotTested(check="gemm", why=NOT_SELECTED),
        NotTested(check="stress", why="takes long", within="4h"),
        NotTested(check="training", what="long", why="takes long", within="30m"),
    )
    assert coverage_lines(left, verbose=False) == ["not tested: links, ddp: needs two GPUs"]
    assert len(coverage_lines(left, verbose=True)) == 3
    assert next_steps(report(coverage=left)) == ["Not tested yet; --within 30m adds: training (long)"]


def test_a_stored_report_with_the_former_reason_of_unselected_checks() -> None:
    left = (
        NotTested(check="gemm", why="not among the checks asked for"),
        NotTested(check="links", why="needs two GPUs"),
    )
    assert coverage_lines(left, verbose=False) == ["not tested: links: needs two GPUs"]


def test_the_verdict_with_how_long_it_took() -> None:
    assert verdict_line(report()) == "PASS  node-3, 2 GPUs, 2m: All findings passed."
    (again,) = next_steps(report(verdict=Grade.FAIL))
    assert again.startswith("Test again: gpukeeper accept")


def test_the_document_has_no_samples_and_shows_where_they_are() -> None:
    document = acceptance_document(report(), "/reports/run-1")
    assert document["report_folder"] == "/reports/run-1"
    assert not {"schema", "timeline", "records"} & set(document)
    assert acceptance_document(report(), "")["report_folder"] is None


def test_a_node_that_should_have_a_report_is_no_pass() -> None:
    rows = list(node_verdicts(merge([report(run="run-1")], ["node-3", "node-9"])))
    assert [(one.node, one.gpus, one.run) for one in rows] == [("node-3", 2, "run-1"), ("node-9", None, "")]
    assert rows[1].verdict is Grade.INCONCLUSIVE


def test_a_check_shows_what_it_proves_and_what_it_cannot() -> None:
    for one in CHECKS:
        facts = check_facts(one)
        assert (facts.name, facts.proves, facts.cannot) == (one.name, one.proves, one.cannot)
        assert facts.servings == tuple(one.servings)
