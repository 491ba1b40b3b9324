"""Real collectives over gloo: every element on every rank, every round anew; each planted fault is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.torch import together

OPS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
SIZES = [24, 3 * 65_521 * 4, 999_999]  # a few words, whole rows of the pattern, and what divides by nothing


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> together.Left:
    return together.torchrun(tmp_path_factory.mktemp("ranks"), 3, "collectives", ops=OPS, sizes=SIZES)


def test_every_element_is_right_on_every_rank_round_after_round(clean: together.Left) -> None:
    """C1.2 and S3-09: many rounds in place, and the sum of one round is what is found after each of them."""
    for rank in range(3):
        results = clean.done(rank)["results"]
        assert [(row["op"], row["wrong"]) for row in results] == [(op, 0) for _ in SIZES for op in OPS]
        assert {row["rounds"] for row in results} == {6}  # C1.4: twice the ranks


def test_sizes_count_whole_elements_of_every_rank(clean: together.Left) -> None:
    for row in clean.done(0)["results"]:
        assert row["elements"] % 3 == 0
        assert row["bytes"] == 4 * row["elements"]
    assert [row["bytes"] for row in clean.done(0)["results"]][:: len(OPS)] == [24, 786_252, 999_996]


def test_bandwidth_is_counted_as_nccl_tests_do(clean: together.Left) -> None:
    """Facts §5: bus bandwidth is 2(n−1)/n of the algorithm's for all-reduce, 1 for broadcast, else (n−1)/n."""
    factors = {"all_reduce": 4 / 3, "broadcast": 1.0}
    for row in clean.done(1)["results"]:
        algorithm = [row["bytes"] / seconds / 1e9 for seconds in row["seconds"]]
        assert row["algbw"] == pytest.approx(algorithm)
        assert row["busbw"] == pytest.approx([factors.get(row["op"], 2 / 3) * one for one in algorithm])


def test_latency_and_what_ran_are_reported(clean: together.Left) -> None:
    """C1.6: latency; which algorithm is not known without NCCL, and not invented."""
    result = clean.done(2)
    assert len(result["latency_us"]) == 5
    assert min(result["latency_us"]) > 0
    assert (result["backend"], result["variant"], result["algorithm"]) == ("gloo", "default", None)
    assert (result["transports"], result["nvls"], result["nccl_version"]) == (None, None, None)


@pytest.mark.parametrize("dtype", ["bf16"])
def test_one_changed_element_on_one_rank_is_found_and_located_there(tmp_path: Path, dtype: str) -> None:
    params: dict[str, Any] = {"ops": OPS, "sizes": [400_000], "rounds": 3, "dtype": dtype, "inject": {"wrong_rank": 1}}
    left = together.torchrun(tmp_path, 2, "collectives", **params)
    assert [row["wrong"] for row in left.done(0)["results"]] == [0] * len(OPS)
    for row in left.done(1)["results"]:
        assert row["wrong"] == 1, row["op"]
        (place,) = row["where"]
        received = row["elements"] // (2 if row["op"] == "reduce_scatter" else 1)
        assert (place["index"], place["round"]) == (received // 3, 1)
        assert place["got"] == place["want"] + 1


def test_a_sum_of_sums_is_found(tmp_path: Path) -> None:
    """S3-09: the old kit summed in place again and again, and held it against the sum of one round."""
    left = together.torchrun(
        tmp_path, 2, "collectives", ops=["all_reduce"], sizes=[40_000], rounds=3, inject={"stale": True}
    )
    for rank in range(2):
        (row,) = left.done(rank)["results"]
        assert row["wrong"] > row["elements"]  # most of the second and third round
        assert min(place["round"] for place in row["where"]) == 1


def test_a_dtype_that_cannot_hold_the_sum_is_refused(tmp_path: Path) -> None:
    left = together.torchrun(tmp_path, 1, "collectives", ops=["all_reduce"], sizes=[64], dtype="fp4")
    assert "BadSetting: Unknown dtype 'fp4' for collectives" in left.broken(0)
