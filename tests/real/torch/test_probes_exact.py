"""Silent corruption: single flips in every kind of number are found and located, and so is a GPU that always lies."""

from __future__ import annotations

import random

import pytest

from tests.real.torch import installation

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 32, "int8": 32}  # of the result
N = 96


@pytest.mark.smoke
def test_a_healthy_device_has_no_mismatch(worker: installation.Worker) -> None:
    result = worker.run("exact", n=N, rounds=4)
    for dtype in BITS:
        record = result["dtypes"][dtype]
        assert (record["mismatches"], record["where"]) == (0, [])
        assert (record["rounds"], record["elements"]) == (4, 4 * N * N)
        assert len(record["digest"]) == 16
    assert result["dtypes"]["tf32"] == {"unsupported": "a CPU does not support tf32"}


def test_the_same_seed_gives_the_same_bits_and_another_one_others(worker: installation.Worker) -> None:
    first, again, other = (
        worker.run("exact", n=N, rounds=1, dtypes=["fp32", "int8"], seed=seed)["dtypes"] for seed in (1, 1, 2)
    )
    for dtype in ("fp32", "int8"):
        assert first[dtype]["digest"] == again[dtype]["digest"] != other[dtype]["digest"]


@pytest.mark.parametrize("dtype", BITS)
def test_a_single_flipped_bit_is_found_and_located_wherever_it_is(worker: installation.Worker, dtype: str) -> None:
    """Every bit of the result, the lowest and the sign included, at random places and at the corners: 100 % found."""
    n = 32 if dtype == "fp8" else N  # a CPU takes long for it
    chance = random.Random(7)
    places = [(0, 0), (n - 1, n - 1)] + [(chance.randrange(n), chance.randrange(n)) for _ in range(BITS[dtype] - 2)]
    for bit, (row, column) in enumerate(places):
        inject = {"flip": dtype, "bit": bit, "row": row, "col": column, "round": 1}
        record = worker.run("exact", n=n, rounds=2, dtypes=[dtype], inject=inject)["dtypes"][dtype]
        assert record["mismatches"] == 1, (dtype, bit, row, column)
        (where,) = record["where"]
        assert (where["row"], where["col"], where["round"]) == (row, column, 1)


def test_the_lowest_bit_of_a_zero_is_found(worker: installation.Worker) -> None:
    """It makes the smallest number there is; no sum of a row shows that, comparing bits does."""
    found = 0
    for seed in range(40):
        inject = {"flip": "bf16", "bit": 0, "row": seed, "col": seed}
        record = worker.run("exact", n=N, rounds=1, dtypes=["bf16"], seed=seed, inject=inject)["dtypes"]["bf16"]
        assert record["mismatches"] == 1
        found += record["where"][0]["want"] == 0
    assert found, "no element was zero: the test proves nothing"


def test_a_flip_is_found_by_its_sums_when_elements_are_compared_seldom(worker: installation.Worker) -> None:
    inject = {"flip": "fp32", "bit": 12, "row": 5, "col": 6, "round": 1}
    result = worker.run("exact", n=N, rounds=3, dtypes=["fp32"], compare_every=100, inject=inject)
    (where,) = result["dtypes"]["fp32"]["where"]
    assert (where["row"], where["col"], where["round"]) == (5, 6, 1)


def test_not_a_number_is_found(worker: installation.Worker) -> None:
    record = worker.run("exact", n=N, rounds=1, dtypes=["fp16"], inject={"nan": "fp16"})["dtypes"]["fp16"]
    assert record["mismatches"] == 1
    assert record["where"][0]["got"] == "nan"


@pytest.mark.parametrize("dtype", BITS)
def test_a_device_that_is_wrong_the_same_way_each_time_is_found_by_the_cpu(
    worker: installation.Worker, dtype: str
) -> None:
    """Its results, its other kernel and its sums agree with each other; only counting elsewhere shows it."""
    record = worker.run("exact", n=N, rounds=2, dtypes=[dtype], inject={"lie": dtype})["dtypes"][dtype]
    assert record["mismatches"] >= 1
    where = record["where"][0]
    assert (where["row"], where["col"]) == (1, 1)
    assert where["got"] == where["want"] + 2


def test_the_place_of_a_fault_in_another_kind_of_number_does_not_touch_the_others(worker: installation.Worker) -> None:
    result = worker.run("exact", n=N, rounds=1, dtypes=["fp32", "bf16"], inject={"flip": "bf16"})["dtypes"]
    assert (result["fp32"]["mismatches"], result["bf16"]["mismatches"]) == (0, 1)


def test_a_size_whose_sums_are_not_exact_is_refused(worker: installation.Worker) -> None:
    words = worker.ask("exact", n=512, rounds=1, dtypes=["bf16"])["broken"]["words"]
    assert "n 512 is too large for bf16" in words.splitlines()[-1]


def test_hot_heats_before_it_looks(worker: installation.Worker) -> None:
    result = worker.run("exact", n=N, rounds=1, dtypes=["fp32"], phase="hot", heat_s=0.05)
    assert (result["phase"], result["dtypes"]["fp32"]["mismatches"]) == ("hot", 0)
