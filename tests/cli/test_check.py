"""`gpukeeper check`: which checks there are, what they prove and what they cannot."""

from __future__ import annotations

from gpukeeper.acceptance.suite import CHECKS
from tests.cli.fleet import Fleet


def test_the_list_has_every_check_in_order(fleet: Fleet) -> None:
    ran = fleet.run("check", "list")
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()[1:]] == [check.name for check in CHECKS]
    told = fleet.run("check", "list", "--json").json()["checks"]
    assert [one["name"] for one in told] == [check.name for check in CHECKS]


def test_a_check_shows_what_it_proves_and_cannot_and_what_can_be_set(fleet: Fleet) -> None:
    ran = fleet.run("check", "show", "training")
    assert ran.code == 0
    assert "proves         A classifier learns" in ran.out
    assert "cannot detect  " in ran.out
    rows = {line.split()[0]: line.split()[1:3] for line in ran.out.splitlines() if line.startswith("training.")}
    assert rows["training.epochs"] == ["2", "3"]
    assert "gpukeeper accept --check training" in ran.out
    told = fleet.run("check", "show", "training", "--json").json()["check"]
    assert told["servings"][0]["params"]["epochs"] == 2


def test_an_unknown_check_is_answered_with_the_nearest(fleet: Fleet) -> None:
    ran = fleet.run("check", "show", "trainings")
    assert (ran.code, ran.out) == (2, "")
    assert 'unknown check "trainings". Did you mean "training"?' in ran.err
