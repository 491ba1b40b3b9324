"""hosts.yaml: what is wanted on each server, and its mistakes with their lines."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from gpukeeper.config.hosts_file import load_hosts
from gpukeeper.model.errors import UsageError
from gpukeeper.rollout.plan import Bundle, Unit, Wanted

POLICY = "mode: enforce\nscope: {host: {}}\n"


def bundle(path: Path) -> Bundle:
    if not path.exists():
        raise UsageError(f"the bundle {path.name} cannot be read")
    return Bundle(path=str(path), version="2.0", sha256="0", size=1, pythons=("3.11",), machine="x86_64")


def read(folder: Path, text: str) -> tuple[Wanted, ...]:
    (folder / "hosts.yaml").write_text(text)
    (folder / "policy.yaml").write_text(POLICY)
    (folder / "b.pyz").touch()
    return load_hosts(folder / "hosts.yaml", bundle).wanted


def test_a_host_wins_over_its_group_and_that_over_the_defaults(tmp_path: Path) -> None:
    text = """\
defaults: {bundle: b.pyz, directory: /srv/gk/, timeout: 2m}
groups:
  lab: {policy: policy.yaml, unit: cron, every: 2h}
hosts:
  gpu01:
  gpu02: {group: lab}
  gpu03: {group: lab, unit: timer, user: ann, port: 2222, address: 192.0.2.7}
"""
    first, second, third = read(tmp_path, text)
    assert (first.name, first.unit, first.policy, first.directory) == ("gpu01", Unit.SYSTEMD, None, "/srv/gk")
    assert first.timeout == timedelta(minutes=2)
    assert first.bundle is not None
    assert second.policy is not None
    assert (second.unit, second.every, second.policy.mode) == (Unit.CRON, "2h", "enforce")
    assert (third.unit, third.host.user, third.host.port) == (Unit.TIMER, "ann", 2222)
    assert (third.name, third.host.address) == ("gpu03", "192.0.2.7")


def test_a_list_of_names_is_enough(tmp_path: Path) -> None:
    assert [one.name for one in read(tmp_path, "hosts: [gpu01, gpu02]\n")] == ["gpu01", "gpu02"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "hosts.yaml:1: there are no settings"),
        ("defaults: {}\n", '"hosts" is missing'),
        ("hosts: {}\n", "hosts.yaml:1: hosts: has no server"),
        ("hosts: [a, b, a]\n", "a is in the list twice"),
        ("hosts:\n  a:\n    polici: x\n", 'hosts.yaml:3: unknown setting "polici". Did you mean "policy"?'),
        ("hosts:\n  a: {unit: upstart}\n", "hosts.yaml:2: hosts.a.unit"),
        ("hosts:\n  -oProxyCommand=x:\n", "is not a host"),
        ("hosts:\n  a: {group: lab}\ngroups: {labs: {}}\n", '"lab" is not in groups. Did you mean "labs"?'),
        ("hosts:\n  a: {bundle: c.pyz}\n", "hosts.yaml:2: hosts.a.bundle: the bundle c.pyz cannot be read"),
        ("hosts:\n  a: {policy: none.yaml}\n", "none.yaml does not exist. Write it, or leave it out"),
        ("hosts:\n  a: {unit: cron}\n", "acts only by a policy in mode enforce"),
        ("hosts:\n  a: {timeout: soon}\n", "Write it like 10m"),
        ("hosts:\n  a: {directory: /opt/a b}\n", "hosts.yaml:2: hosts.a.directory"),
        ("hosts:\n  a: {python: python3; reboot}\n", "hosts.yaml:2: hosts.a.python"),
    ],
)
def test_mistakes_have_a_line_and_an_advice(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as problem:
        read(tmp_path, text)
    assert words in str(problem.value)
    assert "Nothing was done." in str(problem.value)
