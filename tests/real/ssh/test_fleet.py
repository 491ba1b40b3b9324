"""`gpukeeper fleet` over real ssh servers, each with its own /opt and /etc: two that work, one unreachable, one with a
full disk, one without sudo, one whose Python says 3.10 (a stand-in), one that dies in the middle. By cron: no systemd
runs here; tests/real/systemd has `fleet` and `setup host` with a real one, and a real sudo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpukeeper.interfaces.cli.fleet import app
from tests.docs.test_ci_examples import DEPLOYS, login_of, scripts
from tests.engines import has_sshd, require
from tests.real.host.machine import first_program
from tests.real.launch.ssh_hosts import SshHosts, ssh_hosts
from tests.real.ssh.tiny_bundle import tiny_bundle

PYTHON = os.path.realpath(sys.executable)
GOOD, FULL, NO_SUDO, OLD, DIES, SECOND = range(6)
POLICY = """
mode: enforce
scope: {host: {}}
admins: [root]
temporary: [{root: /opt/scratch, names: ["tmp*"], above: 1B, older_than: 0s, under_pressure: 0s}]
"""
OLD_PYTHON = f"""#!/bin/sh
exec {PYTHON} -I -S -c 'import sys, platform; platform.python_version = lambda: "3.10.12"; \\
exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))'
"""


def own_files(number: int, folder: Path) -> str:
    """/opt stays when the server is started again; /etc does not."""
    opt = "mount -t tmpfs -o size=4k tmpfs /opt" if number == FULL else f"mount --bind {folder}/opt /opt"
    return f"""
        mkdir -p {folder}/opt {folder}/etc
        {opt}
        mount -t tmpfs tmpfs {folder}/etc
        mkdir {folder}/etc/upper {folder}/etc/work
        mount -t overlay overlay -o lowerdir=/etc,upperdir={folder}/etc/upper,workdir={folder}/etc/work /etc
        mkdir -p /etc/cron.d /etc/tmpfiles.d
        echo 'eve:x:4242:4242::/tmp:/bin/sh' >> /etc/passwd
        cat {folder}/authorized_keys {folder.parent}/gpu{GOOD}/key.pub > /etc/fleet_keys
        sed -i 's,^AuthorizedKeysFile.*,AuthorizedKeysFile /etc/fleet_keys,' {folder}/sshd_config
    """


class Fleet:
    def __init__(self, hosts: SshHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder

    def write(self, bundle: Path, others: str = "", only: tuple[int, ...] = (GOOD, SECOND)) -> None:
        names = "".join(f"  gpu{number}:\n" for number in only)
        text = f"defaults:\n  bundle: {bundle}\n  policy: policy.yaml\n  unit: cron\n  python: {PYTHON}\n"
        (self.folder / "hosts.yaml").write_text(f"{text}hosts:\n{names}{others}")

    def run(self, command: str, *more: str) -> tuple[int, dict[str, Any]]:
        connection = ["--ssh-config", self.hosts.options["config"], "--connect", "2s"]
        done = CliRunner().invoke(app, [command, str(self.folder / "hosts.yaml"), "--json", *connection, *more])
        assert done.stdout.startswith("{"), (done.output, done.exception)
        found = json.loads(done.stdout)
        schemas = dict.fromkeys(("plan", "apply"), "gpukeeper/fleet-pass/v1") | {"logs": "gpukeeper/fleet-logs/v1"}
        assert found["schema"] == schemas.get(command, "gpukeeper/fleet/v1")
        return done.exit_code, {one["host"]: one for one in found["hosts"]}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    require("ssh", has_sshd())
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "policy.yaml").write_text(f"{POLICY}disk: {{unreadable: [{first_program()}]}}\n")
    (folder / "python3.10").write_text(OLD_PYTHON)
    (folder / "python3.10").chmod(0o755)
    with ssh_hosts(folder, 6, prepare=own_files) as hosts:
        with (folder / "ssh_config").open("a") as config:
            config.write("Host away\n    HostName 198.18.255.254\n")
        yield Fleet(hosts, folder)


@pytest.fixture(scope="module")
def deployed(fleet: Fleet) -> dict[str, Any]:
    """One deployment to all of them; the last one dies while it installs."""
    slow = f"open({str(fleet.folder / 'begun')!r}, 'w').close()\nimport time\ntime.sleep(60)"
    dying = tiny_bundle(fleet.folder, "1.0.1", installer_begin=slow)
    # The Python of the tests may be in a directory that only root enters.
    no_sudo = f"  gpu{NO_SUDO}: {{user: eve, python: /usr/bin/python3}}\n"
    others = f"  away:\n  gpu{FULL}:\n{no_sudo}  gpu{OLD}: {{python: {fleet.folder}/python3.10}}\n"
    fleet.write(tiny_bundle(fleet.folder, "1.0"), f"{others}  gpu{DIES}: {{bundle: {dying}}}\n")
    killer = threading.Thread(target=_kill, args=(fleet,))
    killer.start()
    code, found = fleet.run("deploy", "--yes", "--first", "1")
    killer.join()
    assert code == 3
    return found


def _kill(fleet: Fleet) -> None:
    late = time.monotonic() + 100
    while not (fleet.folder / "begun").exists() and time.monotonic() < late:
        time.sleep(0.05)
    fleet.hosts.hosts[DIES].die()


@pytest.mark.smoke
def test_the_servers_that_can_get_it_have_it(deployed: dict[str, Any]) -> None:
    for name in (f"gpu{GOOD}", f"gpu{SECOND}"):
        assert (deployed[name]["outcome"], deployed[name]["words"]) == ("deployed", []), deployed[name]
        assert deployed[name]["version"] == "1.0"
        assert deployed[name]["mode"] == "enforce"
        assert deployed[name]["started_by"] == "cron"


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("away", "unreachable", "cannot be reached"),
        (f"gpu{FULL}", "blocked", "Free some space"),
        (f"gpu{NO_SUDO}", "blocked", "this needs root: there is no sudo"),
        (f"gpu{OLD}", "blocked", "Python 3.10; gpukeeper needs 3.11"),
        (f"gpu{DIES}", "failed", "is continued by the next"),
    ],
)
def test_the_others_say_why_and_stop_no_one(deployed: dict[str, Any], name: str, outcome: str, words: str) -> None:
    assert deployed[name]["outcome"] == outcome, deployed[name]
    assert words in " ".join(deployed[name]["words"]), deployed[name]


def test_what_failed_left_nothing_in_force(fleet: Fleet, deployed: dict[str, Any]) -> None:
    host = fleet.hosts.hosts[DIES]
    assert not os.path.lexists(host.folder / "opt/gpukeeper")
    assert list((fleet.hosts.hosts[OLD].folder / "opt").iterdir()) == []


def test_again_changes_nothing(fleet: Fleet, deployed: dict[str, Any]) -> None:
    fleet.write(fleet.folder / "gpukeeper-1.0.pyz")
    code, found = fleet.run("deploy", "--yes")
    assert (code, {one["outcome"] for one in found.values()}) == (0, {"unchanged"}), found


def test_a_pass_on_each_server_reclaims_what_is_due_there(fleet: Fleet, deployed: dict[str, Any]) -> None:
    scratch = [fleet.hosts.hosts[number].folder / "opt/scratch" for number in (GOOD, SECOND)]
    for one, names in zip(scratch, (("tmp-old", "data"), ("tmp-old", "data")), strict=True):
        for name in names:
            (one / name).mkdir(parents=True)
            (one / name / "file").write_text("x" * 10_000)
    fleet.write(fleet.folder / "gpukeeper-1.0.pyz", "  away:\n")
    code, found = fleet.run("plan")
    assert (code, found["away"]["outcome"]) == (3, "unreachable")
    steps = {
        name: [step["seen"]["ref"]["name"] for place in found[name]["places"] for step in place["steps"]]
        for name in (f"gpu{GOOD}", f"gpu{SECOND}")
    }
    assert list(steps.values()) == [["/opt/scratch/tmp-old"], ["/opt/scratch/tmp-old"]], found
    code, found = fleet.run("apply", "--yes", "--only", f"gpu{SECOND}")
    assert (code, {name: one["outcome"] for name, one in found.items()}) == (0, {f"gpu{SECOND}": "applied"})
    assert [sorted(one.name for one in path.iterdir()) for path in scratch] == [["data", "tmp-old"], ["data"]]
    code, found = fleet.run("apply", "--yes")
    assert code == 3, "one host is dead"
    assert found["away"]["outcome"] == "unreachable", "and was named, and stopped no other"
    assert {one["outcome"] for name, one in found.items() if name != "away"} == {"applied"}, [
        one["words"] for one in found.values()
    ]
    assert [sorted(one.name for one in path.iterdir()) for path in scratch] == [["data"], ["data"]]
    row = found[f"gpu{GOOD}"]
    assert row["bytes_back"] >= 10_000
    assert row["seconds"] > 0
    (disk,) = [node for place in row["places"] for node in place["nodes"] if node["kind"] == "disk"]
    assert disk["before"]["bytes"] > 0
    assert disk["after"]["bytes"] > 0
    for path in scratch:
        shutil.rmtree(path)


def test_the_logs_of_all_servers_come_in_one_command(fleet: Fleet, deployed: dict[str, Any]) -> None:
    """The last lines of each, its errors, and why there are none of a host that is dead. Without a database."""
    folder = fleet.hosts.hosts[GOOD].folder / "opt/scratch/tmp-kept"
    folder.mkdir(parents=True)
    (folder / "file").write_text("x" * 10_000)
    subprocess.run(["chattr", "+i", folder / "file"], check=True)
    fleet.write(fleet.folder / "gpukeeper-1.0.pyz", "  away:\n")
    try:
        assert fleet.run("apply", "--yes")[1][f"gpu{GOOD}"]["outcome"] == "incomplete"
    finally:
        subprocess.run(["chattr", "-R", "-f", "-i", folder.parent], check=False)  # of its lock file it has no flags
    code, found = fleet.run("logs", "--last", "5")
    assert code == 3
    assert found["away"]["outcome"] == "unreachable"
    assert (found["away"]["ledger"], found["away"]["errors"]) == (None, None)
    for name in (f"gpu{GOOD}", f"gpu{SECOND}"):
        assert (found[name]["outcome"], found[name]["words"]) == ("read", [])
        assert 0 < len(found[name]["ledger"]) <= 5
    assert any("tmp-kept" in line for line in found[f"gpu{GOOD}"]["errors"])
    assert not any("tmp-kept" in line for line in found[f"gpu{SECOND}"]["errors"])
    shutil.rmtree(folder.parent)


def test_a_version_that_does_not_work_is_rolled_back_and_goes_no_further(
    fleet: Fleet, deployed: dict[str, Any]
) -> None:
    broken = "if 'setup' in sys.argv and '--yes' in sys.argv: sys.exit('broken here')"
    fleet.write(tiny_bundle(fleet.folder, "2.0", begin=broken))
    code, found = fleet.run("upgrade", "--yes")
    first, second = found[f"gpu{GOOD}"], found[f"gpu{SECOND}"]
    assert code == 3
    assert (first["outcome"], first["version"]) == ("rolled back", "1.0"), first
    assert "broken here" in " ".join(first["words"])
    assert second["outcome"] == "not started", second
    fleet.write(fleet.folder / "gpukeeper-1.0.pyz", only=(GOOD,))
    assert fleet.run("status")[0] == 0


def test_removed_without_a_trace_but_the_ledger(fleet: Fleet, deployed: dict[str, Any]) -> None:
    fleet.write(fleet.folder / "gpukeeper-1.0.pyz")
    code, found = fleet.run("remove", "--yes")
    assert (code, {one["outcome"] for one in found.values()}) == (0, {"removed"}), found
    for number in (GOOD, SECOND):
        assert list((fleet.hosts.hosts[number].folder / "opt").iterdir()) == []


@pytest.mark.parametrize("name", DEPLOYS)
def test_the_jobs_of_the_pipelines_deploy_and_verify(fleet: Fleet, tmp_path: Path, name: str) -> None:
    """examples/ci: the scripts themselves, with the real program and one key for two servers and one that is dead."""
    for file in ("hosts.yaml", "policy.yaml"):
        shutil.copy(fleet.folder / "policy.yaml", tmp_path / file)
    hosts = fleet.hosts.hosts
    rows = "".join(f"  gpu{one}: {{address: {hosts[one].address}}}\n" for one in (GOOD, SECOND))
    head = (
        f"defaults: {{bundle: {fleet.folder}/gpukeeper-1.0.pyz, policy: policy.yaml, unit: cron, python: {PYTHON}}}\n"
    )
    login = login_of(
        name,
        tmp_path,
        key=(hosts[GOOD].folder / "key").read_text().strip(),
        known_hosts="\n".join((hosts[one].folder / "known_hosts").read_text().strip() for one in (GOOD, SECOND)),
    )

    def job(which: str) -> tuple[int, str]:
        files = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", scripts(name)[which]],
            cwd=tmp_path,
            env={"PATH": path, "HOME": str(tmp_path), "ONLY": "", **login, **files},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    (tmp_path / "hosts.yaml").write_text(f"{head}hosts:\n{rows}")
    if "github" in name:
        assert job("login")[0] == 0
    assert job("check")[0] == 0
    code, said = job("plan")
    assert (code, "2 planned" in said) == (0, True), said
    assert not os.path.lexists(hosts[GOOD].folder / "opt/gpukeeper")
    code, said = job("deploy")
    assert (code, "2 deployed" in said) == (0, True), said
    code, said = job("verify")
    assert (code, "2 unchanged" in said) == (0, True), said
    (tmp_path / "hosts.yaml").write_text(f"{head}hosts:\n{rows}  away: {{address: 198.18.255.254}}\n")
    code, said = job("deploy")
    assert (code, "2 unchanged, 1 unreachable" in said) == (3, True), said
    assert "== away: unreachable" in said, "the logs are shown, too"
    assert job("verify")[0] == 3
    fleet.write(fleet.folder / "gpukeeper-1.0.pyz")
    assert fleet.run("remove", "--yes")[0] == 0
