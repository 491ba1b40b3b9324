"""`gpukeeper accept --on ENGINE` and what finds a run again, on the simulated engine.

C3.3, C4.1, C4.3
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.cli.fleet import Fleet
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

ON = ("--on", "simulated")
FAST = ("--option", "seconds=0")


def launched(fleet: Fleet, scripts: str, *more: str) -> tuple[int, dict[str, object]]:
    ran = fleet.run("accept", *ON, *FAST, "--option", f"scripts={scripts}", "--json", *more)
    assert ran.out, ran.err
    return ran.code, ran.json()


def test_a_run_over_many_nodes_is_collected_written_and_removed(fleet: Fleet) -> None:
    """C4.1: one report for each node and one of the run, on disk; nothing is left on the engine."""
    ran = fleet.run("accept", *ON, *FAST, "--option", "scripts=pass,fail,evicted,lost-log")
    assert ran.code == 5, ran.out + ran.err
    folder = Path(next(line for line in ran.out.splitlines() if line.startswith("Report: ")).removeprefix("Report: "))
    names = {"run.json", "fleet.json", "fleet.html", "nodes.csv", "gpus.csv", "junit.xml", "nodes"}
    assert {path.name for path in folder.iterdir()} == names
    assert {path.name for path in (folder / "nodes").iterdir()} == {"sim-01", "sim-02"}
    assert "[evicted] It is gone without a report." in ran.out
    assert "Its termination message says" in ran.out
    assert "nothing of the run is left" in ran.out
    assert fleet.run("accept", "list", *ON, "--json").json()["runs"] == []
    shown = fleet.run("accept", "show", folder.name)
    assert "2 without a report (sim-03, sim-04)" in shown.out
    listed = fleet.run("accept", "list").out
    assert folder.name in listed
    assert "4 nodes" in listed


def test_the_files_of_older_kits_come_back_from_every_node(fleet: Fleet) -> None:
    """C4.1: a summary for each node."""
    _, told = launched(fleet, "pass,fail,pass", "--together", "--legacy", "--report-name", "node.json")
    folder = Path(str(told["report_folder"])) / "nodes"
    for name in ("sim-01", "sim-02", "sim-03"):
        summary = json.loads((folder / name / "node.json").read_text())
        assert {"env", "gpu_tests", "ddp_tests", "ddp_train"} <= set(summary)
        assert (folder / name / "gpu_tests_result.json").is_file()


def test_an_interruption_collects_and_removes_and_each_node_has_its_reason(fleet: Fleet) -> None:
    """C3.3: a summary comes in any case."""
    program = fleet.start("accept", *ON, *FAST, "--option", "scripts=wait,hang,pass", "--json")
    assert program.stderr is not None
    for line in program.stderr:
        if "sim-03: INCONCLUSIVE" in line:
            break
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == 130, err
    told = json.loads(out)
    assert [one["code"] for one in told["missing"]] == ["interrupted", "interrupted"]
    assert "maintenance=true:NoSchedule" in told["missing"][0]["reason"]
    assert told["interrupted"]
    assert told["removal"]["left"] == []


def test_a_run_whose_launcher_is_gone_is_found_by_its_id(fleet: Fleet) -> None:
    """C4.3: list, show, logs, fetch and remove ask the engine itself."""
    code, told = launched(fleet, "pass,pass", "--keep-objects")
    run = str(told["run"])
    assert (code, told["removal"]) == (5, None)
    [there] = fleet.run("accept", "list", *ON, "--json").json()["runs"]
    assert (there["run"], there["nodes"], there["objects"]) == (run, {"ended": 2}, 2)
    assert "sim-01" in fleet.run("accept", "show", run, *ON).out
    logs = fleet.run("accept", "logs", run, *ON).out
    assert logs == "sim-01: [ENV] sim-01: 8 simulated GPUs\nsim-02: [ENV] sim-02: 8 simulated GPUs\n"
    elsewhere = fleet.folder.parent / "elsewhere"
    fetched = fleet.run("accept", "fetch", run, *ON, "--report-dir", str(elsewhere), "--json").json()
    assert [one["node"] for one in fetched["fleet"]["nodes"]] == ["sim-01", "sim-02"]
    assert (elsewhere / run / "nodes" / "sim-02" / "report.json").is_file()
    removed = fleet.run("accept", "remove", run, *ON, "--json").json()
    assert len(removed["removal"]["removed"]) == 2
    again = fleet.run("accept", "remove", run, *ON)
    assert (again.code, "has nothing of run" in again.err) == (2, True)


def test_a_run_past_its_deadline_is_collected_and_removed_by_the_next_one(fleet: Fleet) -> None:
    """C3.3: its launcher was killed before it collected anything."""
    _, told = launched(fleet, "pass,pass", "--keep-objects")
    run, folder = str(told["run"]), Path(str(told["report_folder"]))
    shutil.rmtree(folder)
    for path in (fleet.state / "simulated-engine").iterdir():
        made = json.loads(path.read_text())
        made["spec"]["created"] = "2026-01-01T00:00:00Z"
        path.write_text(json.dumps(made))
    other = fleet.run("accept", *ON, *FAST, "--option", "scripts=pass", "--owner", "eve")
    assert f"To remove it: gpukeeper accept remove {run} --on simulated" in other.err, "of another owner it stays"
    mine = fleet.run("accept", *ON, *FAST, "--option", "scripts=pass")
    assert f"Run {run} was left behind, past its deadline: removed 2 objects; 2 reports are in {folder}" in mine.err
    assert (folder / "nodes" / "sim-02" / "report.json").is_file()
    assert fleet.run("accept", "list", *ON, "--json").json()["runs"] == []


def test_the_state_directory_is_private_whichever_command_creates_it(fleet: Fleet) -> None:
    """Later commands refuse one that others can read."""
    _, told = launched(fleet, "pass", "--keep-objects", "--report-dir", str(fleet.folder.parent / "elsewhere"))
    assert oct(fleet.state.stat().st_mode & 0o7777) == "0o700"
    engine = (fleet.state / "simulated-engine").rename(fleet.folder.parent / "engine")
    fleet.state.rmdir()
    launched(fleet, "pass")
    assert oct(fleet.state.stat().st_mode & 0o7777) == "0o700"
    shutil.rmtree(fleet.state)
    fleet.state.mkdir(mode=0o755)
    engine.rename(fleet.state / "simulated-engine")
    refused = fleet.run("accept", *ON, *FAST, "--option", "scripts=pass")
    assert (refused.code, "chmod 700" in refused.err) == (1, True), refused.err
    assert not (fleet.state / "reports").exists()
    fetched = fleet.run("accept", "fetch", str(told["run"]), *ON)
    assert (fetched.code, "chmod 700" in fetched.err) == (1, True), fetched.err


def test_a_report_directory_that_cannot_be_written_is_named(fleet: Fleet) -> None:
    (fleet.folder.parent / "file").touch()
    ran = fleet.run("accept", *ON, *FAST, "--option", "scripts=pass", "--report-dir", f"{fleet.folder.parent}/file/in")
    assert (ran.code, "run.json could not be written" in ran.err) == (1, True), ran.err


def test_render_starts_nothing(fleet: Fleet) -> None:
    ran = fleet.run("accept", *ON, "--nodes", "sim-01", "--render", "--check", "gemm", "--gpus-per-node", "4")
    assert ran.code == 0
    assert ran.out.startswith("sim-01: GPUKEEPER_GROUP_SIZE=1 GPUKEEPER_NODE=sim-01 gpukeeper accept --report-to-log ")
    assert ran.out.endswith(" --expect 4 --check gemm\n")
    assert fleet.run("accept", "list", *ON, "--json").json()["runs"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "kube"), "unknown engine."),
        ((*ON, "--nodes", "gpu-9"), "--nodes gpu-9: unknown node. Nothing was started."),
        ((*ON, "--nodes", "rack=99"), "no node was selected"),
        ((*ON, "--check", "gem"), 'unknown check "gem"'),
        ((*ON, "--timeout", "5"), "--timeout"),
        ((*ON, "--option", "x"), "write it like KEY=VALUE"),
        ((*ON, "--option", "node=3"), 'Did you mean "nodes"?'),
        ((*ON, "--self-test"), "--self-test: not with --on. Nothing was started."),
        ((*ON, "--legacy", "--report-name", "report.json"), "not a plain file name"),
        (("--nodes", "all", "--keep-objects"), "--nodes, --keep-objects: only with --on ENGINE"),
        (("show", "r-1", *ON), "simulated has nothing of run r-1. Runs there: none."),
    ],
)
def test_refused_before_anything_is_started(fleet: Fleet, words: tuple[str, ...], said: str) -> None:
    ran = fleet.run("accept", *words)
    assert (ran.code, said in ran.err) == (2, True), ran.err


def test_a_group_that_fails_starts_the_search_and_the_bad_node_is_named(fleet: Fleet) -> None:
    """A node that passes alone and hangs with every partner. A simulation itself is INCONCLUSIVE."""
    code, told = launched(fleet, "pass,pass,bad-network,pass,pass", "--together")
    assert code == 5
    reasons = {one["node"]: one["reason"] for one in told["fleet"]["nodes"]}  # type: ignore[index]
    named = "Result of the checks: FAIL. The search names node sim-03: node sim-03 failed with"
    assert [name for name, words in reasons.items() if named in words] == ["sim-03"]
    assert [name for name, words in reasons.items() if "checks: FAIL" in words] == ["sim-03"]
    path = Path(str(told["report_folder"])) / "nodes" / "sim-01" / "report.json"
    jobs = json.loads(path.read_text())["group"]["jobs"]
    assert "first pairing: inside the leaf" in {one["why"] for one in jobs}
    assert told["removal"]["left"] == []  # type: ignore[index]


def test_a_group_in_which_a_node_never_comes_names_it_and_is_not_searched(fleet: Fleet) -> None:
    code, told = launched(fleet, "pass,pass,evicted", "--together")
    assert code == 5
    reasons = {one["node"]: one["reason"] for one in told["fleet"]["nodes"]}  # type: ignore[index]
    assert sorted(reasons) == ["sim-01", "sim-02"]
    assert all("node 2 (index 2 of 3) did not connect within" in words for words in reasons.values()), reasons
