"""`gpukeeper accept` as a user types it: text, JSON, exit codes, files. On simulated GPUs, or without any.

C1.1, C2.1, C4.1, C4.2, C4.4, C17.2
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpukeeper.ledger.journal import lease_name
from tests.cli.fleet import Fleet
from tests.engines import has_gpu
from tests.patience import PATIENCE
from tests.unit.acceptance.reports import altered

pytestmark = pytest.mark.slow

SIMULATED = ("accept", "--device", "simulated")
SMALL = (*SIMULATED, "--ranks", "3", "--check", "gemm,exact")
VIEWS = {
    *("report.json", "samples.json", "report.html", "results.csv", "junit.xml", "metrics.prom", "MANIFEST.sha256"),
}
no_gpu_here = pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")


def test_a_clean_machine_passes_but_a_simulation_accepts_no_node(fleet: Fleet) -> None:
    """B5: every GPU is good, and the exit code is none that a script would take for an accepted machine."""
    ran = fleet.run(*SIMULATED, "--expect", "8")
    assert ran.code == 5, ran.out + ran.err
    for tag in ("[ENV]", "[RUN]", "[COMPUTE]", "[TRAIN]", "[DDP]", "[SUMMARY]"):
        assert tag in ran.out
    last = ran.out.split("[RESULT] ")[1]
    assert [line.split()[:3] for line in last.splitlines() if line.startswith("PASS     GPU")] == [
        ["PASS", "GPU", str(number)] for number in range(8)
    ]
    assert "This was a simulation, so no GPU was tested. Result of the checks: PASS." in last
    assert "Not tested yet; --within 5m adds:" in last
    folder = Path(next(line for line in last.splitlines() if line.startswith("Report: ")).removeprefix("Report: "))
    assert {path.name for path in folder.iterdir()} == VIEWS


def test_fewer_gpus_than_expected_is_a_fail(fleet: Fleet) -> None:
    """C1.1: the expected count is an input."""
    for ran in (fleet.run(*SMALL, "--expect", "4"), fleet.run(*SMALL, GPUKEEPER_EXPECT="4")):
        assert "[RESULT] FAILURE: node gpus-missing\n" in ran.out
        assert "Result of the checks: FAIL." in ran.out
    assert "Result of the checks: WARN." in fleet.run(*SMALL, "--expect", "2").out


@no_gpu_here
def test_without_a_gpu_it_is_inconclusive_and_teaches(fleet: Fleet) -> None:
    """C17.2, C2.1: the old kit ended in exit 0."""
    ran = fleet.run("accept")
    assert ran.code == 5
    assert "No GPU is visible from here." in ran.out
    assert "--gpus all" in ran.out
    assert "not tested: gemm, memory_bandwidth" in ran.out
    assert ran.out.splitlines()[-2].startswith("INCONCLUSIVE  ")
    assert fleet.run("accept", "--expect", "8").code == 4
    lines = fleet.lines("acceptance")
    assert [(one["verdict"], one["device"]) for one in lines] == [("INCONCLUSIVE", "cuda"), ("FAIL", "cuda")]
    assert Path(lines[0]["report"], "report.json").is_file()


@no_gpu_here
def test_without_torch_it_shows_how_to_get_it(fleet: Fleet, tmp_path: Path) -> None:
    ran = fleet.run("accept", "--device", "cpu", PATH=str(tmp_path))
    assert ran.code == 5
    assert ran.out.count("pip install '.[accept]'") == 1, ran.out
    assert ran.out.count("--python") == 1
    assert "[RESULT] SKIPPED: not accepted, INCONCLUSIVE: " in ran.out


def test_a_simulation_is_in_no_ledger(fleet: Fleet) -> None:
    fleet.run(*SMALL)
    assert fleet.lines("acceptance") == []


def test_json_is_one_document_and_talk_is_elsewhere(fleet: Fleet) -> None:
    ran = fleet.run(*SMALL, "--json")
    assert ran.code == 5
    told = ran.json()
    assert (told["schema"], told["verdict"], told["device"]) == ("gpukeeper/acceptance/v1", "INCONCLUSIVE", "simulated")
    assert "[COMPUTE] PASS 3 GPUs gemm.bf16" in ran.err
    whole = json.loads(Path(told["report_folder"], "report.json").read_text())
    assert whole["findings"] == told["findings"]


def test_verbose_shows_every_finding(fleet: Fleet) -> None:
    short, long = fleet.run(*SMALL), fleet.run(*SMALL, VERBOSE="1")
    assert "[COMPUTE] PASS 3 GPUs gemm.bf16" in short.out
    assert "[COMPUTE] PASS 3 GPUs gemm.bf16" not in long.out
    for number in range(3):
        assert f"[COMPUTE] PASS GPU {number} gemm.bf16" in long.out


def test_verbose_shows_with_which_parameters_a_probe_is_started(fleet: Fleet) -> None:
    long = fleet.run(*SMALL, "--verbose")
    assert "[MUL] gemm dtypes=['fp32'" in long.out
    assert "[MUL]" not in fleet.run(*SMALL).out


def test_only_some_gpus(fleet: Fleet) -> None:
    told = fleet.run(*SIMULATED, "--gpus", "1,3", "--check", "exact", "--json").json()
    assert len(told["tallies"]) == 2
    ran = fleet.run(*SIMULATED, "--gpus", "9")
    assert (ran.code, "--gpus 9: GPU not found. Nothing was run." in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--check", "gem"), 'unknown check "gem". Did you mean "gemm"?'),
        (("--skip", "gem"), 'unknown check "gem"'),
        (("--set", "training.epochs=1"), "cannot show that the loss falls"),
        (("--set", "training.epoch=2"), 'Did you mean "epochs"?'),
        (("--within", "5"), '--within: "5" is not a duration'),
        (("--within", "1s"), "too short"),
        (("--quick", "--full"), "cannot be combined"),
        (("--device", "tpu"), '--device "tpu" is not a valid value'),
        (("--device", "gpu"), '--device "gpu" is not a valid value. Use cuda for GPUs, or cpu or simulated.'),
        (("--ranks", "2"), "on GPUs there is one rank per GPU"),
        (("--python", "/no/such/python"), "program not found"),
        (("--reference", "/no/such/file"), "could not be read"),
        (("--report-dir", "/proc/nowhere"), "Use another directory: --report-dir DIR"),
        (("--keep", "list"), "not an option of list"),
    ],
)
def test_mistakes_are_told_before_anything_runs(fleet: Fleet, words: tuple[str, ...], said: str) -> None:
    ran = fleet.run("accept", *words)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert not (fleet.state / "reports").exists() or not list((fleet.state / "reports").iterdir())


def test_a_rank_of_a_larger_job_does_nothing(fleet: Fleet) -> None:
    """C1.9: said clearly, rather than testing one node and looking like the whole job."""
    ran = fleet.run("accept", RANK="3", WORLD_SIZE="16", MASTER_ADDR="node-0")
    assert (ran.code, ran.out) == (2, "")
    assert "the variables are those of one node of several" in ran.err.lower()


def test_a_second_run_on_this_machine_has_to_wait(fleet: Fleet) -> None:
    folder = fleet.state / "leases"
    fleet.state.mkdir(mode=0o700)
    folder.mkdir()
    held = os.open(folder / lease_name("acceptance", socket.gethostname()), os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        ran = fleet.run(*SMALL)
    finally:
        os.close(held)
    assert ran.code == 11
    assert "Nothing was touched" in ran.err


def test_the_older_kits_files_are_where_they_were(fleet: Fleet, tmp_path: Path) -> None:
    """C4.1, C4.4: summary.json directly in the report folder, anew each time."""
    folder = tmp_path / "reports"
    first = fleet.run(*SMALL, REPORT_DIR=str(folder))
    assert first.code == 5, first.err
    assert "from the environment: REPORT_DIR means --report-dir" in first.err
    assert json.loads((folder / "summary.json").read_text())["gpu_tests"]["returncode"] == 2, "a simulation"
    assert (folder / "gpu_accept_simulated-7.json").is_file()
    before = (folder / "summary.json").stat().st_ino
    fleet.run(*SMALL, "--report-dir", str(folder), "--legacy", "--report-name", "night.json")
    assert (folder / "night.json").is_file()
    assert (folder / "summary.json").stat().st_ino == before
    runs = fleet.run("accept", "list", "--report-dir", str(folder), "--json").json()["runs"]
    assert [one["problem"] for one in runs] == ["", ""]


def test_your_own_reference_is_held_against(fleet: Fleet, tmp_path: Path) -> None:
    """A floor of one's own, above what these GPUs show."""
    row = (
        '[{gpu: "NVIDIA H200", check: gemm, metric: bf16, unit: TFLOP/s, floor: 900, ceiling: 989, '
        "origin: measured, source: ours}]"
    )
    path = tmp_path / "reference.yaml"
    path.write_text(row)
    ran = fleet.run(*SMALL, "--reference", str(path))
    assert "Result of the checks: FAIL." in ran.out
    assert "gemm-below-floor" in ran.out


def test_reports_are_listed_shown_compared_and_merged(fleet: Fleet, tmp_path: Path) -> None:
    """C4.3"""
    assert "No reports in" in fleet.run("accept", "list").err
    first = fleet.run(*SMALL, "--keep", "--json").json()
    second = fleet.run(*SMALL, "--json").json()
    listed = fleet.run("accept", "list")
    assert listed.code == 0
    rows = {line.split()[1]: line for line in listed.out.splitlines()[1:]}
    assert set(rows) == {first["run"], second["run"]}
    assert "kept" in rows[first["run"]]
    assert "kept" not in rows[second["run"]]

    shown = fleet.run("accept", "show", first["run"])
    assert shown.code == 0
    assert "INCONCLUSIVE  simulated-7, 3 GPUs" in shown.out
    assert fleet.run("accept", "show", first["run"], "--json").json()["findings"] == first["findings"]
    page = tmp_path / "page.html"
    assert fleet.run("accept", "show", first["run"], "--html", str(page)).code == 0
    assert page.read_text().startswith("<!doctype html>")

    compared = fleet.run("accept", "compare", first["run"], second["run"], "--exit-code")
    assert compared.code == 0
    assert "values compared: 0 worse and 0 better beyond the noise." in compared.out

    # Nobody is accepted by a simulation, whatever its own verdict; and a node without a report is named.
    words = ("accept", "merge", first["report_folder"], str(fleet.state / "reports"))
    table = tmp_path / "nodes.csv"
    merged = fleet.run(*words, "--expect-nodes", "simulated-7,node-2", "--csv", str(table), "--html", str(page))
    assert merged.code == 5
    assert "node-2" in merged.out
    assert "no report of this node" in merged.out
    assert table.read_text().count("\n") == 3
    assert "node-2" in page.read_text()


def test_a_report_that_cannot_be_read_stops_a_merge(fleet: Fleet, tmp_path: Path) -> None:
    """Left out silently, it would make a fleet look better than it is."""
    broken = tmp_path / "report.json"
    broken.write_text('{"schema": "gpukeeper/acceptance/v9"}')
    ran = fleet.run("accept", "merge", str(broken), "/no/such/folder")
    assert ran.code == 2
    assert "gpukeeper/acceptance/v9" in ran.err
    assert "/no/such/folder is neither" in ran.err
    assert "Nothing was merged." in ran.err


def test_the_self_test_without_torch_is_never_a_pass(fleet: Fleet, tmp_path: Path) -> None:
    ran = fleet.run("accept", "--self-test", PATH=str(tmp_path))
    assert ran.code == 5, ran.out
    rows = [line for line in ran.out.splitlines() if line.startswith(("yes ", "NO "))]
    assert len(rows) >= 7
    assert all(row.startswith("yes ") for row in rows), ran.out
    assert "no fault was injected into probes on this machine" in ran.out


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_reader_who_leaves_ends_neither_the_run_nor_its_verdict(fleet: Fleet, more: tuple[str, ...]) -> None:
    """`accept | head -1`: the report is there and the exit code is the verdict's; other verbs end with 0."""
    assert _unread(fleet, *SMALL, *more) == 5
    (folder,) = (fleet.state / "reports").iterdir()
    assert _unread(fleet, "accept", "merge", str(folder), *more) == 5
    assert _unread(fleet, "accept", "list", *more) == 0


def _unread(fleet: Fleet, *words: str) -> int:
    """The exit code when nobody reads what it says."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "gpukeeper", *words]
        run = subprocess.run(
            command, env=fleet.env(), stdout=writing, stderr=subprocess.PIPE, timeout=PATIENCE, check=False
        )
    finally:
        os.close(writing)
    assert b"Traceback" not in run.stderr
    return run.returncode


@pytest.mark.parametrize(
    "name", ["no findings", "no GPU", "a FAIL inside", "8 expected and 1 present", "a FAIL that says PASS"]
)
def test_a_merge_does_not_trust_the_verdict_of_a_report(fleet: Fleet, tmp_path: Path, name: str) -> None:
    """Each says PASS, and its manifest fits."""
    good = altered.put(tmp_path / "good", altered.good())
    assert fleet.run("accept", "merge", str(good)).code == 0
    folder = altered.put(tmp_path / "altered", altered.altered(name))
    ran = fleet.run("accept", "merge", str(folder))
    assert ran.code in (4, 5), ran.out
    assert ran.out.splitlines()[-1].startswith(("FAIL  ", "INCONCLUSIVE  "))
    assert fleet.run("accept", "merge", str(folder / "report.json")).code == ran.code
    for words in (("show", str(folder)), ("list", "--report-dir", str(tmp_path))):
        shown = fleet.run("accept", *words)
        assert shown.code == 0
        assert "SUCCESS" not in shown.out
    rows = fleet.run("accept", "list", "--report-dir", str(tmp_path), "--json").json()["runs"]
    assert {one["run"]: one["verdict"] for one in rows}["altered"] in ("FAIL", "INCONCLUSIVE")
    compared = fleet.run("accept", "compare", str(good), str(folder), "--exit-code")
    assert compared.code == 4


def test_a_report_without_its_manifest_accepts_no_node(fleet: Fleet, tmp_path: Path) -> None:
    folder = altered.put(tmp_path / "run", altered.good())
    (folder / "MANIFEST.sha256").unlink()
    ran = fleet.run("accept", "merge", str(folder / "report.json"))
    assert ran.code == 5
    assert "copy the whole directory of a run" in ran.out
