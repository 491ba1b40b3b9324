"""Which open finding a trial proves: only what it saw on every node that the finding is about."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.fleet.preflight.facts import Finding, failed, passed, unchecked
from gpukeeper.wiring.preflight import is_proven

ON_BOTH = (passed("trial-gpu", "node gpu1", ("gpu1",)), passed("trial-gpu", "node gpu2", ("gpu2",)))


def test_drivers_are_proven_by_trials_on_all_of_their_nodes() -> None:
    assert is_proven(unchecked("drivers", "no label", ("gpu1", "gpu2")), ON_BOTH)


@pytest.mark.parametrize("tried", [(), ON_BOTH[:1], (ON_BOTH[0], failed("trial-gpu", "node gpu2", ("gpu2",)))])
def test_a_trial_on_some_nodes_proves_nothing_about_the_others(tried: tuple[Finding, ...]) -> None:
    assert not is_proven(unchecked("drivers", "no label", ("gpu1", "gpu2")), tried)


def test_a_trial_does_not_prove_that_other_nodes_can_pull_the_image() -> None:
    assert not is_proven(unchecked("image", "no node lists it", ("gpu1", "gpu2")), ON_BOTH)


def test_a_finding_about_no_named_node_stays() -> None:
    assert not is_proven(unchecked("drivers", "the nodes could not be read"), ON_BOTH)
