"""Reading data-parallel training: who left the others, and whether it learned."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.check import RunMode, RunRequest
from gpukeeper.acceptance.checks import ddp
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.checks import results
from tests.unit.acceptance.checks.results import trial


def test_no_rank_runs_on_a_slice() -> None:
    """NCCL takes two slices of one GPU for the same GPU twice."""
    together = {one.name: one.slices for one in CHECKS if one.how is RunMode.TOGETHER}
    assert {"ddp", "throughput", "collectives", "links"} <= together.keys()
    assert not any(together.values()), together


def test_equal_parameters_and_a_falling_loss_pass() -> None:
    """C1.2, C1.4."""
    same, loss = ddp.interpret(trial(results.ddp()), results.node())
    assert (same.verdict, same.code) == (Grade.PASS, "ddp-parameters-ok")
    assert (loss.verdict, loss.value, loss.floor) == (Grade.PASS, 0.857, 0.2)


def test_the_rank_that_differs_is_named_by_majority() -> None:
    more = {"hashes_equal": False, "differing": [5], "first_step": 12}
    odd, _ = ddp.interpret(trial(results.ddp(**more)), results.node())
    assert (odd.verdict, odd.gpu, odd.code, odd.confirm) == (Grade.FAIL, "GPU-5", "ddp-rank-differs", False)
    assert "From step 12 on, rank 5 (GPU 5) had different parameters from the 7 ranks that agree" in odd.message


def test_one_rank_that_saw_a_difference_is_enough() -> None:
    said = results.ddp(3)
    said[2] |= {"hashes_equal": False, "differing": [2], "first_step": 1}
    assert ddp.interpret(trial(said), results.node(3))[0].gpu == "GPU-2"


def test_of_two_that_differ_nobody_is_blamed_and_nothing_passes() -> None:
    more = {"hashes_equal": False, "differing": [0, 1], "first_step": 3, "majority": False}
    odd, _ = ddp.interpret(trial(results.ddp(2, **more)), results.node(2))
    assert (odd.verdict, odd.gpu, odd.code) == (Grade.FAIL, None, "ddp-ranks-differ")
    assert "rank 0 (GPU 0) and rank 1 (GPU 1) had different parameters" in odd.message


@pytest.mark.parametrize("fall", [0.1, -1.0, "nan"])
def test_a_loss_that_does_not_fall_by_a_fifth_fails(fall: float | str) -> None:
    found = ddp.interpret(trial(results.ddp(fall=fall)), results.node())[1]
    assert (found.verdict, found.code, found.confirm) == (Grade.FAIL, "ddp-loss-did-not-fall", True)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"epochs": 1}, "epochs 1 cannot show that the loss falls"),
        ({"min_fall": 1.0}, "min_fall 1.0 is not between 0 and 1"),
        ({"classes": 1}, "one class cannot be learned"),
        ({"batch": 9000}, "batch 9000 of 4000 samples gives no step"),
        ({"rate": 0}, "rate 0 cannot learn"),
    ],
)
def test_settings_that_can_never_pass_are_refused_before_anything_runs(params: dict[str, float], words: str) -> None:
    """C1.4: a usage error, exit 2."""
    with pytest.raises(UsageError) as error:
        ddp.request(ddp.CHECK.servings[0], results.node(wish=RunRequest(params={"ddp": params})))
    assert words in str(error.value)
    assert str(error.value).endswith("Nothing was run.")


def test_the_defaults_are_the_old_kits() -> None:
    """C1.4: 2 epochs, batch 256, loss down by 20 %."""
    params = ddp.request(ddp.CHECK.servings[0], results.node()).params
    assert (params["epochs"], params["batch"], params["min_fall"]) == (2, 256, 0.20)
