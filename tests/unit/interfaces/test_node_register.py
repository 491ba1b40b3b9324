"""`gpukeeper node register`, the ledger lines of marks, and the settings of the policy, on nodes in memory."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gpukeeper.__main__ import app
from gpukeeper.acceptance.fleet.collect import Collected, run_report
from gpukeeper.acceptance.fleet.launcher import RunSpec, Target
from gpukeeper.acceptance.launchers.story import RunArchive
from gpukeeper.ledger.archive import rotate
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.event import NodeMarked
from gpukeeper.model.gpu import Grade
from gpukeeper.model.policy import LedgerKeep
from gpukeeper.wiring import kubernetes
from tests.unit.acceptance.launchers.test_marks import Nodes
from tests.unit.interfaces.test_accept_mark import NOW, write

SCOPE = "scope: {kubernetes: {namespaces: [research]}}\n"


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Nodes:
    found = Nodes(20)
    for index in range(20):
        found.node(f"n{index}")["status"]["nodeInfo"] = {"systemUUID": f"machine-{index}"}
    monkeypatch.setenv("GPUKEEPER_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(kubernetes, "cluster_api", lambda options: found)
    monkeypatch.setattr(kubernetes, "lease_turn", lambda api: api.turn())
    return found


def gpukeeper(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def quarantine(*words: str) -> Result:
    return gpukeeper("node", "quarantine", *words, "--on", "kubernetes", "--apply")


def back(*words: str) -> Result:
    return gpukeeper("node", "return", *words, "--on", "kubernetes", "--apply")


def lines(tmp_path: Path) -> list[NodeMarked]:
    ledger = open_ledger(tmp_path / "state" / "ledger.db", write=False)
    try:
        found = asyncio.run(ledger.lines(LineFilter(last=None)))
    finally:
        ledger.close()
    return [line for _, line in found if isinstance(line, NodeMarked)]


def entries(*words: str) -> dict[str, dict[str, Any]]:
    document = json.loads(gpukeeper("node", "register", *words, "--json").stdout)
    assert document["schema"] == "gpukeeper/node-register/v1"
    return {one["name"]: one for one in document["entries"]}


def test_before_and_after_each_change_there_is_a_line(nodes: Nodes, tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    def look(node: str, what: str) -> None:
        with ThreadPoolExecutor(1) as beside:  # here a loop runs already
            seen.extend((one.action, one.result) for one in beside.submit(lines, tmp_path).result())

    nodes.before = look
    assert quarantine("n3", "--reason", "loud fans", "--for", "7d").exit_code == 0
    assert seen[0] == ("quarantine", "begun")
    nodes.before = lambda node, what: None
    assert back("n3", "--reason", "new fans").exit_code == 0
    found = lines(tmp_path)
    assert [(one.action, one.result, one.out) for one in found] == [
        ("quarantine", "begun", False),
        ("quarantine", "done", True),
        ("return", "begun", False),
        ("return", "done", False),
    ]
    assert (found[1].machine, found[1].reason, found[3].reason) == ("machine-3", "loud fans", "new fans")
    assert found[1].until is not None
    assert (found[0].step == found[1].step, found[1].step == found[2].step) == (True, False)
    listed = gpukeeper("ledger", "list", "--workload", "n3")
    assert "loud fans" in listed.stdout
    assert f"quarantine by {found[0].by}" in listed.stdout


def test_a_machine_that_is_taken_out_again_and_again_is_named(nodes: Nodes) -> None:
    for _ in range(2):
        quarantine("n3", "--reason", "loud fans")
        assert "was taken out" not in back("n3").output
    nodes.node("n9")["status"]["nodeInfo"] = {"systemUUID": "machine-3"}
    ran = quarantine("n9")
    assert "machine machine-3 was taken out 3 times in 90d" in ran.output
    assert "machine machine-3 was taken out 3 times" in gpukeeper("node", "register").output
    entry = entries("machine-3")["machine-3"]
    assert (entry["taken_out"], entry["returned"], entry["nodes"]) == (3, 2, ["n9", "n3"])
    shown = gpukeeper("node", "register", "n9").stdout
    assert shown.count("taken out") == 3
    assert "loud fans" in shown
    planned = json.loads(gpukeeper("node", "return", "n9", "--on", "kubernetes", "--json").stdout)
    assert planned["warnings"] == ["machine machine-3 was taken out 3 times in 90d"]


def test_a_failed_run_is_in_the_register_of_the_gpu_and_the_machine(nodes: Nodes, tmp_path: Path) -> None:
    write(tmp_path, "r1", {"n0": Grade.PASS, "n1": Grade.FAIL, "n2": Grade.PASS})
    words = ("accept", "mark", "r1", "--on", "kubernetes", "--apply", "--report-dir", str(tmp_path))
    assert gpukeeper(*words).exit_code == 0
    assert [(one.action, one.result, one.run) for one in lines(tmp_path)] == [
        ("label", "begun", "r1"),
        ("label", "done", "r1"),
    ]
    assert gpukeeper(*words, "--taint").exit_code == 0
    found = entries()
    (gpu,) = [one for one in found.values() if one["kind"] == "gpu"]
    for one in (gpu, found["machine-1"]):
        assert (one["failed"], one["taken_out"], one["nodes"]) == (1, 1, ["n1"])
        assert one["events"][0]["run"] == "r1"
    assert len(found) == 2


def test_an_empty_register_and_an_unknown_name(nodes: Nodes) -> None:
    ran = gpukeeper("node", "register")
    assert (ran.exit_code, ran.stdout.count("\n") <= 1) == (0, True)
    assert "The ledger has no failed acceptance runs" in ran.output
    ran = gpukeeper("node", "register", "S77")
    assert ran.exit_code != 0
    assert 'the register has nothing about "S77"' in f"{ran.output}{ran.exception}"


def collect(state: Path, run: str, verdicts: dict[str, Grade], engine: str = "kubernetes") -> Path:
    """As `accept fetch` does: the report of each node, and that of the run."""
    state.mkdir(mode=0o700, exist_ok=True)
    archive = RunArchive(state / "reports", run)
    targets = tuple(Target(node=node) for node in verdicts)
    spec = RunSpec(run=run, owner="ann", created=NOW, engine=engine)
    archive.begin(spec, targets)
    write(archive.nodes.path, run, verdicts)
    archive.finish(run_report(Collected(spec, targets, reports=archive.reports(run)), NOW))
    return archive.path


def test_a_run_that_was_collected_and_never_marked_is_listed_so(nodes: Nodes, tmp_path: Path) -> None:
    collect(tmp_path / "state", "r1", {"n0": Grade.PASS, "n1": Grade.FAIL})
    collect(tmp_path / "state", "r2", {"n2": Grade.FAIL}, engine="simulated")
    found = entries()
    (gpu,) = [one for one in found.values() if one["kind"] == "gpu"]
    assert {one["name"] for one in found.values()} == {"n1", gpu["name"]}
    for one in found.values():
        assert (one["failed"], one["not_marked"], one["taken_out"]) == (1, 1, 0)
        assert [(event["what"], event["run"], event["by"]) for event in one["events"]] == [
            ("failed, not marked", "r1", "ann")
        ]
    assert "1 (1 not marked)" in gpukeeper("node", "register").stdout
    words = ("accept", "mark", "r1", "--on", "kubernetes", "--apply")
    assert gpukeeper(*words).exit_code == 0
    marked = entries()["machine-1"]
    assert (marked["failed"], marked["not_marked"]) == (1, 0)


def test_lines_that_the_ledger_has_archived_are_read(nodes: Nodes, tmp_path: Path) -> None:
    quarantine("n3", "--reason", "loud fans")
    ledger = open_ledger(tmp_path / "state" / "ledger.db", write=True)
    try:
        later = datetime.now(UTC) + timedelta(days=3)
        assert asyncio.run(rotate(ledger, LedgerKeep(archive_after=timedelta(days=1)), later)).lines
    finally:
        ledger.close()
    assert lines(tmp_path) == []
    assert entries()["machine-3"]["taken_out"] == 1
    (archive,) = (tmp_path / "state" / "archive").iterdir()
    archive.write_bytes(archive.read_bytes()[:-20])
    (collect(tmp_path / "state", "r1", {"n1": Grade.FAIL}) / "fleet.json").write_text("{")
    ran = gpukeeper("node", "register")
    assert (ran.exit_code, ran.output.count("The register is not complete")) == (3, 2)
    assert len(json.loads(gpukeeper("node", "register", "--json").stdout)["unread"]) == 2
    assert "These nodes may have been taken out more often" in quarantine("n4").output


def test_a_state_path_that_is_a_file_is_an_error(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file, not a directory")
    ran = gpukeeper("node", "register")
    assert isinstance(ran.exception, LedgerError)
    assert f"{tmp_path / 'state'} is not a directory" in str(ran.exception)
    assert "GPUKEEPER_STATE" in str(ran.exception)


def test_without_a_ledger_nothing_is_changed(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file, not a directory")
    ran = quarantine("n3")
    assert ran.exit_code != 0
    assert "Nothing was changed on the cluster" in f"{ran.output}{ran.exception}"
    assert nodes.written == []


@pytest.mark.parametrize("good", [0, 1])
def test_a_ledger_that_cannot_be_written(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    """Before the change: it is not made. After it: the output says which node was changed, and the exit code is 3."""
    real, left = SqliteLedger.append, [good]

    async def full(ledger: SqliteLedger, given: Any) -> None:
        if not left[0]:
            raise LedgerError("The disk is full.")
        left[0] -= 1
        await real(ledger, given)

    monkeypatch.setattr(SqliteLedger, "append", full)
    ran = quarantine("n3")
    words = f"{ran.output}{ran.exception}"
    assert "The disk is full." in words
    if good:
        assert (ran.exit_code, nodes.out()) == (3, {"n3"})
        assert "The nodes were changed (n3), but the result is not in the ledger" in words
        assert [event["what"] for event in entries()["n3"]["events"]] == ["interrupted"]
    else:
        assert ran.exit_code not in (0, 3)
        assert (nodes.written, lines(tmp_path)) == ([], [])


def test_the_policy_has_the_defaults_and_options_win(nodes: Nodes, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"{SCOPE}acceptance:\n  marks:\n    taint: true\n    max_out: 3\n    repeats: 1\n")
    policy.chmod(0o600)
    write(tmp_path, "r1", {f"n{index}": Grade.FAIL if index < 4 else Grade.PASS for index in range(12)})
    mark = ("accept", "mark", "r1", "--on", "kubernetes", "--report-dir", str(tmp_path), "--policy", str(policy))
    assert gpukeeper(*mark).output.count("add taint") == 3
    assert gpukeeper(*mark, "--most", "1").output.count("add taint") == 1
    assert gpukeeper(*mark, "--no-taint").output.count("add taint") == 0
    ran = quarantine("n15", "--policy", str(policy))
    assert "machine machine-15 was taken out once in 90d" in ran.output


@pytest.mark.parametrize("value", ["200%", "-1", "{share: 2}", "many"])
def test_a_limit_that_is_none_is_refused(nodes: Nodes, tmp_path: Path, value: str) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"{SCOPE}acceptance:\n  marks:\n    max_out: {value}\n")
    ran = quarantine("n3", "--policy", str(policy))
    assert ran.exit_code != 0
    assert "max_out" in f"{ran.output}{ran.exception}"
    assert nodes.written == []


def test_a_policy_that_others_can_change_is_not_applied(nodes: Nodes, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"{SCOPE}acceptance:\n  marks:\n    max_out: 100%\n")
    policy.chmod(0o666)
    ran = quarantine("n3", "--policy", str(policy))
    assert "A policy that other users can change is not applied" in f"{ran.output}{ran.exception}"
    assert nodes.written == []
