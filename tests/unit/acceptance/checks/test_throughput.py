"""Reading training speed: once for all ranks, each GPU by itself, and how well it scales."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.checks import throughput
from gpukeeper.acceptance.record import Finding
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance import machines
from tests.unit.acceptance.checks import results
from tests.unit.acceptance.checks.results import trial


def by_metric(found: tuple[Finding, ...]) -> dict[tuple[str, str | None], Finding]:
    return {(one.metric, one.gpu): one for one in found}


def test_the_speed_is_taken_from_one_rank_and_never_added_up() -> None:
    """C2.3: eight records say 10,240 samples a second; so it is."""
    found = by_metric(throughput.interpret(trial(results.throughput()), results.node()))
    whole = found["samples", None]
    assert whole.value == pytest.approx(8 * 32e3 / 25)
    assert (whole.verdict, whole.code) == (Grade.SKIPPED, "throughput-noted")
    assert "Later runs are compared with it" in whole.message


def test_it_is_held_against_earlier_runs() -> None:
    key = "throughput.samples train/resnet50/synthetic/b32/fp32/iown/n8"
    before = {"node-1": tuple(machines.past(14_000.0, day, key=key) for day in (1, 2, 3))}
    found = by_metric(throughput.interpret(trial(results.throughput()), results.node(history=before)))
    assert (found["samples", None].verdict, found["samples", None].code) == (
        Grade.FAIL,
        "throughput-slower-than-before",
    )


def test_a_slow_gpu_shows_in_its_own_step_against_its_equals() -> None:
    """With the exchange all wait for it, so all steps look the same."""
    said = results.throughput()
    said[6]["local_step_ms"] = [27.0] * 20
    found = by_metric(throughput.interpret(trial(said), results.node()))
    assert (found["step", "GPU-6"].verdict, found["step", "GPU-6"].code) == (Grade.FAIL, "throughput-slower-than-peers")
    assert found["step", "GPU-5"].verdict is Grade.PASS


@pytest.mark.parametrize(
    ("count", "share", "verdict"),
    [
        (8, 0.96, Grade.PASS), (8, 0.94, Grade.WARN), (2, 0.94, Grade.WARN), (16, 0.91, Grade.PASS),
        (16, 0.89, Grade.WARN), (32, 0.86, Grade.PASS), (32, 0.84, Grade.WARN), (64, 0.81, Grade.PASS),
        (64, 0.79, Grade.WARN),
        (8, 1.20, Grade.INCONCLUSIVE),
    ],
)  # fmt: skip
def test_scaling_has_a_floor_by_the_number_of_gpus(count: int, share: float, verdict: Grade) -> None:
    """C2.3: 95, 90, 85 and 80 %. Faster than possible is inconclusive."""
    said = results.throughput(count, alone=1280.0 / share)
    found = by_metric(throughput.interpret(trial(said), results.node(count)))["scaling", None]
    assert found.value == pytest.approx(share)
    assert found.verdict is verdict


def test_scaling_without_a_gpu_by_itself_is_not_measured() -> None:
    found = by_metric(throughput.interpret(trial(results.throughput(alone=None)), results.node()))["scaling", None]
    assert (found.verdict, found.code) == (Grade.INCONCLUSIVE, "throughput-missing")


def test_one_gpu_has_nothing_to_scale() -> None:
    found = by_metric(throughput.interpret(trial(results.throughput(1, alone=None)), results.node(1)))
    assert ("scaling", None) not in found
    assert found["step", "GPU-0"].code == "throughput-noted"


def test_cpus_do_not_scale_and_nobody_minds() -> None:
    found = by_metric(throughput.interpret(trial(results.throughput(2, alone=9000.0)), results.cpu()))["scaling", None]
    assert found.verdict is Grade.SKIPPED


def test_the_speed_of_nonsense_is_no_speed() -> None:
    said = results.throughput()
    said[2]["loss"] = "nan"
    found = by_metric(throughput.interpret(trial(said), results.node()))["loss", "GPU-2"]
    assert (found.verdict, found.code) == (Grade.FAIL, "throughput-loss-not-a-number")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"model": "vgg"}, "unknown model 'vgg'; valid values: resnet50, resnet18, transformer"),
        ({"data": "mnist"}, "unknown data set 'mnist'"),
        ({"data": "cifar10"}, "cifar10 needs data_dir"),
        ({"data": "imagenet", "data_dir": "d", "model": "transformer"}, "the transformer reads tokens"),
        ({"warmup": 0}, "warmup 0 is too small"),
    ],
)
def test_what_cannot_run_is_refused_before(params: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as error:
        throughput.request(throughput.CHECK.servings[0], results.node(wish=RunRequest(params={"throughput": params})))
    assert words in str(error.value)


def test_missing_data_is_inconclusive_and_teaches() -> None:
    """C1.5: said in the verdict, never silently synthetic."""
    words = "DataMissing: The data set cifar10 is not in data: there is no data/cifar-10-batches-py/data_batch_1."
    (found,) = throughput.interpret(trial({0: results.broken("no_data", words)}), results.node(1))
    assert (found.verdict, found.code) == (Grade.INCONCLUSIVE, "no-data")
    assert "synthetic data was not used instead" in found.message


def test_the_defaults_are_the_old_kits() -> None:
    """C1.5: resnet50 on synthetic data, batch 32, 1000 classes, rate 0.01, 50 + 100 steps."""
    params = throughput.request(throughput.CHECK.servings[0], results.node()).params
    assert params == {
        "model": "resnet50",
        "data": "synthetic",
        "batch": 32,
        "classes": 1000,
        "rate": 0.01,
        "warmup": 50,
        "steps": 100,
    }
