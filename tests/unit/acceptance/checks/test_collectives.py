"""Reading collectives: right or wrong, fast or slow, the way it went; and ranks that gave nothing."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.checks import collectives
from gpukeeper.acceptance.record import Finding, Remedy
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.checks import results
from tests.unit.acceptance.checks.results import row, trial

CHECK = collectives.CHECK


def by_metric(found: tuple[Finding, ...]) -> dict[str, Finding]:
    assert len({(one.metric, one.gpu) for one in found}) == len(found)
    return {one.metric: one for one in found}


def test_a_healthy_node_passes_with_its_plateau_and_curve() -> None:
    """C1.6, C2.2: judged from 1 GiB on, by the reference row of eight H200."""
    found = by_metric(CHECK.interpret(trial(results.collectives()), results.node()))
    assert {one.verdict for one in found.values()} == {Grade.PASS}
    assert set(found) == {"data", "all_reduce", "latency"}
    fast = found["all_reduce"]
    assert (fast.value, fast.unit, fast.gpu) == (478.0, "GB/s", None)
    assert fast.method == "busbw/nccl/n8/fp32/default/plateau"
    assert fast.evidence["busbw_by_bytes"] == {"all_reduce": {"8192": 0.4, str(2**30): 478.0}}
    assert "NCCL used NVLS/SIMPLE." in fast.message


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    said = results.collectives(2)
    said[1]["results"] = [row(2**13, 0.4), row(2**30, 300.0)]
    found = by_metric(CHECK.interpret(trial(said), results.node(2)))
    assert found["all_reduce"].value == 300.0


def test_speed_is_judged_from_1_gib_on_and_by_the_best_of_those() -> None:
    """A size of which half fits into a cache must not stand for the links."""
    said = results.collectives(results=[row(2**29, 900.0), row(2**30, 440.0), row(2**33, 470.0)])
    assert by_metric(CHECK.interpret(trial(said), results.node()))["all_reduce"].value == 470.0


def test_a_machine_too_small_for_1_gib_is_judged_by_another_method() -> None:
    said = results.collectives(results=[row(2**26, 200.0), row(2**28, 100.0)])
    found = by_metric(CHECK.interpret(trial(said), results.node()))["all_reduce"]
    assert (found.value, found.method) == (100.0, f"busbw/nccl/n8/fp32/default/{2**28}B")


def test_latency_is_that_of_the_slowest_rank() -> None:
    said = results.collectives()
    said[5]["latency_us"] = [90.0] * 5
    assert by_metric(CHECK.interpret(trial(said), results.node()))["latency"].value == 90.0


@pytest.mark.parametrize(("busbw", "verdict"), [(420.0, Grade.PASS), (370.0, Grade.WARN), (340.0, Grade.FAIL)])
def test_lines_of_eight_hoppers(busbw: float, verdict: Grade) -> None:
    """C2.2: more than 400 GB/s, fails below 350."""
    found = by_metric(CHECK.interpret(trial(results.collectives(busbw=busbw)), results.node()))["all_reduce"]
    assert found.verdict is verdict
    assert found.confirm is (verdict is Grade.FAIL)


def test_a_slow_node_without_the_switchs_help_is_told_to_look_there_first() -> None:
    said = results.collectives(busbw=365.0, nvls=False, algorithms={"all_reduce": "RING/SIMPLE"})
    message = by_metric(CHECK.interpret(trial(said), results.node()))["all_reduce"].message
    assert "NCCL used RING/SIMPLE. NVLS is off" in message


def test_less_than_half_of_what_is_expected_fails_even_where_the_row_only_warns() -> None:
    """C2.2: the flag under 50 %; the row for eight A100 only warns."""
    name = "NVIDIA A100-SXM4-80GB"
    found = by_metric(CHECK.interpret(trial(results.collectives(busbw=100.0)), results.node(8, name)))
    assert found["all_reduce"].verdict is Grade.WARN
    half = found["all_reduce share"]
    assert (half.verdict, half.code, half.confirm) == (Grade.FAIL, "collectives-under-half", True)
    assert half.value == pytest.approx(100 / 235)


def test_a_latency_over_200_us_is_flagged() -> None:
    """C2.2: a flag above 200 µs, a warning above 30 between GPUs with NVLink."""
    assert (
        by_metric(CHECK.interpret(trial(results.collectives(latency_us=40.0)), results.node()))["latency"].verdict
        is Grade.WARN
    )
    found = by_metric(CHECK.interpret(trial(results.collectives(latency_us=450.0)), results.node()))
    assert (found["latency limit"].verdict, found["latency limit"].code) == (Grade.WARN, "collectives-high-latency")


def test_one_wrong_element_on_one_rank_fails_that_gpu_at_once() -> None:
    """C1.2: every element on every rank; no second try makes it right."""
    said = results.collectives()
    said[3]["results"] = [row(2**13, 0.4), row(2**30, 478.0, wrong=1)]
    wrong = by_metric(CHECK.interpret(trial(said), results.node()))["data"]
    assert (wrong.verdict, wrong.gpu, wrong.confirm) == (Grade.FAIL, "GPU-3", False)
    assert wrong.action is Remedy.CONTACT_VENDOR
    assert "rank 3 (GPU 3) has 1 wrong element, first after all_reduce of 1073741824 bytes." in wrong.message
    assert "Element 7 is 3.0, expected 2.0, in round 1. No other rank has wrong elements" in wrong.message


def test_wrong_elements_on_all_ranks_without_a_place_blame_no_single_one() -> None:
    said = results.collectives(2, results=[row(2**30, 478.0, wrong=2) | {"where": []}])
    found = [one for one in CHECK.interpret(trial(said), results.node(2)) if one.code == "collectives-wrong-data"]
    assert [one.gpu for one in found] == ["GPU-0", "GPU-1"]
    assert found[0].message.endswith(
        "has 2 wrong elements, first after all_reduce of 1073741824 bytes. Take it out of service."
    )


def test_other_collectives_without_a_yardstick_are_noted_and_all_reduce_is_not() -> None:
    said = results.collectives(3, algorithms={})
    for one in said:
        one["results"] = [row(2**30, 300.0, op) for op in collectives.OPS]
    found = by_metric(CHECK.interpret(trial(said), results.node(3, "NVIDIA X9")))
    assert {found[op].code for op in collectives.OPS[1:]} == {"collectives-noted"}
    assert {found[op].verdict for op in collectives.OPS[1:]} == {Grade.SKIPPED}
    assert found["all_reduce"].verdict is Grade.INCONCLUSIVE


def test_a_number_of_gpus_that_was_not_measured_is_held_against_their_wire_and_only_warns() -> None:
    """Else a machine with three of them could never be accepted."""
    for speed, verdict in ((300.0, Grade.PASS), (100.0, Grade.WARN)):
        said = results.collectives(3, algorithms={})
        for one in said:
            one["results"] = [row(2**30, speed)]
        assert by_metric(CHECK.interpret(trial(said), results.node(3)))["all_reduce"].verdict is verdict


def test_sizes_that_did_not_fit_are_named() -> None:
    left = {"op": "all_reduce", "bytes": 2**33, "rounds": 16, "left_out": "needs 18 GB of memory, 14 are free"}
    said = results.collectives()
    for one in said:
        one["results"] = [row(2**30, 478.0), left]
    skipped = by_metric(CHECK.interpret(trial(said), results.node()))["all_reduce 8589934592"]
    assert (skipped.verdict, skipped.code) == (Grade.SKIPPED, "collectives-left-out")


def test_nothing_that_fitted_is_no_pass() -> None:
    left = {"op": "all_reduce", "bytes": 2**33, "rounds": 16, "left_out": "too large"}
    said = results.collectives(results=[left])
    found = by_metric(CHECK.interpret(trial(said), results.node()))
    assert {found["data"].verdict, found["all_reduce"].verdict} == {Grade.INCONCLUSIVE}


@pytest.mark.parametrize("result", [{"results": [{}]}, {"results": None}, {}])
def test_an_answer_that_lacks_its_figures_is_no_measurement(result: dict[str, object]) -> None:
    found = CHECK.interpret(trial([dict(result), dict(result)]), results.node(2))
    assert {one.verdict for one in found} == {Grade.INCONCLUSIVE}


# Variants


def variant(name: str, **more: object) -> list[dict[str, object]]:
    return results.collectives(variant=name, **more)


def test_a_variant_that_took_only_its_own_way_reports_it() -> None:
    """C1.6 and facts §5: check that the switch changed something."""
    found = by_metric(collectives.NVLINK.interpret(trial(variant("nvlink")), results.node()))
    assert (found["variant"].verdict, found["variant"].code) == (Grade.PASS, "collectives-nvlink-switched")
    assert found["all_reduce"].verdict is Grade.SKIPPED  # noted: no row is for this way


@pytest.mark.parametrize(
    ("check", "name", "transports"),
    [
        (collectives.NETWORK, "network", {"P2P/CUMEM": 48}),
        (collectives.NETWORK, "network", {"NET/IB": 4, "SHM/direct": 2}),
        (collectives.NVLINK, "nvlink", {"P2P/CUMEM": 4, "NET/Socket": 2}),
    ],
)
def test_a_switch_that_changed_nothing_is_inconclusive(check: object, name: str, transports: dict[str, int]) -> None:
    """CRE published a run with multi-node NVLink "off" that was not, as PASSED."""
    assert isinstance(check, collectives.Check)
    found = by_metric(check.interpret(trial(variant(name, transports=transports)), results.node()))["variant"]
    assert (found.verdict, found.code) == (Grade.INCONCLUSIVE, f"collectives-{name}-switch-without-effect")


def test_a_switch_that_nobody_saw_is_inconclusive() -> None:
    found = by_metric(collectives.NETWORK.interpret(trial(variant("network", transports=None)), results.node()))[
        "variant"
    ]
    assert (found.verdict, found.code) == (Grade.INCONCLUSIVE, "collectives-network-switch-not-seen")


def test_on_a_cpu_there_is_no_switch() -> None:
    found = by_metric(collectives.NETWORK.interpret(trial(variant("network", backend="gloo")), results.cpu(8)))[
        "variant"
    ]
    assert (found.verdict, found.code) == (Grade.SKIPPED, "collectives-network-no-switch")


def test_jobs_carry_sizes_of_the_serving_and_small_ones_for_a_cpu() -> None:
    """C1.6: 8 KB to 8 GB; C1.4: rounds null is twice the ranks."""
    deepest = CHECK.servings[-1]
    job = CHECK.request(deepest, results.node()) if CHECK.request else None
    assert job is not None
    assert (min(job.params["sizes"]), max(job.params["sizes"])) == (8192, 8 * 2**30)
    small = CHECK.request(CHECK.servings[0], results.cpu()) if CHECK.request else None
    assert small is not None
    assert max(small.params["sizes"]) == 2**20
    wish = RunRequest(inject={"collectives": {"wrong_rank": 1}}, params={"collectives": {"dtype": "bf16"}})
    told = CHECK.request(CHECK.servings[0], results.node(wish=wish)) if CHECK.request else None
    assert told is not None
    assert (told.params["inject"], told.params["dtype"], told.params["rounds"]) == ({"wrong_rank": 1}, "bf16", None)


@pytest.mark.parametrize("ranks", [(3,), tuple(range(8))], ids=["one rank", "all ranks"])
def test_an_nccl_error_is_never_a_pass_and_is_quoted(ranks: tuple[int, ...]) -> None:
    """C2.4: no NCCL errors. The others' figures do not make up for it."""
    words = "DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled system error"
    said = results.collectives()
    answers = {
        rank: results.broken("nccl", words) if rank in ranks else results.done(**said[rank]) for rank in range(8)
    }
    found = CHECK.interpret(trial(answers), results.node())
    assert {one.verdict for one in found} == {Grade.INCONCLUSIVE}
    assert {one.code for one in found} == {"nccl"}
    assert any("unhandled system error" in one.message + str(one.evidence) for one in found)
