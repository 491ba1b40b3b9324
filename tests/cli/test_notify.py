"""What admins are sent by the real daemon: over a command, and in its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpukeeper.interfaces.cli.notify import Row, not_delivered
from tests.cli.fleet import Fleet
from tests.patience import PATIENCE

POLICY = """\
preset: development
mode: plan
scope: {docker: {}}
admins: [root, ADMIN]
notify: {admins: [{command: [PROGRAM, --token, hush]}]}
"""


@pytest.fixture
def pager(tmp_path: Path) -> Path:
    """A program that passes on what it gets, and where that can be read."""
    program, pipe = tmp_path / "pager", tmp_path / "pipe"
    os.mkfifo(pipe)
    passes_on = f"open({str(pipe)!r}, 'w').write(os.environ['GPUKEEPER_KIND'] + ' ' + sys.stdin.read())"
    program.write_text(f"#!{sys.executable}\nimport os, sys\n{passes_on}\n")
    program.chmod(0o755)
    return pipe


@contextmanager
def serving(fleet: Fleet) -> Iterator[subprocess.Popen[str]]:
    daemon = fleet.start("serve")
    try:
        yield daemon
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=PATIENCE)


def test_overdue_work_in_mode_plan_reaches_the_admins(fleet: Fleet, pager: Path) -> None:
    fleet.write_policy(POLICY.replace("PROGRAM", str(pager.with_name("pager"))))
    fleet.ended("old", days=2)
    with serving(fleet) as daemon:
        assert pager.read_text() == (
            "overdue docker/node-1: 1 due, not applied because the mode is plan."
            " Details: gpukeeper plan. To apply: gpukeeper apply.\n"
        )
        assert daemon.stderr is not None
        assert any("overdue: docker/node-1: 1 due" in line for line in daemon.stderr)
    assert fleet.names() == {"old"}


def test_a_command_that_fails_is_logged_and_passes_go_on(fleet: Fleet, tmp_path: Path) -> None:
    fleet.write_policy(POLICY.replace("PROGRAM", "/nowhere/pager"))
    fleet.ended("old", days=2)
    with serving(fleet) as daemon:
        assert daemon.stderr is not None
        said = next(line for line in daemon.stderr if "the channel" in line)
    assert "the channel command /nowhere/pager fails: it cannot be started: No such file or directory" in said


def test_a_command_does_not_notify(fleet: Fleet, tmp_path: Path) -> None:
    """Whoever runs it reads what it prints."""
    program, out = tmp_path / "pager", tmp_path / "out"
    program.write_text(f"#!/bin/sh\ncat >> {out}\n")
    program.chmod(0o755)
    fleet.write_policy(POLICY.replace("PROGRAM", str(program)))
    fleet.ended("old", days=2)
    assert fleet.run("plan").code == 0
    fleet.run("apply", "--yes")
    assert not out.exists()


def test_secrets_of_a_channel_are_not_printed(fleet: Fleet) -> None:
    fleet.write_policy(POLICY.replace("PROGRAM", "/usr/bin/pager"))
    shown = fleet.run("policy", "show", "notify")
    assert "command: /usr/bin/pager (2 arguments not shown)" in shown.out
    for words in (("policy", "show"), ("policy", "show", "--json"), ("policy", "check"), ("plan", "--json")):
        ran = fleet.run(*words)
        assert "hush" not in ran.out + ran.err


MAIL = """\
preset: development
mode: plan
scope: {docker: {}}
notify: {admins: [{apprise: FILE}], owners: [{apprise: FILE}], address: "{owner}@uni.example"}
"""


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """A file with a URL that leads nowhere, and that others can read."""
    path = tmp_path / "service.url"
    path.write_text("json://user:hush@127.0.0.1:1/hush/{address}\n")
    path.chmod(0o644)
    return path


def test_a_test_message_is_sent_over_each_channel(fleet: Fleet, tmp_path: Path) -> None:
    program, out = tmp_path / "pager", tmp_path / "out"
    program.write_text(f"#!/bin/sh\ncat >> {out}\n")
    program.chmod(0o755)
    fleet.write_policy(POLICY.replace("PROGRAM", str(program)))
    ran = fleet.run("notify", "test", "--admins")
    assert ran.code == 0
    assert "delivered" in ran.out
    assert "This is a test message of gpukeeper" in out.read_text()


def test_a_message_that_reached_nobody_exits_with_3(fleet: Fleet) -> None:
    """The only channel of an owner is a terminal, and nobody of this name is logged in."""
    ran = fleet.run("notify", "test", "--owner", "no-such-user")
    assert (ran.code, "not delivered" in ran.out) == (3, True), ran.out + ran.err


@pytest.mark.parametrize(
    ("rows", "failed"),
    [
        ([("ann", "terminal", True, "")], False),
        ([("ann", "terminal", False, "no terminal")], True),
        ([("ann", "terminal", False, "no terminal"), ("ann", "mail", True, "")], False),
        ([("ann", "terminal", True, ""), ("ann", "mail", False, "refused")], True),
        ([("admins", "log", True, ""), ("ann", "terminal", False, "no terminal")], True),
    ],
)
def test_who_is_not_logged_in_is_reached_by_another_channel(rows: list[Row], failed: bool) -> None:
    assert not_delivered(rows) is failed


def test_a_channel_that_fails_is_reported_without_its_secret(fleet: Fleet, url: Path) -> None:
    fleet.write_policy(MAIL.replace("FILE", str(url)))
    ran = fleet.run("notify", "test", "--owner", "ann", "--json")
    assert ran.code == 3
    assert "can be read by others" in ran.out
    assert "hush" not in ran.out + ran.err
    assert fleet.run("notify", "test", "--owner", "ann", "--admins").code == 2


def test_doctor_checks_channels_and_shows_no_secret(fleet: Fleet, url: Path) -> None:
    fleet.write_policy(MAIL.replace("FILE", str(url)))
    ran = fleet.run("doctor")
    assert f"apprise {url}: The secret in {url} is not used" in " ".join(ran.out.split())
    for words in (("policy", "show"), ("policy", "show", "--json"), ("doctor", "--json")):
        shown = fleet.run(*words)
        assert "hush" not in shown.out + shown.err
