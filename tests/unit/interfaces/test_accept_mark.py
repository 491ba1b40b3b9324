"""`gpukeeper accept mark` on reports of a real H200 and nodes in memory: what is printed, and the exit codes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from gpukeeper.__main__ import app
from gpukeeper.acceptance.reports.store import ReportFolder, folder_name, load_file
from gpukeeper.clients.kubernetes.api import NODES
from gpukeeper.model.gpu import Grade
from gpukeeper.wiring import kubernetes as kubernetes_module
from tests.unit.acceptance.launchers.test_marks import Nodes

EXAMPLE = Path(__file__).parents[3] / "examples" / "acceptance" / "h200-quick" / "report.json"
NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Nodes:
    found = Nodes(4)
    monkeypatch.setenv("GPUKEEPER_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(kubernetes_module, "cluster_api", lambda options: found)
    monkeypatch.setattr(kubernetes_module, "lease_turn", lambda api: api.turn())
    return found


def write(folder: Path, run: str, verdicts: dict[str, Grade], name: str = "", **fields: Any) -> None:
    measured = load_file(EXAMPLE)
    first = next(one for one in measured.findings if one.verdict is Grade.PASS and one.gpu is not None)
    failed = msgspec.structs.replace(first, verdict=Grade.FAIL, code="planted", message="planted")
    for node, verdict in verdicts.items():
        findings = tuple(failed if one is first and verdict is Grade.FAIL else one for one in measured.findings)
        machine = msgspec.structs.replace(measured.machine, node=node)
        changed = {"run": run, "node": node, "machine": machine, "verdict": verdict, "ended": NOW} | fields
        changed["started"] = NOW - (measured.ended - measured.started)
        report = msgspec.structs.replace(measured, findings=findings, **changed)
        ReportFolder(folder).write(report, name=name or folder_name(run, node))


def mark(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["accept", "mark", *words, "--report-dir", str(folder)])


def kubernetes(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    ran = mark(folder, *words, "--on", "kubernetes", "--json")
    return ran.exit_code, json.loads(ran.stdout)


ONE_FAILED = {"n0": Grade.PASS, "n1": Grade.FAIL, "n2": Grade.PASS}


def test_without_apply_it_prints_the_plan_and_changes_nothing(nodes: Nodes, tmp_path: Path) -> None:
    write(tmp_path, "r1", ONE_FAILED)
    ran = mark(tmp_path, "r1", "--on", "kubernetes", "--taint")
    assert ran.exit_code == 0
    (row,) = [line for line in ran.stdout.splitlines() if " n1 " in line]
    assert row.split()[:4] == ["failed", "n1", "add", "taint"]
    assert "Nothing was changed. To write the marks: add --apply" in ran.output
    assert nodes.written == []


def test_apply_writes_and_prints_what_is_there_afterwards(nodes: Nodes, tmp_path: Path) -> None:
    write(tmp_path, "r1", ONE_FAILED)
    code, document = kubernetes(tmp_path, "r1", "--apply", "--taint")
    assert code == 0
    found = {one["node"]: (one["acceptance"], one["tainted"]) for one in document["nodes"]}
    assert found == {"n0": ("passed", False), "n1": ("failed", True), "n2": ("passed", False)}
    assert nodes.out() == {"n1"}


def test_reports_that_were_collected_from_the_nodes_are_found(nodes: Nodes, tmp_path: Path) -> None:
    write(tmp_path / "r1" / "nodes", "r1", {"n1": Grade.FAIL}, name="n1")
    code, document = kubernetes(tmp_path, "r1", "--apply", "--taint")
    assert (code, [one["node"] for one in document["nodes"]], nodes.out()) == (0, ["n1"], {"n1"})


@pytest.mark.parametrize("words", [[], ["--no-taint"]])
def test_without_the_option_no_node_is_taken_out(nodes: Nodes, tmp_path: Path, words: list[str]) -> None:
    write(tmp_path, "r1", ONE_FAILED)
    code, document = kubernetes(tmp_path, "r1", "--apply", *words)
    assert (code, document["nodes"][1]["acceptance"], nodes.out()) == (0, "failed", set())


def test_a_run_that_did_not_test_the_gpus_changes_nothing(nodes: Nodes, tmp_path: Path) -> None:
    write(tmp_path, "r1", {"n1": Grade.FAIL}, interrupted=True)
    code, document = kubernetes(tmp_path, "r1", "--apply")
    assert (code, document["nodes"], nodes.written) == (3, [], [])
    assert document["plan"]["kept"] == [
        {"node": "n1", "why": "the run was interrupted: it says nothing about the GPUs"}
    ]


def test_beyond_the_limit_the_exit_code_is_3(nodes: Nodes, tmp_path: Path) -> None:
    nodes.node("n3")["spec"]["unschedulable"] = True
    write(tmp_path, "r1", ONE_FAILED)
    code, document = kubernetes(tmp_path, "r1", "--apply", "--taint")
    assert (code, document["nodes"][1]["deferred"]) == (3, "1 of 4 GPU nodes are out (1 cordoned); at most 1 may be")
    assert kubernetes(tmp_path, "r1", "--apply", "--taint", "--share", "0.5")[0] == 0
    assert nodes.out() == {"n1", "n3"}


def test_when_most_fail_the_exit_code_is_12(nodes: Nodes, tmp_path: Path) -> None:
    write(tmp_path, "r1", dict.fromkeys(ONE_FAILED, Grade.FAIL))
    ran = mark(tmp_path, "r1", "--on", "kubernetes", "--apply", "--taint", "--share", "1")
    assert (ran.exit_code, nodes.out()) == (12, set())
    assert "3 of 3 tested nodes failed" in ran.output


def test_another_run_whose_name_begins_the_same_is_not_marked(nodes: Nodes, tmp_path: Path) -> None:
    write(tmp_path, "r1", {"n0": Grade.PASS})
    write(tmp_path, "r1.5", {"n1": Grade.FAIL})
    assert [one["node"] for one in kubernetes(tmp_path, "r1", "--apply")[1]["nodes"]] == ["n0"]
    assert {node for node, _ in nodes.written} == {"n0"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["r1"], "is not an engine"),
        (["r1", "--on", "slurm"], "is not an engine"),
        (["r7", "--on", "kubernetes"], "No report of run r7"),
        (["twice", "--on", "kubernetes"], "has two reports of run twice for n0"),
    ],
)
def test_wrong_words_change_nothing(nodes: Nodes, tmp_path: Path, words: list[str], why: str) -> None:
    write(tmp_path, "r1", {"n0": Grade.PASS})
    write(tmp_path, "twice", {"n0": Grade.PASS})
    write(tmp_path, "twice", {"n0": Grade.FAIL}, name="twice.again")
    ran = mark(tmp_path, *words, "--apply")
    assert ran.exit_code != 0
    assert why in f"{ran.output}{ran.exception}"
    assert len(nodes.of(NODES)) == 4
    assert nodes.requests == 0
