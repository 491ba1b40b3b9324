"""Over real ssh servers that reach each other: checks before a run, and several hosts as one run of ranks over gloo.

C1.2, C17.2
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import has_sshd, has_torch, require
from tests.real.launch.ssh_hosts import SshHost, SshHosts, ssh_hosts
from tests.real.launch.waiting import until
from tests.real.torch import installation

GPUKEEPER = Path(sys.executable).with_name("gpukeeper")
LONGEST_S = 240
CPU = ("--together", "--device", "cpu", "--ranks", "1", "--check", "group", "--python", installation.python())
FEW = ("--set", "group.growing=false", "--set", "group.search=false", "--set", "group.rendezvous_s=90")


class Bed:
    def __init__(self, hosts: SshHosts, folder: Path) -> None:
        self.hosts, self.state = hosts, folder / "launcher"
        self.state.mkdir(mode=0o700)

    def start(self, *words: str, **options: str) -> subprocess.Popen[str]:
        given = {**self.hosts.options, "program": str(GPUKEEPER), **options}
        written = [word for name, value in given.items() for word in ("--option", f"{name}={value}")]
        env = {"PATH": os.environ["PATH"], "HOME": str(self.state), "GPUKEEPER_STATE": str(self.state)}
        command = [str(GPUKEEPER), "accept", *words, "--on", "ssh", *written, "--json"]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, code: int, *words: str, **options: str) -> dict[str, Any]:
        return ended(self.start(*words, **options), code)

    def together(self, *nodes: str, **options: str) -> subprocess.Popen[str]:
        given = {"master": self.hosts.hosts[0].inside, **options}
        return self.start(*CPU, *FEW, "--nodes", ",".join(nodes), "--timeout", "4m", **given)


def ended(process: subprocess.Popen[str], code: int) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=LONGEST_S)
    finally:
        process.kill()
    assert process.returncode == code, err + out[-4000:]
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    require("ssh", has_sshd())
    require("torch", has_torch())
    folder = tmp_path_factory.mktemp("ssh")
    with ssh_hosts(folder, 3, joined=True) as hosts:
        yield Bed(hosts, folder)


def findings(found: dict[str, Any], code: str) -> list[dict[str, Any]]:
    return [one for one in found["findings"] if one["code"] == code]


def groups(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of the nodes that reported: the result of the group, by node."""
    files = Path(found["report_folder"]).glob("nodes/*/report.json")
    return {file.parent.name: json.loads(file.read_text())["group"] for file in files}


def test_preflight_finds_what_is_wrong_with_a_login_and_leaves_nothing(bed: Bed) -> None:
    """A key that is not known, a login that is refused, a name that does not resolve; the third host is good."""
    gpu0, gpu1, _ = bed.hosts.hosts
    changed = {gpu0.folder / "known_hosts": "", gpu1.folder / "authorized_keys": ""}
    before = {path: path.read_text() for path in changed}
    try:
        for path, text in changed.items():
            path.write_text(text)
        names = ",".join([*bed.hosts.names, "no-such-host.invalid"])
        options = {**bed.hosts.options, "nodes": names}
        del options["hosts"]
        written = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
        ran = subprocess.run(
            [str(GPUKEEPER), "accept", "preflight", "--on", "ssh", *written, "--together", "--json"],
            env={"PATH": os.environ["PATH"], "HOME": str(bed.state), "GPUKEEPER_STATE": str(bed.state)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for path, text in before.items():
            path.write_text(text)
    assert ran.returncode == 4, ran.stderr + ran.stdout
    found = json.loads(ran.stdout)
    said = {one["about"][0]: one for one in findings(found, "host-login")}
    assert "the host key is not known" in said["gpu0"]["message"]
    assert said["gpu0"]["fix"] == [f"ssh -F {bed.hosts.folder}/ssh_config gpu0 true"]
    assert "the login was refused" in said["gpu1"]["message"]
    assert said["gpu1"]["fix"] == [f"ssh-copy-id -F {bed.hosts.folder}/ssh_config gpu1"]
    assert "the name does not resolve" in said["no-such-host.invalid"]["message"]
    assert (said["gpu2"]["verdict"], said["gpu2"]["message"]) == ("PASS", "1 host of 4 can be reached")
    (master,) = findings(found, "host-master")
    assert master["verdict"] == "INCONCLUSIVE"
    assert bed.hosts.left() == []
    assert list(bed.hosts.folder.glob("*/state/*")) == []


def test_preflight_names_the_host_that_does_not_reach_the_first_one(bed: Bed) -> None:
    """By the outer address of the first host, which is not routed between them; then by the inner one."""
    gpu0 = bed.hosts.hosts[0]
    outer = bed.run(4, "preflight", "--together", "--nodes", "gpu0,gpu1", master=gpu0.address)
    (one,) = findings(outer, "host-master")
    assert (one["verdict"], one["about"]) == ("FAIL", ["gpu1"])
    assert f"{gpu0.address} port 29500 cannot be reached from there: Network is unreachable" in one["message"]
    until(lambda: not gpu0.processes(), gpu0.processes)  # what listened there ends with the command
    inner = bed.run(4, "preflight", "--together", "--gpus-per-node", "8", master=gpu0.inside)
    (one,) = findings(inner, "host-master")
    assert (one["verdict"], "2 hosts reach gpu0" in one["message"]) == ("PASS", True)
    assert [one["verdict"] for one in findings(inner, "host-program")] == ["PASS"]
    assert bed.hosts.left() == []
    assert list(bed.hosts.folder.glob("*/state/*")) == []


def test_hosts_are_one_run_over_gloo_and_leave_nothing(bed: Bed) -> None:
    """C1.2: collectives and training across hosts; every host has the same report of the group."""
    count = 3
    found = ended(bed.together(*bed.hosts.names[:count]), 5)  # no GPU was tested
    sent = groups(found)
    assert len(sent) == count, found["missing"]
    group = sent["gpu0"]
    assert all(one == group for one in sent.values())
    assert (group["size"], group["verdict"]) == (count, "PASS"), group["reason"]
    assert [one["verdict"] for one in group["ranks"]] == ["PASS"] * count
    assert {(one["probe"], len(one["nodes"])) for one in group["jobs"]} == {("collectives", count), ("ddp", count)}
    assert bed.hosts.left() == []


def test_an_address_that_a_host_does_not_reach_is_named_and_nothing_is_started(bed: Bed) -> None:
    """C17.2: before the start, not after ten minutes of waiting."""
    found = ended(bed.together(*bed.hosts.names, master="192.0.2.1"), 5)
    reasons = {one["node"]: one["reason"] for one in found["missing"]}
    assert sorted(reasons) == bed.hosts.names
    assert "the hosts do not meet at 192.0.2.1 port 29500, so nothing was started" in reasons["gpu0"]
    assert "gpu1: 192.0.2.1 port 29500 cannot be reached from there" in reasons["gpu0"]
    assert bed.hosts.left() == []
    assert list(bed.hosts.folder.glob("*/state/gpukeeper-runs/*/*")) == []


def test_a_host_that_dies_in_the_middle_is_named_and_the_others_end_everything(bed: Bed) -> None:
    """The last test of this module. The launcher ends by itself; the dead host is to blame, and its rank is named."""
    gpu0, gpu1, gpu2 = bed.hosts.hosts
    running = bed.start(
        *(*CPU, "--set", "group.growing=false", "--set", "group.search=false", "--timeout", "3m"),
        *("--set", "group.probes=ddp", "--set", "ddp.epochs=100000"),
        master=gpu0.inside,
    )
    try:
        until(lambda: is_training(gpu2), gpu2.processes, 120)
    except BaseException:
        running.kill()
        raise
    gpu2.die()
    found = ended(running, 5)
    sent = groups(found)
    assert sorted(sent) == ["gpu0", "gpu1"]
    (lost,) = [one for one in sent["gpu0"]["findings"] if one["finding"]["code"] == "group-member-lost"]
    assert lost["nodes"] == ["gpu2"]
    verdicts = {one["rank"]: (one["nodes"], one["verdict"]) for one in sent["gpu0"]["ranks"]}
    assert verdicts[2] == (["gpu2"], "INCONCLUSIVE")
    assert sent["gpu1"] == sent["gpu0"]
    (missing,) = found["missing"]
    assert (missing["node"], missing["code"]) == ("gpu2", "unreachable")
    assert gpu0.processes() == gpu1.processes() == gpu2.processes() == []


def is_training(host: SshHost) -> bool:
    return any(" ranks " in title and installation.python() in title for _, title in host.processes())
