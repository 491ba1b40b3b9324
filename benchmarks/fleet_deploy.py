"""`gpukeeper fleet deploy` to 40 ssh servers, beside `ansible-playbook` doing the same copies and commands.

The servers are network namespaces of this machine, each with its own sshd, /opt and /etc, so their work is done by the
same cores as that of the client. The bundle has the size of a real one and installs a program that runs this checkout,
so that neither pip nor a network is measured. The playbook copies bundle and policy, runs the installer and `setup
host`; `fleet deploy` also reads each server before, and verifies it afterwards. Both work on ten servers at once.

HOSTS=8 sets how many (default 40).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from benchmarks.needs import CannotMeasure, need
from benchmarks.report import Figure, print_figure, print_table
from benchmarks.size import sized
from tests.engines import has_sshd
from tests.real.launch.ssh_hosts import SshHosts, ssh_hosts
from tests.real.ssh.test_fleet import GOOD, POLICY, PYTHON, own_files
from tests.real.ssh.tiny_bundle import tiny_bundle

HOSTS = int(os.environ.get("HOSTS", sized("40", tiny="2")))
AT_ONCE = 10
SIZE = 20_000_000  # bytes, as the bundle of one Python version
_PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - copy: {{src: {bundle}, dest: /opt/bundle.pyz, mode: "0644"}}
    - copy: {{src: {policy}, dest: /opt/policy.yaml, mode: "0644"}}
    - command: {python} -I /opt/bundle.pyz /opt/gpukeeper
    - command: /opt/gpukeeper/bin/gpukeeper setup host --yes --cron --every 1h --policy /opt/policy.yaml
"""


def run() -> None:
    need("ssh", has_sshd())
    playbook = shutil.which("ansible-playbook")
    if playbook is None:
        raise CannotMeasure("ansible-playbook is not on PATH: apt install ansible-core")
    with tempfile.TemporaryDirectory() as folder:
        ours = _measured(Path(folder, "ours"), _fleet)
        theirs = _measured(Path(folder, "theirs"), lambda *given: _ansible(playbook, *given))
    rows = [("gpukeeper fleet deploy", f"{ours:.1f} s"), ("ansible-playbook, without verification", f"{theirs:.1f} s")]
    print_table((f"{HOSTS} servers, load {os.getloadavg()[0]:.0f}", "time"), rows)
    against = f"ansible-playbook with the same copies and commands on {HOSTS} servers"
    print_figure(Figure("fleet-deploy", round(ours, 1), "s", round(ours / theirs, 2), against))


def _measured(folder: Path, words: object) -> float:
    assert callable(words)
    folder.mkdir()
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    bundle = tiny_bundle(folder, "1.0")
    with zipfile.ZipFile(bundle, "a") as archive:
        archive.writestr("padding", os.urandom(SIZE))
    with ssh_hosts(folder, HOSTS, prepare=lambda _, own: own_files(GOOD, own)) as hosts:
        command, environ = words(folder, hosts, bundle, policy)
        began = time.monotonic()
        done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
        took = time.monotonic() - began
        missing = [one.name for one in hosts.hosts if not (one.folder / "opt/gpukeeper/bin/gpukeeper").exists()]
    if done.returncode or missing:
        raise RuntimeError(f"{command[0]} failed on {missing}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return took


def _fleet(folder: Path, hosts: SshHosts, bundle: Path, policy: Path) -> tuple[list[str], dict[str, str]]:
    names = "".join(f"  {name}:\n" for name in hosts.names)
    settings = f"  bundle: {bundle}\n  policy: {policy}\n  unit: cron\n  python: {PYTHON}\n"
    (folder / "hosts.yaml").write_text(f"defaults:\n{settings}hosts:\n{names}")
    words = [sys.executable, "-m", "gpukeeper", "fleet", "deploy", str(folder / "hosts.yaml"), "--yes"]
    return [*words, "--parallel", str(AT_ONCE), "--ssh-config", hosts.options["config"]], {}


def _ansible(
    playbook: str, folder: Path, hosts: SshHosts, bundle: Path, policy: Path
) -> tuple[list[str], dict[str, str]]:
    (folder / "playbook.yml").write_text(_PLAYBOOK.format(bundle=bundle, policy=policy, python=PYTHON))
    (folder / "inventory").write_text("\n".join(hosts.names) + "\n")
    environ = {
        "ANSIBLE_SSH_ARGS": f"-F {hosts.options['config']} -o ControlMaster=auto -o ControlPersist=60s",
        "ANSIBLE_PYTHON_INTERPRETER": PYTHON,
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_HOME": str(folder / "ansible"),
    }
    words = [playbook, "--forks", str(AT_ONCE), "--inventory", str(folder / "inventory")]
    return [*words, str(folder / "playbook.yml")], environ
