"""What hosts report of themselves over ssh: each planted problem is found, with the command that fixes it."""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.acceptance.fleet.preflight.engines import HostFacts, HostsRequest, judge_hosts
from gpukeeper.acceptance.fleet.preflight.facts import Finding
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.preflight.clusters import the

GIB = 1024**3
GOOD: dict[str, Any] = {
    "python": "3.11.2",
    "gpus": 8,
    "driver": "570.86.15",
    "program": "/usr/bin/gpukeeper",
    "version": "gpukeeper 1.0",
    "shm": 64 * GIB,
    "free": 500 * GIB,
    "folder": "/home/ann/.local/state/gpukeeper-runs",
}
REQUEST: dict[str, Any] = {"version": "gpukeeper 1.0", "gpus_per_node": 8, "master": "gpu1"}


def host(node: str, **changes: Any) -> HostFacts:
    return HostFacts(**{"node": node, "destination": node, **GOOD, **changes})


def silent(node: str, words: str, code: str = "unreachable") -> HostFacts:
    return HostFacts(node=node, destination=f"-p 2222 ann@{node}", code=code, silent=words)


def judged(*hosts: HostFacts, **request: Any) -> tuple[Finding, ...]:
    return judge_hosts(hosts, HostsRequest(**{**REQUEST, **request}))


def test_good_hosts_pass() -> None:
    found = judged(host("gpu1"), host("gpu2"), together=True, unmet={})
    assert {one.verdict for one in found} == {Grade.PASS}
    assert "Paths between the others were not tried" in the("host-master", found).message


@pytest.mark.parametrize(
    ("words", "cause", "fix"),
    [
        (
            "No ED25519 host key is known for gpu2 …; Host key verification failed",
            "not known",
            "ssh -p 2222 ann@gpu2 true",
        ),
        ("Host key for gpu2 has changed …; Host key verification failed", "another one", "ssh-keygen -R gpu2"),
        ("ann@gpu2: Permission denied (publickey)", "login was refused", "ssh-copy-id -p 2222 ann@gpu2"),
        ("ssh: Could not resolve hostname gpu2: Name or service not known", "does not resolve", "getent hosts gpu2"),
        ("ssh: connect to host gpu2 port 2222: Connection timed out", "no reply in time", "nc -vz gpu2 2222"),
        ("ssh: connect to host gpu2 port 2222: Connection refused", "no ssh server listens", "nc -vz gpu2 2222"),
        ("ssh: connect to host gpu2 port 2222: No route to host", "no route", "ip route get gpu2"),
        ("kex_exchange_identification: read: Connection reset", "cannot be reached", "ssh -v -p 2222 ann@gpu2 true"),
    ],
)
def test_a_host_that_cannot_be_reached_has_the_reason_and_the_command(words: str, cause: str, fix: str) -> None:
    one = the("host-login", judged(host("gpu1"), silent("gpu2", words)), Grade.FAIL)
    assert cause in one.message
    assert words in one.message
    assert (one.about, one.fix) == (("gpu2",), (fix,))


def test_nothing_is_said_about_what_a_silent_host_did_not_report() -> None:
    found = judged(silent("gpu1", "Connection refused"), silent("gpu2", "Connection refused"))
    assert [one.code for one in found] == ["host-login"]
    one = the("host-master", judged(silent("gpu1", "Connection refused"), host("gpu2"), together=True))
    assert (one.verdict, "all hosts must reply first" in one.message) == (Grade.INCONCLUSIVE, True)


@pytest.mark.parametrize(
    ("code", "changes", "verdict", "fix"),
    [
        (
            "host-program",
            {"program": None, "version": ""},
            Grade.FAIL,
            "ssh gpu2 'python3 -m pip install --user gpukeeper'",
        ),
        ("host-program", {"broken": "No module named msgspec"}, Grade.FAIL, "ssh gpu2 '/usr/bin/gpukeeper --version'"),
        ("host-program", {"version": "gpukeeper 0.9"}, Grade.WARN, "--upgrade gpukeeper"),
        (
            "host-folder",
            {"refused": "open; change it: chmod 700 /x"},
            Grade.FAIL,
            "ssh gpu2 'chmod 700 /x'",
        ),
        ("host-folder", {"free": GIB // 16}, Grade.FAIL, "du -xh"),
        ("host-folder", {"free": GIB // 2}, Grade.WARN, "du -xh"),
        ("host-folder", {"free": None}, Grade.INCONCLUSIVE, "df -h"),
        ("host-gpus", {"gpus": 7}, Grade.FAIL, "ssh gpu2 'nvidia-smi -L'"),
        ("host-drivers", {"driver": ""}, Grade.FAIL, "ssh gpu2 'sudo modprobe nvidia'"),
        ("host-drivers", {"driver": "535.1"}, Grade.WARN, "cat /proc/driver/nvidia/version"),
        ("host-shm", {"shm": GIB}, Grade.WARN, "sudo mount -o remount,size=17179869184 /dev/shm"),
        ("host-shm", {"shm": None}, Grade.INCONCLUSIVE, "df -h /dev/shm"),
        ("host-clock", {"clock_s": -90.0}, Grade.WARN, "sudo timedatectl set-ntp true"),
    ],
)
def test_planted_problems(code: str, changes: dict[str, Any], verdict: Grade, fix: str) -> None:
    one = the(code, judged(host("gpu1"), host("gpu2", **changes)), verdict)
    assert "gpu2" in one.message
    assert "gpu2" in one.about
    assert any(fix in command for command in one.fix), one.fix


def test_without_a_requested_number_hosts_are_compared_with_each_other() -> None:
    assert the("host-gpus", judged(host("gpu1"), host("gpu2", gpus=4), gpus_per_node=None)).verdict is Grade.WARN
    assert the("host-gpus", judged(host("gpu1", gpus=0), gpus_per_node=None)).verdict is Grade.FAIL


def test_who_does_not_reach_the_first_host_is_named() -> None:
    one = the("host-master", judged(host("gpu1"), host("gpu2"), together=True, unmet={"gpu2": "no reply"}))
    assert (one.verdict, one.about) == (Grade.FAIL, ("gpu2",))
    assert one.fix[0] == "ssh gpu2 'nc -vz gpu1 29500'"
    taken = the("host-master", judged(host("gpu1"), host("gpu2"), together=True, unmet={"gpu1": "port 29500 in use"}))
    assert taken.fix == ("ssh gpu1 'ss -ltnp '\"'\"'sport = :29500'\"'\"''",)


def test_many_hosts_have_a_bounded_number_of_commands() -> None:
    one = the("host-gpus", judged(*(host(f"gpu{number}", gpus=0) for number in range(64))))
    assert (len(one.about), len(one.fix)) == (64, 13)
    assert one.fix[-1].startswith("# the same on 52 more: gpu12")
