"""`gpukeeper node quarantine|return|list --on kubernetes` on nodes in memory: what is printed, and the exit codes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gpukeeper.__main__ import app
from gpukeeper.acceptance.fleet.marks import DETAILS, LABEL, QUARANTINE, QUARANTINE_DETAILS, TAINT
from gpukeeper.model.errors import PlatformError
from gpukeeper.wiring import kubernetes
from tests.unit.acceptance.launchers.test_marks import Nodes


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Nodes:
    found = Nodes(20)
    monkeypatch.setenv("GPUKEEPER_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(kubernetes, "cluster_api", lambda options: found)
    monkeypatch.setattr(kubernetes, "lease_turn", lambda api: api.turn())
    return found


def node(*words: str) -> Result:
    return CliRunner().invoke(app, ["node", *words, "--on", "kubernetes"])


def as_json(*words: str) -> tuple[int, dict[str, Any]]:
    ran = node(*words, "--json")
    return ran.exit_code, json.loads(ran.stdout)


def test_a_plan_changes_nothing(nodes: Nodes) -> None:
    ran = node("quarantine", "n3", "--reason", "fans are loud", "--for", "7d")
    assert ran.exit_code == 0
    assert ran.stdout.splitlines()[1].split()[:2] == ["quarantine", "n3"]
    assert "fans are loud" in ran.stdout
    assert "Nothing was changed" in ran.output
    assert nodes.written == []


def test_a_node_is_quarantined_listed_and_returned(nodes: Nodes) -> None:
    before = copy.deepcopy(nodes.node("n3"))
    code, document = as_json("quarantine", "n3", "--reason", "fans are loud", "--apply")
    assert (code, document["schema"]) == (0, "gpukeeper/node-quarantine/v1")
    assert (document["nodes"][0]["quarantined"], nodes.out()) == (True, {"n3"})
    assert "unschedulable" not in nodes.node("n3")["spec"]
    _, listed = as_json("list")
    (found,) = [one for one in listed["nodes"] if one["quarantined"]]
    assert found["node"] == "n3"
    assert "fans are loud" in found["quarantine"]
    again = node("quarantine", "n3", "--apply")
    assert again.exit_code != 0
    assert "is quarantined already" in f"{again.output}{again.exception}"
    code, document = as_json("return", "n3", "--apply")
    assert (code, nodes.out()) == (0, set())
    after = copy.deepcopy(nodes.node("n3"))
    for one in (before, after):
        del one["metadata"]["resourceVersion"]
    assert {key: value for key, value in after["metadata"].items() if value} == before["metadata"]
    assert after["status"] == before["status"]
    assert after["spec"].get("taints", []) == []
    ran = node("return", "n3", "--apply")
    assert "is not quarantined" in f"{ran.output}{ran.exception}"


def test_marks_of_others_stay(nodes: Nodes) -> None:
    theirs = [{"key": "nvidia.com/gpu", "effect": "NoSchedule", "value": "present"}]
    nodes.node("n3")["spec"]["taints"] = copy.deepcopy(theirs)
    nodes.node("n3")["metadata"]["labels"] = {"team": "a"}
    node("quarantine", "n3", "--apply")
    assert len(nodes.node("n3")["spec"]["taints"]) == 2
    node("return", "n3", "--apply")
    assert nodes.node("n3")["spec"]["taints"] == theirs
    assert nodes.node("n3")["metadata"]["labels"] == {"team": "a"}


def test_not_more_than_the_limit(nodes: Nodes) -> None:
    nodes.node("n1")["spec"]["unschedulable"] = True
    nodes.node("n2")["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    ran = node("quarantine", "n3", "--apply")
    assert (ran.exit_code, nodes.written) == (3, [])
    assert "2 of 20 GPU nodes are out (1 cordoned, 1 not ready); at most 2 may be" in ran.stdout
    assert node("quarantine", "n3", "--apply", "--most", "3").exit_code == 0
    for index in range(4, 13):
        nodes.node(f"n{index}")["spec"]["unschedulable"] = True
    ran = node("quarantine", "n15", "--apply", "--share", "1")
    assert (ran.exit_code, "a common cause is likely" in ran.output) == (12, True)


def test_without_its_turn_nothing_is_written(nodes: Nodes) -> None:
    nodes.refused_turn = "another instance holds the lease"
    code, document = as_json("quarantine", "n3", "--apply")
    assert (code, nodes.written) == (3, [])
    assert document["nodes"][0]["deferred"] == "another instance holds the lease"


def test_a_failed_node_needs_force_and_a_confirmation(nodes: Nodes) -> None:
    meta = nodes.node("n3")["metadata"]
    meta["labels"] = {LABEL: "failed"}
    meta["annotations"] = {DETAILS: '{"run":"r1","at":"2026-01-04T12:00:00Z","verdict":"FAIL","code":"slow"}'}
    nodes.node("n3")["spec"]["taints"] = [{"key": TAINT, "value": "r1", "effect": "NoSchedule"}]
    ran = node("return", "n3", "--apply")
    assert (ran.exit_code, nodes.written) == (3, [])
    assert "its last acceptance failed (run r1, 2026-01-04 12:00Z, slow)" in ran.stdout
    ran = node("return", "n3", "--apply", "--force")
    assert "--force needs a confirmation" in f"{ran.output}{ran.exception}"
    assert nodes.written == []
    assert node("return", "n3", "--apply", "--force", "--yes").exit_code == 0
    assert nodes.out() == set()
    assert nodes.node("n3")["metadata"]["labels"] == {LABEL: "failed"}


def test_expired_returns_all_whose_time_is_over(nodes: Nodes) -> None:
    for index in range(2):
        node("quarantine", f"n{index}", "--apply", "--for", "1h")
    old = '{"by":"ann","at":"2026-01-04T12:00:00Z","until":"2026-01-05T12:00:00Z"}'
    nodes.node("n1")["metadata"]["annotations"][QUARANTINE_DETAILS] = old
    ran = node("list")
    assert "The time of 1 quarantines is over" in ran.output
    assert node("return", "--expired", "--apply").exit_code == 0
    assert nodes.out() == {"n0"}
    assert node("return", "--expired").exit_code == 0


def test_an_api_error_in_the_middle_is_said_and_the_next_call_completes_it(nodes: Nodes) -> None:
    def lost(name: str, what: str) -> None:
        if what == "status":
            raise PlatformError("no answer")

    nodes.after = lost
    code, document = as_json("quarantine", "n3", "--apply", "--reason", "x")
    assert code == 3
    assert "no answer" in document["nodes"][0]["deferred"] + document["nodes"][0]["problem"]
    nodes.after = lambda name, what: None
    assert node("quarantine", "n3", "--apply", "--reason", "x").exit_code == 0
    assert nodes.out() == {"n3"}
    assert nodes.node("n3")["metadata"]["labels"][QUARANTINE] == "yes"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["quarantine", "n77"], 'the cluster has no node "n77"'),
        (["quarantine", "n3", "--for", "soon"], "--for"),
        (["quarantine", "n3", "--for", "0s"], "--for"),
        (["return"], "Name one node, or use --expired"),
        (["return", "n3", "--expired"], "Name one node, or use --expired"),
    ],
)
def test_wrong_words_change_nothing(nodes: Nodes, words: list[str], why: str) -> None:
    ran = node(*words, "--apply")
    assert ran.exit_code != 0
    assert why in f"{ran.output}{ran.exception}"
    assert nodes.written == []


def test_another_engine_and_options_for_a_gpu_are_refused(nodes: Nodes) -> None:
    ran = CliRunner().invoke(app, ["node", "quarantine", "n3", "--on", "slurm"])
    assert "is not an engine" in f"{ran.output}{ran.exception}"
    ran = CliRunner().invoke(app, ["node", "quarantine", "0", "--apply", "--for", "7d"])
    assert "--apply, --for: only with --on ENGINE" in f"{ran.output}{ran.exception}"
    assert nodes.requests == 0
