"""Evidence: saved before anything is removed, found again unchanged, within its quota and its folder."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.ledger import evidence as module
from gpukeeper.ledger.evidence import DirectoryEvidence, safe_name
from gpukeeper.model.decision import Evidence
from gpukeeper.model.subject import Ref
from gpukeeper.model.unknown import Unknown
from tests.effort import examples
from tests.unit.ledger.examples import EVAL, NOW, TRAIN, run

MIB = 2**20
LOGS = Evidence({"logs.txt": b"epoch 1\n", "manifest.json": b"{}"})


def size_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def save(store: DirectoryEvidence, evidence: Evidence = LOGS, ref: Ref = EVAL, step: str = "s1") -> str:
    name = run(store.save(ref, step, NOW, evidence))
    assert isinstance(name, str)
    return name


def test_what_was_saved_is_loaded_again(tmp_path: Path) -> None:
    store = DirectoryEvidence(tmp_path / "evidence", MIB)
    assert save(store) == "20260310/eval-s1"
    assert run(store.load("20260310/eval-s1")) == LOGS
    index = json.loads((tmp_path / "evidence/20260310/eval-s1/index.json").read_text())
    assert (index["step"], index["ref"]["uid"]) == ("s1", "c0ffee")
    assert index["files"]["logs.txt"]["size"] == 8
    assert (tmp_path / "evidence").stat().st_mode & 0o777 == 0o700


def test_a_step_that_is_captured_again_does_not_overwrite(tmp_path: Path) -> None:
    store = DirectoryEvidence(tmp_path, MIB)
    names = [save(store), save(store, Evidence({"logs.txt": b"other"}))]
    assert names == ["20260310/eval-s1", "20260310/eval-s1-2"]
    assert run(store.load(names[0])) == LOGS


_names = st.text(st.characters(codec="utf-8"), max_size=120)


@examples(0.5)
@given(st.dictionaries(_names, st.binary(max_size=50), max_size=6), _names, _names)
def test_any_names_are_saved_inside_the_directory_and_loaded_unchanged(
    files: dict[str, bytes], name: str, step: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryEvidence(Path(folder) / "evidence", MIB)
        saved = save(store, Evidence(files), Ref("docker", "a", "container", name, "1"), step)
        assert [p.name for p in Path(folder).iterdir()] == ["evidence"]
        assert len(list((Path(folder) / "evidence" / saved).iterdir())) == len(files) + 1
        assert run(store.load(saved)) == Evidence(files)


HOSTILE = ["../../etc/passwd", "a/../../b", "INDEX.JSON", "index.json", "", ".", "..", "-rf", "x" * 999]
NO_NAMES = ["", "..", "../20260310/eval-s1", "20260310", "20260310/..", "20260310/eval-s1/logs.txt", "/etc"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_data(tmp_path: Path, name: str) -> None:
    store = DirectoryEvidence(tmp_path / "evidence", MIB)
    evidence = Evidence({name: b"1", name + "/": b"2"})
    assert run(store.load(save(store, evidence, Ref("docker", "a", "c", name, "1"), name))) == evidence
    assert [p.name for p in tmp_path.iterdir()] == ["evidence"]
    assert "/" not in safe_name(name)


def test_over_the_quota_nothing_is_saved_and_the_answer_reports_it(tmp_path: Path) -> None:
    store = DirectoryEvidence(tmp_path, 5000)
    name = save(store, Evidence({"logs": b"x" * 3000}))
    refused = run(store.save(TRAIN, "s2", NOW, Evidence({"logs": b"x" * 3000})))
    assert isinstance(refused, Unknown)
    assert "quota of 4.9 KiB" in refused.why
    assert [p.name for p in (tmp_path / "20260310").iterdir()] == ["eval-s1"]
    assert 3000 < size_below(tmp_path) < 5000
    # Another process made room.
    for file in (tmp_path / name).iterdir():
        file.unlink()
    assert isinstance(run(store.save(TRAIN, "s2", NOW, Evidence({"logs": b"x" * 3000}))), str)


def test_captures_that_are_saved_at_once_stay_below_the_quota_together(tmp_path: Path) -> None:
    """Steps of several places and of one batch save at the same time; each used to check what all of them then used."""
    quota, size, tries = 2_000_000, 150_000, 30
    store = DirectoryEvidence(tmp_path, quota)

    async def together() -> list[str | Unknown]:
        return list(await asyncio.gather(*(store.save(EVAL, f"s{n}", NOW, _logs(size)) for n in range(tries))))

    saved = run(together())
    assert size_below(tmp_path) <= quota
    # None is refused that fits: what others reserve is not counted twice.
    assert sum(isinstance(one, str) for one in saved) == quota // (size + 1000)
    assert all("quota" in one.why for one in saved if isinstance(one, Unknown))


def test_a_disk_that_hangs_does_not_hold_a_step_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is not known, so its workload is kept; the bytes stay reserved until the write ends."""
    hangs, answers = threading.Event(), threading.Event()
    real = os.fsync

    def hanging(fd: int) -> None:
        hangs.set()
        answers.wait()
        real(fd)

    store = DirectoryEvidence(tmp_path, 5000)
    monkeypatch.setattr(module.os, "fsync", hanging)
    monkeypatch.setattr(module, "SAVED_WITHIN", timedelta(milliseconds=20))
    monkeypatch.setattr(module, "ROOM_WITHIN", 0.01)
    late = run(store.save(EVAL, "s1", NOW, _logs(3000)))
    assert hangs.wait(60)
    monkeypatch.setattr(module, "SAVED_WITHIN", timedelta(minutes=1))
    busy = run(store.save(EVAL, "s2", NOW, _logs(3000)))
    answers.set()
    monkeypatch.setattr(module, "ROOM_WITHIN", 60.0)
    over = run(store.save(EVAL, "s3", NOW, _logs(3000)))
    whys = [one.why if isinstance(one, Unknown) else one for one in (late, busy, over)]
    assert "timed out" in whys[0]
    assert "other captures are still being written" in whys[1]
    assert "quota" in whys[2]


def test_what_a_failed_write_had_reserved_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    store = DirectoryEvidence(tmp_path, 5000)
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", broken)
        failed = run(store.save(EVAL, "s1", NOW, _logs(3000)))
    assert isinstance(failed, Unknown)
    assert "Input/output error" in failed.why
    assert isinstance(run(store.save(EVAL, "s2", NOW, _logs(3000))), str)


def _logs(size: int) -> Evidence:
    return Evidence({"logs": b"x" * size})


def test_old_days_are_pruned_and_foreign_files_are_not(tmp_path: Path) -> None:
    store = DirectoryEvidence(tmp_path / "evidence", MIB)
    for age in (91, 90, 1):
        assert isinstance(run(store.save(EVAL, "s1", NOW - timedelta(days=age), LOGS)), str)
    (tmp_path / "evidence" / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "evidence" / "2020").symlink_to(tmp_path / "elsewhere")
    assert run(store.prune(timedelta(days=90), NOW)) > 0
    assert {p.name for p in (tmp_path / "evidence").iterdir()} == {"20251210", "20260309", "notes.txt", "2020"}


def test_date_named_directories_of_others_are_not_pruned(tmp_path: Path) -> None:
    """A backup script names its folders by date, too; only what has our index in it is ours."""
    root = tmp_path / "evidence"
    store = DirectoryEvidence(root, MIB)
    run(store.save(EVAL, "s1", NOW - timedelta(days=200), LOGS))
    (root / "20240101").mkdir()
    (root / "20240101" / "thesis.tar").write_text("years of work")
    day = next(p for p in root.iterdir() if p.name != "20240101")
    (day / "mine").mkdir()
    run(store.prune(timedelta(days=90), NOW))
    assert (root / "20240101" / "thesis.tar").read_text() == "years of work"
    assert [p.name for p in day.iterdir()] == ["mine"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_loading_refuses_what_is_no_name_of_evidence(tmp_path: Path, name: str) -> None:
    store = DirectoryEvidence(tmp_path / "evidence", MIB)
    save(store)
    assert isinstance(run(store.load(name)), Unknown)


def test_links_are_not_followed(tmp_path: Path) -> None:
    store = DirectoryEvidence(tmp_path / "evidence", MIB)
    name = save(store)
    secret = tmp_path / "secret"
    secret.write_bytes(b"epoch 1\n")
    file = tmp_path / "evidence" / name / "logs.txt"
    file.unlink()
    file.symlink_to(secret)
    assert isinstance(run(store.load(name)), Unknown)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    answer = run(DirectoryEvidence(tmp_path / "link", MIB).save(EVAL, "s1", NOW, LOGS))
    assert isinstance(answer, Unknown)
    assert not list((tmp_path / "real").iterdir())


def test_damaged_and_unfinished_evidence_is_unknown(tmp_path: Path) -> None:
    store = DirectoryEvidence(tmp_path, MIB)
    name = save(store)
    (tmp_path / name / "logs.txt").write_bytes(b"epoch 2\n")
    answer = run(store.load(name))
    assert isinstance(answer, Unknown)
    assert "damaged" in answer.why
    (tmp_path / name / "index.json").unlink()
    assert isinstance(run(store.load(name)), Unknown)
    assert isinstance(run(store.load("20200101/never-s1")), Unknown)


def test_a_directory_that_cannot_be_written_is_unknown_so_nothing_is_removed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = run(DirectoryEvidence(tmp_path / "file" / "evidence", MIB).save(EVAL, "s1", NOW, LOGS))
    assert isinstance(answer, Unknown)
    assert "could not be saved" in answer.why
