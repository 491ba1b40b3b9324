"""Which checks fit into the time, and what is said of those that do not."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpukeeper.acceptance import suite
from gpukeeper.acceptance.check import Check, CheckSize, RunMode, RunRequest
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.model.gpu import Gpu

GPUS = tuple(Gpu(uuid=f"GPU-{n}", index=n) for n in range(2))


def check(
    name: str, *servings: tuple[float, float], how: RunMode = RunMode.EACH, least: int = 1, slices: bool = True
) -> Check:
    """`servings`: seconds and worth of each depth."""
    return Check(
        name=name,
        title=name,
        proves=".",
        cannot=".",
        how=how,
        servings=tuple(
            CheckSize(depth=depth, seconds=seconds, worth=worth, what=f"{name} for {seconds:.0f} s")
            for depth, (seconds, worth) in enumerate(servings)
        ),
        interpret=lambda trial, context: (),
        least_gpus=least,
        slices=slices,
    )


def names(programme: suite.CheckPlan) -> list[tuple[str, int]]:
    return [(one.check.name, one.serving.depth) for one in programme.chosen]


def test_the_time_is_never_exceeded() -> None:
    checks = [check("a", (20, 5), (200, 9)), check("b", (20, 4)), check("c", (20, 3)), check("d", (20, 2))]
    for seconds in (30.0, 60.0, 75.0, 300.0):
        programme = suite.choose(checks, RunRequest(within_s=seconds), GPUS)
        assert programme.seconds <= seconds
        assert programme.seconds == suite.START_S + sum(one.serving.seconds for one in programme.chosen)


def test_what_tells_most_per_minute_goes_first_and_the_order_is_the_catalogs() -> None:
    checks = [check("slow", (40, 4)), check("dear", (20, 4)), check("cheap", (10, 4))]
    programme = suite.choose(checks, RunRequest(within_s=suite.START_S + 35), GPUS)
    assert names(programme) == [("dear", 0), ("cheap", 0)]


def test_every_check_runs_once_before_any_runs_deeper() -> None:
    """However much a deeper one would tell: a GPU with one kind of test is not tested."""
    checks = [check("a", (5, 1), (25, 100)), check("b", (20, 1))]
    programme = suite.choose(checks, RunRequest(within_s=suite.START_S + 30), GPUS)
    assert names(programme) == [("a", 0), ("b", 0)]
    programme = suite.choose(checks, RunRequest(within_s=suite.START_S + 45), GPUS)
    assert names(programme) == [("a", 1), ("b", 0)]


def test_what_is_left_out_is_named_with_the_time_that_runs_it() -> None:
    checks = [check("a", (20, 5), (100, 9), (90000, 10)), check("b", (100, 4))]
    left = suite.choose(checks, RunRequest(within_s=60), GPUS).left_out
    assert [(one.check, one.within) for one in left] == [("a", "5m"), ("a", ""), ("b", "5m")]
    assert "--within 5m runs it" in left[0].why
    assert left[0].what == "a for 100 s"
    assert "--check a" in left[1].why
    assert not left[2].what  # nothing of it ran


@pytest.mark.parametrize(
    ("wish", "gpus", "why"),
    [
        (RunRequest(skip=("x",)), GPUS, "skipped on request (--skip)"),
        (RunRequest(only=("y",)), GPUS, "not among the selected checks"),
        (RunRequest(), (), "no GPU available"),
        (RunRequest(), GPUS[:1], "needs 2 GPUs, 1 available"),
        (RunRequest(), (GPUS[0], Gpu(uuid="MIG-1", index=1, part_of="GPU-0")), "does not apply to slices of a GPU"),
    ],
)
def test_what_does_not_apply_is_reported_with_its_reason(wish: RunRequest, gpus: tuple[Gpu, ...], why: str) -> None:
    checks = [check("x", (1, 1), least=2, slices=False), check("y", (1, 1), how=RunMode.LOOK)]
    left = suite.choose(checks, wish, gpus).left_out
    assert [(one.check, one.why) for one in left] == [("x", why)]


@pytest.mark.parametrize("wish", [RunRequest(only=("x",)), RunRequest(skip=("environment", "health"))])
def test_whether_all_gpus_are_here_and_well_is_always_asked(wish: RunRequest) -> None:
    """C1.1: --expect counts whatever else was requested."""
    checks = [check(name, (0, 1), how=RunMode.LOOK) for name in ("environment", "health")]
    assert names(suite.choose([*checks, check("x", (1, 1))], wish, GPUS)) == [
        ("environment", 0),
        ("health", 0),
        ("x", 0),
    ]


def test_what_looks_only_runs_without_a_gpu() -> None:
    assert names(suite.choose([check("x", (1, 1), how=RunMode.LOOK)], RunRequest(), ())) == [("x", 0)]


def test_what_was_requested_by_name_runs_however_long_it_takes() -> None:
    checks = [check("long", (500, 1), (900, 2)), check("other", (1, 1))]
    programme = suite.choose(checks, RunRequest(only=("long",), within_s=60), GPUS)
    assert names(programme) == [("long", 0)]
    assert suite.choose(checks, RunRequest(only=("long",), within_s=1000), GPUS).chosen[0].serving.depth == 1


def chosen(gpus: int, within_s: float) -> dict[str, int]:
    """By check: how deep it runs."""
    here = tuple(Gpu(uuid=f"GPU-{n}", index=n) for n in range(gpus))
    return {
        one.check.name: one.serving.depth for one in suite.choose(CHECKS, RunRequest(within_s=within_s), here).chosen
    }


def test_a_minute_has_every_kind_of_check() -> None:
    """Figures, wrong bits, memory, learning; of several GPUs also that they work together. C1.1, C1.2"""
    alone = {"environment", "health", "topology", "gemm", "memory_bandwidth", "copies", "exact", "training"}
    assert alone | {"memory_pattern"} <= set(chosen(1, 60))
    assert alone | {"memory_pattern", "collectives"} <= set(chosen(8, 60))


def test_five_minutes_have_every_check_there_is() -> None:
    assert set(chosen(8, 300)) == {one.name for one in CHECKS}
    needs_several = {one.name for one in CHECKS if one.least_gpus > 1}
    assert set(chosen(1, 300)) == {one.name for one in CHECKS} - needs_several


def test_longer_is_never_shallower() -> None:
    for gpus in (1, 8):
        for short, long in pairwise((60.0, 300.0, 1800.0, 14400.0)):
            less, more = chosen(gpus, short), chosen(gpus, long)
            assert all(more[name] >= depth for name, depth in less.items())
