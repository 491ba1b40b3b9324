"""Training: impossible settings are refused, a loss that does not fall and bits that differ are found."""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.checks.training import CHECK
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.checks.trials import OUT_OF_MEMORY, codes, read, the
from tests.unit.acceptance.machines import context, gpus


def run(fall: float | str = 0.8, hash_: str = "aa", bits: str = "1 2 3") -> dict[str, Any]:
    return {"loss_start": 1.4, "loss_end": 0.3, "fall": fall, "loss_bits": bits.split(), "hash": hash_, "steps": 126}


def said(*runs: dict[str, Any], equal: bool = True, **more: Any) -> dict[str, Any]:
    return {"runs": list(runs or (run(), run())), "equal": equal, "deterministic": True, "transformer": None} | more


def test_the_defaults_are_those_of_the_old_kit() -> None:
    """C1.4."""
    assert CHECK.request is not None
    quick, full = (CHECK.request(serving, context(gpus(1))).params for serving in CHECK.servings)
    assert [quick[name] for name in ("samples", "features", "classes", "rate", "min_fall")] == [4000, 128, 4, 3e-3, 0.3]
    assert (quick["epochs"], full["epochs"]) == (2, 3)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"epochs": 1}, "epochs 1 cannot show that the loss falls"),
        ({"min_fall": 0}, "min_fall 0 is not between 0 and 1"),
        ({"classes": 1}, "one class cannot be learned"),
        ({"rate": -1}, "rate -1 cannot learn"),
        ({"batch": 0}, "batch 0 is too small to prove anything"),
        ({"samples": 1}, "samples 1 is too small to prove anything; use 100 or more"),
        ({"steps": 0}, "steps 0 is too small to prove anything"),
    ],
)
def test_settings_that_can_never_pass_are_refused_before_anything_runs(params: dict[str, Any], words: str) -> None:
    """C1.4: epochs 1 compared a loss with itself."""
    assert CHECK.request is not None
    with pytest.raises(UsageError, match=words):
        CHECK.request(CHECK.servings[0], context(gpus(1), wish=RunRequest(params={"training": params})))


def test_all_problems_are_told_at_once() -> None:
    assert CHECK.request is not None
    with pytest.raises(UsageError, match=r"epochs 1 .*; rate 0 .*Nothing was run"):
        CHECK.request(
            CHECK.servings[0], context(gpus(1), wish=RunRequest(params={"training": {"epochs": 1, "rate": 0}}))
        )


def test_a_gpu_that_learns_twice_alike_passes() -> None:
    findings = read(CHECK, context(gpus(1)), said())
    assert [(one.metric, one.verdict) for one in findings] == [("loss", Grade.PASS), ("repeat", Grade.PASS)]
    assert the(findings, "loss").value == 0.8


@pytest.mark.parametrize("fall", [0.29, -1.0, "nan", "-inf"])
def test_a_loss_that_does_not_fall_fails_also_when_it_is_not_a_number(fall: float | str) -> None:
    finding = the(read(CHECK, context(gpus(1)), said(run(), run(fall))), "loss")
    assert (finding.verdict, finding.code, finding.confirm) == (Grade.FAIL, "training-loss-did-not-fall", True)


def test_two_runs_that_differ_fail_and_the_step_is_named() -> None:
    result = said(run(), run(hash_="bb", bits="1 9 3"), equal=False)
    finding = the(read(CHECK, context(gpus(1)), result), "repeat")
    assert (finding.verdict, finding.code, finding.confirm) == (Grade.FAIL, "training-not-deterministic", False)
    assert "the classifier's losses differ from step 1" in finding.message


def test_a_transformer_that_differs_is_enough() -> None:
    small = {"runs": [run(hash_="cc"), run(hash_="dd")], "equal": False}
    finding = the(read(CHECK, context(gpus(1)), said(equal=False, transformer=small)), "repeat")
    assert finding.verdict is Grade.FAIL
    assert "the transformer's weights differ (cc, dd)" in finding.message


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_transformer_without_a_loss_fails_though_it_was_so_twice(loss: str) -> None:
    bad = run(hash_="cc") | {"loss_end": loss}
    small = {"runs": [bad, bad], "equal": True}
    finding = the(read(CHECK, context(gpus(1)), said(transformer=small)), "transformer")
    assert (finding.verdict, finding.code, finding.confirm) == (Grade.FAIL, "training-loss-not-finite", True)
    good = {"runs": [run(hash_="cc")] * 2, "equal": True}
    assert {one.verdict for one in read(CHECK, context(gpus(1)), said(transformer=good))} == {Grade.PASS}


def test_gradients_alone_may_differ() -> None:
    finding = the(read(CHECK, context(gpus(1)), said(equal=False)), "repeat")
    assert "the gradients differ" in finding.message


def test_without_a_second_run_or_a_promise_nothing_was_compared() -> None:
    once = the(read(CHECK, context(gpus(1)), said(run())), "repeat")
    loose = the(read(CHECK, context(gpus(1)), said(equal=False, deterministic="no :4096:8")), "repeat")
    assert (once.verdict, loose.verdict) == (Grade.INCONCLUSIVE, Grade.INCONCLUSIVE)


def test_the_gpu_whose_weights_are_not_those_of_the_others_fails() -> None:
    """All GPUs train, and are held against each other (C1.1)."""
    odd = said(run(hash_="bb"), run(hash_="bb"))
    findings = read(CHECK, context(gpus(4)), said(), odd, said(), said())
    assert [the(findings, "peers", gpu).verdict for gpu in range(4)] == [Grade.PASS, Grade.FAIL, Grade.PASS, Grade.PASS]
    assert the(findings, "peers", 1).code == "training-differs-from-peers"


def test_of_two_that_differ_both_are_warned_about() -> None:
    odd = said(run(hash_="bb"), run(hash_="bb"))
    findings = read(CHECK, context(gpus(2)), said(), odd)
    assert {the(findings, "peers", gpu).code for gpu in (0, 1)} == {"training-split"}
    assert {the(findings, "peers", gpu).verdict for gpu in (0, 1)} == {Grade.WARN}


def test_one_that_disagrees_with_itself_has_no_say() -> None:
    findings = read(CHECK, context(gpus(2)), said(), said(run(), run(hash_="bb"), equal=False))
    assert "peers" not in {one.metric for one in findings}


def test_no_answer_and_half_an_answer_never_pass() -> None:
    assert codes(read(CHECK, context(gpus(1)), OUT_OF_MEMORY)) == ["out-of-memory"]
    assert codes(read(CHECK, context(gpus(1)), {"runs": []})) == ["training-missing"]
