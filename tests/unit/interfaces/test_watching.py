"""What `serve` and `operator` share: a policy file that changes under them, and lines for people."""

from __future__ import annotations

import asyncio
import grp
import json
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpukeeper.config import load, machine
from gpukeeper.engine.observe import Survey
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.terminal import watching
from gpukeeper.interfaces.terminal.watching import PassPrinter, PolicyReloader
from gpukeeper.model.decision import Action, Plan, Result, Unseen
from gpukeeper.model.errors import PolicyError
from gpukeeper.model.event import Closed
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import Ref
from gpukeeper.wiring.session import Session, open_session, read_policy

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
    book = PolicyReloader(session, file, said.append)
    assert now(book) is Mode.ENFORCE
    file.write_text("scope: {docker: {}}\nmode: plan\n")
    assert now(book) is Mode.PLAN
    assert book.last.policy.mode is Mode.PLAN
    assert (said, book.problem) == ([], None)


def test_after_a_remark_was_added_values_are_shown_with_their_new_lines(session: Session, file: Path) -> None:
    text = "scope: {docker: {}}\nmode: enforce\nexemptions: [{owner: ann, until: 2020-01-01, reason: x}]\n"
    book = PolicyReloader(session, file, [].append)
    file.write_text(text)
    now(book)
    before = book.last
    file.write_text(f"# a remark\n{text}")
    assert now(book) is Mode.ENFORCE
    assert (session.loaded.origin(("mode",)), session.loaded.exemption_origins) == (f"{file}:3", (f"{file}:4",))
    assert book.last is before, "its values are the same"


def test_a_broken_policy_looks_only_and_is_reported_once(session: Session, file: Path) -> None:
    said: list[str] = []
    book = PolicyReloader(session, file, said.append)
    file.write_text("mode: enforced\n")
    assert [now(book) for _ in range(3)] == [Mode.PLAN] * 3
    assert book.last.policy.mode is Mode.ENFORCE
    assert book.problem is not None
    assert "enforced" in book.problem
    assert len(said) == 1
    file.unlink()
    assert now(book) is Mode.PLAN
    assert "could not be read" in said[1]
    file.write_text("scope: {docker: {}}\nmode: enforce\n")
    assert now(book) is Mode.ENFORCE
    assert (said[2], book.problem) == ("the policy is valid again: mode enforce", None)


def now(book: PolicyReloader) -> Mode:
    """As a pass would use it now."""
    asyncio.run(book.refresh())
    return book().policy.mode


@pytest.mark.usefixtures("session", "settled")
def test_a_policy_that_did_not_change_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_policy(file)
    assert read_policy(file, first) is first
    file.write_text("scope: {docker: {}}\nmode: plan\n")
    changed = read_policy(file, first)
    assert changed.loaded.policy.mode is Mode.PLAN
    assert read_policy(file, changed) is changed
    # Written a moment ago: another change may have the same times, so it is read until it is old enough.
    monkeypatch.setattr(load, "SETTLED", 3600.0)
    assert read_policy(file, changed) is not changed


@pytest.mark.usefixtures("session", "settled")
def test_a_link_that_is_turned_to_another_file_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes does with a ConfigMap."""
    folder = tmp_path / "mounted"
    for name, mode in (("one", "enforce"), ("two", "plan")):
        (folder / name).mkdir(parents=True)
        (folder / name / "policy.yaml").write_text(f"scope: {{docker: {{}}}}\nmode: {mode}\n")
    (folder / "data").symlink_to("one")
    file = folder / "data" / "policy.yaml"
    first = read_policy(file)
    (folder / "new").symlink_to("two")
    (folder / "new").replace(folder / "data")
    assert read_policy(file, first).loaded.policy.mode is Mode.PLAN


@pytest.mark.usefixtures("session", "settled")
def test_a_file_that_others_may_change_is_noticed_although_it_did_not_change(file: Path) -> None:
    first = read_policy(file)
    file.parent.chmod(0o777)
    try:
        with pytest.raises(PolicyError, match="other users can change"):
            read_policy(file, first)
    finally:
        file.parent.chmod(0o700)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file had been written long ago."""
    monkeypatch.setattr(load, "SETTLED", 0.0)


@pytest.mark.usefixtures("settled")
def test_a_directory_service_that_hangs_stops_neither_the_loop_nor_acting(
    session: Session, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = grp.getgrgid(0).gr_name
    file.write_text(f"scope: {{docker: {{}}}}\nmode: enforce\ngroups: {{staff: {{unix_group: {group}}}}}\n")
    said: list[str] = []
    book = PolicyReloader(session, file, said.append)
    assert now(book) is Mode.ENFORCE
    answers = threading.Event()

    def hanging() -> list[Any]:
        answers.wait()
        return []

    monkeypatch.setattr(machine, "_USERS", machine._Users())
    monkeypatch.setattr(machine.pwd, "getpwall", hanging)
    monkeypatch.setattr(machine, "WITHIN", 0.05)
    monkeypatch.setattr(watching, "GROUPS_FRESH", 0.0)

    try:
        # Twice: it is said once. Each returns although the list never comes.
        assert [now(book), now(book), book.problem] == [Mode.ENFORCE, Mode.ENFORCE, None]
        assert len(said) == 1
        assert "could not be listed within" in said[0]
    finally:
        answers.set()


def report(*unseen: Unseen, whole: bool = True, **more: Any) -> PassReport:
    platform: Any = SimpleNamespace(name="kubernetes", place="lab")
    return PassReport(1, Survey(platform, NOW, unseen=list(unseen), whole=whole), Plan("", NOW, ()), **more)


def test_what_is_unseen_is_reported_when_it_begins_and_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    finished = PassPrinter(said.append, json=False, quiet=False).finished
    for one in (report(), report(Unseen("jobs", "403")), report(Unseen("jobs", "403")), report(whole=False), report()):
        finished(one)
    assert len(said) == 2
    assert "jobs" in said[0]
    assert said[1] == "kubernetes/lab: everything can be read again"
    assert capsys.readouterr().out == ""


def test_outcomes_are_lines_on_stdout_and_quiet_leaves_the_talk_out(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    ref = Ref("kubernetes", "lab", "job", "run-7", "u", "team-a")
    closed = Closed(
        at=NOW, ref=ref, step="1.1", action=Action.REMOVE, rule="retention", result=Result.RECLAIMED, reason="over"
    )
    PassPrinter(said.append, json=True, quiet=True).finished(report(Unseen("jobs", "403"), outcomes=[closed]))
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["ref"]["name"] == "run-7"
    assert said == []
    PassPrinter(said.append, json=False, quiet=True).finished(report(outcomes=[closed]))
    assert "kubernetes/lab/team-a/job/run-7" in capsys.readouterr().out


def test_an_exemption_that_ends_while_it_serves_is_reported_once(session: Session, file: Path) -> None:
    until = (session.keeper.clock.now() - timedelta(days=2)).date()
    said: list[str] = []
    book = PolicyReloader(session, file, said.append)
    asyncio.run(book.refresh())
    assert said == []
    file.write_text(f"scope: {{docker: {{}}}}\nexemptions: [{{owner: ann, reason: paper, until: {until}}}]\n")
    asyncio.run(book.refresh())
    asyncio.run(book.refresh())
    assert len(said) == 1
    assert "the exemption of ann (paper) ended" in said[0]


def test_outcomes_are_told_while_a_pass_runs_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    lines = PassPrinter(said.append, json=True, quiet=False)
    told = report(beside_work=Counter({("ray/lab/worker-1/tmp", "work runs beside it"): 2}))
    for number in range(3):
        ref = Ref("kubernetes", "lab", "job", f"run-{number}", f"u{number}", "team-a")
        told.outcomes.append(
            Closed(at=NOW, ref=ref, step="1.1", action=Action.REMOVE, rule="x", result=Result.RECLAIMED, reason="over")
        )
        lines.in_progress(told)
        (line,) = capsys.readouterr().out.splitlines()
        assert json.loads(line)["ref"]["name"] == f"run-{number}"
    lines.finished(told)
    assert capsys.readouterr().out == ""
    assert said == [
        "ray/lab/worker-1/tmp: work runs beside it. 2 more trees there were skipped; the next pass decides again."
    ]
