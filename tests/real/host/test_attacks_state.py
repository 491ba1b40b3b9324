"""Files that others could change, and a lock that anybody could take: refused by the real command, run as root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines import require
from tests.real.host.machine import AS_NOBODY, NOBODY, Host, can_be_nobody, sees_everybody, until
from tests.real.host.test_attacks_socket import public

__all__ = ["public"]
TREES = 'temporary: [{root: ROOT, names: ["tmp*"], above: 1B, older_than: 0s}]\nschedule: {every: 1s}\n'
LOCK = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(); sys.stdin.read()"


@pytest.fixture
def host(public: Path) -> Host:
    require("root", can_be_nobody() and sees_everybody())
    return Host(public, TREES)


def test_a_policy_that_others_may_write_is_not_obeyed(host: Host) -> None:
    path = host.tree("tmp-old")
    host.policy.chmod(0o666)
    # With write access to the policy a user could have any tree on the machine removed.
    subprocess.run([*AS_NOBODY, "sh", "-c", f"echo '# mine' >> {host.policy}"], check=True)
    ran = host.apply()
    assert (ran.code, path.exists()) == (10, True), ran
    assert f"chmod go-w {host.policy}" in ran.err
    planned = host.run("plan", "--platform", "host")
    assert planned.code == 0
    assert "chmod go-w" in planned.err
    checked = host.run("policy", "check", str(host.policy))
    assert (checked.code, "chmod go-w" in checked.err) == (0, True), checked
    host.policy.chmod(0o644)
    until(lambda: host.apply().code == 0 and not path.exists(), "its removal")


def test_a_policy_of_another_user_is_not_obeyed(host: Host) -> None:
    path = host.tree("tmp-old")
    os.chown(host.policy, NOBODY, NOBODY)
    ran = host.apply()
    assert (ran.code, path.exists()) == (10, True), ran
    assert f"chown root {host.policy}" in ran.err


def test_a_daemon_stops_acting_when_its_policy_becomes_writable(host: Host) -> None:
    with host.start("serve") as daemon:
        until(lambda: host.lines("pass") != [], "a first pass")
        host.policy.chmod(0o666)
        passes = len(host.lines("pass"))
        until(lambda: len(host.lines("pass")) > passes + 1, "passes go on")
        path = host.tree("tmp-old")
        passes = len(host.lines("pass"))
        until(lambda: len(host.lines("pass")) > passes + 1, "passes go on")
        daemon.send_signal(signal.SIGTERM)
        _, said = daemon.communicate(timeout=60)
    assert path.exists()
    assert "the policy is not valid any more, so no action is taken" in said
    assert said.count("chmod go-w") == 1


@contextmanager
def locked_by_nobody(folder: Path) -> Iterator[None]:
    command = [*AS_NOBODY, sys.executable, "-c", LOCK, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        yield
        child.stdin.close()


def test_a_state_directory_that_others_can_open_is_refused_and_their_lock_is_not_waited_for(host: Host) -> None:
    host.state.mkdir()
    host.state.chmod(0o755)
    with locked_by_nobody(host.state):
        ran = host.apply()
        assert ran.code == 1, ran
        assert f"chmod 700 {host.state}" in ran.err
        host.state.chmod(0o700)
        ran = host.apply()
        assert ran.code == 1, ran
        assert "has locked the directory" in ran.err
    assert host.apply().code == 0


def test_a_state_directory_of_another_user_or_through_their_link_is_refused(host: Host) -> None:
    host.state.mkdir(mode=0o700)
    os.chown(host.state, NOBODY, NOBODY)
    assert f"chown root {host.state}" in host.apply().err
    shutil.rmtree(host.state)
    elsewhere = host.state.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    host.state.symlink_to(elsewhere)
    os.chown(host.state, NOBODY, NOBODY, follow_symlinks=False)
    assert f"chown -h root {host.state}" in host.apply().err
    assert list(elsewhere.iterdir()) == []
