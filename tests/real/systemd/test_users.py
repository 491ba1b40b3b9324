"""What an ordinary user can do on a server that `gpukeeper setup host` has set up, with the unit that it writes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gpukeeper.model.subject import State
from gpukeeper.platforms.simulated.folder import Workload
from tests.real.systemd.machine import Machine
from tests.real.systemd.test_setup import GPUKEEPER

POLICY = "preset: development\nmode: enforce\nscope: {docker: {}}\nadmins: [root]\nschedule: {every: 10s}\n"
# An engine of files, for the daemon alone: what users have comes from its socket.
DROP_IN = "[Service]\nEnvironment=GPUKEEPER_FLEET=folder:/srv/node-1\n"
OURS, MINE = "/etc/systemd/system/gpukeeper.service", "docker/node-1/mine"


@pytest.fixture(scope="module")
def server(booted: Machine) -> Iterator[Machine]:
    booted.run("python3", "/bundle.pyz", PIP_NO_COMPILE="1")
    booted.shell("for name in ann eve; do useradd --create-home $name 2>/dev/null || true; done")
    started = datetime.now(UTC) - timedelta(hours=2)
    mine = Workload(state=State.RUNNING, created=started, started=started, owner="ann", devices=("GPU-0",))
    write(booted, "/srv/node-1/mine.json", msgspec.json.encode(mine).decode())
    write(booted, "/etc/gpukeeper/policy.yaml", POLICY)
    write(booted, f"{OURS}.d/fleet.conf", DROP_IN)
    booted.run(GPUKEEPER, "setup", "host", "--yes")
    booted.until(f"{GPUKEEPER} ledger list | grep -q ' pass '", "the daemon has made a pass")
    yield booted
    booted.run(GPUKEEPER, "setup", "remove", "--yes", check=False)
    booted.shell(f"rm -rf /etc/gpukeeper /var/lib/gpukeeper /srv/node-1 {OURS}.d; systemctl daemon-reload")


def write(server: Machine, path: str, text: str) -> None:
    server.shell(f"mkdir -p $(dirname {path}) && cat > {path} <<'EOF'\n{text}\nEOF")


def as_user(server: Machine, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    become = ("setpriv", f"--reuid={name}", f"--regid={name}", "--clear-groups", "--")
    return server.run(*become, GPUKEEPER, *words, check=False, HOME=f"/home/{name}")


def test_anyone_may_connect_and_nobody_else_may_replace_the_socket(server: Machine) -> None:
    assert server.shell("stat -c '%a %U' /run/gpukeeper /run/gpukeeper/socket").splitlines() == ["755 root", "666 root"]
    assert server.shell("stat -c %a /var/lib/gpukeeper /var/lib/gpukeeper/ledger.db").split() == ["700", "600"]
    server.run("systemctl", "restart", "gpukeeper")
    assert server.shell("stat -c %a /run/gpukeeper /run/gpukeeper/socket").split() == ["755", "666"]
    server.run("systemctl", "stop", "gpukeeper")
    server.shell("test ! -e /run/gpukeeper")
    server.run("systemctl", "start", "gpukeeper")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "--verbose"), MINE),
        (("observe",), ""),
        (("observe", "--gpus"), ""),
        (("explain", MINE), "Decision: keep"),
        (("workload", "list"), MINE),
        (("workload", "show", MINE), "Decision: keep"),
        (("doctor",), "/run/gpukeeper/socket"),
        (("node", "list"), ""),
        (("report",), ""),
        (("ledger", "list"), ""),
        (("policy", "show"), "admins"),
        (("policy", "check", "/etc/gpukeeper/policy.yaml"), ""),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_a_user_reads(server: Machine, words: tuple[str, ...], said: str) -> None:
    ran = as_user(server, "ann", *words)
    assert (ran.returncode, said in ran.stdout, "Traceback" in ran.stderr) == (0, True, False), (ran.stdout, ran.stderr)


def test_an_owner_holds_and_releases_and_another_user_may_not(server: Machine) -> None:
    refused = as_user(server, "eve", "workload", "hold", MINE, "--for", "1h")
    assert refused.returncode == 2, (refused.stdout, refused.stderr)
    removal = as_user(server, "eve", "workload", "remove", MINE, "--yes")
    assert (removal.returncode, "Traceback" in removal.stderr) == (2, False), removal.stderr
    held = as_user(server, "ann", "workload", "hold", MINE, "--for", "1h")
    assert held.returncode == 0, (held.stdout, held.stderr)
    lines = json.loads(server.run(GPUKEEPER, "ledger", "list", "--type", "hold", "--json").stdout)["lines"]
    assert [one["by"] for one in lines] == ["ann"]
    released = as_user(server, "ann", "workload", "release", MINE)
    assert released.returncode == 0, (released.stdout, released.stderr)
    server.shell("test -e /srv/node-1/mine.json")


@pytest.mark.parametrize("words", [("top",), ("login",), ("restore", "x"), ("accept", "list"), ("notify", "test")])
def test_no_command_ends_with_a_traceback(server: Machine, words: tuple[str, ...]) -> None:
    ran = as_user(server, "ann", *words)
    assert ran.returncode in (0, 1, 2, 3), ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr


@pytest.mark.parametrize("words", [("pause",), ("stop-all", "--yes"), ("setup", "remove", "--yes"), ("setup", "host")])
def test_what_only_an_admin_may_do_is_refused_with_a_sentence(server: Machine, words: tuple[str, ...]) -> None:
    ran = as_user(server, "ann", *words)
    assert ran.returncode != 0, ran.stdout
    assert "Traceback" not in ran.stderr, ran.stderr
    server.shell("test -e /srv/node-1/mine.json && systemctl is-active gpukeeper")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("plan",), 2, "chmod 755 /run/gpukeeper"),
        (("explain", MINE), 2, "chmod 755 /run/gpukeeper"),
        (("workload", "list"), 2, "chmod 755 /run/gpukeeper"),
        (("workload", "hold", MINE), 2, "chmod 755 /run/gpukeeper"),
        (("doctor",), 1, "chmod 755 /run/gpukeeper"),
        (("observe",), 0, "its holds and warnings are not shown"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_a_socket_that_is_closed_to_users_is_a_sentence(
    server: Machine, words: tuple[str, ...], code: int, said: str
) -> None:
    server.shell("chmod 700 /run/gpukeeper")
    try:
        ran = as_user(server, "ann", *words)
    finally:
        server.shell("chmod 755 /run/gpukeeper")
    assert "Traceback" not in ran.stderr, ran.stderr
    assert (ran.returncode, said in ran.stdout + ran.stderr) == (code, True), (ran.stdout, ran.stderr)


def test_under_a_unit_of_an_older_version_too(server: Machine) -> None:
    server.run("systemctl", "stop", "gpukeeper")
    server.shell(f"cp {OURS} /srv/unit; sed -i /RuntimeDirectory/d {OURS}; systemctl daemon-reload")
    server.shell("install -d -m 700 /run/gpukeeper; systemctl start gpukeeper")
    assert server.shell("stat -c %a /run/gpukeeper /run/gpukeeper/socket").split() == ["755", "666"]
    assert as_user(server, "ann", "workload", "list").returncode == 0
    server.shell(f"cp /srv/unit {OURS}; systemctl daemon-reload; systemctl restart gpukeeper")
