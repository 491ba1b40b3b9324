"""`gpukeeper setup` on a machine with systemd: from the offline bundle to a running service, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.real.systemd.machine import Machine

GPUKEEPER = "/opt/gpukeeper/bin/gpukeeper"
# Trees that others own, in a directory that only their owner may enter, inside a sticky one.
OTHERS_TREE = """
useradd --create-home ann 2>/dev/null || true
install -d -m 1777 /srv/tmp
install -d -m 700 -o ann /srv/tmp/tmp-old /srv/tmp/tmp-old/below
head -c 100000 /dev/zero > /srv/tmp/tmp-old/below/f
chown -R ann /srv/tmp/tmp-old
"""
POLICY = """\
mode: enforce
scope: {host: {}}
admins: [root]
temporary: [{root: /srv/tmp, names: ["tmp*"], above: 1B, older_than: 0s, under_pressure: 0s}]
schedule: {every: 10s}
"""


@pytest.fixture(scope="module")
def installed(booted: Machine) -> Machine:
    booted.run("python3", "/bundle.pyz", PIP_NO_COMPILE="1")  # what is never imported here need not be compiled
    return booted


@pytest.fixture
def server(installed: Machine) -> Iterator[Machine]:
    yield installed
    installed.run(GPUKEEPER, "setup", "remove", "--yes", check=False)
    installed.shell("rm -rf /etc/gpukeeper /var/lib/gpukeeper /srv/tmp; systemctl reset-failed")


@pytest.mark.smoke
def test_from_nothing_to_a_running_daemon_and_back(server: Machine) -> None:
    before = server.shell("find /etc /usr/local /var/lib/gpukeeper -newermt 2000-01-01 2>/dev/null | sort || true")
    shown = server.run(GPUKEEPER, "setup", "host", "--yes")
    assert "/etc/systemd/system/gpukeeper.service" in shown.stdout
    assert "gpukeeper.service is running" in shown.stdout
    assert "ok" in shown.stdout  # of doctor
    server.shell("systemctl is-active gpukeeper && systemctl is-enabled gpukeeper")
    status = json.loads(server.run(GPUKEEPER, "doctor", "--json").stdout)
    assert {one["about"]: one["verdict"] for one in status["findings"]}["daemon"] == "ok"
    assert server.shell("stat -c %a /var/lib/gpukeeper").strip() == "700"

    again = server.run(GPUKEEPER, "setup", "host", "--yes")
    assert "create" not in again.stdout

    removed = server.run(GPUKEEPER, "setup", "remove", "--yes")
    assert "to delete them: rm -r /var/lib/gpukeeper" in removed.stdout
    server.shell("rm -r /var/lib/gpukeeper")
    after = server.shell("find /etc /usr/local /var/lib/gpukeeper -newermt 2000-01-01 2>/dev/null | sort || true")
    assert after == before
    assert server.run("systemctl", "is-active", "gpukeeper", check=False).stdout.strip() == "inactive"


def test_a_policy_that_is_there_is_kept_and_the_daemon_has_the_rights_of_its_unit(server: Machine) -> None:
    """That these suffice is shown in tests/real/host: in a container gpukeeper cannot see all processes, and keeps."""
    server.shell(OTHERS_TREE)
    server.shell(f"mkdir -p /etc/gpukeeper && cat > /etc/gpukeeper/policy.yaml <<'EOF'\n{POLICY}EOF")
    kept = server.run(GPUKEEPER, "setup", "host", "--yes")
    assert "it exists and was not written by gpukeeper setup" in kept.stdout
    server.until(f"{GPUKEEPER} ledger list | grep -q ' pass '", "the daemon has made a pass")
    status = server.shell("cat /proc/$(systemctl show -P MainPID gpukeeper)/status")
    values = dict(line.split(":", 1) for line in status.splitlines())
    assert bin(int(values["CapBnd"], 16)).count("1") == 9
    assert values["NoNewPrivs"].strip() == "1"
    planned = server.run(GPUKEEPER, "plan", "--verbose").stdout
    assert "only the processes of this container can be seen from here" in planned


def test_a_daemon_that_dies_is_started_again(server: Machine) -> None:
    server.run(GPUKEEPER, "setup", "host", "--yes")
    document = json.loads(server.run(GPUKEEPER, "setup", "host", "--yes", "--json").stdout)
    assert (document["schema"], document["active"]) == ("gpukeeper/setup/v1", True)
    assert {one["change"] for one in document["files"]} == {"unchanged"}
    first = server.shell("systemctl show -P MainPID gpukeeper").strip()
    server.shell(f"kill -9 {first}")
    again = f'pid=$(systemctl show -P MainPID gpukeeper); [ "$pid" != {first} ] && [ "$pid" != 0 ]'
    server.until(f"{again} && systemctl is-active gpukeeper", "systemd has started it again")


def test_single_passes_by_a_timer(server: Machine) -> None:
    dry = server.run(GPUKEEPER, "setup", "host", "--every", "1h", "--yes", check=False)
    assert dry.returncode == 2
    assert "Then add --enforce" in dry.stderr
    server.run(GPUKEEPER, "setup", "host", "--every", "1h", "--enforce", "--yes")
    server.shell("systemctl is-active gpukeeper-pass.timer")
    server.run("systemctl", "start", "gpukeeper-pass.service")
    server.shell(f"{GPUKEEPER} ledger list | grep -q ' pass '")
    server.run(GPUKEEPER, "setup", "host", "--yes")
    assert server.run("systemctl", "is-active", "gpukeeper-pass.timer", check=False).stdout.strip() == "inactive"
    server.shell("systemctl is-active gpukeeper; test ! -e /etc/systemd/system/gpukeeper-pass.timer")


def test_the_policy_in_force_is_not_replaced_by_a_first_one(server: Machine) -> None:
    """`fleet` installs with --policy."""
    server.shell("useradd ann 2>/dev/null || true")
    server.shell(f"cat > /srv/named.yaml <<'EOF'\n{POLICY}EOF")
    server.run(GPUKEEPER, "setup", "host", "--yes", "--policy", "/srv/named.yaml")
    for more in ((), ("--admins", "root,ann")):
        stopped = server.run(GPUKEEPER, "setup", "host", "--yes", *more, check=False, SUDO_USER="ann")
        assert stopped.returncode == 2, stopped.stdout
        assert "-admins: [root]\n" in stopped.stderr, "the difference is shown"
        assert "Nothing was written" in stopped.stderr
    assert server.shell("cat /etc/gpukeeper/policy.yaml") == POLICY
    kept = server.run(GPUKEEPER, "setup", "host", "--yes", "--policy", "/etc/gpukeeper/policy.yaml")
    assert "gpukeeper.service is running" in kept.stdout
    server.run(GPUKEEPER, "setup", "remove", "--yes")
    server.run(GPUKEEPER, "setup", "host", "--yes", "--admins", "root")
    server.run(GPUKEEPER, "setup", "host", "--yes", SUDO_USER="ann")
    assert "admins: [root]\n" in server.shell("cat /etc/gpukeeper/policy.yaml")


def test_mistakes_change_nothing(server: Machine) -> None:
    unknown = server.run(GPUKEEPER, "setup", "host", "--yes", "--admins", "nosuchuser", check=False)
    assert unknown.returncode == 2
    assert "nosuchuser is not a user of this machine. Nothing was written." in unknown.stderr
    asked = server.run(GPUKEEPER, "setup", "host", check=False)
    assert asked.returncode == 2
    assert "For scripts: --yes" in asked.stderr
    preset = server.run(GPUKEEPER, "setup", "host", "--yes", "--preset", "nonsense", check=False)
    assert preset.returncode == 10
    assert server.run(GPUKEEPER, "setup", "remove", "--yes", check=False).returncode == 2
    server.shell("useradd eve 2>/dev/null || true")
    refused = server.run("setpriv", "--reuid=eve", "--clear-groups", GPUKEEPER, "setup", "host", "--yes", check=False)
    assert "sudo gpukeeper setup" in refused.stderr
    server.shell("test ! -e /etc/gpukeeper && test ! -e /etc/systemd/system/gpukeeper.service")


def test_a_program_that_others_can_change_gets_no_service_of_root(server: Machine) -> None:
    server.shell("useradd ann 2>/dev/null || true; mkdir -p /srv/own; chown ann /srv/own")
    server.shell("ln -sfn /opt/gpukeeper/bin/gpukeeper /srv/own/gpukeeper")
    refused = server.run("/srv/own/gpukeeper", "setup", "host", "--yes", check=False)
    assert refused.returncode == 2
    assert "others could change it" in refused.stderr
