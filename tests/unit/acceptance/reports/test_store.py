"""The folder of reports: whole or not at all, never overwritten, and retention touches only what is surely ours."""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from pathlib import Path

import pytest

from gpukeeper.acceptance.reports import formats
from gpukeeper.acceptance.reports.store import ReportFolder
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.reports import examples

VIEWS = {"report.json", "samples.json", "report.html", "results.csv", "junit.xml", "metrics.prom", "MANIFEST.sha256"}
NEW = examples.START + timedelta(days=1)
LATE = examples.START + timedelta(days=365)


@pytest.fixture
def folder(tmp_path: Path) -> ReportFolder:
    return ReportFolder(tmp_path / "reports")


def write(folder: ReportFolder, run: str, *, days: int = 0, keep: bool = False) -> Path:
    began = examples.START + timedelta(days=days)
    report = examples.one_good_gpu(run=run, started=began, ended=began + timedelta(minutes=1))
    return folder.write(report, keep=keep)


def test_a_run_has_all_its_views(folder: ReportFolder) -> None:
    """C4.1, C4.7"""
    path = folder.write(examples.eight_gpus())
    assert path == folder.path / examples.eight_gpus().run
    assert {one.name for one in path.iterdir()} == VIEWS
    assert folder.verify(path.name) == []
    assert path.stat().st_mode & 0o777 == 0o755
    assert all(one.stat().st_mode & 0o777 == 0o644 for one in path.iterdir())
    assert [one.name for one in folder.path.iterdir()] == [path.name], "nothing unfinished is left"


def test_the_files_of_older_kits_come_on_request(folder: ReportFolder) -> None:
    """C4.1, C4.4: `--report-name`."""
    path = folder.write(examples.eight_gpus(), with_legacy=True, summary="mine.json", extra={"nccl.log": b"x"})
    names = {one.name for one in path.iterdir()}
    assert {"mine.json", "gpu_tests_result.json", "gpu_accept_node-07.json", "nccl.log"} <= names
    assert folder.verify(path.name) == []


@pytest.mark.parametrize("name", ["../evil.json", "report.json", "", "a/b", "MANIFEST.sha256"])
def test_a_summary_cannot_take_the_place_of_another_file(folder: ReportFolder, name: str) -> None:
    with pytest.raises(UsageError, match="--report-name"):
        folder.write(examples.one_good_gpu(), with_legacy=True, summary=name)
    assert not folder.path.exists()


@pytest.mark.parametrize("run", ["../up", "", ".hidden", "a/b", "x" * 200, "ü"])
def test_a_run_cannot_name_a_directory_elsewhere(folder: ReportFolder, run: str) -> None:
    with pytest.raises(UsageError, match="not a valid directory name"):
        folder.write(examples.one_good_gpu(run=run))


def test_a_run_is_never_overwritten(folder: ReportFolder) -> None:
    path = write(folder, "one")
    before = (path / "report.json").read_bytes()
    with pytest.raises(UsageError, match="never overwritten"):
        write(folder, "one", days=3)
    assert (path / "report.json").read_bytes() == before


def test_a_link_in_the_place_of_a_run_is_not_written_through(folder: ReportFolder, tmp_path: Path) -> None:
    folder.path.mkdir()
    (folder.path / "one").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="exists already"):
        write(folder, "one")


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("a file in its place")
    with pytest.raises(KeeperError, match="could not be written"):
        write(ReportFolder(tmp_path / "reports"), "one")


def test_a_write_that_fails_in_the_middle_leaves_no_half_of_a_run(folder: ReportFolder) -> None:
    """The system refuses files beyond a limit, as a full disk would: the page is the first that is too large."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        with pytest.raises(KeeperError, match="File too large"):
            folder.write(examples.eight_gpus(timeline=(), records=()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(folder.path.iterdir()) == []


def test_runs_are_listed_newest_first_with_their_verdict(folder: ReportFolder) -> None:
    write(folder, "old")
    write(folder, "new", days=2)
    folder.write(examples.eight_gpus(run="middle", started=NEW, ended=NEW), keep=True)
    assert [(one.run, one.verdict, one.kept) for one in folder.list()] == [
        ("new", Grade.PASS, False),
        ("middle", Grade.FAIL, True),
        ("old", Grade.PASS, False),
    ]


def test_what_cannot_be_read_is_named_and_what_is_not_ours_is_not(folder: ReportFolder) -> None:
    write(folder, "good")
    for name, text in (("broken", "{"), ("newer", '{"schema": "gpukeeper/acceptance/v9"}')):
        (folder.path / name).mkdir()
        (folder.path / name / "report.json").write_text(text)
    (folder.path / "notes").mkdir()
    (folder.path / ".unfinished-x").mkdir()
    found = {one.run: one.problem for one in folder.list()}
    assert found.keys() == {"good", "broken", "newer", ".unfinished-x"}
    assert found["good"] == ""
    assert all(found[name] for name in ("broken", "newer", ".unfinished-x"))


def test_a_directory_that_is_not_there_has_no_runs(tmp_path: Path) -> None:
    assert ReportFolder(tmp_path / "nowhere").list() == []


def test_a_run_is_found_by_name_beginning_and_path(folder: ReportFolder) -> None:
    path = write(folder, "20260314-aaaa")
    write(folder, "20260315-bbbb")
    for wanted in ("20260314-aaaa", "20260314", str(path), str(path / "report.json")):
        assert folder.load(wanted).run == "20260314-aaaa"
    with pytest.raises(UsageError, match="is ambiguous: 20260314-aaaa, 20260315-bbbb"):
        folder.load("202603")
    with pytest.raises(UsageError, match="Report 2027 not found in"):
        folder.load("2027")


def test_samples_come_back_unless_they_are_not_wanted_or_gone(folder: ReportFolder) -> None:
    path = write(folder, "one")
    assert folder.load("one").timeline
    assert not folder.load("one", samples=False).timeline
    (path / formats.SAMPLES).unlink()
    assert not folder.load("one").timeline


def test_a_changed_file_is_noticed(folder: ReportFolder) -> None:
    path = write(folder, "one")
    (path / "results.csv").write_text("made up")
    (path / "junit.xml").unlink()
    (path / "notes.txt").write_text("mine")
    assert folder.verify("one") == [
        "junit.xml is missing.",
        "notes.txt is not in the manifest.",
        "results.csv was changed.",
    ]


def test_old_runs_are_removed_and_kept_ones_are_not(folder: ReportFolder) -> None:
    """C4.6: files of older kits had no retention."""
    write(folder, "old")
    write(folder, "precious", keep=True)
    write(folder, "new", days=300)
    done = folder.prune(LATE, older_than=timedelta(days=90))
    assert done.removed == ("old",)
    assert done.spared == {"precious": "it is kept"}
    assert {one.name for one in folder.path.iterdir()} == {"precious", "new"}


def test_the_newest_runs_stay_however_old_they_are(folder: ReportFolder) -> None:
    for day in range(4):
        write(folder, f"day-{day}", days=day)
    assert folder.prune(LATE, keep_last=2).removed == ("day-1", "day-0")


def test_more_than_the_most_are_removed_oldest_first(folder: ReportFolder) -> None:
    for day in range(4):
        write(folder, f"day-{day}", days=day)
    assert folder.prune(NEW, most=3).removed == ("day-0",)


def test_beyond_a_quota_of_bytes_the_oldest_are_removed(folder: ReportFolder) -> None:
    """C4.6: a report with a long timeline is large; a number of days says nothing about the disk."""
    for day in range(4):
        write(folder, f"day-{day}", days=day, keep=day == 1)
    sizes = [sum(file.stat().st_size for file in (folder.path / f"day-{day}").iterdir()) for day in range(4)]
    assert folder.prune(NEW, quota=sum(sizes)).removed == ()
    done = folder.prune(NEW, quota=sum(sizes) - 1)
    assert (done.removed, done.spared) == (("day-0",), {})
    done = folder.prune(NEW, quota=sizes[3] + 1)
    assert (done.removed, done.spared) == (("day-2",), {"day-1": "it is kept"})
    assert folder.prune(NEW, quota=1).removed == ()  # the newest stays, and what is kept


def test_retention_leaves_everything_that_is_not_surely_ours(folder: ReportFolder, tmp_path: Path) -> None:
    with_notes = write(folder, "with-notes")
    (with_notes / "notes.txt").write_text("mine")
    with_link = write(folder, "with-link")
    (with_link / "results.csv").unlink()
    (with_link / "results.csv").symlink_to(tmp_path / "precious")
    (write(folder, "no-manifest") / "MANIFEST.sha256").unlink()
    elsewhere = ReportFolder(tmp_path / "elsewhere")
    (folder.path / "linked").symlink_to(write(elsewhere, "linked"))
    (folder.path / "foreign").mkdir()
    (folder.path / "foreign" / "report.json").write_text('{"schema": "somebody/else"}')
    write(folder, "newest", days=1)
    before = {one.name for one in folder.path.iterdir()}
    done = folder.prune(LATE)
    assert done.removed == ()
    assert done.spared.keys() == {"with-notes", "with-link", "no-manifest", "foreign"}
    assert {one.name for one in folder.path.iterdir()} == before
    assert elsewhere.load("linked").run == "linked"


def test_a_run_can_be_kept_and_let_go_later(folder: ReportFolder) -> None:
    write(folder, "one")
    write(folder, "two", days=1)
    folder.keep("one")
    assert folder.prune(LATE).removed == ()
    folder.keep("one", kept=False)
    assert folder.prune(LATE).removed == ("one",)


@pytest.mark.parametrize("name", ["{precious}", "../../precious", "results.csv/../../../precious", ".."])
def test_retention_removes_nothing_that_a_manifest_names_elsewhere(
    folder: ReportFolder, tmp_path: Path, name: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    old = write(folder, "old")
    write(folder, "new", days=1)
    with (old / "MANIFEST.sha256").open("a") as manifest:
        manifest.write(f"{'0' * 64}  {name.format(precious=precious)}\n")
    done = folder.prune(LATE)
    assert precious.read_text() == "mine"
    assert done.removed == ()
    assert "lists files outside this directory" in done.spared["old"]
    assert len(list(old.iterdir())) == len(VIEWS), "nothing of it was touched"


def test_one_report_that_cannot_be_read_hides_no_other(folder: ReportFolder) -> None:
    """A time without a zone, nesting without end, no UTF-8, a pipe nobody writes to, a folder in its place."""
    good = (write(folder, "good") / "report.json").read_bytes()
    write(folder, "newest", days=1)
    bad = {
        "naive": good.replace(b'Z"', b'"').replace(b"+00:00", b""),
        "nested": good.rstrip()[:-1] + b', "more": ' + b"[" * 200_000,
        "latin": good.replace(b"node-07", b"node-\xff"),
    }
    for name, text in bad.items():
        assert text != good
        (folder.path / name).mkdir()
        (folder.path / name / "report.json").write_bytes(text)
        with pytest.raises(KeeperError, match=r"report\.json"):
            folder.load(name)
    (folder.path / "pipe").mkdir()
    os.mkfifo(folder.path / "pipe" / "report.json")
    (folder.path / "dir" / "report.json").mkdir(parents=True)
    problems = {one.run: one.problem for one in folder.list()}
    assert problems.keys() == {"good", "newest", "pipe", "dir", *bad}
    assert [name for name, problem in problems.items() if not problem] == ["newest", "good"]
    assert "not a regular file" in problems["pipe"]
    done = folder.prune(LATE)
    assert done.removed == ("good",)
    assert done.spared.keys() == {"pipe", "dir", *bad}


def test_a_report_that_is_too_large_is_not_read(folder: ReportFolder) -> None:
    write(folder, "one")
    with (folder.path / "one" / "report.json").open("r+b") as file:
        file.truncate(1 << 40)  # nothing of it is on the disk
    assert "MiB" in folder.list()[0].problem


def test_bytes_that_are_no_text_do_not_cost_the_report(folder: ReportFolder) -> None:
    """A variable of the environment may hold any bytes; Python hands them on as half characters."""
    broken = os.fsdecode(b"NCCL_FOO=\xff")
    plain = examples.one_good_gpu()
    machine = examples.replace(plain.machine, environment={"nccl_env": broken, broken: "ü", "torch": "2.11.0"})
    records = ({"check": "gemm", "who": broken, "answer": {"words": [broken]}},)
    folder.write(examples.replace(plain, machine=machine, reason=broken, records=records), with_legacy=True)
    back = folder.load(plain.run)
    assert back.reason == "NCCL_FOO=\\udcff"
    assert back.machine.environment == {"nccl_env": back.reason, back.reason: "ü", "torch": "2.11.0"}
    assert back.findings == plain.findings
