"""`gpukeeper doctor --bundle`: what a support request needs, and no secrets."""

from __future__ import annotations

import tarfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpukeeper.engine.loop import TOO_SLOW
from gpukeeper.interfaces.cli.doctor import last_pass, measuring, space
from gpukeeper.interfaces.cli.support import GONE, without_secrets
from gpukeeper.model.event import Complaint, Passed
from tests.cli.fleet import Fleet

NOW = datetime(2026, 11, 17, 5, tzinfo=UTC)


def contents(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as tar:
        found = {one.name.rpartition("/")[2]: tar.extractfile(one) for one in tar}
        return {name: file.read().decode() for name, file in found.items() if file is not None}


def test_it_has_findings_policy_ledger_and_versions(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ended("eval", days=2)
    fleet.run("apply", "--yes")
    ran = fleet.run("doctor", "--bundle", str(tmp_path / "s.tar.gz"))
    assert "read it before you send it" in ran.err
    found = contents(tmp_path / "s.tar.gz")
    assert set(found) == {"about.json", "doctor.json", "policy.txt", "ledger.jsonl"}
    assert "mode = " in found["policy.txt"]
    assert "eval" in found["ledger.jsonl"]
    assert '"msgspec"' in found["about.json"]
    assert (tmp_path / "s.tar.gz").stat().st_mode & 0o777 == 0o600


def test_a_file_that_exists_is_kept(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "s.tar.gz").write_text("precious")
    ran = fleet.run("doctor", "--bundle", str(tmp_path / "s.tar.gz"))
    assert ran.code == 2
    assert (tmp_path / "s.tar.gz").read_text() == "precious"


def test_values_of_variables_are_not_in_it(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run("doctor", "--bundle", str(tmp_path / "s.tar.gz"), GPUKEEPER_GROUP_SECRET="correct horse")
    found = contents(tmp_path / "s.tar.gz")
    assert "GPUKEEPER_GROUP_SECRET" in found["about.json"]
    assert not [name for name, text in found.items() if "correct horse" in text]


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://keeper:hunter2@db/gpukeeper",
        "https://hunter2@example.org/hook",
        '"api_key": "hunter2"',
        "PASSWORD=hunter2",
        "db-password: hunter2",
        "Authorization: Bearer hunter2hunter2",
        "token='hunter2'",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nhunter2 and then it was cut",
        "xoxb-hunter2-hunter2",
    ],
)
def test_what_has_the_form_of_a_secret_is_replaced(text: str) -> None:
    cleaned = without_secrets(f"before {text} after")
    assert "hunter2" not in cleaned
    assert GONE in cleaned
    assert cleaned.startswith("before ")


@pytest.mark.parametrize(
    "text", ["docker/node-3/train", "2026-11-17T05:00:00Z", "idle for 30m: stopped", "http://127.0.0.1:8265/x"]
)
def test_ordinary_words_stay(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize("word", ["token", "a", "://", "eyJ", "Bearer ", "-----BEGIN PRIVATE KEY-----"])
def test_hostile_text_does_not_take_long(word: str) -> None:
    began = time.thread_time()
    assert without_secrets(word * 20_000 + " train").endswith(("train", GONE))
    assert time.thread_time() - began < 20, "seconds of this thread alone, whatever else the machine does"


def test_the_last_pass_is_shown_with_its_age() -> None:
    def row(ago: timedelta) -> tuple[str, ...]:
        made = Passed(
            at=NOW - ago, pass_id=1, platform="docker", place="node-3", seen=4, due=0, reclaimed=0, deferred=0, failed=0
        )
        return last_pass([(1, made)], NOW)

    assert row(timedelta(minutes=5))[0] == "ok"
    assert "systemctl status gpukeeper" in row(timedelta(hours=3))[2]
    assert row(-timedelta(hours=2))[0] == "problem"
    assert last_pass([], NOW)[0] == "note"


def test_that_measuring_was_too_slow_is_shown() -> None:
    line = Complaint(at=NOW - timedelta(hours=3), what=f"{TOO_SLOW} (4 times in the last 1h)")
    assert measuring([(7, line)], NOW) == [("note", "measuring", f"3h ago: {TOO_SLOW}")]
    assert measuring([(7, Complaint(at=NOW, what="another problem"))], NOW) == []


def test_the_space_of_a_directory_that_does_not_exist_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    assert space(tmp_path / "not" / "yet")[0] in ("ok", "problem")
    assert str(tmp_path) in space(tmp_path / "not" / "yet")[2]
