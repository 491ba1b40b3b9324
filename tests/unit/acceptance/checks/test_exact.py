"""Exact products: how their answers are read. That flips are found is shown in tests/real/torch."""

from __future__ import annotations

from typing import Any

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.checks.exact import CHECK
from gpukeeper.acceptance.record import Remedy
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.checks.trials import OUT_OF_MEMORY, codes, read, the
from tests.unit.acceptance.machines import context, gpus

BF16 = RunRequest(params={"exact": {"dtypes": ["bf16"]}})


def said(mismatches: int = 0, digest: str = "00ff", **more: Any) -> dict[str, Any]:
    where = [{"row": 5, "col": 7, "got": 17.125, "want": 17, "round": 2}] if mismatches else []
    record = {"rounds": 10, "elements": 671088640, "mismatches": mismatches, "where": where, "kernel": "torch.mm bf16"}
    return {"dtypes": {"bf16": record | {"digest": digest} | more}, "phase": "cold"}


def test_right_results_pass_and_say_how_many_they_were() -> None:
    (finding,) = read(CHECK, context(gpus(1), wish=BF16), said())
    assert (finding.verdict, finding.code, finding.metric) == (Grade.PASS, "exact-ok", "bf16")
    assert "0 wrong elements of 671,088,640" in finding.message


def test_one_wrong_element_fails_at_once_and_names_its_place() -> None:
    """No tolerance, no second chance: a result that was wrong once was wrong."""
    (finding,) = read(CHECK, context(gpus(1), wish=BF16), said(1))
    assert (finding.verdict, finding.code, finding.confirm) == (Grade.FAIL, "exact-mismatch", False)
    assert finding.action is Remedy.REPLACE_GPU
    assert "row 5, column 7: 17.125, expected 17" in finding.message
    assert finding.evidence["where"][0]["round"] == 2


def test_a_wrong_sum_is_told_as_such() -> None:
    where = [{"row": 3, "col": None, "got": "sum of the row", "want": 12.0, "round": 0}]
    (finding,) = read(CHECK, context(gpus(1), wish=BF16), said(1, where=where))
    assert "The sum of row 3 is wrong" in finding.message


def test_what_was_not_verified_does_not_pass() -> None:
    for nothing in (said(rounds=0), {"dtypes": {}}, {}):
        assert codes(read(CHECK, context(gpus(1), wish=BF16), nothing)) == ["exact-missing"]
    assert codes(read(CHECK, context(gpus(1), wish=BF16), OUT_OF_MEMORY)) == ["out-of-memory"]


def test_a_kind_of_number_that_the_gpu_lacks_is_skipped() -> None:
    wish = RunRequest(params={"exact": {"dtypes": ["fp8"]}})
    (finding,) = read(CHECK, context(gpus(1), wish=wish), {"dtypes": {"fp8": {"unsupported": "needs 8.9"}}})
    assert (finding.verdict, finding.code) == (Grade.SKIPPED, "exact-unsupported")


def test_the_gpu_with_other_bits_than_the_rest_is_named() -> None:
    findings = read(CHECK, context(gpus(4), wish=BF16), said(), said(), said(digest="beef"), said())
    odd = the(findings, "bf16_peers", 2)
    assert (odd.verdict, odd.code) == (Grade.FAIL, "exact-differs-from-peers")
    assert codes(findings, 0) == ["exact-ok"]


def test_of_two_that_differ_both_are_warned_about() -> None:
    findings = read(CHECK, context(gpus(2), wish=BF16), said(), said(digest="beef"))
    assert [the(findings, "bf16_peers", gpu).verdict for gpu in (0, 1)] == [Grade.WARN, Grade.WARN]


def test_a_gpu_with_wrong_results_has_no_say_among_its_peers() -> None:
    findings = read(CHECK, context(gpus(3), wish=BF16), said(), said(), said(1, digest="beef"))
    assert codes(findings, 2) == ["exact-mismatch"]
