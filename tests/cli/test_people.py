"""What people ask for: hold, release, stop, remove, restore, pause; through the daemon with the rights of who asks."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from gpukeeper.model.subject import State
from tests.cli.fleet import POLICY, Fleet, ago
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

NOBODY = 65534


def test_a_hold_keeps_and_a_release_lets_go(fleet: Fleet) -> None:
    """C16.5, C8.5"""
    fleet.ended("old", days=2)
    held = fleet.run("workload", "hold", "old", "--for", "2h", "--reason", "comparing runs")
    assert held.code == 0, held.err
    assert "docker/node-1/old is held until" in held.out
    assert fleet.run("apply", "--yes").code == 0
    assert fleet.names() == {"old"}
    assert "comparing runs" in fleet.run("plan", "--verbose").out
    assert fleet.run("workload", "release", "old").code == 0
    fleet.run("apply", "--yes")
    assert fleet.names() == set()


def test_a_removal_on_request_is_recorded_and_can_be_restored(fleet: Fleet) -> None:
    fleet.ended("mine", days=0.1)
    assert fleet.run("workload", "remove", "mine", "--yes").code == 0
    assert fleet.names() == set()
    (outcome,) = fleet.lines("outcome")
    assert outcome["rule"] == "request"
    restored = fleet.run("restore", "mine")
    assert restored.code == 0, restored.err
    assert fleet.names() == {"mine"}
    assert fleet.run("workload", "remove", "mine", "--yes").code == 0
    restored = fleet.run("workload", "restore", "mine")
    assert restored.code == 0, restored.err
    assert fleet.names() == {"mine"}


def test_a_stop_on_request_stops_running_work(fleet: Fleet) -> None:
    fleet.add("busy", state=State.RUNNING, started=ago(hours=1), devices=("GPU-0",))
    ran = fleet.run("workload", "stop", "busy", "--yes")
    assert ran.code == 0, ran.err
    assert "verified: stopped" in ran.out


def test_a_stop_that_nobody_can_confirm_is_not_done(fleet: Fleet) -> None:
    fleet.add("busy", state=State.RUNNING, started=ago(hours=1), devices=("GPU-0",))
    ran = fleet.run("workload", "stop", "busy", stdin="y\n")
    assert (ran.code, ran.out) == (2, "")
    assert "stdin is not a terminal. Nothing was done" in ran.err
    assert fleet.lines("intent") == []


@pytest.mark.parametrize("served", [True, False], ids=["daemon", "alone"])
def test_on_a_terminal_one_is_shown_what_goes_and_a_no_is_a_no(fleet: Fleet, served: bool) -> None:
    """In mode plan too: a person confirms, and the daemon gives the question."""
    fleet.write_policy(POLICY.replace("enforce", "plan"))
    fleet.ended("old", days=2)
    with daemon(fleet) if served else nullcontext():
        if served:
            wait_for(lambda: fleet.lines("pass"))  # a pass under way would hold the lease
        scripted = fleet.run("workload", "remove", "old", "--yes")
        assert (scripted.code, fleet.names()) == (2, {"old"})
        assert "only mode: enforce acts unattended" in scripted.err
        code, said = _answered(fleet, "n")
        assert (code, fleet.names()) == (1, {"old"}), said
        assert "Will remove docker/node-1/old (" in said
        code, said = _answered(fleet, "y")
        assert (code, fleet.names()) == (0, set()), said


def _answered(fleet: Fleet, answer: str) -> tuple[int, str]:
    screen, device = pty.openpty()
    try:
        os.write(screen, f"{answer}\n".encode())
        command = [sys.executable, "-m", "gpukeeper", "workload", "remove", "old"]
        done = subprocess.run(
            command, env=fleet.env(), stdin=device, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        return done.returncode, done.stdout + done.stderr
    finally:
        os.close(screen)
        os.close(device)


def test_pause_stops_all_acting_until_resume(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    assert fleet.run("pause", "disk replacement").code == 0
    ran = fleet.run("apply", "--yes")
    assert ran.code == 3
    assert "All actions are paused: disk replacement" in ran.err
    assert fleet.names() == {"old"}
    refused = fleet.run("workload", "remove", "old", "--yes")
    assert refused.code == 2
    assert "everything is paused" in refused.err
    assert fleet.run("resume").code == 0
    assert fleet.run("apply", "--yes").code == 0
    assert fleet.names() == set()


def test_the_ledger_is_searched_and_exported_with_tags(fleet: Fleet) -> None:
    """C15.6"""
    fleet.ended("old", days=2)
    fleet.run("apply", "--yes")
    found = fleet.run("ledger", "list", "--search", "Verified: Gone", "--json").json()["lines"]
    assert [line["type"] for line in found] == ["outcome"]
    assert "No lines found." in fleet.run("ledger", "list", "--search", "nothing like this").err
    (line,) = fleet.run("ledger", "export", "--format", "syslog", "--type", "outcome").out.splitlines()
    assert " node-1 ds01-cleanup: container.remove reclaimed docker/node-1/old user=ann: succeeded 2d ago" in line
    assert fleet.run("ledger", "export", "--search", "verified: gone").out.count("\n") == 1


def test_a_second_pause_a_resume_and_a_release_of_nothing_report_it(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    assert fleet.run("pause", "disk replacement").code == 0
    again = fleet.run("pause", "something else")
    assert again.code == 0, again.err
    assert "Already paused: disk replacement, by " in again.out
    assert "All actions are paused: disk replacement, by " in fleet.run("plan").err
    resumed = fleet.run("resume")
    assert resumed.code == 0
    assert "disk replacement, by " in resumed.out
    for words, said in (
        (("resume",), "not paused; nothing was changed"),
        (("workload", "release", "old"), "nothing was released"),
    ):
        ran = fleet.run(*words)
        assert (ran.code, ran.out) == (2, ""), words
        assert said in ran.err


def test_what_was_stopped_is_started_again_by_restore(fleet: Fleet) -> None:
    fleet.add("busy", state=State.RUNNING, started=ago(hours=1), devices=("GPU-0",))
    assert fleet.run("workload", "stop", "busy", "--yes").code == 0
    assert fleet.state_of("busy") == "ended"
    back = fleet.run("restore", "busy")
    assert back.code == 0, back.err
    assert fleet.state_of("busy") == "running"
    again = fleet.run("restore", "busy")
    assert again.code == 2
    assert "it is running already" in again.err


def test_the_ledger_is_listed_filtered_exported_and_summed(fleet: Fleet) -> None:
    """C15.3, C15.6"""
    fleet.ended("old", days=2)
    fleet.ended("bobs", days=2, owner="bob")
    fleet.run("apply", "--yes")
    assert {line["owner"] for line in fleet.lines("outcome")} == {"ann", "bob"}
    only = fleet.run("ledger", "list", "--owner", "bob", "--type", "outcome", "--json").json()["lines"]
    assert [line["ref"]["name"] for line in only] == ["bobs"]
    assert fleet.run("ledger", "list", "--workload", "node-1/old", "--type", "outcome").out.count("\n") == 1
    assert fleet.run("ledger", "list", "--errors").out == ""
    csv = fleet.run("ledger", "export", "--format", "csv", "--type", "outcome").out.splitlines()
    assert csv[0] == "timestamp,event_type,user,source,details,schema_version"
    assert "container.remove" in csv[1]
    totals = fleet.run("ledger", "totals", "--json").json()["totals"]
    assert totals["whole"]["steps"] == 2
    assert set(totals["rules"]) == {"retention"}
    number = fleet.lines("outcome")[0]["seq"]
    assert "verified: gone" in fleet.run("ledger", "show", str(number)).out


@contextmanager
def daemon(fleet: Fleet, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = fleet.start("serve", **env)
    assert process.stderr is not None
    said = [process.stderr.readline() for _ in range(2)]
    assert "listening on" in said[-1], said
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)


def wait_for(condition: object, seconds: float = PATIENCE) -> None:
    """Of a real daemon's next pass; there is no virtual time across processes."""
    end = time.monotonic() + seconds
    assert callable(condition)
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_the_daemon_reclaims_answers_and_ends_on_sigterm(fleet: Fleet) -> None:
    """C6.3"""
    fleet.ended("old", days=2)
    fleet.ended("young", days=0.5)
    with daemon(fleet) as process:
        wait_for(lambda: fleet.names() == {"young"})
        held = fleet.run("workload", "hold", "young", "--for", "1h")
        assert held.code == 0, held.err
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "reclaimed  docker/node-1/old" in out
    (hold,) = fleet.lines("hold")
    assert hold["hold"]["by"] == hold["by"]


def test_every_line_of_the_daemon_carries_its_time(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    process = fleet.start("serve")
    assert process.stdout is not None
    reclaimed = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    assert "reclaimed  docker/node-1/old" in reclaimed
    for line in [reclaimed, *out.splitlines(), *err.splitlines()]:
        assert re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ \S", line), line
    assert "listening on" in err


@pytest.mark.parametrize(
    ("places", "named"), [("node-1", "serves docker/node-1, mode"), ("elsewhere", "serves no place")]
)
def test_the_daemon_names_the_places_of_its_scope_only(fleet: Fleet, places: str, named: str) -> None:
    fleet.write_policy(POLICY.replace("docker: {}", f"docker: {{places: [{places}]}}"))
    process = fleet.start("serve")
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert named in first


def test_two_daemons_at_once_are_refused(fleet: Fleet) -> None:
    with daemon(fleet):
        second = fleet.run("serve")
        assert second.code == 11
        assert "serve" in second.err
        assert "gpukeeper serves" not in second.err, "it does not"


def test_ctrl_c_ends_the_daemon_cleanly(fleet: Fleet) -> None:
    with daemon(fleet) as process:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 0


def test_ctrl_c_while_watching_exits_with_130(fleet: Fleet) -> None:
    fleet.ended("old", days=2)
    process = fleet.start("observe", "--watch", "--every", "1s")
    assert process.stdout is not None
    assert "STATE" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Interrupted." in err
    assert "Traceback" not in err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to ask as somebody else: run the tests as root")
def test_the_daemon_sees_who_asks_and_gives_only_their_rights(fleet: Fleet) -> None:
    """A user holds their own work, and nobody else's; the uid comes from the kernel, not from the request."""
    fleet.ended("anns", days=0.5)
    fleet.ended("theirs", days=0.5, owner="nobody")
    with tempfile.TemporaryDirectory(prefix="gpukeeper-test-") as public:
        Path(public).chmod(0o755)
        path = Path(public) / "socket"
        with daemon(fleet, GPUKEEPER_SOCKET=str(path)):
            refused = _ask_as_nobody(path, b'{"verb": "hold", "workload": "anns", "seconds": 60}')
            assert b"belongs to ann; nobody may not change it" in refused
            granted = _ask_as_nobody(path, b'{"verb": "hold", "workload": "theirs", "seconds": 60}')
            assert b'"done":true' in granted
            forged = _ask_as_nobody(path, b'{"verb": "hold", "workload": "anns", "seconds": 60, "by": "root"}')
            assert b"invalid request" in forged
            assert b"only an admin may do that" in _ask_as_nobody(path, b'{"verb": "pause"}')
            assert b"invalid request" in _ask_as_nobody(path, b"hello")
    assert [line["hold"]["by"] for line in fleet.lines("hold")] == ["nobody"]


def _ask_as_nobody(path: Path, request: bytes) -> bytes:
    """A child that gives up root, connects and prints the answer."""
    program = (
        "import os, socket, sys\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.connect(sys.argv[1]); s.sendall(sys.argv[2].encode() + b'\\n')\n"
        "print(s.makefile().read())\n"
    )
    command = [sys.executable, "-c", program, str(path), request.decode()]
    return subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE).stdout
