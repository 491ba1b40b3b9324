"""What a job over several nodes shows, with planted faults."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpukeeper.acceptance.fleet.group_jobs import Fabric, Member, RankProgress
from gpukeeper.acceptance.fleet.group_judge import Group, of_job, slowness, trend
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.record import GroupFinding, ProbeFailure, ProbeResult
from gpukeeper.model.gpu import Grade, worst
from tests.unit.acceptance.checks import results
from tests.unit.acceptance.fleet import groups


def grade(found: Iterable[GroupFinding]) -> Grade:
    return worst(one.finding.verdict for one in found)


def only(found: Iterable[GroupFinding], grade: Grade) -> GroupFinding:
    (one,) = [each for each in found if each.finding.verdict is grade]
    return one


def test_every_element_right_on_every_rank_of_all_nodes_passes() -> None:
    """C1.2, C2.2: the row of this network is used, with its latency limit."""
    of = groups.group(8)
    found = of_job(groups.collectives(of), of)
    assert grade(found) is Grade.PASS
    codes = {one.finding.metric: one.finding.code for one in found}
    assert codes["collectives data on 8 nodes"] == "group-collectives-exact"
    assert codes["collectives line rate on 8 nodes"] == "group-line-rate-ok"
    fast = next(one.finding for one in found if one.finding.metric == "collectives all_reduce on 8 nodes")
    assert (fast.reference, fast.source) == (386, "CoreWeave, 8 machines of 8 H100 (legacy)")
    small = next(one.finding for one in found if one.finding.metric == "collectives latency on 8 nodes")
    assert (small.verdict, small.method) == (Grade.PASS, "latency/nccl/n64/ib-ndr400/8B")


def test_latency_over_the_limit_of_the_network_warns() -> None:
    """C2.2: 50 us for InfiniBand, 100 us for Ethernet."""
    of = groups.group(4)
    found = of_job(groups.collectives(of, busbw=400.0, latency_us=[60.0] * 5), of)
    assert only(found, Grade.WARN).finding.metric == "collectives latency on 4 nodes"
    wired = groups.group(4, fabric=Fabric(kind="ethernet", gbits=100.0, cards=8))
    over = {"latency_us": [90.0] * 5, "transports": {"NET/Socket": 8}}
    lines = [one.finding for one in of_job(groups.collectives(wired, busbw=75.0, **over), wired)]
    assert next(one for one in lines if one.metric.startswith("collectives latency")).verdict is Grade.PASS


def test_one_wrong_element_on_one_rank_fails_that_gpu_on_that_node() -> None:
    of = groups.group(2)
    said = results.collectives(16, busbw=386.0)
    said[11]["results"] = [results.row(2**30, 386.0, wrong=1)]
    for rank, one in enumerate(said):
        one["results"] = one["results"] if rank == 11 else [results.row(2**30, 386.0)]
    found = only(of_job(groups.done(of, groups.job(of), said), of), Grade.FAIL)
    assert (found.nodes, found.rank, found.finding.gpu) == (("gpu-1",), 11, "GPU-1-3")
    assert found.finding.code == "group-collectives-wrong-data"
    assert "rank 11 (gpu-1 GPU 3) has 1 wrong element" in found.finding.message
    assert not found.finding.confirm


def test_a_rank_with_other_parameters_names_its_node() -> None:
    of = groups.group(3, 1)
    odd = only(of_job(groups.ddp(of, hashes_equal=False, differing=[2], first_step=4), of), Grade.FAIL)
    assert (odd.nodes, odd.rank) == (("gpu-2",), 2)
    assert odd.finding.code == "group-ddp-rank-differs"


def test_of_two_nodes_that_differ_none_is_named_and_the_group_fails() -> None:
    of = groups.group(2, 1)
    more = {"hashes_equal": False, "differing": [0, 1], "first_step": 3, "majority": False}
    odd = only(of_job(groups.ddp(of, **more), of), Grade.FAIL)
    assert odd.nodes == ()


def test_a_hang_ends_with_the_rank_to_blame() -> None:
    of = groups.group(3, 1)
    waits = RankProgress(stage="ddp", step=9, what="step 9", heartbeat_age_s=0.2)
    late = RankProgress(stage="ddp", step=8, what="step 8", heartbeat_age_s=55.0, state="T")
    result = groups.ended(of, groups.job(of, "ddp"), {}, {0: waits, 1: late, 2: waits}, ended="stalled")
    (found,) = of_job(result, of)
    assert (found.finding.verdict, found.finding.code) == (Grade.FAIL, "group-hang-rank")
    assert (found.nodes, found.rank) == (("gpu-1",), 1)
    assert (
        "The cause is rank 1 (gpu-1 GPU 0). Its process does not run: it is stopped by a signal"
        in found.finding.message
    )
    assert found.finding.evidence["last_steps"]["0"] == "step 9 (step 9)"


def test_a_hang_of_all_ranks_in_one_step_blames_the_network_and_is_inconclusive() -> None:
    of = groups.group(2, 1)
    waits = RankProgress(stage="collectives", step=9, what="all_reduce", heartbeat_age_s=0.2)
    result = groups.ended(of, groups.job(of), {}, {0: waits, 1: waits}, ended="deadline")
    (found,) = of_job(result, of)
    assert (found.finding.verdict, found.finding.code, found.nodes) == (Grade.INCONCLUSIVE, "group-hang", ())
    assert "it was not done after 240 s" in found.finding.message


def test_a_lost_member_is_named_and_inconclusive() -> None:
    of = groups.group(3, 1)
    result = groups.ended(of, groups.job(of), {}, ended="lost", lost={"1": "its connection was closed"})
    (found,) = of_job(result, of)
    assert (found.finding.verdict, found.finding.code, found.nodes) == (
        Grade.INCONCLUSIVE,
        "group-member-lost",
        ("gpu-1",),
    )
    assert "gpu-1 was lost while collectives ran on 3 nodes: its connection was closed." in found.finding.message


def test_a_rank_without_a_result_never_passes() -> None:
    of = groups.group(2, 1)
    good = ProbeResult(result={"rank": 0, "world": 2, "backend": "nccl", **results.collectives(1)[0]})
    dead = ProbeFailure(kind="crashed", words="rank 1 exited without a record by signal 9")
    (found,) = of_job(groups.ended(of, groups.job(of), {0: good, 1: dead}), of)
    assert (found.finding.verdict, found.finding.code) == (Grade.INCONCLUSIVE, "group-crashed")
    assert (found.nodes, found.rank) == (("gpu-1",), 1)


def test_ranks_that_only_followed_another_one_add_nothing() -> None:
    of = groups.group(3, 1)
    broken = {
        0: ProbeFailure(kind="failed", words="rank 0 was stopped because rank 2 failed"),
        1: ProbeFailure(kind="failed", words="rank 1 was stopped because rank 2 failed"),
        2: ProbeFailure(kind="ecc", words="uncorrectable ECC error encountered"),
    }
    (found,) = of_job(groups.ended(of, groups.job(of), broken), of)
    assert (found.finding.verdict, found.finding.code, found.nodes) == (Grade.FAIL, "group-ecc", ("gpu-2",))


def test_a_slow_rank_is_named_by_its_own_work() -> None:
    """In the collective all take equally long: they wait for the slow one."""
    of = groups.group(2, 4)
    result = groups.collectives(of)
    slow = {rank: 5.0 if rank == 6 else 2.0 for rank in range(8)}
    said = [{**one.reply.result, "local_ms": [slow[one.rank]] * 8} for one in result.ranks]  # type: ignore[union-attr]
    found = [one for one in of_job(groups.done(of, result.job, said), of) if one.finding.code == "group-slow-rank"]
    (one,) = found
    assert (one.nodes, one.rank, one.finding.verdict, one.finding.confirm) == (("gpu-1",), 6, Grade.FAIL, True)
    assert "rank 6 (gpu-1 GPU 2) takes 2.5 times as long" in one.finding.message


def test_slowness_is_compared_step_by_step() -> None:
    found = slowness({0: [10.0, 1.0, 1.0], 1: [10.0, 1.0, 1.0], 2: [10.0, 4.0, 4.0]})
    assert found[0] == (1.0, 0.0)
    assert found[2] == (4.0, 3.0)
    assert slowness({0: [1.0]}) == {}
    assert slowness({0: [], 1: [1.0]}) == {}


@pytest.mark.parametrize(
    ("busbw", "verdict", "what"),
    [
        (520.0, Grade.INCONCLUSIVE, "implausible"),
        (400.0, Grade.PASS, "ok"),
        (374.0, Grade.WARN, "near"),
        (340.0, Grade.WARN, "low"),
        (240.0, Grade.FAIL, "under-half"),
    ],
)
def test_the_share_of_the_line_rate(busbw: float, verdict: Grade, what: str) -> None:
    """C2.2: four nodes; below 70 % it warns, below half it fails, above the line it is no measurement."""
    of = groups.group(4, fabric=Fabric(kind="infiniband", gbits=400.0, cards=8))
    found = of_job(groups.collectives(of, busbw=busbw * (1.1 if what == "implausible" else 1.0)), of)
    line = next(one.finding for one in found if one.finding.metric == "collectives line rate on 4 nodes")
    assert (line.verdict, line.code) == (verdict, f"group-line-rate-{what}")
    assert "TREE/SIMPLE" in line.message
    assert line.confirm == (verdict is Grade.FAIL)


def test_two_nodes_are_not_held_against_the_line() -> None:
    """Healthy ones show 44 to 65 % of it by this conversion; the row of the network counts."""
    of = groups.group(2, fabric=Fabric(kind="infiniband", gbits=200.0, cards=8))
    found = of_job(groups.collectives(of, busbw=165.0), of)
    assert grade(found) is Grade.PASS
    assert not any("line rate" in one.finding.metric for one in found)


def test_without_a_known_network_the_speed_is_inconclusive() -> None:
    of = groups.group(2, fabric=Fabric())
    slow = only(of_job(groups.collectives(of), of), Grade.INCONCLUSIVE)
    assert slow.finding.code == "group-collectives-no-yardstick"


def test_nodes_with_one_gpu_are_not_held_against_rows_of_nodes_with_eight() -> None:
    """Half of 386 GB/s is more than a single card can carry."""
    of = groups.group(4, 1, fabric=Fabric(kind="infiniband", gbits=400.0, cards=1))
    found = of_job(groups.collectives(of, busbw=45.0), of)
    assert grade(found) is Grade.PASS
    line = next(one.finding for one in found if "line rate" in one.finding.metric)
    assert line.value == pytest.approx(0.9)


def test_a_line_that_the_user_sets_counts() -> None:
    bare = groups.group(4, fabric=Fabric())
    of = Group(bare.members, bare.wish, reference.limits, line_gbits=400.0)
    found = of_job(groups.collectives(of, busbw=390.0), of)
    assert grade(found) is Grade.PASS


def test_scaling_over_all_nodes_has_the_floor_of_their_number() -> None:
    """C2.3: 16 GPUs 90 %, 32 GPUs 85 %."""
    of = groups.group(2)
    for alone, grade_ in ((1320.0, Grade.PASS), (1600.0, Grade.WARN)):
        said = results.throughput(16, alone=alone)
        found = of_job(groups.done(of, groups.job(of, "throughput"), said), of)
        scaling = next(one.finding for one in found if one.finding.metric == "throughput scaling on 2 nodes")
        assert (scaling.verdict, scaling.floor) == (grade_, 0.90)


def test_a_rate_that_falls_with_the_number_of_nodes_warns() -> None:
    """C2.2."""
    of = groups.group(8)
    good = [groups.collectives(of, count, busbw=386.0) for count in (2, 4, 8)]
    (steady,) = trend(good, of)
    assert (steady.finding.verdict, steady.finding.code) == (Grade.PASS, "group-trend-ok")
    (falls,) = trend([*good[:2], groups.collectives(of, 8, busbw=250.0)], of)
    assert (falls.finding.verdict, falls.finding.code) == (Grade.WARN, "group-trend-falls")
    assert "2 nodes 386.0 GB/s, 4 nodes 386.0 GB/s, 8 nodes 250.0 GB/s" in falls.finding.message
    assert trend(good[:1], of) == ()


def test_a_cpu_run_passes_by_its_data_and_reports_its_speed() -> None:
    of = groups.group(2, 1, device="cpu", name="CPU", fabric=Fabric())
    more = {"algorithms": {}, "transports": None, "nvls": None}
    found = of_job(groups.collectives(of, busbw=0.8, **more), of)
    assert grade(found) is Grade.PASS
    noted = [one.finding for one in found if one.finding.code == "group-collectives-noted"]
    assert {one.verdict for one in noted} == {Grade.SKIPPED}


def test_nodes_with_the_same_host_name_are_kept_apart() -> None:
    same = {index: Member(index=index, node="localhost") for index in range(2)}
    assert Group(same, groups.group().wish, reference.limits).labels == {0: "localhost#0", 1: "localhost#1"}
