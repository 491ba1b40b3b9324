"""The register: what was taken out, came back and failed, by serial number, from lines of the ledger."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from gpukeeper.model.event import Event, NodeMarked, NodeTested, Quarantined, Returned
from gpukeeper.model.gpu import Grade
from gpukeeper.model.subject import Ref
from gpukeeper.views.nodes import Register, RegisterEntry, entries_of, register, warnings_about

NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def marked(days: float, node: str = "n1", action: str = "quarantine", result: str = "done", **more: Any) -> NodeMarked:
    """So many days ago."""
    out = action in ("quarantine", "taint") and result == "done"
    given = {"step": f"s{days}", "machine": "m1", "out": out, "by": "ann", "reason": "loud fans"} | more
    ref = Ref("kubernetes", "prod", "node", node, f"uid-{node}")
    return NodeMarked(at=NOW - days * DAY, ref=ref, action=action, result=result, **given)


def run_line(days: float, node: str, run: str, verdict: Grade = Grade.FAIL, **more: Any) -> NodeTested:
    given = {"device": "cuda", "gpus": {"S1": verdict, "S2": Grade.PASS}, "reason": "too slow"} | more
    ref = Ref("host", node, "node", node, node)
    return NodeTested(at=NOW - days * DAY, ref=ref, run=run, verdict=verdict, **given)


def of(*lines: Event) -> Register:
    return register(lines, NOW, repeats=3, within=90 * DAY)


def one(found: Register, kind: str, name: str) -> RegisterEntry:
    (entry,) = [each for each in found.entries if (each.kind, each.name) == (kind, name)]
    return entry


def test_a_machine_is_the_same_under_another_node_name() -> None:
    lines = [marked(20), marked(10, node="renamed"), marked(9, node="renamed", action="return"), marked(1)]
    found = of(*lines)
    (entry,) = found.entries
    assert (entry.kind, entry.name, entry.nodes) == ("machine", "m1", ("n1", "renamed"))
    assert (entry.taken_out, entry.returned, entry.lately) == (3, 1, 3)
    assert entry.warning == "machine m1 was taken out 3 times in 90d"
    assert [event.what for event in entry.events] == ["taken out", "taken out", "returned", "taken out"]
    assert warnings_about(found, ["n1"]) == (entry.warning,)
    assert warnings_about(found, ["renamed"]) == ()


def test_what_was_long_ago_is_listed_and_not_warned_of() -> None:
    (entry,) = of(marked(200), marked(100), marked(1)).entries
    assert (entry.taken_out, entry.lately, entry.warning) == (3, 1, "")


def test_another_machine_of_the_same_name_is_another_entry() -> None:
    found = of(marked(3), marked(2, machine="m2"), run_line(1, "n1", "r1"))
    assert {(each.kind, each.name) for each in found.entries} == {
        ("machine", "m1"),
        ("machine", "m2"),
        ("node", "n1"),  # which of the two was tested is unknown
        ("gpu", "S1"),
    }


def test_a_gpu_that_fails_in_one_machine_and_then_in_another_is_one_gpu() -> None:
    first = marked(10, action="taint", run="r1", failed=True, gpus=("S1",))
    second = marked(5, node="n2", action="taint", run="r2", failed=True, gpus=("S1",), machine="m2")
    found = of(first, second, marked(9, action="return"), run_line(20, "n3", "r0", models={"S1": "H200"}))
    entry = one(found, "gpu", "S1")
    assert (entry.model, entry.nodes) == ("H200", ("n2", "n1", "n3"))
    assert (entry.taken_out, entry.failed) == (2, 3)
    # The GPU may have been replaced before the node came back.
    assert (entry.returned, one(found, "machine", "m1").returned) == (0, 1)
    assert [each.name for each in entries_of(found, "S1")] == ["S1"]
    assert {each.name for each in entries_of(found, "n2")} == {"S1", "m2"}


def test_a_run_that_is_recorded_twice_failed_once() -> None:
    label = marked(1, action="label", run="r1", failed=True, gpus=("S1",))
    again = marked(0.5, action="label", result="unchanged", run="r1", failed=True, gpus=("S1",))
    found = of(run_line(2, "n1", "r1"), label, again)
    assert (one(found, "gpu", "S1").failed, one(found, "machine", "m1").failed) == (1, 1)


def test_what_did_not_happen_is_not_counted() -> None:
    deferred = marked(4, action="taint", result="deferred", run="r1", failed=True)
    found = of(
        deferred,
        marked(3, action="return", result="failed"),
        marked(3, action="update"),
        run_line(2, "n1", "r2", Grade.PASS),
        run_line(2, "n1", "r3", device="cpu"),
    )
    (entry,) = found.entries
    assert (entry.taken_out, entry.returned, entry.failed) == (0, 0, 1)


def test_a_taint_that_could_not_be_removed_again_counts_as_taken_out() -> None:
    (entry,) = of(marked(1, action="taint", result="failed", out=True)).entries
    assert entry.taken_out == 1


def test_a_change_without_a_result_is_listed_as_interrupted() -> None:
    begun = marked(2, result="begun", machine="", step="s1")
    (entry,) = of(begun).entries
    assert ((entry.kind, entry.name), entry.taken_out) == (("node", "n1"), 0)
    assert [event.what for event in entry.events] == ["interrupted"]
    (entry,) = of(begun, marked(1.9, step="s1")).entries
    assert [event.what for event in entry.events] == ["taken out"]


def test_a_quarantined_gpu_of_this_machine_is_found_by_its_serial_number() -> None:
    gpu = Ref("host", "n1", "gpu", "GPU-1", "GPU-1")
    quarantine = Quarantined(at=NOW - 3 * DAY, ref=gpu, reason="dirty")
    back = Returned(at=NOW - 2 * DAY, ref=gpu, by="ann")
    entry = one(of(quarantine, back, run_line(1, "n1", "r1", serials={"GPU-1": "S1"})), "gpu", "S1")
    assert (entry.taken_out, entry.returned, entry.failed) == (1, 1, 1)
    (entry,) = of(quarantine).entries
    assert entry.name == "GPU-1"
