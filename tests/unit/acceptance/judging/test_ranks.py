"""Ranks that gave nothing: by cause, not by rank; and figures that are noted."""

from __future__ import annotations

from gpukeeper.acceptance.checks import ddp
from gpukeeper.acceptance.judging import judge
from gpukeeper.acceptance.judging.replies import as_noted
from gpukeeper.acceptance.record import Measurement, Thresholds
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.checks import results
from tests.unit.acceptance.checks.results import broken, done, trial


def test_a_cause_that_several_ranks_share_is_the_nodes() -> None:
    """C17.2: a rendezvous that failed says nothing about GPUs."""
    answers = {rank: broken("rendezvous", "RendezvousError: rank 0 of 4 did not meet all others") for rank in range(4)}
    (found,) = ddp.interpret(trial(answers), results.node(4))
    assert (found.verdict, found.code, found.gpu) == (Grade.INCONCLUSIVE, "rendezvous", None)
    assert found.evidence["ranks"] == [0, 1, 2, 3]


def test_the_rank_that_failed_is_named_and_those_that_followed_are_not() -> None:
    answers = {
        0: broken("failed", "rank 0 was stopped because rank 1 failed by signal 9"),
        1: broken("out_of_memory", "CUDA out of memory"),
    }
    (found,) = ddp.interpret(trial(answers), results.node(2))
    assert (found.code, found.gpu) == ("out-of-memory", "GPU-1")
    assert found.message.startswith("rank 1 (GPU 1): ")


def test_followers_alone_are_still_told() -> None:
    answers = {0: broken("failed", "rank 0 was stopped because rank 1 failed"), 1: done(**results.ddp(1)[0])}
    found = ddp.interpret(trial(answers), results.node(2))
    assert [(one.verdict, one.gpu) for one in found] == [(Grade.INCONCLUSIVE, "GPU-0")]


def test_a_rank_without_any_answer_is_missing() -> None:
    (found,) = ddp.interpret(trial({0: done(**results.ddp(1)[0])}), results.node(2))
    assert (found.verdict, found.code, found.gpu) == (Grade.INCONCLUSIVE, "ddp-missing", "GPU-1")


def test_ranks_that_met_in_smaller_groups_tested_no_machine() -> None:
    halves = [one | {"world": 2} for one in results.ddp(4)]
    (found,) = ddp.interpret(trial(halves), results.node(4))
    assert (found.verdict, found.code) == (Grade.INCONCLUSIVE, "ddp-missing")
    assert "rank 0 reported 2 ranks instead of 4" in found.message


def test_a_lost_gpu_fails_it() -> None:
    answers = {0: done(**results.ddp(1)[0]), 1: broken("lost_gpu", "GPU is lost")}
    (found,) = ddp.interpret(trial(answers), results.node(2))
    assert (found.verdict, found.gpu) == (Grade.FAIL, "GPU-1")


def test_only_figures_without_a_yardstick_are_noted() -> None:
    asked = Measurement(check="c", metric="m", gpu=None, unit="GB/s", method="x", samples=(5.0, 5.0))
    judged = judge.assess([asked], results.node(1, limits=Thresholds(floor=4.0, ceiling=6.0)))
    assert as_noted(judged) == judged
    (noted,) = as_noted(judge.assess([asked], results.node(1, limits=Thresholds())))
    assert (noted.verdict, noted.code, noted.value, noted.samples) == (Grade.SKIPPED, "c-noted", 5.0, (5.0, 5.0))
