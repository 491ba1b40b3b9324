"""Who left the others, by majority; and settings that could never pass."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.probes import ddp, throughput
from gpukeeper.acceptance.probes.ranks import BadSetting


def test_equal_digests_name_nobody() -> None:
    assert ddp.compare([["a", "b"]] * 4)["hashes_equal"] is True


def test_the_first_step_and_the_few_are_named() -> None:
    found = ddp.compare([["a", "b", "c"], ["a", "b", "c"], ["a", "x", "y"], ["a", "b", "c"]])
    assert found == {"hashes_equal": False, "differing": [2], "first_step": 1, "majority": True}


@pytest.mark.parametrize("last", [["b", "c"], ["b", "c", "a", "a"], ["b", "c", "d"]])
def test_without_a_majority_all_are_named(last: list[str]) -> None:
    found = ddp.compare([["a", one] for one in last])
    assert (found["differing"], found["majority"]) == (list(range(len(last))), False)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"epochs": 1}, "epochs=1"),
        ({"min_fall": 0}, "min_fall=0"),
        ({"min_fall": 1}, "min_fall=1"),
        ({"batch": 5000}, "gives no step"),
        ({"classes": 1}, "At least 2 classes"),
    ],
)
def test_settings_that_prove_nothing_are_refused(params: dict[str, float], words: str) -> None:
    """C1.4: epochs 1 compared a loss with itself."""
    with pytest.raises(BadSetting) as error:
        ddp.settings(params)
    assert words in str(error.value)


def test_throughput_starts_from_the_old_kits_defaults() -> None:
    """C1.5: batch 32, 1000 classes, rate 0.01, 50 warm-up and 100 measured steps."""
    wanted = throughput.settings({})
    assert (wanted.model, wanted.data, wanted.batch, wanted.classes) == ("resnet50", "synthetic", 32, 1000)
    assert (wanted.rate, wanted.warmup, wanted.steps) == (0.01, 50, 100)


@pytest.mark.parametrize(
    "params", [{"warmup": 0}, {"steps": 1}, {"dtype": "fp8"}, {"model": "transformer", "data": "cifar10"}]
)
def test_throughput_refuses_what_cannot_be_timed(params: dict[str, object]) -> None:
    with pytest.raises(BadSetting):
        throughput.settings(params)
