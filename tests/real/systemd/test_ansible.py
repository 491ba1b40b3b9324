"""The Ansible role on a Debian machine with systemd: from the offline bundle to a running service, and back.

ansible-core runs in that machine (connection local), which has no network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.docs.markdown import ROOT
from tests.engines import has_ansible, require
from tests.real.systemd.machine import Machine

DIRECTORY = "/opt/keeper"  # not that of the other tests
BUNDLE = {"gpukeeper_bundle": "/bundle.pyz", "gpukeeper_policy": "/policies/small-lab.yaml"}
INDEX = {
    "gpukeeper_package": "gpukeeper",
    "gpukeeper_pip_arguments": ["--no-index", "--find-links", "/srv/bundle/wheels"],
}
TRACES = f"ls -d {DIRECTORY}* /etc/gpukeeper/* /etc/systemd/system/gpukeeper* 2>/dev/null || true"


@pytest.fixture
def host(booted: Machine) -> Iterator[Machine]:
    require("ansible", has_ansible())
    yield booted
    booted.run(f"{DIRECTORY}/bin/gpukeeper", "setup", "remove", "--yes", check=False)
    booted.shell(f"rm -rf {DIRECTORY}* /etc/gpukeeper /var/lib/gpukeeper; systemctl reset-failed")


def play(host: Machine, values: Mapping[str, Any], *flags: str, check: bool = True) -> tuple[dict[str, int], str]:
    """The numbers of its recap, and all it printed."""
    done = host.run(
        *("python3", "-m", "ansible", "playbook", "-i", "localhost,", "-c", "local", "/playbook/site.yml", *flags),
        *("-e", "ansible_python_interpreter=/usr/bin/python3"),
        *("-e", json.dumps({"gpukeeper_directory": DIRECTORY, **values})),
        check=check,
        PYTHONPATH="/ansible",
        ANSIBLE_ROLES_PATH="/playbook/roles",
        ANSIBLE_NOCOLOR="1",
        ANSIBLE_PIPELINING="1",
        PIP_NO_COMPILE="1",  # what is never imported here need not be compiled
    )
    (recap,) = [line for line in done.stdout.splitlines() if line.startswith("localhost ")]
    numbers = dict(pair.split("=") for pair in recap.partition(":")[2].split())
    return {name: int(number) for name, number in numbers.items()}, done.stdout + done.stderr


def changed(host: Machine, values: Mapping[str, Any], *flags: str) -> int:
    return play(host, values, *flags)[0]["changed"]


@pytest.mark.smoke
def test_from_the_bundle_into_service_unchanged_by_the_second_run_and_gone(host: Machine) -> None:
    _, shown = play(host, BUNDLE, "--check", "--diff")
    assert "not installed on this host yet" in shown
    assert host.shell(TRACES) == "", "check mode changes nothing"

    assert changed(host, BUNDLE) > 0
    host.shell("systemctl is-active gpukeeper && systemctl is-enabled gpukeeper")
    assert host.shell("cat /etc/gpukeeper/policy.yaml") == (ROOT / "examples/policies/small-lab.yaml").read_text()
    daemon = host.shell("systemctl show -P MainPID gpukeeper")
    assert changed(host, BUNDLE) == 0

    host.shell("echo 'mode: plann' > /bad.yaml")
    numbers, shown = play(host, BUNDLE | {"gpukeeper_policy": "/bad.yaml"}, check=False)
    assert (numbers["failed"], numbers["changed"]) == (1, 0)
    assert "plann" in shown
    assert host.shell("systemctl show -P MainPID gpukeeper") == daemon, "none of these restarted the daemon"

    assert changed(host, BUNDLE | {"gpukeeper_state": "absent"}) > 0
    assert host.run("systemctl", "is-active", "gpukeeper", check=False).stdout.strip() == "inactive"
    assert host.shell(TRACES).split() == ["/etc/gpukeeper/policy.yaml"], "the policy stays"


def test_from_an_index_and_removed_with_a_policy_that_was_changed_by_hand(host: Machine) -> None:
    host.shell("python3 -m zipfile -e /bundle.pyz /srv/bundle")
    assert changed(host, INDEX) > 0
    assert changed(host, INDEX) == 0
    daemon = host.shell("systemctl show -P MainPID gpukeeper; echo '# mine' >> /etc/gpukeeper/policy.yaml")
    numbers, shown = play(host, INDEX | {"gpukeeper_metrics": "127.0.0.1:9101"}, "--check")
    assert numbers["changed"] == 1
    assert "+ExecStart=" in shown
    assert host.shell("systemctl is-active gpukeeper; systemctl show -P MainPID gpukeeper") == f"active\n{daemon}"

    absent = {"gpukeeper_state": "absent"}
    assert changed(host, absent) > 0
    assert host.shell(TRACES).split() == ["/etc/gpukeeper/policy.yaml"], "the policy stays"
    assert changed(host, absent) == 0


def test_two_sources_are_refused(host: Machine) -> None:
    numbers, shown = play(host, BUNDLE | INDEX, check=False)
    assert numbers["failed"] == 1
    assert "Set either gpukeeper_bundle or gpukeeper_package" in shown
