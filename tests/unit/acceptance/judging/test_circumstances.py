"""A healthy GPU beside another program, or with clocks that somebody fixed, is slow: that proves nothing about it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gpukeeper.acceptance.judging.verdicts import named_processes
from gpukeeper.acceptance.record import Finding, Remedy, Report
from gpukeeper.acceptance.reports.legacy import grade_by_check
from gpukeeper.model.gpu import Grade, Health
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.benches import BenchWith, run_on

SPEED = ("gemm", "memory_bandwidth", "copies", "collectives", "links", "throughput", "stress")


def about_speed(report: Report) -> list[Finding]:
    return [one for one in report.findings if one.check in SPEED and one.samples and one.unit != "elements"]


def test_a_slow_gpu_alone_fails() -> None:
    """Else the tests below would prove nothing."""
    assert run_on(BenchWith(gpus=1, slow={0: 0.5})).verdict is Grade.FAIL


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("slow", [0.03, 0.12, 0.51])
def test_no_speed_beside_a_foreign_process_fails_or_warns(gpus: int, slow: float) -> None:
    report = run_on(BenchWith(gpus=gpus, slow={0: slow}, foreign={0: (4242,)}), within_s=300.0)
    assert report.verdict is Grade.INCONCLUSIVE, report.reason
    assert not [one.code for one in about_speed(report) if one.verdict in (Grade.FAIL, Grade.WARN)]
    assert "pid 4242 (simulated: python train.py)" in report.reason
    assert "test again" in report.reason
    assert [one.verdict for one in report.tallies[:1]] == [Grade.INCONCLUSIVE]
    assert all(one.verdict is Grade.PASS for one in report.tallies[1:])


def test_noise_beside_a_foreign_process_is_its_noise() -> None:
    report = run_on(BenchWith(gpus=1, noise=0.2, foreign={0: (4242,)}))
    assert "gemm-disturbed" in {one.code for one in report.findings}
    assert not [one.code for one in report.findings if one.code.endswith("-noisy")]
    assert report.reason.startswith("Another program used the GPU at the same time: pid 4242")


def test_it_is_not_measured_again_to_confirm_what_does_not_count() -> None:
    report = run_on(BenchWith(gpus=1, slow={0: 0.5}, foreign={0: (4242,)}))
    assert not [one for one in report.records if one["again"]]


@pytest.mark.parametrize("fault", [{"flip": {0: "bf16"}}, {"memory": (0,)}, {"training": (0,)}, {"ecc": (0,)}])
def test_wrong_bits_beside_a_foreign_process_still_fail(fault: dict[str, Any]) -> None:
    report = run_on(BenchWith(gpus=3, slow={0: 0.5}, foreign={0: (4242,)}, **fault))
    assert report.verdict is Grade.FAIL
    assert [one.verdict for one in report.tallies] == [Grade.FAIL, Grade.PASS, Grade.PASS]


def test_only_what_ran_meanwhile_is_excused() -> None:
    """The process came with the second check: the slow figure of the first one was measured without it."""
    report = run_on(BenchWith(gpus=1, slow={0: 0.5}, foreign={0: (4242,)}, foreign_from=4))
    verdicts = grade_by_check(about_speed(report))
    assert verdicts["gemm"] is Grade.FAIL
    assert verdicts["memory_bandwidth"] is Grade.INCONCLUSIVE


HIDDEN = Unknown("40000 MiB of its memory are in use by a process that is not visible from here")
NO_RIGHTS = Unknown("3 processes could not be looked into: run it as root", by_design=True)


def test_a_sign_of_a_process_that_cannot_be_seen_counts_like_one() -> None:
    report = run_on(BenchWith(gpus=1, slow={0: 0.5}, unseen=HIDDEN))
    assert report.verdict is Grade.INCONCLUSIVE
    assert "40000 MiB" in report.reason


def test_a_slow_gpu_is_found_where_processes_can_never_be_seen() -> None:
    """No root, or a container: without any sign of another program the GPU is slow."""
    assert run_on(BenchWith(gpus=1, slow={0: 0.5}, unseen=NO_RIGHTS)).verdict is Grade.FAIL
    assert run_on(BenchWith(gpus=1, unseen=NO_RIGHTS)).verdict is Grade.PASS


def test_many_processes_are_counted() -> None:
    read = Health(uuid="a", at=datetime(2026, 1, 1, tzinfo=UTC), foreign=(1, 2, 3, 4, 5))
    assert named_processes([read]) == "pid 1, pid 2, pid 3 and 2 more"


# Settings of the GPU


@pytest.mark.parametrize(
    ("states", "readings", "said"),
    [
        (
            {"power_limit_w": 300.0},
            {},
            "Its power limit is set to 300 W, the default is 700 W. To reset it: nvidia-smi -i 0 -pl 700",
        ),
        (
            {},
            {"reasons": 0x2, "sm_mhz": 600.0},
            "Its clocks are locked by a setting. To reset it: nvidia-smi -i 0 -rgc",
        ),
        (
            {},
            {"reasons": 0x0, "sm_mhz": 600.0, "power_w": 220.0},
            "Its clock stays at 600 MHz of 1980 MHz below its power limit",
        ),
        ({}, {"reasons": 0x0, "memory_mhz": 1593.0}, "Its memory runs at 1593 MHz of 3201 MHz under load"),
    ],
)
def test_a_setting_that_makes_it_slow_is_named_first_with_the_command_that_undoes_it(
    states: dict[str, Any], readings: dict[str, Any], said: str
) -> None:
    report = run_on(BenchWith(gpus=1, slow={0: 0.4}, states=states, while_loaded=readings))
    assert report.verdict is Grade.INCONCLUSIVE, report.reason
    assert report.reason.startswith(said), report.reason
    assert not [one for one in report.findings if one.action is Remedy.CONTACT_VENDOR]
    held = [one for one in report.findings if one.code.endswith("-held-back")]
    assert held
    assert {one.action for one in held} == {Remedy.RESET_SETTING}


def test_wrong_bits_under_a_lowered_power_limit_still_fail() -> None:
    assert run_on(BenchWith(gpus=1, states={"power_limit_w": 300.0}, flip={0: "bf16"})).verdict is Grade.FAIL


@pytest.mark.parametrize(
    "readings",
    [
        {"reasons": 0x0, "power_w": 695.0, "sm_mhz": 1200.0},  # at its power limit: that is why
        {"reasons": 0x4, "sm_mhz": 1200.0, "power_w": 300.0},  # the driver says: power cap
        {"reasons": None, "sm_mhz": 600.0, "power_w": 220.0},  # reasons not known: nothing is recognized
        {"reasons": 0x0, "sm_mhz": 1965.0, "power_w": 220.0},  # near its highest clock
    ],
)
def test_a_slow_gpu_without_such_a_setting_fails(readings: dict[str, Any]) -> None:
    assert run_on(BenchWith(gpus=1, slow={0: 0.4}, while_loaded=readings)).verdict is Grade.FAIL
