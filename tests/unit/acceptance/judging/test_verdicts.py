"""From findings to verdicts: tries that agree or not, a GPU, a run. C2.1"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.judging import verdicts
from gpukeeper.acceptance.record import Finding, Remedy
from gpukeeper.model.gpu import Gpu, Grade, worst

GPUS = (Gpu(uuid="GPU-a", index=0, serial="S1"), Gpu(uuid="GPU-b", index=1, serial="S2"))


def finding(
    verdict: Grade, code: str = "", *, gpu: str | None = "GPU-a", confirm: bool = False, value: float = 1.0
) -> Finding:
    words = code or f"gemm-{verdict.lower()}"
    return Finding(
        check="gemm",
        metric="bf16",
        gpu=gpu,
        verdict=verdict,
        code=words,
        message=f"It says {words}.",
        confirm=confirm,
        value=value,
        samples=(value,),
    )


SLOW = finding(Grade.FAIL, "gemm-below-floor", confirm=True)
GOOD = finding(Grade.PASS, "gemm-ok", value=2.0)
NOISY = finding(Grade.INCONCLUSIVE, "gemm-noisy")


def settled(*tries: Finding | None) -> Finding:
    return verdicts.confirmed([() if one is None else (one,) for one in tries])[0]


def test_a_fail_that_is_seen_twice_is_a_fail() -> None:
    for tries in ((SLOW, SLOW), (SLOW, GOOD, SLOW)):
        found = settled(*tries)
        assert (found.verdict, found.code) == (Grade.FAIL, "gemm-below-floor")
        assert f"2 of {len(tries)} attempts" in found.message
        assert len(found.evidence["attempts"]) == len(tries)


def test_a_fail_that_is_seen_once_is_a_warning_and_a_retest() -> None:
    found = settled(SLOW, GOOD, GOOD)
    assert (found.verdict, found.code) == (Grade.WARN, "gemm-below-floor-not-confirmed")
    assert found.action is Remedy.RETEST
    assert "2 of 3 attempts did not show it" in found.message


def test_a_fail_whose_repetition_could_not_be_measured_is_not_a_warning() -> None:
    """What could not be seen again was not refuted either."""
    broken = finding(Grade.INCONCLUSIVE, "timeout")
    assert settled(SLOW, broken, broken).verdict is Grade.INCONCLUSIVE


def test_a_fail_that_needs_no_confirmation_counts_at_once() -> None:
    wrong = finding(Grade.FAIL, "exact-mismatch")
    assert not verdicts.needs_another(wrong)
    assert settled(wrong) is wrong


def test_noise_is_given_one_more_try_and_then_counts_as_it_is() -> None:
    assert verdicts.needs_another(NOISY)
    assert verdicts.undecided([NOISY])
    assert not verdicts.undecided([NOISY, NOISY])
    assert settled(NOISY, GOOD) == GOOD
    assert settled(NOISY, NOISY).verdict is Grade.INCONCLUSIVE


def test_a_fail_after_noise_has_to_be_seen_twice_as_well() -> None:
    assert verdicts.undecided([NOISY, SLOW])
    assert not verdicts.undecided([NOISY, SLOW, SLOW])
    assert settled(NOISY, SLOW, GOOD) == NOISY
    found = settled(NOISY, SLOW, SLOW)
    assert (found.verdict, found.code) == (Grade.FAIL, "gemm-below-floor")
    assert "2 of 3 attempts" in found.message


def test_two_findings_about_one_thing_both_stay() -> None:
    """A good figure must not hide a wrong result of the same check."""
    both = (GOOD, finding(Grade.FAIL, "exact-mismatch"))
    assert verdicts.confirmed([both]) == both
    assert verdicts.find(both, verdicts.key(GOOD)) == both[1]
    slow = (GOOD, SLOW)
    assert [one.verdict for one in verdicts.confirmed([slow, slow])] == [Grade.PASS, Grade.FAIL]


WRONG = finding(Grade.FAIL, "collectives-wrong-data")


def test_a_wrong_result_counts_whichever_try_showed_it() -> None:
    """Ranks are asked again together, so a try for the speed may be the one that shows a wrong element."""
    assert settled(GOOD, WRONG) == WRONG
    assert settled(SLOW, GOOD, WRONG) == WRONG
    assert not verdicts.undecided([SLOW, WRONG])
    other = finding(Grade.FAIL, "collectives-wrong-data", gpu="GPU-b")
    assert verdicts.confirmed([(SLOW,), (SLOW, other)])[1] == other


LATE = finding(Grade.FAIL, "gemm-below-floor", gpu="GPU-b", confirm=True)
FINE = finding(Grade.PASS, "gemm-ok", gpu="GPU-b")


def test_a_fail_counts_alike_in_whichever_tries_it_was_seen() -> None:
    """Two of three are a FAIL and one is a warning, also of what was good, or not there, at first."""
    both = verdicts.confirmed([(SLOW, FINE), (SLOW, LATE), (SLOW, LATE)])
    assert [(one.gpu, one.verdict) for one in both] == [("GPU-a", Grade.FAIL), ("GPU-b", Grade.FAIL)]
    assert verdicts.confirmed([(SLOW,), (SLOW, LATE), (SLOW, LATE)])[1].verdict is Grade.FAIL
    for first in ((SLOW, FINE), (SLOW,)):
        once = verdicts.confirmed([first, (SLOW, LATE), (SLOW, FINE)])[1]
        assert (once.verdict, once.code) == (Grade.WARN, "gemm-below-floor-not-confirmed")
    # What a check says only where it is so, and does not say again, was not confirmed either.
    assert verdicts.confirmed([(SLOW,), (), ()])[0].verdict is Grade.WARN


def test_a_crash_in_any_try_is_kept() -> None:
    """A figure that was good at last does not undo a program that hung before."""
    crash = msgspec.structs.replace(finding(Grade.INCONCLUSIVE, "kernel-fault"), metric="", samples=())
    for tries in ([(SLOW,), (crash,), (GOOD,)], [(SLOW,), (GOOD,), (crash,)]):
        assert [(one.metric, one.verdict, one.code) for one in verdicts.confirmed(tries)] == [
            ("bf16", Grade.WARN, "gemm-below-floor-not-confirmed"),
            ("", Grade.INCONCLUSIVE, "kernel-fault"),
        ]
    missing = finding(Grade.INCONCLUSIVE, "gemm-missing")
    assert settled(SLOW, missing, GOOD) == missing
    # A good metric that was only noisy in a later try is as good as it was.
    assert verdicts.confirmed([(SLOW, FINE), (SLOW, msgspec.structs.replace(NOISY, gpu="GPU-b"))])[1] == FINE


@pytest.mark.parametrize(
    ("tries", "more"),
    [
        ([SLOW], True),
        ([SLOW, GOOD], True),
        ([SLOW, SLOW], False),
        ([SLOW, GOOD, GOOD], False),
        ([SLOW, None], True),
    ],
)
def test_tries_go_on_until_two_agree(tries: Sequence[Finding | None], more: bool) -> None:
    assert verdicts.undecided(tries) is more


@pytest.mark.parametrize(("names", "found"), [((), [0, 1]), (("1",), [1]), (("GPU-a",), [0]), (("S2", "0"), [0, 1])])
def test_gpus_are_named_by_index_uuid_or_serial(names: tuple[str, ...], found: list[int]) -> None:
    assert [gpu.index for gpu in verdicts.wanted(GPUS, names)] == found


def test_the_verdict_on_a_gpu_is_its_worst_finding() -> None:
    both = [GOOD, finding(Grade.WARN, "warm"), finding(Grade.PASS, gpu="GPU-b"), finding(Grade.FAIL, gpu=None)]
    first, second = verdicts.of_gpus(GPUS, both, {"GPU-a": 30.0}, 60.0)
    assert (first.verdict, first.reason, first.busy) == (Grade.WARN, "It says warm.", 0.5)
    assert (second.verdict, second.busy) == (Grade.PASS, None)


def test_a_gpu_of_which_nothing_is_known_did_not_pass() -> None:
    assert verdicts.of_gpus(GPUS[:1], [], {}, 1.0)[0].verdict is Grade.INCONCLUSIVE
    skipped = [finding(Grade.SKIPPED, "none-here")]
    assert verdicts.of_gpus(GPUS[:1], skipped, {}, 1.0)[0].verdict is Grade.INCONCLUSIVE


def test_the_worst_counts_in_this_order() -> None:
    order = [Grade.SKIPPED, Grade.PASS, Grade.WARN, Grade.INCONCLUSIVE, Grade.FAIL]
    for better, worse in pairwise(order):
        assert worst([worse, better]) is worse
    assert worst([]) is Grade.INCONCLUSIVE
    assert worst([Grade.SKIPPED]) is Grade.INCONCLUSIVE


def verdict(wish: RunRequest, findings: Sequence[Finding], **how: bool) -> tuple[Grade, str]:
    return verdicts.of_run(wish, GPUS[:1], findings, **{"interrupted": False, **how})


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_run_without_gpus_never_accepts_one(device: str) -> None:
    for one in (GOOD, finding(Grade.WARN), SLOW):
        grade, reason = verdict(RunRequest(device=device), [one])
        assert grade is Grade.INCONCLUSIVE
        assert "no GPU was tested" in reason
        assert one.verdict in reason


def test_the_self_test_hears_what_the_checks_say_of_a_simulated_machine() -> None:
    assert verdict(RunRequest(device="simulated"), [GOOD], self_test=True)[0] is Grade.PASS
    assert verdict(RunRequest(device="cpu"), [GOOD], self_test=True)[0] is Grade.INCONCLUSIVE


def test_an_interrupted_run_never_accepts_but_a_fail_stays_one() -> None:
    assert verdict(RunRequest(), [GOOD], interrupted=True)[0] is Grade.INCONCLUSIVE
    assert verdict(RunRequest(), [SLOW], interrupted=True)[0] is Grade.FAIL


def test_a_gpu_without_a_single_measurement_is_not_accepted() -> None:
    looked = Finding(check="health", gpu="GPU-a", verdict=Grade.PASS, code="healthy", message="It is healthy.")
    grade, reason = verdict(RunRequest(), [looked])
    assert (grade, "Nothing was measured on GPU 0" in reason) == (Grade.INCONCLUSIVE, True)


def test_what_ran_by_name_only_is_reported() -> None:
    grade, reason = verdict(RunRequest(only=("gemm", "health")), [GOOD])
    assert (grade, reason.startswith("Only gemm ran besides environment and health, as requested.")) == (
        Grade.PASS,
        True,
    )


def test_what_only_looks_measures_no_gpu_also_when_requested_by_name() -> None:
    looked = Finding(check="topology", gpu="GPU-a", verdict=Grade.PASS, code="topology-ok", message="It is whole.")
    grade, reason = verdict(RunRequest(only=("topology",)), [looked])
    assert (grade, reason.startswith("None of the selected checks (--check) measured a GPU.")) == (
        Grade.INCONCLUSIVE,
        True,
    )


def test_what_was_left_out_or_set_otherwise_is_reported() -> None:
    wish = RunRequest(skip=("stress", "exact"), params={"gemm": {"n": 512, "dtypes": ["bf16"]}})
    grade, reason = verdict(wish, [GOOD])
    assert grade is Grade.PASS
    assert "Without stress, exact, as requested." in reason
    assert "--set gemm.n=512 gemm.dtypes=['bf16']" in reason


def test_a_part_of_the_gpus_is_reported() -> None:
    grade, reason = verdict(RunRequest(gpus=("0",)), [GOOD])
    assert (grade, reason.startswith("Only GPU 0 of this machine, as requested.")) == (Grade.PASS, True)


def test_the_reason_is_the_first_of_the_worst_and_how_many_more() -> None:
    grade, reason = verdict(RunRequest(), [GOOD, SLOW, SLOW])
    assert (grade, reason) == (Grade.FAIL, "It says gemm-below-floor. (1 more like it)")
    assert verdict(RunRequest(), [GOOD]) == (Grade.PASS, "All 1 findings passed.")
    assert verdict(RunRequest(), []) == (Grade.INCONCLUSIVE, "Nothing was tested.")
