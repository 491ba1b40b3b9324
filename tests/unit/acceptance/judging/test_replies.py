"""What probes said, sorted; and which of several equal GPUs is the odd one."""

from __future__ import annotations

import math

import pytest

from gpukeeper.acceptance.checks import memory_pattern
from gpukeeper.acceptance.judging import replies
from gpukeeper.model.gpu import Gpu, Grade
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.checks.trials import OUT_OF_MEMORY, read, trial
from tests.unit.acceptance.machines import context, gpus


def test_what_was_measured_and_what_broke_are_distinguished() -> None:
    results, findings = replies.of_gpus("gemm", trial(memory_pattern.CHECK, {"a": 1}, OUT_OF_MEMORY))
    assert results == {"GPU-0": {"a": 1}}
    assert [(one.gpu, one.code, one.verdict) for one in findings] == [
        ("GPU-1", "out-of-memory", Grade.INCONCLUSIVE),
    ]


@pytest.mark.parametrize("said", [{}, {"errors": "many"}, {"errors": 0, "tested_bytes": 1, "total_bytes": 0}])
def test_an_answer_that_cannot_be_read_is_no_measurement(said: dict[str, object]) -> None:
    """Missing never passes, and never stops the run."""
    (finding,) = read(memory_pattern.CHECK, context(gpus(1)), said)
    assert (finding.verdict, finding.code) == (Grade.INCONCLUSIVE, "memory-pattern-missing")


def test_words_for_infinite_figures_become_figures_again() -> None:
    assert replies.figures([1, "inf", 2.5]) == (1.0, math.inf, 2.5)
    assert math.isnan(replies.figures(["nan"])[0])
    assert replies.figures(None) == ()


@pytest.mark.parametrize(
    ("said", "stands"),
    [
        ("aaaa", "like like like like"),
        ("aaba", "like like odd like"),
        ("aab", "like like odd"),
        ("ab", "split split"),
        ("aabb", "split split split split"),
        ("abc", "split split split"),
        ("aaabb", "like like like odd odd"),
        ("a", ""),
    ],
)
def test_a_majority_of_three_or_more_shows_which_one_is_odd(said: str, stands: str) -> None:
    values = {f"GPU-{i}": one for i, one in enumerate(said)}
    found = replies.against_majority(values, context(gpus(len(said))))
    assert [found[gpu][0] for gpu in values if gpu in found] == stands.split()


def test_only_equals_vote() -> None:
    mixed = (*gpus(2), Gpu(uuid="GPU-2", index=2, name="NVIDIA A100-SXM4-80GB"))
    assert replies.against_majority({"GPU-0": "a", "GPU-1": "a", "GPU-2": "b"}, context(mixed)) == {
        "GPU-0": ("like", 2),
        "GPU-1": ("like", 2),
    }
    nameless = gpus(3, name=Unknown("not read from the driver"))
    assert replies.against_majority({"GPU-0": "a", "GPU-1": "a", "GPU-2": "b"}, context(nameless)) == {}
