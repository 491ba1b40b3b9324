"""Removing evidence from a report never improves its verdict, whatever is removed."""

from __future__ import annotations

from functools import cache

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.acceptance.recompute import recomputed
from gpukeeper.acceptance.record import Report
from gpukeeper.model.gpu import Grade, rank
from tests.unit.acceptance.reports import altered

FAULTS: tuple[dict[str, object], ...] = (
    *({}, {"flip": {1: "bf16"}}, {"slow": {0: 0.2}}, {"hang": {2: "gemm"}}, {"ecc": (0,)}, {"memory": (1,)}),
    *({"foreign": (0,)}, {"broken": (2,)}, {"wrong_collective": True}, {"throttle": (1,)}, {"missing": 1}),
)
PARTS = ("findings", "coverage", "tallies", "power", "programme", "deltas")


@cache
def run(number: int) -> Report:
    return altered.run(3, **FAULTS[number])


@st.composite
def cut(draw: st.DrawFn) -> tuple[Report, Report]:
    """A run, and the same with parts removed."""
    whole = run(draw(st.integers(0, len(FAULTS) - 1)))
    report = whole
    for part in draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=3, unique=True)):
        things = getattr(report, part)
        gone = draw(st.sets(st.integers(0, max(len(things) - 1, 0)), min_size=1, max_size=max(len(things), 1)))
        left = tuple(one for number, one in enumerate(things) if number not in gone)
        report = msgspec.structs.replace(report, **{part: left})
    if draw(st.booleans()) and isinstance(report.machine.gpus, tuple):
        stay = report.machine.gpus[: draw(st.integers(0, len(report.machine.gpus)))]
        report = msgspec.structs.replace(report, machine=msgspec.structs.replace(report.machine, gpus=stay))
    return whole, report


@given(cut())
def test_removed_evidence_never_improves_a_verdict(pair: tuple[Report, Report]) -> None:
    whole, report = pair
    assert rank(recomputed(report).verdict) >= rank(recomputed(whole).verdict)


@given(cut(), st.sampled_from([Grade.PASS, Grade.WARN, Grade.SKIPPED]))
def test_a_better_verdict_field_changes_nothing(pair: tuple[Report, Report], claimed: Grade) -> None:
    """What is left of the evidence decides; a better claim than that is noticed."""
    _, report = pair
    told = recomputed(msgspec.structs.replace(report, verdict=claimed))
    honest = recomputed(report).verdict
    if honest in (Grade.FAIL, Grade.INCONCLUSIVE) and any(one.verdict is honest for one in report.findings):
        assert told.verdict not in (Grade.PASS, Grade.WARN)


@given(st.integers(0, len(FAULTS) - 1), st.sets(st.sampled_from(["gemm", "exact", "health", "environment", "copies"])))
def test_a_run_without_whole_checks_is_never_accepted(number: int, gone: set[str]) -> None:
    report = run(number)
    left = tuple(one for one in report.findings if one.check not in gone)
    told = recomputed(msgspec.structs.replace(report, findings=left, verdict=Grade.PASS))
    if gone or report.verdict is not Grade.PASS:
        assert told.verdict not in (Grade.PASS, Grade.WARN)
