"""`gpukeeper fleet` over ssh to a machine with systemd and sudo: the service runs, is repaired and removed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpukeeper.interfaces.cli.fleet import app
from tests.engines import has_sshd, require
from tests.real.package.test_bundle import renamed
from tests.real.systemd.machine import Machine, machine
from tests.real.systemd.test_setup import GPUKEEPER, OTHERS_TREE, POLICY

# ann may do everything with sudo, bob nothing. The machine has no network: each connection is an sshd of its own.
USERS = """
useradd --create-home --shell /bin/sh ann
useradd --create-home --shell /bin/sh bob
echo 'ann ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/ann
mkdir -p /run/sshd
install -d -m 1777 /srv/tmp
for name in ann bob; do
    install -d -m 700 -o $name /home/$name/.ssh
    install -m 600 -o $name /keys/key.pub /home/$name/.ssh/authorized_keys
done
"""
CONFIG = """\
Host gpu1 gpu2
    ProxyCommand nsenter --target={leader} --all -- /usr/sbin/sshd -i
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking accept-new
"""


class Fleet:
    """gpu1: as ann. gpu2: the same machine as bob."""

    def __init__(self, server: Machine, folder: Path) -> None:
        self.server, self.folder = server, folder

    def write(self, bundle: Path, hosts: str = "  gpu1: {user: ann}\n") -> None:
        text = f"defaults:\n  bundle: {bundle}\n  policy: policy.yaml\nhosts:\n{hosts}"
        (self.folder / "hosts.yaml").write_text(text)

    def run(self, command: str, *more: str) -> tuple[int, dict[str, Any]]:
        config = ["--ssh-config", str(self.folder / "ssh_config")]
        done = CliRunner().invoke(app, [command, str(self.folder / "hosts.yaml"), "--json", *config, *more])
        assert done.stdout.startswith("{"), (done.output, done.exception)
        return done.exit_code, {one["host"]: one for one in json.loads(done.stdout)["hosts"]}


@pytest.fixture(scope="module")
def fleet(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    require("ssh", has_sshd())
    folder = tmp_path_factory.mktemp("fleet")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    (folder / "policy.yaml").write_text(POLICY)
    with machine({folder / "key.pub": "/keys/key.pub"}) as server:
        server.shell(USERS)
        (folder / "ssh_config").write_text(CONFIG.format(leader=server.leader, folder=folder))
        made = Fleet(server, folder)
        made.write(bundle)
        yield made


@pytest.fixture(scope="module")
def deployed(fleet: Fleet, bundle: Path) -> dict[str, Any]:
    fleet.write(bundle, "  gpu1: {user: ann}\n  gpu2: {user: bob}\n")
    code, found = fleet.run("deploy", "--yes")
    assert code == 3, found
    fleet.write(bundle)
    return found


def test_the_service_runs_and_is_verified(fleet: Fleet, deployed: dict[str, Any]) -> None:
    one = deployed["gpu1"]
    assert (one["outcome"], one["words"], one["mode"], one["started_by"]) == (
        *("deployed", [], "enforce"),
        "gpukeeper.service",
    ), one
    fleet.server.shell("systemctl is-active gpukeeper && systemctl is-enabled gpukeeper")
    assert fleet.server.run(GPUKEEPER, "--version").stdout.split()[-1] == one["version"]
    code, found = fleet.run("deploy", "--yes")
    assert (code, found["gpu1"]["outcome"]) == (0, "unchanged"), found


def test_a_user_whom_sudo_refuses_is_blocked_and_stops_no_one(deployed: dict[str, Any]) -> None:
    assert deployed["gpu2"]["outcome"] == "blocked", deployed["gpu2"]
    assert "sudo" in " ".join(deployed["gpu2"]["words"]), deployed["gpu2"]


def test_the_daemon_makes_passes_and_so_does_an_apply_through_sudo(fleet: Fleet, deployed: dict[str, Any]) -> None:
    """Both keep the trees of others: in a container it cannot see all processes. tests/real/host does it."""
    fleet.server.shell(OTHERS_TREE)
    assert "the last one was" in fleet.run("status")[1]["gpu1"]["last_pass"]
    _, found = fleet.run("apply", "--yes")
    assert [(one["platform"], one["outcomes"]) for one in found["gpu1"]["places"]] == [("host", [])], found
    fleet.server.shell("test -e /srv/tmp/tmp-old/below/f")


def test_a_stopped_service_is_reported_and_started_again(fleet: Fleet, deployed: dict[str, Any]) -> None:
    assert fleet.run("status")[0] == 0
    fleet.server.shell("systemctl disable --now gpukeeper")
    code, found = fleet.run("status")
    assert code == 3, found
    assert "gpukeeper.service" in " ".join(found["gpu1"]["words"]), found
    code, found = fleet.run("deploy", "--yes")
    assert (code, found["gpu1"]["outcome"]) == (0, "deployed"), found
    fleet.server.shell("systemctl is-active gpukeeper && systemctl is-enabled gpukeeper")


def test_a_newer_version_is_in_service_after_an_upgrade(fleet: Fleet, deployed: dict[str, Any], bundle: Path) -> None:
    fleet.write(renamed(bundle, fleet.folder / "gpukeeper-99.0.pyz", version="99.0"))
    code, found = fleet.run("upgrade", "--yes")
    one = found["gpu1"]
    assert (code, one["outcome"], one["version"]) == (0, "deployed", "99.0"), one
    assert one["previous"] == deployed["gpu1"]["version"]
    fleet.server.shell("systemctl is-active gpukeeper")


def test_removed_without_a_trace_but_the_ledger(fleet: Fleet, deployed: dict[str, Any]) -> None:
    code, found = fleet.run("remove", "--yes")
    assert (code, found["gpu1"]["outcome"]) == (0, "removed"), found
    left = fleet.server.shell("find /etc /opt /usr/local /home -name '*gpukeeper*' -not -path '/etc/gpukeeper*'")
    assert left == ""
    assert fleet.server.run("systemctl", "is-active", "gpukeeper", check=False).stdout.strip() == "inactive"
