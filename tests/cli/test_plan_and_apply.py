"""plan shows, apply does, and the exit code says how it went."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from gpukeeper.__main__ import app
from gpukeeper.config.load import load_text
from gpukeeper.interfaces.terminal.session import narrowed, own_only
from gpukeeper.ledger.journal import take_lease
from gpukeeper.lifecycle.decide import RULES
from gpukeeper.lifecycle.settings import Narrow, Rulebook
from gpukeeper.model.errors import UsageError
from gpukeeper.model.subject import Outcome, State
from tests.cli.fleet import POLICY, Fleet, ago
from tests.patience import PATIENCE


def test_plan_shows_what_is_due_and_why_and_changes_nothing(fleet: Fleet) -> None:
    """C5.1: failures are kept longer than successes."""
    fleet.ended("old", days=2)
    fleet.ended("failed", days=2, outcome=Outcome.FAILED)
    ran = fleet.run("plan", "--verbose")
    assert ran.code == 0
    assert "remove  docker/node-1/old" in ran.out
    assert "succeeded 2d ago, kept for 1d" in ran.out
    assert "kept    docker/node-1/failed" in ran.out
    assert "failed 2d ago, kept for 7d" in ran.out
    assert fleet.names() == {"old", "failed"}
    assert not fleet.state.exists(), "plan must not write a ledger"


@pytest.mark.parametrize(
    "words",
    [
        *(("observe",), ("explain", "eval"), ("doctor",), ("workload", "list"), ("report",), ("policy", "show")),
        *(("ledger", "list"), ("ledger", "totals"), ("ledger", "status"), ("ledger", "verify")),
    ],
    ids=" ".join,
)
def test_a_command_that_only_reads_creates_nothing(fleet: Fleet, words: tuple[str, ...]) -> None:
    fleet.ended("eval", days=2)
    ran = fleet.run(*words)
    assert ran.out or ran.err == "No lines found.\n", ran.err
    assert not fleet.state.exists()


def test_a_failure_is_told_with_what_it_ended_with(fleet: Fleet) -> None:
    fleet.ended("failed", days=2, outcome=Outcome.FAILED, ended_with="exit code 137, out of memory")
    reason = "failed with exit code 137, out of memory, 2d ago, kept for 7d"
    assert reason in fleet.run("plan", "--verbose").out
    assert reason in fleet.run("explain", "failed").out
    assert fleet.run("apply", "--yes").code == 0
    assert "ended, failed with exit code 137, out of memory" in fleet.run("ledger", "list", "--type", "noticed").out
    assert fleet.lines("noticed")[0]["ended_with"] == "exit code 137, out of memory"


def test_plan_exit_code_is_4_only_when_something_is_due(fleet: Fleet) -> None:
    assert fleet.run("plan", "--exit-code").code == 0
    fleet.ended("old", days=2)
    assert fleet.run("plan", "--exit-code").code == 4


def test_plan_narrows_by_namespace_and_age(fleet: Fleet) -> None:
    """C6.1, C6.2: `plan --namespace default --older-than 1h`. Containers have no namespace, so nothing fits."""
    fleet.ended("old", days=2)
    both = fleet.run("plan", "--namespace", "default", "--older-than", "1h", "--json").json()
    assert both["places"][0]["decisions"] == []
    aged = fleet.run("plan", "--older-than", "1h", "--json").json()
    assert [d["seen"]["ref"]["name"] for d in aged["places"][0]["decisions"]] == ["old"]
    assert fleet.run("plan", "--older-than", "3d", "--json").json()["places"][0]["decisions"] == []


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--owner", "bob"), ["bobs"]),
        (("--outcome", "failed"), ["bobs"]),
        (("--name", "an*"), ["anns"]),
        (("--kind", "container"), ["anns", "bobs", "left"]),
        (("--kind", "trainjob"), []),
        (("--label", "team=vision"), ["anns"]),
        (("--label", "team"), ["anns"]),
        (("--platform", "docker/node-1"), ["anns", "bobs", "left"]),
        (("--class", "serving"), ["bobs"]),
        (("--class", "doc*"), ["anns"]),
        (("--class", "unknown"), ["left"]),
        (("--owner", "nobody"), ["left"]),
    ],
)
def test_narrowing_flags_choose_and_never_widen(fleet: Fleet, flags: tuple[str, str], names: list[str]) -> None:
    """C6.1, C12.2: what nobody owns, and each class as the policy assigns it, is easy to list."""
    fleet.write_policy(POLICY + "match: [{class: serving, owner: bob}]\n")
    fleet.ended("left", days=0.5, owner=None, class_="unknown")
    fleet.ended("anns", days=9, labels={"team": "vision"})
    fleet.ended("bobs", days=9, outcome=Outcome.FAILED, owner="bob")
    found = fleet.run("plan", *flags, "--json").json()["places"][0]["decisions"]
    assert sorted(d["seen"]["ref"]["name"] for d in found) == names
    if flags[0] in ("--class", "--owner"):
        listed = fleet.run("workload", "list", *flags, "--json").json()["decisions"]
        assert sorted(d["seen"]["ref"]["name"] for d in listed) == names


def test_apply_narrows_to_a_class_and_to_what_has_no_owner(fleet: Fleet) -> None:
    fleet.write_policy(POLICY + "match: [{class: serving, owner: bob}]\n")
    fleet.ended("anns", days=9)
    fleet.ended("bobs", days=9, owner="bob")
    fleet.ended("left", days=9, owner=None)
    assert fleet.run("apply", "--yes", "--class", "serving").code == 0
    assert fleet.names() == {"anns", "left"}
    assert fleet.run("apply", "--yes", "--owner", "nobody").code == 0
    assert fleet.names() == {"anns"}


def test_short_times_are_tried_on_named_workloads_alone(fleet: Fleet) -> None:
    """C16.6: one minute instead of an hour; what is due by the policy itself is kept, too, unless it is named."""
    fleet.write_policy(POLICY + "retention: {succeeded: 1h}\n")
    for name in ("named", "other"):
        fleet.ended(name, days=1 / 24 / 30)
    fleet.ended("old", days=9)
    short = ("--compress", "60", "--workload", "docker/node-1/named", "--workload", "docker/node-1/none")
    ran = fleet.run("plan", "--verbose", *short)
    assert "ago, kept for 1m (times divided by 60)" in ran.out
    assert ("other" in ran.out, "old" in ran.out) == (False, False)
    assert "docker/node-1/none was not found" in ran.err
    ran = fleet.run("apply", "--yes", *short)
    assert ran.code == 0
    assert "docker/node-1/none was not found" in ran.err
    assert fleet.names() == {"other", "old"}
    assert all("(times divided by 60)" in line["reason"] for line in fleet.lines("intent"))


@pytest.mark.parametrize(
    "words",
    [
        ("--compress", "60"),
        ("--workload", "docker/node-1/a"),
        ("--compress", "60", "--workload", "docker/node-1/*"),
        ("--compress", "60", "--workload", "a"),
        ("--compress", "1", "--workload", "docker/node-1/a"),
    ],
)
def test_short_times_without_names_are_refused(words: tuple[str, ...]) -> None:
    for command in ("plan", "apply"):
        ran = CliRunner().invoke(app, [command, *words])
        assert ran.exit_code == 2 or isinstance(ran.exception, UsageError), ran.output


def test_who_is_called_nobody_and_is_no_admin_does_not_reclaim_what_has_no_owner() -> None:
    wanted = narrowed(Narrow(owner="nobody"))
    for user, nobodys in (("nobody", False), ("root", True)):
        session = SimpleNamespace(book=Rulebook(load_text("scope: {docker: {}}").policy), user=user)
        assert own_only(session, wanted).nobodys is nobodys  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("older_than", "left"),
    [
        ("90s", set()),
        ("30m", set()),
        ("1h", {"40m"}),
        ("1.5h", {"40m"}),
        ("2h30m", {"40m", "2h"}),
        ("2d", {"40m", "2h"}),
        ("1w", {"40m", "2h", "3d"}),
    ],
)
def test_apply_by_hand_takes_what_is_older_than_any_unit_of_time(fleet: Fleet, older_than: str, left: set[str]) -> None:
    """C6.2: everything here is due; the flag chooses."""
    fleet.write_policy(POLICY + "retention: {succeeded: 0s}\n")
    for name, minutes in (("40m", 40), ("2h", 120), ("3d", 3 * 1440)):
        fleet.ended(name, days=minutes / 1440)
    ran = fleet.run("apply", "--yes", "--older-than", older_than)
    assert ran.code == 0, ran.err
    assert fleet.names() == left


@pytest.mark.parametrize("older_than", ["30", "1 fortnight", "-1h", ""])
def test_a_time_without_a_unit_is_refused_and_nothing_goes(fleet: Fleet, older_than: str) -> None:
    """C6.2"""
    fleet.ended("old", days=9)
    ran = fleet.run("apply", "--yes", "--older-than", older_than)
    assert ran.code == 2
    assert "Write it like 30m, 2h or 7d" in ran.err
    assert fleet.names() == {"old"}


def test_what_has_no_start_or_end_does_not_break_a_pass(fleet: Fleet) -> None:
    """C6.2: a missing start time broke the pass of the others."""
    fleet.add("strange", outcome=Outcome.SUCCEEDED)
    fleet.add("runs", state=State.RUNNING, devices=("GPU-0",))
    fleet.ended("old", days=2)
    ran = fleet.run("apply", "--yes", "--older-than", "1h")
    assert ran.code == 0, ran.err
    assert fleet.names() == {"strange", "runs"}


def test_apply_removes_only_what_is_due_and_records_it(fleet: Fleet) -> None:
    """C15.3: every pass is readable afterwards."""
    fleet.ended("old", days=2)
    fleet.ended("young", days=0.5)
    ran = fleet.run("apply", "--yes")
    assert ran.code == 0, ran.err
    assert fleet.names() == {"young"}
    assert "reclaimed  docker/node-1/old" in ran.out
    (outcome,) = fleet.lines("outcome")
    assert outcome["result"] == "reclaimed"
    assert "verified: gone" in outcome["reason"]
    assert [line["type"] for line in fleet.lines("evidence", "intent", "outcome")] == ["evidence", "intent", "outcome"]


def test_apply_in_mode_plan_does_not_act_unattended(fleet: Fleet) -> None:
    fleet.write_policy(POLICY.replace("enforce", "plan"))
    fleet.ended("old", days=2)
    ran = fleet.run("apply", "--yes")
    assert ran.code == 2
    assert "only mode: enforce acts unattended" in ran.err
    assert fleet.names() == {"old"}


def test_apply_without_anybody_to_ask_does_nothing(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    ran = fleet.run("apply", stdin="y\n")
    assert ran.code == 2
    assert "stdin is not a terminal" in ran.err
    assert fleet.names() == {"old"}


@pytest.mark.parametrize(("answer", "left"), [("y\n", set()), ("n\n", {"old"})])
def test_apply_asks_on_a_terminal_in_either_mode(fleet: Fleet, answer: str, left: set[str]) -> None:
    fleet.write_policy(POLICY.replace("enforce", "plan"))
    fleet.ended("old", days=2)
    ours, theirs = pty.openpty()
    asked = subprocess.Popen(
        [sys.executable, "-m", "gpukeeper", "apply"],
        env=fleet.env(),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.write(ours, answer.encode())
    out, err = asked.communicate(timeout=PATIENCE)
    os.close(ours)
    os.close(theirs)
    assert asked.returncode == 0, err
    assert "remove  docker/node-1/old" in out
    assert "Apply this step?" in err
    assert fleet.names() == left


@pytest.mark.slow
def test_ctrl_c_at_the_question_does_nothing_and_exits_with_130(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "gpukeeper", "apply"], fleet.env(TERM="dumb"))
    shown = b""
    while b"Apply this step?" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):
        while True:
            if not select.select([terminal], [], [], 20)[0]:
                os.write(terminal, b"\x03")  # Python loses one that comes just before it waits for the line
            elif not os.read(terminal, 4096):
                break
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert fleet.names() == {"old"}
    assert fleet.lines("intent") == []


def test_a_second_place_with_another_pass_is_reported_beside_what_was_done_at_the_first(fleet: Fleet) -> None:
    fleet.ended("here", days=2)
    fleet.ended("there", days=2, folder=fleet.with_second_place())
    lease = take_lease(fleet.lease_folder(), "docker", "node-2")
    try:
        ran = fleet.run("apply", "--yes", "--textfile", str(fleet.state.parent / "metrics.prom"))
        told = fleet.run("apply", "--yes", "--json").json()["places"]
    finally:
        lease.release()
    assert ran.code == 3, ran.err
    assert "reclaimed  docker/node-1/here" in ran.out
    assert f"Another pass is running on docker/node-2: pid {os.getpid()} " in ran.err
    assert "Nothing was touched there." in ran.err
    assert "1 of 1 due reclaimed" in ran.err
    assert fleet.second is not None
    assert (fleet.second / "there.json").exists()
    assert "metrics.prom was not written" in ran.err
    assert not (fleet.state.parent / "metrics.prom").exists()
    assert [(one["place"], "Another pass" in (one["leased"] or "")) for one in told] == [
        ("node-1", False),
        ("node-2", True),
    ]
    assert fleet.run("apply", "--yes").code == 0
    assert not (fleet.second / "there.json").exists()


def test_another_pass_at_the_only_place_exits_with_11(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    lease = take_lease(fleet.lease_folder(), "docker", "node-1")
    try:
        ran = fleet.run("apply", "--yes", "--quiet")
    finally:
        lease.release()
    assert (ran.code, ran.out) == (11, "")
    assert "Another pass is running on docker/node-1" in ran.err
    assert fleet.names() == {"old"}


def test_apply_on_a_terminal_refuses_in_a_pause_before_it_asks(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    assert fleet.run("pause", "disk replacement").code == 0
    ours, theirs = pty.openpty()
    asked = subprocess.Popen(
        [sys.executable, "-m", "gpukeeper", "apply"],
        env=fleet.env(),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = asked.communicate(timeout=PATIENCE)
    os.close(ours)
    os.close(theirs)
    assert (asked.returncode, out) == (2, "")
    assert "all actions are paused: disk replacement, by " in err
    assert "Apply this step?" not in err
    assert fleet.names() == {"old"}


def test_a_plan_with_a_docker_engine_that_does_not_answer_exits_with_3(fleet: Fleet, tmp_path: Path) -> None:
    """Beside a host that does: what Docker has is not known. Alone, nothing answered."""
    engine = {"GPUKEEPER_FLEET": "", "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    fleet.write_policy("scope: {docker: {}, host: {}}\n")
    ran = fleet.run("plan", **engine)
    assert (ran.code, "could not be read (the engine at unix://" in ran.err) == (3, True), ran.err
    assert fleet.run("plan", "--json", **engine).code == 3
    assert fleet.run("plan", "--exit-code", **engine).code == 3
    assert fleet.run("plan", "--platform", "host", **engine).code == 0, "it was not asked for"
    fleet.write_policy("scope: {docker: {}}\n")
    assert fleet.run("plan", **engine).code == 1


def test_due_work_comes_before_what_could_not_be_read(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    broken = fleet.with_second_place()
    (broken / "old.json").write_text("{")
    assert fleet.run("plan", "--exit-code").code == 4
    assert fleet.run("plan").code == 0, "a part of a place"


def test_the_budget_defers_the_rest_oldest_first(fleet: Fleet) -> None:
    fleet.write_policy(POLICY + "budget: {per_pass: 2}\n")
    for days in (2, 3, 4, 5):
        fleet.ended(f"ended-{days}", days=days)
    ran = fleet.run("apply", "--yes")
    assert ran.code == 3
    assert "2 deferred by the budget, oldest first" in ran.err
    assert fleet.names() == {"ended-2", "ended-3"}


def test_overdue_running_work_is_warned_twice_before_anything_is_stopped(fleet: Fleet) -> None:
    """C14.2"""
    fleet.write_policy(POLICY + "classes: {docker: {max_runtime: 1h, on_max_runtime: stop}}\n")
    for n in range(4):
        fleet.add(f"run-{n}", state=State.RUNNING, started=ago(hours=9), devices=("GPU-0",))
    for _ in range(3):
        assert fleet.run("apply", "--yes").code == 0
    assert [line["stage"] for line in fleet.lines("warning")] == [1] * 4 + [2] * 4
    assert fleet.lines("intent") == []


def test_the_breaker_refuses_with_12_and_allows_what_a_person_allows(fleet: Fleet) -> None:
    for n in range(6):
        fleet.ended(f"young-{n}", days=0.1)
    fleet.run("apply", "--yes")
    fleet.ended("old", days=2)
    for n in range(4):
        (fleet.folder / f"young-{n}.json").unlink()
    refused = fleet.run("apply", "--yes")
    assert refused.code == 12
    assert "4 of 6 objects of the last pass are missing" in refused.err
    assert "Nothing was touched." in refused.err
    assert "gpukeeper apply --budget" in refused.err
    assert "old" in fleet.names()
    assert fleet.lines("intent") == []
    assert fleet.run("apply", "--yes", "--budget", "1").code == 0
    assert "old" not in fleet.names()


def test_what_cannot_be_read_is_not_seen_and_not_touched(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    (fleet.folder / "broken.json").write_text("{ this is no workload")
    ran = fleet.run("apply", "--yes")
    assert ran.code == 3
    assert "broken.json could not be read" in ran.err
    assert fleet.names() == {"broken"}


def test_an_invalid_policy_names_every_problem_and_nothing_is_done(fleet: Fleet) -> None:
    fleet.write_policy(POLICY + "retention: {succeed: 1d, failed: soon}\n")
    fleet.ended("old", days=2)
    ran = fleet.run("apply", "--yes")
    assert ran.code == 10
    assert 'unknown setting "succeed". Did you mean "succeeded"?' in ran.err
    assert '"soon" is not a duration' in ran.err
    assert "Nothing was changed" in ran.err
    assert fleet.names() == {"old"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "--older-than", "1 hour"), "is not a duration. Write it like 30m, 2h or 7d."),
        (("plan", "--outcome", "dead"), "is not one of: succeeded, failed, stopped"),
        (("plan", "--platform", "slurm"), "is not a reachable platform"),
        (("explain", "nothing-like-it"), 'nothing in the policy\'s scope is named "nothing-like-it"'),
        (("apply", "--budget", "0"), "greater than or equal to 1"),
        (("plan", "--no-such-flag"), "No such option"),
        (("ledger", "show", "99"), "has no line 99"),
        (("restore", "nothing-like-it"), "reclaimed nothing named"),
    ],
)
def test_wrong_usage_exits_with_2_and_shows_what_to_do(fleet: Fleet, words: tuple[str, ...], said: str) -> None:
    ran = fleet.run(*words)
    assert ran.code == 2, ran.err
    assert said in ran.err


def test_explain_gives_every_rules_answer(fleet: Fleet) -> None:
    """C7.1"""
    fleet.ended("old", days=0.5)
    ran = fleet.run("explain", "old")
    assert ran.code == 0
    assert "Decision: keep by retention, due in" in ran.out
    for rule in ("target", "exemption", "hold", "idle", "max_runtime", "retention", "temporary_tree"):
        assert f"  {rule}" in ran.out
    said = fleet.run("explain", "node-1/old", "--json").json()
    assert [one["rule"] for one in said["answers"]] == [rule.name for rule in RULES]


@pytest.mark.parametrize("words", [("plan",), ("plan", "--json"), ("policy", "schema"), ("apply", "--yes")])
def test_output_that_cannot_be_written_is_a_sentence_and_1(fleet: Fleet, words: tuple[str, ...]) -> None:
    fleet.ended("old", days=2)
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "gpukeeper", *words],
            env=fleet.env(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert ran.returncode == 1
    assert "The output could not be written: No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr


def test_output_for_a_pipe_has_no_colour(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    assert "\x1b" not in fleet.run("plan").out + fleet.run("--help").out


def test_who_narrows_to_nothing_is_told_so(fleet: Fleet) -> None:
    """A misspelt owner must not read as "nothing is due"."""
    fleet.ended("old", days=2)
    ran = fleet.run("plan", "--owner", "nobody-of-that-name")
    assert ran.code == 0
    assert "No objects match the filters" in ran.err
