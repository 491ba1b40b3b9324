"""Nodes, disks and trees as people see them: in `observe`, at the end of `plan`, and before and after in `apply`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gpukeeper.engine.outlook import PolicyHead
from gpukeeper.engine.view import observe_fleet
from gpukeeper.interfaces.cli import apply, observe, plan
from gpukeeper.interfaces.cli.apply import Progress
from gpukeeper.interfaces.cli.observe import change_in_words, node_row
from gpukeeper.interfaces.terminal import show
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.subject import Category, Gone, Ref, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.fleet import SubjectChange
from gpukeeper.views.plan import plan_view
from tests.unit.interfaces.workers import GIB, HOUR, POLICY, Workers, disk, node, session, tree

HEAD = PolicyHead("a test", POLICY.digest, POLICY.preset, POLICY.mode)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_a_node_says_its_bytes_its_disk_its_sessions_and_whether_it_works() -> None:
    labels = {"disk_size": str(100 * GIB), "sessions_live": "1", "sessions_dead": "3"}
    one = node("worker-1", 35 * GIB, 0.81, busy="2 tasks run", labels=labels)
    assert node_row(one) == (
        *("node", "ray/lab/worker-1", "35.0 GiB", "81% of 100 GiB (/)", "10%", "1 live, 3 dead", "2 tasks run"),
    )


def test_what_is_unknown_of_a_node_reports_it() -> None:
    one = node("worker-1", Unknown("du was silent"), busy=Unknown("Ray was silent"), disk=None, labels={})
    assert node_row(one) == ("node", "ray/lab/worker-1", "?", "?", "?", "-", "unknown: Ray was silent")


def test_a_disk_shows_how_full_it_is_and_nothing_of_work() -> None:
    assert node_row(disk("/", 0.81)) == ("disk", "host/node-3/", "-", "81% of 100 GiB", "-", "-", "-")


def test_observe_shows_nodes_in_a_table_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    one = session(Workers(node("worker-1", GIB), tree("/tmp/ray/session_1", "worker-1", Unknown("too many files"))))
    found = asyncio.run(observe_fleet(one.keeper, one.book))
    observe.print_view(observe.view_of(one, found, Narrow()), quiet=False)
    printed = capsys.readouterr()
    things, below = printed.out.split("\n\n")
    assert cells(things.splitlines()[1])[0] == "tree"
    assert "?" in cells(things.splitlines()[1]), "a size that is not known is no dash"
    assert cells(below.splitlines()[0])[:3] == ["KIND", "NAME", "TEMPORARY"]
    assert cells(below.splitlines()[1])[:3] == ["node", "ray/lab/worker-1", "1.0 GiB"]
    assert "2 objects" in printed.err


def test_a_plan_ends_with_what_lies_around_by_category(capsys: pytest.CaptureFixture[str]) -> None:
    """C10.9: total, keep and remove, with sizes."""
    one = session(
        Workers(
            node("worker-1"),
            tree("/tmp/ray/session_1", "worker-1", 3 * GIB),
            tree("/tmp/ray/session_2", "worker-1", GIB, unused=HOUR / 2),
            tree("/tmp/ray/session_3", "worker-1", Unknown("too many files"), in_use=True),
            tree("/results/a", "worker-1", 2 * GIB, category=Category.REPORT),
            tree(
                "/tmp/ray/session_4", "worker-1", Unknown("it lives", by_design=True), state=State.RUNNING, in_use=True
            ),
        )
    )
    reports = asyncio.run(plan.plans(one, Narrow()))
    view = plan_view(reports, HEAD)
    plan.print_plan(view, verbose=False)
    _, totals = capsys.readouterr().out.split("\n\n")
    assert [cells(line) for line in totals.splitlines()] == [
        ["TREES", "TOTAL", "KEEP", "REMOVE"],
        ["dead-session", "3 (4.0 GiB, 1 not measured)", "2 (1.0 GiB, 1 not measured)", "1 (3.0 GiB)"],
        ["report", "1 (2.0 GiB)", "1 (2.0 GiB)", "-"],
        ["live", "1", "1", "-"],
    ]
    show.as_json("plan", view)
    (place,) = msgspec.json.decode(capsys.readouterr().out)["places"]
    assert [entry["category"] for entry in place["trees"]] == ["dead-session", "report", "live"]
    assert place["trees"][0]["remove"] == {"number": 1, "bytes": 3 * GIB, "sized": 1, "unsized": 0}


def test_a_narrowed_plan_adds_up_what_was_requested(capsys: pytest.CaptureFixture[str]) -> None:
    here = Workers(node("worker-1"), tree("/tmp/ray/session_1", "worker-1"), tree("/tmp/ray/session_2", "worker-1"))
    (report,) = asyncio.run(plan.plans(session(here), Narrow(name="/tmp/ray/session_1")))
    assert [(one.category, one.total.number) for one in plan_view([report], HEAD).trees] == [("dead-session", 1)]
    assert [one.ref.name for one in report.survey.nodes] == ["worker-1"]


def test_the_size_of_a_tree_that_is_unknown_is_no_dash(capsys: pytest.CaptureFixture[str]) -> None:
    one = session(
        Workers(
            node("worker-1"),
            tree("/tmp/ray/session_1", "worker-1", Unknown("too many files")),
            tree("/tmp/ray/session_2", "worker-1", Unknown("it lives", by_design=True), in_use=True),
        )
    )
    plan.print_plan(plan_view(asyncio.run(plan.plans(one, Narrow())), HEAD), verbose=True)
    rows = [cells(line) for line in capsys.readouterr().out.split("\n\n")[0].splitlines()]
    assert {row[1].rpartition("/")[2]: row[4] for row in rows if "session" in row[1]} == {
        "session_1": "?",
        "session_2": "-",
    }


def test_a_plan_without_trees_says_nothing_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    one = session(Workers(node("worker-1")))
    plan.print_plan(plan_view(asyncio.run(plan.plans(one, Narrow())), HEAD), verbose=False)
    assert capsys.readouterr().out == ""


def applied(one: Any) -> list[apply.AppliedPass]:
    run = Progress(one.keeper, quiet=True)
    return asyncio.run(apply._apply(one, Narrow(), None, run, ask=False, again=False))


def test_apply_ends_with_before_and_after_of_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    """C10.1: before, after and saved for each worker."""
    one = session(
        Workers(
            node("worker-1", 35 * GIB, 0.81),
            node("worker-2", 4 * GIB, 0.30),
            tree("/tmp/ray/session_1", "worker-1", 17 * GIB),
            tree("/tmp/ray/session_2", "worker-1", 10 * GIB),
        )
    )
    done = applied(one)
    apply._print(one, done, json=False, quiet=True)
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "ray/lab/worker-1: 35.0 GiB -> 8.0 GiB temporary; disk /: 81% -> 54%; 27.0 GiB freed",
        "ray/lab/worker-2: 4.0 GiB -> 4.0 GiB temporary; disk /: 30% -> 30%",
        "ray/lab: 27.0 GiB freed",
    ]
    apply._print(one, done, json=True, quiet=True)
    (place,) = msgspec.json.decode(capsys.readouterr().out)["places"]
    assert place["bytes_back"] == 27 * GIB
    first = place["nodes"][0]
    assert (first["kind"], first["name"]) == ("node", "worker-1")
    assert (first["before"]["bytes"], first["after"]["bytes"]) == (35 * GIB, 8 * GIB)
    assert first["before"]["disk"]["used"] == 0.81


def test_where_nothing_was_done_nobody_looks_again(capsys: pytest.CaptureFixture[str]) -> None:
    one = session(Workers(node("worker-1", GIB)))
    done = applied(one)
    assert [change.after for change in done[0].nodes] == [None]
    apply._print(one, done, json=False, quiet=True)
    assert capsys.readouterr().out == ""


class Vanishing(Workers):
    """Nobody knows what became of its nodes."""

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        if ref.kind == "node":
            if ref.name == "worker-2":
                raise PlatformError("lab did not answer")
            return Gone(ref, self.there[ref.key].seen.at)
        return await super().read(ref)


def test_a_node_that_cannot_be_read_afterwards_is_not_empty(capsys: pytest.CaptureFixture[str]) -> None:
    one = session(
        Vanishing(node("worker-1", 2 * GIB), node("worker-2", GIB), tree("/tmp/ray/session_1", "worker-1", GIB))
    )
    done = applied(one)
    assert [str(change.after) for change in done[0].nodes] == [
        "unknown: it no longer exists",
        "unknown: lab did not answer",
    ]
    apply._print(one, done, json=False, quiet=True)
    out = capsys.readouterr().out
    assert "ray/lab/worker-1: 2.0 GiB -> ? temporary; disk /: 50% -> ?; 1.0 GiB freed" in out


def test_bytes_that_were_not_measured_are_not_in_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    one = session(Workers(node("worker-1"), tree("/tmp/ray/session_1", "worker-1", Unknown("too many files"))))
    apply._print(one, applied(one), json=False, quiet=True)
    assert "ray/lab: 0 B freed; size of 1 not measured" in capsys.readouterr().out


def test_a_disk_is_told_with_its_place() -> None:
    change = SubjectChange(disk("/", 0.81), disk("/", 0.64))
    assert change_in_words(change, 0) == "host/node-3: disk /: 81% -> 64%"
