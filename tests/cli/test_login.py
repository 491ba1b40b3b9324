"""`gpukeeper login`: links, tokens and lists, from a daemon with a dashboard."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.fleet import Fleet
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    daemon = made.start("serve", "--web", "0")
    try:
        _wait(daemon)
        yield made
    finally:
        daemon.terminate()
        daemon.communicate(timeout=PATIENCE)


def _wait(daemon: subprocess.Popen[str]) -> None:
    assert daemon.stderr is not None
    for line in daemon.stderr:
        if "listening on" in line:
            return
    pytest.fail("the daemon ended")


def test_a_link_a_token_and_their_list(fleet: Fleet) -> None:
    link = fleet.run("login", "--json").json()
    assert set(link) == {"schema", "verb", "words", "secret"}
    assert link["schema"] == "gpukeeper/login/v1"
    assert "/login/" in link["secret"]
    token = fleet.run("login", "--token", "nightly", "--expires", "1d", "--json").json()
    assert token["secret"] not in fleet.run("login", "--list").out
    listed = fleet.run("login", "--list", "--json").json()
    assert listed["schema"] == "gpukeeper/logins/v1"
    (one,) = listed["logins"]
    assert (one["kind"], one["name"]) == ("token", "nightly")
    assert fleet.run("login", "--revoke", one["id"]).code == 0
    assert fleet.run("login", "--list", "--json").json()["logins"] == []


def test_without_a_dashboard_nobody_logs_in(tmp_path: Path) -> None:
    ran = Fleet(tmp_path).run("login")
    assert ran.code == 1
    assert "gpukeeper serve --web PORT" in ran.err
