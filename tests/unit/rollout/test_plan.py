"""Steps, what prevents them, and drift: from values to values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpukeeper.clients.ssh import Host
from gpukeeper.rollout.plan import (
    Act,
    Bundle,
    Finding,
    FoundFile,
    FoundSetup,
    PolicyText,
    Seen,
    Unit,
    Wanted,
    plan,
    unverified,
    upgrade,
)

BUNDLE = Bundle(path="b.pyz", version="2.0", sha256="0", size=1000, pythons=("3.11", "3.12"), machine="x86_64")
POLICY = PolicyText(source="policy.yaml", text="mode: enforce\n", mode="enforce")
WANTED = Wanted(host=Host("gpu1", "gpu1"), bundle=BUNDLE, policy=POLICY)
UNITS = {"gpukeeper.service": "active", "gpukeeper-pass.timer": "inactive"}
BARE = Seen(root=True, python="3.11.2", machine="x86_64", free=10**9, units=dict.fromkeys(UNITS, "inactive"))
SAME = FoundSetup(files=(FoundFile("/etc/gpukeeper/policy.yaml", "unchanged"),), unit="gpukeeper.service", active=True)
THERE = Seen(
    root=True,
    python="3.11.2",
    machine="x86_64",
    directory="link",
    version="2.0",
    free=10**9,
    units=UNITS,
    policy=POLICY.text,
    mode="enforce",
    setup=SAME,
)


def seen(base: Seen = THERE, **changes: Any) -> Seen:
    return msgspec.structs.replace(base, **changes)


def test_a_bare_server_gets_everything() -> None:
    found = plan(WANTED, BARE)
    assert [step.act for step in found.steps] == [Act.INSTALL, Act.SETUP]
    assert "+mode: enforce" in found.steps[1].diff
    assert (found.blocked, found.drift) == ((), ())


def test_a_server_as_wanted_has_no_step_and_is_verified() -> None:
    assert plan(WANTED, THERE).steps == ()
    assert unverified(WANTED, THERE) == ()


def test_another_version_is_installed_and_set_up_again() -> None:
    steps = plan(WANTED, seen(version="1.0")).steps
    assert [step.act for step in steps] == [Act.INSTALL, Act.SETUP]
    assert steps[0].words == "install 2.0 in /opt/gpukeeper; now: 1.0"


def test_a_program_that_does_not_run_is_installed_again() -> None:
    assert plan(WANTED, seen(program="no such file", setup=None)).installs


def test_a_changed_policy_is_set_up_without_an_installation() -> None:
    change = FoundFile("/etc/gpukeeper/policy.yaml", "update", "", "-mode: plan\n+mode: enforce")
    (step,) = plan(WANTED, seen(setup=FoundSetup((change,), "gpukeeper.service", True))).steps
    assert (step.act, step.diff) == (Act.SETUP, change.diff)


def test_a_unit_that_is_not_active_is_started() -> None:
    (step,) = plan(WANTED, seen(setup=FoundSetup(SAME.files, SAME.unit, False))).steps
    assert step.words == "start gpukeeper.service, which is not active"


def test_a_file_that_a_person_changed_is_drift_and_no_step() -> None:
    kept = FoundFile("/etc/gpukeeper/policy.yaml", "keep", "it was changed since it was written")
    found = plan(WANTED, seen(mode="plan", setup=FoundSetup((kept,), "gpukeeper.service", True)))
    assert found.steps == ()
    assert found.drift == ("/etc/gpukeeper/policy.yaml: it was changed since it was written; it is kept",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"root": False, "sudo": "a password is required"}, "this needs root: a password is required"),
        ({"python": "3.10.12"}, "is Python 3.10; gpukeeper needs 3.11"),
        ({"python": "3.13.0"}, 'make bundle PYTHONS="3.13"'),
        ({"machine": "aarch64"}, "this server is aarch64"),
        ({"free": 5999}, "Free some space"),
        ({"directory": "foreign"}, "is no virtual environment"),
        ({"units": None}, "Write unit: cron"),
    ],
)
def test_what_prevents_an_installation_is_said_before(changes: dict[str, Any], words: str) -> None:
    (problem,) = plan(WANTED, seen(BARE, **changes)).blocked
    assert words in problem


def test_everything_that_prevents_it_is_said_at_once() -> None:
    assert len(plan(WANTED, seen(BARE, python="3.10.1", free=1, machine="riscv64")).blocked) == 3


def test_where_nothing_is_due_nothing_prevents_it() -> None:
    assert plan(WANTED, seen(free=0, python="3.10.1")).blocked == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"setup": None, "setup_problem": "the policy has problems"}, "is not known: the policy has problems"),
        ({"setup": None, "root": False, "sudo": "there is no sudo"}, "can only root read: there is no sudo"),
    ],
)
def test_what_could_not_be_read_is_not_as_wanted(changes: dict[str, Any], words: str) -> None:
    (problem,) = plan(WANTED, seen(**changes)).blocked
    assert words in problem


def test_without_a_bundle_a_bare_server_stays_bare() -> None:
    (problem,) = plan(msgspec.structs.replace(WANTED, bundle=None), BARE).blocked
    assert "no bundle is named" in problem


def test_cron_needs_no_systemd() -> None:
    by_cron = msgspec.structs.replace(WANTED, unit=Unit.CRON)
    assert plan(by_cron, seen(BARE, units=None)).blocked == ()
    assert by_cron.answers() == ["--every", "1h", "--cron"]


def test_an_upgrade_keeps_the_policy_and_installs_nowhere_new() -> None:
    kept, found = upgrade(WANTED, seen(version="1.0"))
    assert kept.policy is None
    assert found.installs
    assert upgrade(WANTED, BARE)[1].blocked == ("gpukeeper is not installed there. Install it: gpukeeper fleet deploy",)
    assert upgrade(WANTED, THERE)[1].steps == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "1.0"}, "version 1.0 is installed instead of 2.0"),
        ({"program": "Killed"}, "gpukeeper does not run: Killed"),
        ({"setup": None, "setup_problem": "boom"}, "setup cannot be checked: boom"),
        ({"setup": FoundSetup(SAME.files, SAME.unit, False)}, "gpukeeper.service is not active"),
        ({"mode": "plan"}, "the mode is plan instead of enforce"),
        ({"findings": (Finding("problem", "ledger", "it is damaged"),)}, "ledger: it is damaged"),
    ],
)
def test_what_is_not_as_wanted_is_not_verified(changes: dict[str, Any], words: str) -> None:
    assert unverified(WANTED, seen(**changes)) == (words,)


def test_a_problem_of_the_machine_does_not_undo_a_deployment() -> None:
    assert unverified(WANTED, seen(findings=(Finding("problem", "gpus", "no driver"),))) == ()
