"""What `serve` and `operator` share: a policy file that changes under them, and lines for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpukeeper.engine.observe import Survey
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.terminal.watching import Lines, PolicyNow
from gpukeeper.model.decision import Action, Plan, Result, Unseen
from gpukeeper.model.event import Closed
from gpukeeper.model.identity import Ref
from gpukeeper.model.policy import Mode
from gpukeeper.wiring import Session, open_session

NOW = datetime.fromisoformat("2026-03-02T08:00:00+00:00")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text("scope: {docker: {}}\nmode: enforce\n")
    return path


@pytest.fixture
def session(tmp_path: Path, file: Path) -> Iterator[Session]:
    fleet = tmp_path / "fleet"
    fleet.mkdir()
    environ = {"GPUKEEPER_FLEET": f"folder:{fleet}", "GPUKEEPER_STATE": str(tmp_path / "state")}
    made = open_session(file, write=True, environ=environ)
    yield made
    made.close()


def test_a_changed_policy_counts_from_the_next_reading_on(session: Session, file: Path) -> None:
    said: list[str] = []
    book = PolicyNow(session, file, said.append)
    assert book().policy.mode is Mode.ENFORCE
    file.write_text("scope: {docker: {}}\nmode: plan\n")
    assert book().policy.mode is Mode.PLAN
    assert book.last.policy.mode is Mode.PLAN
    assert (said, book.problem) == ([], None)


def test_a_broken_policy_looks_only_and_is_said_once(session: Session, file: Path) -> None:
    said: list[str] = []
    book = PolicyNow(session, file, said.append)
    file.write_text("mode: enforced\n")
    assert [book().policy.mode for _ in range(3)] == [Mode.PLAN] * 3
    assert book.last.policy.mode is Mode.ENFORCE
    assert book.problem is not None
    assert "enforced" in book.problem
    assert len(said) == 1
    file.unlink()
    assert book().policy.mode is Mode.PLAN
    assert "cannot be read" in said[1]
    file.write_text("scope: {docker: {}}\nmode: enforce\n")
    assert book().policy.mode is Mode.ENFORCE
    assert (said[2], book.problem) == ("the policy can be used again: mode enforce", None)


def report(*unseen: Unseen, whole: bool = True, **more: Any) -> PassReport:
    platform: Any = SimpleNamespace(name="kubernetes", place="lab")
    return PassReport(1, Survey(platform, NOW, unseen=list(unseen), whole=whole), Plan("", NOW, ()), **more)


def test_what_is_unseen_is_said_when_it_begins_and_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    tell = Lines(said.append, json=False, quiet=False).tell
    for one in (report(), report(Unseen("jobs", "403")), report(Unseen("jobs", "403")), report(whole=False), report()):
        tell(one)
    assert len(said) == 2
    assert "jobs" in said[0]
    assert said[1] == "kubernetes/lab: everything is seen again"
    assert capsys.readouterr().out == ""


def test_outcomes_are_lines_on_stdout_and_quiet_leaves_the_talk_out(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    ref = Ref("kubernetes", "lab", "job", "run-7", "u", "team-a")
    closed = Closed(
        at=NOW, ref=ref, step="1.1", action=Action.REMOVE, rule="retention", result=Result.RECLAIMED, reason="over"
    )
    Lines(said.append, json=True, quiet=True).tell(report(Unseen("jobs", "403"), outcomes=[closed]))
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["ref"]["name"] == "run-7"
    assert said == []
    Lines(said.append, json=False, quiet=True).tell(report(outcomes=[closed]))
    assert "kubernetes/lab/team-a/job/run-7" in capsys.readouterr().out


def test_outcomes_are_told_while_a_pass_runs_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    lines = Lines(said.append, json=True, quiet=False)
    told = report(beside_work=Counter({("ray/lab/worker-1/tmp", "work runs beside it"): 2}))
    for number in range(3):
        ref = Ref("kubernetes", "lab", "job", f"run-{number}", f"u{number}", "team-a")
        told.outcomes.append(
            Closed(at=NOW, ref=ref, step="1.1", action=Action.REMOVE, rule="x", result=Result.RECLAIMED, reason="over")
        )
        lines.under_way(told)
        (line,) = capsys.readouterr().out.splitlines()
        assert json.loads(line)["ref"]["name"] == f"run-{number}"
    lines.tell(told)
    assert capsys.readouterr().out == ""
    assert said == [
        "ray/lab/worker-1/tmp: work runs beside it. 2 more trees there were left alone; the next pass decides anew."
    ]
