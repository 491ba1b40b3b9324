"""What `plan`, `apply` and `workload list` show, as values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from gpukeeper.engine.observe import Counts, Survey, TreeCount
from gpukeeper.engine.outlook import Outlooks, PlaceOutlook, PolicyHead
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.terminal.show import decision_row
from gpukeeper.model.decision import Action, Decision, Plan, Step, Unseen, Verdict
from gpukeeper.model.policy import Mode, Policy
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.plan import (
    applied_summary,
    applied_view,
    daemon_plan_notes,
    daemon_plan_summary,
    daemon_plan_view,
    kept_summary,
    notes,
    plan_view,
    summary,
    workloads_view,
)
from tests.unit.lifecycle.examples import HOUR, NOW, decision

HEAD = PolicyHead("policy.yaml", "d1", "development", Mode.ENFORCE)
UNKNOWN = Unknown("too many files")


def kept(number: int, verdict: Verdict = Verdict.WAIT, **more: Any) -> Decision:
    return decision(number, Action.KEEP, verdict=verdict, **more)


def report(*decisions: Decision, place: str = "node-3", **facts: Any) -> PassReport:
    platform: Any = SimpleNamespace(name="docker", place=place)
    given = dict(facts.pop("survey", {}))
    counts = Counts(seen=len(decisions), trees=given.pop("trees", {}))
    survey = Survey(platform, NOW, decisions=list(decisions), counts=counts, **given)
    steps = tuple(Step(f"s{n}", one) for n, one in enumerate(survey.due))
    return PassReport(1, survey, facts.pop("plan", Plan("d1", NOW, steps)), **facts)


def test_a_plan_lists_what_is_due_and_reported_and_with_kept_everything() -> None:
    due, reported, waits = decision(1), kept(2, Verdict.REPORT), kept(3)
    view = plan_view([report(waits, due), report(reported, place="node-4")], HEAD)
    assert (view.due, view.kept) == ([due], [waits, reported])
    assert view.listed(kept=False) == [due, reported]
    assert view.listed(kept=True) == [due, waits, reported]
    assert view.places[0].steps == (due,)


def test_trees_are_added_up_over_places_by_category_with_what_was_not_measured() -> None:
    here = {("report", False): TreeCount(1, 5, 1), ("dead-session", True): TreeCount(2, 10, 2)}
    there = {("dead-session", False): TreeCount(1, 0, 0, 1), ("report", True): TreeCount()}
    view = plan_view([report(survey={"trees": here}), report(survey={"trees": there})], HEAD)
    assert [(one.category, one.total.number, one.keep.number, one.remove.number) for one in view.trees] == [
        ("dead-session", 3, 1, 2),
        ("report", 1, 1, 0),
    ]
    assert view.trees[0].total == TreeCount(3, 10, 2, 1)


def test_the_summary_shows_how_much_is_due_kept_and_by_which_policy() -> None:
    view = plan_view([report(decision(1), kept(2), kept(3), kept(4, Verdict.PROTECT))], HEAD)
    assert summary(view, "gpukeeper apply") == (
        "1 due; 3 kept: 2 waiting, 1 protected. To apply: gpukeeper apply\n"
        "Policy: policy.yaml (development, mode enforce)."
    )
    planning = msgspec.structs.replace(view, policy=msgspec.structs.replace(HEAD, mode=Mode.PLAN))
    assert "the policy's mode is plan. To apply: gpukeeper apply" in summary(planning, "gpukeeper apply")
    unseen = plan_view([report(kept(1), survey={"unseen": [Unseen("pods", "silent")]})], HEAD)
    assert summary(unseen, "").startswith("Nothing is due of what could be read; 1 kept")
    nothing = report()
    nothing.survey.counts.seen = 5
    assert "No objects match the filters" in summary(plan_view([nothing], HEAD), "")
    assert kept_summary([]) == "0 kept"


def test_the_notes_say_a_pause_once_for_all_places() -> None:
    broken = Plan("d1", NOW, (), breaker="The breaker is open.")
    reports = [
        report(kept(1, complaints=("two owners",)), paused="ann"),
        report(decision(2), place="node-4", paused="ann", plan=broken, leased="Another pass is at work."),
    ]
    assert list(notes(reports, Policy())) == [
        "needs an admin: docker/node-3/job-1: two owners",
        "Another pass is at work.",
        "The breaker is open. To allow it once: gpukeeper apply --budget 1",
        "All actions are paused: ann. Resume with: gpukeeper resume",
    ]


def test_what_a_daemon_tells_is_the_same_view() -> None:
    place = PlaceOutlook(
        platform="docker",
        place="node-3",
        at=NOW - HOUR,
        seen=2,
        running=1,
        unseen=(),
        breaker=None,
        decisions=(decision(1), kept(2)),
        left_out=3,
    )
    found = Outlooks(now=NOW, policy=HEAD, paused="ann", places=(place,), who="bob", admin=False)
    view = daemon_plan_view(found)
    assert (view.places[0].steps, view.places[0].trees, view.places[0].paused) == ((decision(1),), (), "ann")
    assert daemon_plan_summary(view).startswith("1 due; 1 kept: 1 waiting.\nPolicy: policy.yaml")
    assert list(daemon_plan_notes(found)) == [
        "docker/node-3: 3 more objects are not listed.",
        "docker/node-3: from the daemon's pass 1h ago.",
        "All actions are paused: ann.",
        "To see the reasons, for work of bob only: gpukeeper explain WORKLOAD",
    ]


def test_a_workload_in_a_line() -> None:
    row = decision_row(kept(1, Verdict.UNKNOWN, owner="", gpus=2, size=UNKNOWN))
    assert (row[0], *row[2:4]) == ("unknown", "-", "2 GPUs")
    assert decision_row(decision(1))[0] == "remove"
    assert decision_row(kept(1, size=UNKNOWN))[3] == "-"
    assert decision_row(kept(1, rule="temporary_tree", size=UNKNOWN))[3] == "?", "of a tree its bytes matter"
    ended = kept(1, gpus=2, size=3 * 1024**2)
    assert decision_row(ended)[3] == "2 GPUs, 3.0 MiB", "what its removal gives back"
    assert decision_row(msgspec.structs.replace(ended, running=True))[3] == "2 GPUs"
    gpu = msgspec.structs.replace(decision(1).seen.ref, kind="gpu")
    device = msgspec.structs.replace(decision(1), seen=msgspec.structs.replace(decision(1).seen, ref=gpu))
    assert workloads_view([device, decision(2)], Mode.PLAN).decisions == (decision(2),)


def test_what_was_applied_names_its_pass_as_documented() -> None:
    view = applied_view([(report(decision(1)), [])], HEAD)
    (place,) = msgspec.to_builtins(view)["places"]
    assert (place["pass"], place["bytes_back"], place["nodes"]) == (1, 0, ())
    assert applied_summary([report(decision(1))]) == "Nothing was done."
