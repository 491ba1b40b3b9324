"""Two runs side by side: a real loss is told from noise, and only like is compared with like."""

from __future__ import annotations

import msgspec
import pytest

from gpukeeper.acceptance.record import Finding, Machine, Report
from gpukeeper.acceptance.reports import compare
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.reports import examples


def one(share: float = 1.0, seed: int = 1, **more: object) -> Report:
    only = examples.gpu(0)
    found = [msgspec.structs.replace(f, verdict=Grade.PASS) for f in examples.measured(only, share, seed)]
    return examples.report([only], found, **more)  # type: ignore[arg-type]


def figures(*samples: float, method: str = "m", unit: str = "GB/s") -> Report:
    found = Finding(
        check="c", metric="x", gpu=examples.gpu(0).uuid, verdict=Grade.PASS, code="c", message="", unit=unit,
        method=method, samples=samples,
    )  # fmt: skip
    return examples.report([examples.gpu(0)], [found])


def test_a_run_compared_with_itself_shows_nothing() -> None:
    found = compare.compare(one(), one())
    assert len(found.changes) == len(examples.FIGURES)
    assert not any(change.sure for change in found.changes)
    assert not found.verdicts
    assert not found.environment
    assert "0 worse and 0 better" in found.sentence


def test_a_real_loss_is_told_first() -> None:
    found = compare.compare(one(), one(0.96, run="later"))
    assert all(change.sure and change.worse for change in found.changes)
    assert found.changes[0].sentence.endswith("beyond the noise (p < 0.001).")
    assert "6 worse and 0 better" in found.sentence


def test_noise_is_not_told_as_a_loss() -> None:
    a, b = figures(100, 101, 99, 100, 102), figures(99, 101, 100, 98, 101)
    change = compare.compare(a, b).changes[0]
    assert not change.sure
    assert "within the noise" in change.sentence


def test_a_change_too_small_to_matter_is_reported_to_be_so() -> None:
    a, b = figures(100.0, 100.01, 100.02, 100.0, 100.01), figures(101.0, 101.01, 101.02, 101.0, 101.01)
    change = compare.compare(a, b).changes[0]
    assert not change.sure
    assert "too small to matter" in change.sentence


def test_two_samples_are_too_few_to_say() -> None:
    found = compare.compare(figures(100, 101), figures(50, 51))
    assert not found.changes[0].sure
    assert "too few samples to tell it from noise" in found.changes[0].sentence
    assert "1 have too few samples" in found.sentence


def test_more_of_what_should_be_little_is_worse() -> None:
    found = compare.compare(figures(10, 10.1, 10.2, unit="us"), figures(20, 20.1, 20.2, unit="us"))
    assert found.changes[0].worse
    assert found.changes[0].sure
    assert not compare.compare(figures(10, 10.1, 10.2), figures(20, 20.1, 20.2)).changes[0].worse


def test_different_methods_are_not_compared_and_that_is_reported() -> None:
    found = compare.compare(figures(1, 2, 3, method="zeros"), figures(1, 2, 3, method="normal"))
    assert not found.changes
    assert found.not_compared == (
        "GPU 0 c.x: not compared, measured by different methods: zeros (GB/s) and normal (GB/s).",
    )


def test_a_gpu_is_the_same_wherever_it_sits() -> None:
    moved = examples.gpu(5, uuid=examples.gpu(0).uuid, serial=examples.gpu(0).serial)
    after = examples.report([moved], examples.measured(moved), node="node-99", run="later")
    found = compare.compare(one(), after)
    assert len(found.changes) == len(examples.FIGURES)
    assert not found.added
    assert not found.removed


def test_a_replaced_gpu_is_added_and_removed_and_never_compared() -> None:
    new = examples.gpu(0, uuid="GPU-new", serial="999")
    found = compare.compare(one(), examples.report([new], examples.measured(new)))
    assert found.added == ("999",)
    assert found.removed == (examples.gpu(0).serial,)
    assert not found.changes
    assert "No GPU is in both runs" in found.sentence


def test_changed_verdicts_and_versions_are_reported() -> None:
    before, after = one(), one(verdict=Grade.WARN)
    machine: Machine = msgspec.structs.replace(
        after.machine, environment={**after.machine.environment, "driver": "580.1"}
    )
    found = compare.compare(before, examples.replace(after, machine=machine, version="0.2.0"))
    assert found.environment == {"gpukeeper": ("0.1.0", "0.2.0"), "driver": ("575.57.08", "580.1")}
    assert [(v.check, v.before, v.after) for v in found.verdicts] == [("run", Grade.PASS, Grade.WARN)]
    told = compare.text(found)
    assert "driver: 575.57.08 → 580.1" in told
    assert "node run: PASS → WARN" in told


def test_a_comparison_is_json() -> None:
    found = compare.compare(one(), examples.eight_gpus())
    assert msgspec.json.decode(msgspec.json.encode(found), type=compare.Comparison) == found


def test_many_figures_do_not_make_noise_significant() -> None:
    """Of 48 figures that differ by noise alone, two or three would be below 5 %; the correction is for that."""
    gpus = [examples.gpu(index) for index in range(8)]
    runs = [examples.report(gpus, [f for gpu in gpus for f in _noise(gpu, seed)]) for seed in (1, 2)]
    assert not any(change.sure for change in compare.compare(*runs).changes)


def _noise(gpu: object, seed: int) -> list[Finding]:
    import random

    rng = random.Random(f"{gpu}{seed}")
    return [
        msgspec.structs.replace(f, value=None, samples=tuple(rng.gauss(100, 1.5) for _ in range(5)))
        for f in examples.measured(gpu)  # type: ignore[arg-type]
    ]


def judged(*grades: tuple[str, Grade], gpus: int = 1, **more: object) -> Report:
    """Checks of GPU 0, each with its verdict."""
    here = [examples.gpu(index) for index in range(gpus)]
    found = [examples.finding(check, here[0].uuid, grade) for check, grade in grades]
    return examples.report(here, found, **more)  # type: ignore[arg-type]


def test_what_is_worse_is_told_from_what_only_changed() -> None:
    """B7: GPUs that are gone, and verdicts below the run's own, which another failure had made as bad before."""
    good, unsure = ("health", Grade.PASS), ("health", Grade.INCONCLUSIVE)
    failed = ("exact", Grade.FAIL)

    def worse(before: Report, after: Report) -> bool:
        return compare.is_worse(compare.compare(before, after))

    assert not worse(one(), one())
    assert worse(one(), one(0.96, run="later"))
    assert worse(judged(good, gpus=8), judged(good, gpus=5))
    assert not worse(judged(good, gpus=5), judged(good, gpus=8))
    assert worse(judged(good, failed), judged(unsure, failed))
    assert worse(judged(good, failed), judged(good, unsure, failed)), "the worst of several about one thing"
    assert worse(judged(good, failed), judged(good, good, ("gemm", Grade.FAIL), failed)), "a new failure"
    assert not worse(judged(unsure, failed), judged(good, failed))
    assert not worse(judged(good, failed), judged(failed)), "not tested this time"
    assert not worse(judged(("health", Grade.SKIPPED)), judged(good))


ESCAPES = "\x1b[2J\x1b]0;evil\x07\u202e"


def test_words_of_a_report_do_not_drive_the_terminal() -> None:
    evil = examples.gpu(0, name=ESCAPES, serial=f"1{ESCAPES}")
    found = [examples.finding("gemm", evil.uuid, Grade.FAIL, metric=ESCAPES, value=1.0, unit=ESCAPES, method=ESCAPES)]
    one = examples.report([evil], found, node=f"node{ESCAPES}\n[RESULT] SUCCESS", version=ESCAPES)
    two = examples.replace(one, version="other", findings=tuple(msgspec.structs.replace(f, method="m") for f in found))
    for words in (compare.text(compare.compare(one, two)), compare.text(compare.compare(one, examples.one_good_gpu()))):
        assert all(sign == "\n" or sign.isprintable() for sign in words), ascii(words)
        assert not any(line.startswith("[RESULT]") for line in words.splitlines())


@pytest.mark.parametrize("serial", [Unknown("not told"), "", "0", "0000000000000", "N/A"])
@pytest.mark.parametrize("uuid", ["", "GPU-00000000-0000-0000-0000-000000000000"])
def test_gpus_of_two_machines_are_never_taken_for_one(serial: str | Unknown, uuid: str) -> None:
    only = examples.gpu(0, uuid=uuid, serial=serial)
    one, two = (examples.report([only], examples.measured(only), node=node) for node in ("a", "b"))
    found = compare.compare(one, two)
    assert (found.changes, found.added, found.removed) == ((), ("b/0",), ("a/0",))
    assert compare.compare(one, one).changes, "in one machine it is the same GPU"


def test_figures_of_two_nodes_are_not_compared() -> None:
    shared = [examples.finding("collectives", None, metric="all_reduce", value=478.2, unit="GB/s")]
    one, two = (examples.report([examples.gpu(number)], shared, node=f"n{number}") for number in (1, 2))
    assert compare.compare(one, two).changes == ()


@pytest.mark.parametrize(
    ("unit", "before", "after", "said"),
    [
        ("share", -0.002, 0.007, "(+0.9 points)"),
        ("share", 0.5, 0.55, "(+5.0 points)"),
        ("percent", 99.0, 97.0, "(-2.0 points)"),
        ("W", 0.0001, 3.0, "0.0001 W → 3 W, "),
        ("W", -1.0, 3.0, "-1 W → 3 W, "),
        ("GB/s", 50.0, 55.0, "(+10.0 %)"),
    ],
)
def test_shares_differ_in_points_and_nothing_is_relative_to_zero(
    unit: str, before: float, after: float, said: str
) -> None:
    only = examples.gpu(0)
    one, two = (
        examples.report([only], [examples.finding("stress", only.uuid, metric="rise", value=value, unit=unit)])
        for value in (before, after)
    )
    (change,) = compare.compare(one, two).changes
    assert said in change.sentence
