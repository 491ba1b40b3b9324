"""Flags become a wish, or every problem is told before anything runs. C1.4"""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.interfaces.cli.accept_settings import EnvironmentSettings, RunOptions, run_request
from gpukeeper.model.errors import UsageError


def wish(**flags: Any) -> RunRequest:
    return run_request(RunOptions(**flags), CHECKS)


def refused(**flags: Any) -> str:
    with pytest.raises(UsageError) as found:
        wish(**flags)
    assert str(found.value).endswith("Nothing was run.")
    return str(found.value)


def test_without_flags_it_is_quick_and_everything() -> None:
    assert wish() == RunRequest()


@pytest.mark.parametrize(
    ("flags", "environment", "length"),
    [
        ({"quick": True}, EnvironmentSettings(within="5m"), ("quick", 60.0)),
        ({}, EnvironmentSettings(within="5m"), ("5m", 300.0)),
        ({"full": True}, EnvironmentSettings(), ("30m", 1800.0)),
        ({"within": "4h"}, EnvironmentSettings(within="5m"), ("4h", 14400.0)),
    ],
)
def test_how_long_it_takes_is_reported_by_flags_first(
    flags: dict[str, Any], environment: EnvironmentSettings, length: tuple[str, float]
) -> None:
    found = run_request(environment.below(RunOptions(**flags)), CHECKS)
    assert (found.profile, found.within_s) == length


def test_lists_may_be_repeated_or_have_commas() -> None:
    found = wish(gpus=["0,3", "GPU-x"], check=["gemm,exact"], skip=["stress"])
    assert (found.gpus, found.only, found.skip) == (("0", "3", "GPU-x"), ("gemm", "exact"), ("stress",))


def test_flags_win_over_variables() -> None:
    environment = EnvironmentSettings(expect=8, settings=["training.epochs=3"])
    found = run_request(environment.below(RunOptions(expect=4, set_=["training.epochs=5"])), CHECKS)
    assert (found.expected, found.params) == (4, {"training": {"epochs": 5}})
    assert run_request(environment.below(RunOptions()), CHECKS).expected == 8


@pytest.mark.parametrize(
    ("words", "param", "value"),
    [
        ("training.epochs=3", "epochs", 3),
        ("training.rate=0.01", "rate", 0.01),
        ("training.twice=false", "twice", False),
        ("gemm.dtypes=bf16,fp8", "dtypes", ["bf16", "fp8"]),
        ("gemm.dtypes=[bf16]", "dtypes", ["bf16"]),
        ("collectives.sizes=1048576,8192", "sizes", [1048576, 8192]),
    ],
)
def test_a_setting_is_read_as_its_default_is(words: str, param: str, value: object) -> None:
    assert wish(set_=[words]).params == {words.partition(".")[0]: {param: value}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("training.epochs", "write it like training.epochs=3"),
        ("epochs=3", "write it like training.epochs=3"),
        ("trainings.epochs=3", 'Did you mean "training"?'),
        ("training.epoch=3", 'Did you mean "epochs"?'),
        ("training.epochs=many", '"many" is not a number'),
        ("training.epochs=-1", "is not a finite number of 0 or more"),
        ("training.epochs=nan", "is not a finite number of 0 or more"),
        ("training.twice=2", "neither true nor false"),
        ("environment.x=1", "It has no parameters"),
    ],
)
def test_a_setting_that_does_not_exist_or_fit_is_refused(words: str, message: str) -> None:
    assert message in refused(set_=[words])


@pytest.mark.parametrize("check", ["training", "ddp"])
def test_one_epoch_can_never_show_a_falling_loss_and_is_refused(check: str) -> None:
    message = refused(set_=[f"{check}.epochs=1"])
    assert message.count("Nothing was run.") == 1
    assert f"--set {check}: epochs 1" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("exact.dtypes=", "--set exact: dtypes is empty, so nothing would be tested"),
        ("exact.dtypes=bf61", 'dtypes: unknown value "bf61"; valid values: fp32, tf32, bf16'),
        ("exact.n=1", "n 1 is too small to prove anything; use 128 or more"),
        ("exact.rounds=0", "rounds 0 is too small to prove anything"),
        ("gemm.dtypes=", "--set gemm: dtypes is empty"),
        ("gemm.repeats=1", "repeats 1 is too small to prove anything; use 3 or more"),
        ("training.samples=1", "samples 1 is too small to prove anything"),
        ("training.steps=0", "steps 0 is too small to prove anything"),
        ("memory_pattern.share=0", "share 0 is too small to prove anything"),
        ("memory_pattern.passes=0", "passes 0 is too small to prove anything"),
        ("memory_bandwidth.bytes=8", "bytes 8 is too small to prove anything"),
        ("copies.bytes=8", "bytes 8 is too small to prove anything"),
        ("collectives.ops=", "--set collectives: ops is empty"),
        ("collectives.sizes=", "--set collectives: sizes is empty"),
        ("collectives_nvlink.sizes=8", "sizes 8 is too small to prove anything"),
        ("collectives.rounds=0", "rounds 0 is too small to prove anything"),
    ],
)
def test_what_would_prove_nothing_is_refused(words: str, message: str) -> None:
    assert message in refused(set_=[words])


def test_all_that_would_prove_nothing_is_told_at_once() -> None:
    message = refused(set_=["exact.dtypes=", "exact.n=1", "training.samples=1"])
    assert [words in message for words in ("dtypes is empty", "n 1 is too small", "samples 1 is too small")] == [
        True
    ] * 3


@pytest.mark.parametrize("name", ["environment", "health"])
def test_what_always_runs_cannot_be_left_out(name: str) -> None:
    assert f"--skip {name}: always runs" in refused(skip=[name, "stress"])


def test_a_number_of_gpus_that_no_machine_has_is_refused() -> None:
    """It was built in memory, to ask the checks what they would run."""
    assert "--expect 1025 is not a valid number of GPUs" in refused(expect=1025, set_=["training.epochs=3"])
    assert wish(expect=1024, set_=["training.epochs=3"]).expected == 1024


def test_every_problem_is_told_at_once() -> None:
    message = refused(
        check=["gem"], skip=["exct"], within="soon", device="cuad", ranks=99, quick=True, set_=["gemm.x=1"]
    )
    for words in (
        '"gemm"',
        '"exact"',
        '"soon" is not a duration',
        "Use cuda for GPUs",
        "--ranks 99",
        "cannot be combined",
        'no parameter "x"',
    ):
        assert words in message
    assert len(message.splitlines()) == 8


def test_what_is_requested_and_left_out_at_once_is_refused() -> None:
    assert "both selected" in refused(check=["gemm"], skip=["gemm"])


def test_ranks_are_for_stand_ins_only() -> None:
    assert "one rank per GPU" in refused(ranks=2)
    assert wish(ranks=2, device="cpu").device == "cpu"


def test_too_short_a_time_is_refused() -> None:
    assert "too short for any check" in refused(within="5s")
