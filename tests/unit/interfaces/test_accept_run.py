"""What the command line does with a finished run: exit codes, retention, and what does not go well at the end."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports.store import ReportFolder
from gpukeeper.interfaces.cli import accept_run
from gpukeeper.interfaces.cli.accept_run import LEAST_KEPT, _history, _pruned, exit_code, prepare, recorded, written
from gpukeeper.interfaces.cli.accept_settings import RunOptions
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.accept_bench import Bench, figure_check, run


def report(**changes: object) -> Report:
    found, _ = run(Bench(), [figure_check("gemm")])
    return msgspec.structs.replace(found, **changes)


@pytest.mark.parametrize(
    ("verdict", "plain", "strict"),
    [
        (Grade.PASS, 0, 0),
        (Grade.WARN, 0, 4),
        (Grade.FAIL, 4, 4),
        (Grade.INCONCLUSIVE, 5, 5),
        (Grade.SKIPPED, 5, 5),
    ],
)
def test_exit_codes(verdict: Grade, plain: int, strict: int) -> None:
    """C2.1"""
    one = report(verdict=verdict)
    assert (exit_code(one, strict=False), exit_code(one, strict=True)) == (plain, strict)
    assert exit_code(msgspec.structs.replace(one, interrupted=True), strict=False) == 130


@pytest.mark.parametrize("name", ["foo/bar", "../x", "report.json", ""])
def test_a_name_for_the_summary_that_cannot_be_written_is_refused_before_the_run(name: str) -> None:
    with pytest.raises(UsageError, match="not a plain file name"):
        prepare(RunOptions(report_name=name), {})


def test_old_reports_go_but_not_the_last_twenty_nor_kept_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C4.6: host files had no retention. Where somebody named the folder, nothing is deleted."""
    monkeypatch.setenv("GPUKEEPER_STATE", str(tmp_path))
    store, now = ReportFolder(tmp_path / "reports"), report(run="now")
    store.path.mkdir()
    for number in range(LEAST_KEPT + 4):
        age = timedelta(days=100 + number)
        old = report(run=f"old-{number:02}", started=now.started - age, ended=now.ended - age)
        store.write(old, keep=number == LEAST_KEPT + 3)
    folder, problems = written(RunOptions(), now, {"ranks-1/torchrun": "words"})
    assert not problems
    assert Path(folder, "log-ranks-1-torchrun").read_text() == "words"
    assert _pruned(RunOptions(report_dir=store.path), now) == []
    assert len(store.list()) == LEAST_KEPT + 5, "a folder that somebody named"
    assert _pruned(RunOptions(), now) == []
    left = {entry.run for entry in store.list()}
    assert left == {"now", *(f"old-{number:02}" for number in range(LEAST_KEPT - 1)), f"old-{LEAST_KEPT + 3}"}


def test_reports_that_are_together_too_large_go_but_not_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C4.6: host files had no quota."""
    monkeypatch.setenv("GPUKEEPER_STATE", str(tmp_path))
    monkeypatch.setattr(accept_run, "MOST_BYTES", 1)
    store, now = ReportFolder(tmp_path / "reports"), report(run="now")
    store.path.mkdir()
    day = timedelta(days=1)
    store.write(report(run="yesterday", started=now.started - day, ended=now.ended - day))
    store.write(now)
    assert _pruned(RunOptions(), now) == []
    assert [entry.run for entry in store.list()] == ["now"]
    assert "Deleted the 1 oldest reports" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_reported_and_the_verdict_stays(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    folder, problems = written(RunOptions(report_dir=taken), report(), {})
    assert folder == ""
    assert "could not be written" in problems[0]


def test_what_was_recorded_is_the_history_of_the_next_run(tmp_path: Path) -> None:
    """C2.5: by serial number, of runs on GPUs only."""
    ledger = open_ledger(tmp_path / "ledger.db", write=True)
    try:
        assert recorded(ledger, report(run="r-1"), "/r") == []
        assert recorded(ledger, report(run="r-2", device="cpu"), "/r") == []
        assert recorded(ledger, report(run="r-3", device="simulated"), "/r") == []
        history = asyncio.run(_history(ledger, "node-1"))
        lines = asyncio.run(ledger.lines(LineFilter(types=("acceptance",))))
    finally:
        ledger.close()
    assert {who: [one.run for one in runs] for who, runs in history.items()} == {"S0": ["r-1"], "S1": ["r-1"]}
    assert len(lines) == 2


def test_a_ledger_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    open_ledger(tmp_path / "ledger.db", write=True).close()
    ledger = open_ledger(tmp_path / "ledger.db", write=False)
    try:
        problems = recorded(ledger, report(), "")
    finally:
        ledger.close()
    assert len(problems) == 1
    assert problems[0].startswith(
        "The run could not be recorded in the ledger, so later runs cannot be compared with it: "
    )


def test_old_reports_that_cannot_be_read_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ledger's line, and without taking anything from the verdict."""
    monkeypatch.setenv("GPUKEEPER_STATE", str(tmp_path))
    (tmp_path / "reports").write_text("")
    (problem,) = _pruned(RunOptions(), report())
    assert problem.startswith("Old reports could not be deleted: ")


def test_of_the_older_kits_files_none_is_left_of_another_run(tmp_path: Path) -> None:
    """A result beside the word that nothing ran would be taken for this run's."""
    ours = {
        "ddp_tests_result.json": {"world": 8, "ok": True},
        "results.json": {"model": "resnet50", "world_size": 8},
        "gpu_tests_skipped.json": {"skipped": True, "reason": "no_gpu"},
    }
    for name, content in ours.items():
        (tmp_path / name).write_bytes(msgspec.json.encode(content))
    (tmp_path / "ddp_tests_result.json.bak").write_text("old")
    _, problems = written(RunOptions(report_dir=tmp_path, legacy=True), report(), {})
    assert not problems
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert not left & set(ours)
    assert {"ddp_tests_skipped.json", "throughput_skipped.json", "gpu_tests_result.json"} <= left
    assert "ddp_tests_result.json.bak" in left


@pytest.mark.parametrize("content", [b'{"accuracy": 0.93}', b"old", b"{}", b"[]", b"\xff"])
@pytest.mark.parametrize("name", ["results.json", "summary.json", "gpu_tests_result.json"])
def test_a_file_of_another_user_is_neither_replaced_nor_deleted(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    _, problems = written(RunOptions(report_dir=tmp_path, legacy=True), report(), {})
    assert (tmp_path / name).read_bytes() == content
    assert problems == [f"Not written, because existing files in {tmp_path} are not from an acceptance run: {name}."]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(f".{name}")]
