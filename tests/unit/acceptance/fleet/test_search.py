"""The search over a few nodes: what it runs in which order, and what it says."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.fleet.search import Outcome, Search, Suspect, Trial

LEAVES = {"a1": "a", "a2": "a", "a3": "a", "a4": "a", "b1": "b", "b2": "b", "b3": "b", "b4": "b"}


def run(search: Search, bad: set[str]) -> Search:
    while trials := search.round():
        search.record(Outcome(one.number, bad.isdisjoint(one.nodes)) for one in trials)
    return search


def leaves_of(trial: Trial) -> set[str]:
    return {LEAVES[node] for node in trial.nodes}


def test_pairs_run_inside_leaves_then_across_them() -> None:
    search = Search(LEAVES, LEAVES, 1)
    first = search.round()
    assert [len(leaves_of(one)) for one in first] == [1, 1, 1, 1]
    search.record(Outcome(one.number, True) for one in first)
    assert [len(leaves_of(one)) for one in search.round()] == [2, 2, 2, 2]


def test_a_round_stays_the_same_until_it_is_recorded() -> None:
    search = Search(LEAVES, LEAVES, 1)
    assert search.round() == search.round()
    with pytest.raises(ValueError, match="number 99"):
        search.record([Outcome(99, True)])


def test_a_healthy_fleet_ends_with_all_nodes_as_one_group() -> None:
    search = run(Search(LEAVES, LEAVES, 1), set())
    found = search.conclusion()
    assert (found.nodes, found.links, found.switches, found.undecided, found.limits) == ((), (), (), (), ())
    assert found.finished
    assert (found.rounds, found.jobs) == (4, 4 + 4 + 2 + 1)


def test_the_bad_node_is_named_with_its_trials() -> None:
    found = run(Search(LEAVES, LEAVES, 1), {"b2"}).conclusion()
    (named,) = found.nodes
    assert named.suspect == Suspect("node", ("b2",))
    assert len(named.trials) >= 3
    assert "partners that passed with others" in named.reason


def test_two_nodes_that_only_failed_with_each_other_are_undecided() -> None:
    found = run(Search(["a1", "b1"], LEAVES, 1), {"b1"}).conclusion()
    assert not found.nodes
    (open_,) = found.undecided
    assert open_.reason == "a1 and b1 failed only with each other: one of them, or what connects them"
    assert {Suspect("node", ("a1",)), Suspect("node", ("b1",)), Suspect("link", ("a1", "b1"))} <= set(open_.suspects)


def test_when_all_fail_nothing_is_named() -> None:
    found = run(Search(LEAVES, LEAVES, 1), set(LEAVES)).conclusion()
    assert (found.nodes, found.links, found.switches) == ((), (), ())
    assert {Suspect("node", (node,)) for node in LEAVES} <= {one for group in found.undecided for one in group.suspects}


def test_a_node_whose_trials_cannot_be_run_is_undecided_not_bad() -> None:
    search = Search(LEAVES, LEAVES, 1)
    while trials := search.round():
        search.record(Outcome(one.number, None if "a1" in one.nodes else True) for one in trials)
    found = search.conclusion()
    assert not found.nodes
    assert [one.reason for one in found.undecided] == ["node a1: no trial with it could be run"]


def test_an_outcome_that_is_missing_counts_as_not_run() -> None:
    search = Search(LEAVES, LEAVES, 1)
    search.record([])
    assert search.conclusion().jobs == 0
    assert search.conclusion().rounds == 1


def test_the_limit_of_rounds_is_said() -> None:
    found = run(Search(LEAVES, LEAVES, 1, rounds_max=2), {"b2"}).conclusion()
    assert not found.finished
    assert found.limits == ("the limit of 2 rounds was reached",)


def test_one_node_alone_needs_no_round() -> None:
    search = Search(["a1"], LEAVES, 1)
    assert search.round() == ()
    assert search.conclusion().undecided[0].reason == "node a1: no trial with it could be run"
