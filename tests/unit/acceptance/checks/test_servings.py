"""What the checks of one GPU ask for, at every depth."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpukeeper.acceptance.check import Check, RunMode, RunRequest
from gpukeeper.acceptance.checks import copies, exact, gemm, memory_bandwidth, memory_pattern, stress, training
from tests.unit.acceptance.machines import context, gpus

ALL = [one.CHECK for one in (gemm, memory_bandwidth, copies, exact, training, memory_pattern, stress)]
QUICK_S = 45  # of the minute that a quick run has


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.name)
def test_each_asks_its_own_probe_and_waits_longer_than_it_takes(check: Check) -> None:
    assert check.how is RunMode.EACH
    assert check.request is not None
    for serving in check.servings:
        for device in ("cuda", "cpu", "simulated"):
            job = check.request(serving, context(gpus(1), wish=RunRequest(device=device)))
            assert job.probe == check.name
            assert device == "cpu" or job.deadline_s > 1.4 * serving.seconds
            if device == "cpu":
                assert {name: job.params[name] for name in serving.small} == dict(serving.small)


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.name)
def test_deeper_takes_longer_and_tells_more(check: Check) -> None:
    for one, other in pairwise(check.servings):
        assert (one.depth, one.seconds, one.worth) < (other.depth, other.seconds, other.worth)
        assert one.worth < other.worth


def test_the_quick_ones_fit_into_a_quick_run_together() -> None:
    assert sum(one.servings[0].seconds for one in ALL if one.servings[0].depth == 0) <= QUICK_S


def test_a_run_of_ten_minutes_holds_a_minute_of_stress() -> None:
    """C1.10: 60 s stress."""
    assert stress.CHECK.servings[1].params["seconds"] == 60
