"""Several nodes as one run, on simulated nodes: when the search for the bad node starts, and whom it names."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet.group_jobs import Member, RankDevice
from gpukeeper.acceptance.group.session import SimulatedGroup, simulated_report
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.record import GroupReport
from gpukeeper.model.gpu import Grade


def member(index: int, **more: Any) -> Member:
    devices = tuple(RankDevice(uuid=f"GPU-{index}-{number}", index=number, name="NVIDIA H200") for number in range(8))
    return Member(index=index, node=f"n{index}", devices=devices, **more)


def result_of(nodes: int, bad: Collection[int] = (), absent: Collection[int] = (), **settings: Any) -> GroupReport:
    members = {index: member(index) for index in range(nodes) if index not in absent}
    wish = RunRequest(device="simulated", params={"group": settings})
    group = SimulatedGroup(members, nodes, bad)
    return asyncio.run(simulated_report("r1", group, nodes, wish, reference.limits))


def named(report: GroupReport) -> list[tuple[str, ...]]:
    return [one.nodes for one in report.findings if one.finding.code == "group-search-named"]


def searched(report: GroupReport) -> list[dict[str, Any]]:
    planned = ("of 4 nodes", "of 6 nodes", "of 2 nodes")
    return [one for one in report.jobs if not str(one["why"]).endswith(planned)]


def test_a_group_that_passes_is_not_searched() -> None:
    report = result_of(4)
    assert (searched(report), named(report)) == ([], [])
    assert not [one for one in report.nodes if one.verdict is Grade.FAIL]


@pytest.mark.parametrize("bad", [0, 2, 5])
def test_a_group_that_fails_without_a_culprit_starts_the_search_which_names_the_node(bad: int) -> None:
    """Every job with it hangs, and no rank is to blame: only other partners show whose fault it is."""
    report = result_of(6, [bad])
    hung = [one.finding.code for one in report.findings if one.finding.code.startswith("group-hang")]
    assert set(hung) == {"group-hang"}, "no rank is named before the search"
    assert named(report) == [(f"n{bad}",)]
    verdicts = {one.nodes[0]: one.verdict for one in report.nodes}
    assert [node for node, verdict in verdicts.items() if verdict is Grade.FAIL] == [f"n{bad}"]
    assert Grade.PASS not in verdicts.values(), "the group did not pass, so no node is accepted by it"


@pytest.mark.slow
def test_512_nodes_with_8_gpus_are_one_run() -> None:
    """4096 ranks, simulated: no run of this size was made with NCCL."""
    report = result_of(512, growing=False)
    assert (report.size, len(report.ranks), len(report.nodes)) == (512, 4096, 512)
    assert not [one for one in report.nodes if one.verdict is Grade.FAIL]


def test_two_bad_nodes_are_both_named() -> None:
    assert named(result_of(6, [1, 4])) == [("n1",), ("n4",)]


def test_trials_of_the_search_are_in_the_report_with_their_reason() -> None:
    whys = [str(one["why"]) for one in searched(result_of(6, [2]))]
    assert whys[0] == "first pairing: inside the leaf"
    assert "second pairing: across leaves" in whys


@pytest.mark.parametrize(
    ("nodes", "absent", "settings", "code"),
    [
        (2, (), {}, "group-hang"),  # no third node that could be a partner
        (4, (), {"search": False}, "group-hang"),
        (4, (1,), {}, "group-rendezvous"),
    ],
)
def test_what_cannot_be_searched_or_must_not_be_is_inconclusive(
    nodes: int, absent: tuple[int, ...], settings: dict[str, Any], code: str
) -> None:
    report = result_of(nodes, [0], absent, **settings)
    assert (report.verdict, searched(report), named(report)) == (Grade.INCONCLUSIVE, [], [])
    assert code in {one.finding.code for one in report.findings}
