"""A fleet is as good as its worst node; nothing that is missing, old or not real makes it look better."""

from __future__ import annotations

import csv
import io
from datetime import timedelta

import msgspec
import pytest

from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports import merge
from gpukeeper.acceptance.reports.html import page_of_fleet
from gpukeeper.acceptance.reports.wording import gpus_of
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.reports import examples
from tests.unit.acceptance.reports.test_html import Page


def node(number: int, share: float = 1.0, **more: object) -> Report:
    """Eight GPUs of its own; with a share the first of them is slow, and its own run did not notice."""
    gpus = [examples.gpu(index, uuid=f"GPU-{number}-{index}", serial=f"{number}-{index}") for index in range(8)]
    found = [f for gpu in gpus for f in examples.measured(gpu, share if gpu.index == 0 else 1.0, seed=number)]
    good = [msgspec.structs.replace(f, verdict=Grade.PASS) for f in found]
    known = {"node": f"node-{number}", "run": f"run-{number}", "reason": "All findings passed."}
    return examples.report(gpus, good, **{**known, **more})  # type: ignore[arg-type]


def test_a_fleet_of_good_nodes_is_accepted() -> None:
    fleet = merge.merge([node(1), node(2)], expected=["node-1", "node-2"])
    assert fleet.verdict is Grade.PASS
    assert fleet.reason == "2 nodes: 2 PASS."


def test_the_worst_node_decides_and_stands_first() -> None:
    fleet = merge.merge([node(1), examples.eight_gpus(), node(2)])
    assert fleet.verdict is Grade.FAIL
    assert fleet.nodes[0].node == "node-07"
    assert "exact-mismatch" in fleet.nodes[0].worst


def test_a_missing_node_is_named_and_no_pass() -> None:
    fleet = merge.merge([node(1)], expected=["node-1", "node-2"])
    assert fleet.verdict is Grade.INCONCLUSIVE
    assert fleet.missing == ("node-2",)
    assert "node-2" in fleet.reason


def test_no_reports_at_all_are_inconclusive() -> None:
    assert merge.merge([]).verdict is Grade.INCONCLUSIVE


def test_an_unexpected_node_is_named() -> None:
    assert merge.merge([node(1), node(2)], expected=["node-1"]).unexpected == ("node-2",)


def test_the_newest_report_of_a_node_counts_and_that_is_reported() -> None:
    later = examples.START + timedelta(hours=1)
    old = node(1, run="old", verdict=Grade.FAIL)
    new = node(1, run="new", started=later, ended=later)
    for given in ([old, new], [new, old]):
        fleet = merge.merge(given)
        assert fleet.verdict is Grade.PASS
        assert fleet.replaced == ("node-1: run old (FAIL) is superseded by the newer run new.",)


PARTS: tuple[dict[str, object], ...] = (
    {"device": "cpu"},
    {"device": "simulated"},
    {"self_test": True},
    {"interrupted": True},
    {"settings": {"wish": {"only": ["environment"]}}},
    {"settings": {"wish": {"skip": ["exact"]}}},
    {"settings": {"wish": {"gpus": ["0"]}}},
)


@pytest.mark.parametrize("more", PARTS)
def test_only_a_whole_run_on_gpus_can_accept_a_node(more: dict[str, object]) -> None:
    fleet = merge.merge([node(1, **more)])
    assert fleet.verdict is Grade.INCONCLUSIVE
    assert "does not count" in fleet.nodes[0].reason


@pytest.mark.parametrize("more", PARTS)
def test_a_newer_run_of_a_part_does_not_hide_a_failure_of_the_whole(more: dict[str, object]) -> None:
    """A11: a check that was requested alone says nothing about those that failed."""
    failed = node(1, run="whole", verdict=Grade.FAIL)
    fleet = merge.merge([node(1, run="part", ended=failed.ended + timedelta(hours=1), **more), failed])
    assert [(one.run, one.verdict) for one in fleet.nodes] == [("whole", Grade.FAIL)]
    (said,) = fleet.replaced
    assert said.startswith("node-1: run part (PASS) does not supersede run whole: it ")


@pytest.mark.parametrize("more", PARTS[3:])
def test_a_failure_of_a_part_counts_until_the_whole_was_tested_again(more: dict[str, object]) -> None:
    hour = timedelta(hours=1)
    first, again = node(1, run="first"), node(1, run="again", ended=examples.START + 3 * hour)
    part = node(1, run="part", verdict=Grade.FAIL, ended=examples.START + hour, **more)
    good = node(1, run="good", ended=examples.START + 2 * hour, **more)
    assert merge.merge([first, part]).nodes[0].run == "part"
    assert merge.merge([part, good]).nodes[0].run == "part", "neither tested all of it: the worse one"
    assert merge.merge([first, part, good, again]).verdict is Grade.PASS


def test_two_machines_of_one_name_are_two_nodes() -> None:
    """A11: cloned machines; the newer one must not speak for the other."""
    later = examples.START + timedelta(hours=1)
    failed = node(1, verdict=Grade.FAIL)
    fleet = merge.merge([failed, node(2, node="node-1", ended=later)], expected=["node-1"])
    assert [(one.node, one.verdict) for one in fleet.nodes] == [("node-1", Grade.FAIL), ("node-1", Grade.PASS)]
    assert fleet.doubles == (
        "2 machines have the name node-1: the runs run-1, run-2 have no GPU in common. Each counts.",
    )
    mended = examples.replace(failed.machine, gpus=(examples.gpu(0, uuid="new"), *gpus_of(failed.machine)[1:]))
    fleet = merge.merge([failed, node(1, run="mended", ended=later, machine=mended)])
    assert [(one.run, one.verdict) for one in fleet.nodes] == [("mended", Grade.PASS)], "one GPU was replaced"
    silent = examples.replace(failed.machine, gpus=())
    fleet = merge.merge([node(1), node(1, run="silent", ended=later, machine=silent, verdict=Grade.INCONCLUSIVE)])
    assert [one.run for one in fleet.nodes] == ["silent"]


def test_a_gpu_that_is_slow_in_the_fleet_is_found_though_its_node_passed() -> None:
    fleet = merge.merge([node(number, 0.9 if number == 3 else 1.0) for number in range(1, 5)])
    assert fleet.verdict is Grade.FAIL
    assert {(out.node, out.index) for one in fleet.figures for out in one.outliers} == {("node-3", 0)}
    assert "1 GPU is an outlier" in fleet.reason


def test_a_figure_of_another_method_or_model_is_no_peer() -> None:
    slow = examples.gpu(0, uuid="GPU-x", serial="x", name="NVIDIA L4")
    found = [msgspec.structs.replace(f, verdict=Grade.PASS) for f in examples.measured(slow, 0.2)]
    fleet = merge.merge([node(1), examples.report([slow], found, node="small", reason="good")])
    assert not [out for one in fleet.figures for out in one.outliers]
    assert {one.model for one in fleet.figures} == {"NVIDIA H200 at 700 W"}, "a single L4 has no peers"


def test_a_gpu_that_two_nodes_claim_is_named() -> None:
    fleet = merge.merge([node(1), examples.replace(node(1), node="node-9", run="x")])
    assert len(fleet.doubles) == 8
    assert "node-9" in fleet.doubles[0]


def test_the_fleet_is_json_csv_and_a_page() -> None:
    fleet = merge.merge([node(1), examples.eight_gpus(), examples.hostile()], expected=["node-1", "gone"])
    assert msgspec.json.decode(msgspec.json.encode(fleet), type=merge.FleetReport) == fleet
    lines = list(csv.DictReader(io.StringIO(merge.fleet_csv(fleet))))
    assert {line["node"]: line["verdict"] for line in lines}["gone"] == "INCONCLUSIVE"
    written = page_of_fleet(fleet)
    text = Page(written).text
    assert "<script" not in written
    assert "Missing reports: gone." in text
    assert "FAIL: not accepted" in text


def test_nodes_are_grouped_by_verdict() -> None:
    fleet = merge.merge([node(1), examples.eight_gpus()], expected=["gone"])
    assert merge.by_verdict(fleet) == {
        Grade.FAIL: ("node-07",),
        Grade.PASS: ("node-1",),
        Grade.INCONCLUSIVE: ("gone",),
    }
