"""`gpukeeper node` on a ledger: what is quarantined, by whom, and who may change it. The fleet of files has no GPUs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.fleet import POLICY, Fleet

UUID = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_an_admin_quarantines_and_returns_a_gpu(fleet: Fleet) -> None:
    """C11.2"""
    ran = fleet.run("node", "quarantine", UUID, "--reason", "fans are loud")
    assert (ran.code, ran.out) == (0, f"{UUID} is quarantined until: gpukeeper node return {UUID}\n")
    listed = fleet.run("node", "list")
    assert listed.code == 0
    assert listed.out.splitlines()[1].split()[:3] == ["quarantined", "-", UUID]
    assert "fans are loud" in listed.out
    # Any unique beginning names it, once it is known.
    ran = fleet.run("node", "return", "gpu-1111")
    assert (ran.code, ran.out) == (0, f"{UUID} was returned.\n")
    assert fleet.run("node", "list").out.splitlines()[1].split()[:3] == ["not", "checked", "-"]
    types = [one["type"] for one in fleet.lines("quarantine", "return")]
    assert types == ["quarantine", "return"]


def test_a_second_quarantine_and_a_return_of_nothing_are_refused(fleet: Fleet) -> None:
    fleet.run("node", "quarantine", UUID)
    ran = fleet.run("node", "quarantine", UUID)
    assert (ran.code, "is quarantined already" in ran.err) == (2, True)
    fleet.run("node", "return", UUID)
    ran = fleet.run("node", "return", UUID)
    assert (ran.code, "is not quarantined; nothing was changed" in ran.err) == (2, True)


def test_only_an_admin_quarantines_or_returns(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, POLICY.replace("[root, ADMIN]", "[nobody-here]"))
    for verb in ("quarantine", "return"):
        ran = fleet.run("node", verb, UUID)
        assert ran.code == 2
        assert "only an admin may do that" in ran.err
    assert fleet.lines("quarantine", "return") == []


@pytest.mark.parametrize("words", ["7", "all", "GPU", "eval", ""])
def test_what_is_no_gpu_of_this_machine_is_refused(fleet: Fleet, words: str) -> None:
    ran = fleet.run("node", "quarantine", words)
    assert ran.code == 2
    assert "this machine has no GPU" in ran.err
    assert fleet.lines("quarantine") == []


def test_an_ambiguous_beginning_is_refused(fleet: Fleet) -> None:
    fleet.run("node", "quarantine", UUID)
    fleet.run("node", "quarantine", UUID[:-1] + "6")
    ran = fleet.run("node", "show", "GPU-1")
    assert ran.code == 2
    assert "matches 2 GPUs" in ran.err


def test_show_tells_everything_recorded(fleet: Fleet) -> None:
    fleet.run("node", "quarantine", UUID, "--reason", "fans are loud")
    ran = fleet.run("node", "show", UUID)
    assert ran.code == 0
    assert "quarantine reason" in ran.out
    assert f"host/{socket.gethostname()}/{UUID}" in ran.out
    told = fleet.run("node", "show", UUID, "--json").json()
    assert told["gpu"]["quarantine_reason"] == "fans are loud"
    assert [one["type"] for one in told["lines"]] == ["quarantine"]


def test_a_list_without_gpus_reports_it(fleet: Fleet) -> None:
    ran = fleet.run("node", "list")
    assert (ran.code, ran.out) == (0, "")
    assert "No GPUs found." in ran.err
    assert fleet.run("node", "list", "--json").json()["gpus"] == []
