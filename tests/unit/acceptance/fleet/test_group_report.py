"""The report on a group, and what the report of one node gets of it."""

from __future__ import annotations

import msgspec

from gpukeeper.acceptance.fleet import group_report
from gpukeeper.acceptance.fleet.group_jobs import Fabric, RankProgress
from gpukeeper.acceptance.fleet.group_judge import of_job
from gpukeeper.acceptance.record import GroupReport
from gpukeeper.model import reading
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.fleet import groups


def stuck(nodes: int = 3) -> GroupReport:
    of = groups.group(nodes, 1, fabric=Fabric(kind="infiniband", gbits=400.0, cards=1))
    waits = RankProgress(stage="ddp", step=9, heartbeat_age_s=0.2)
    late = RankProgress(stage="ddp", step=8, heartbeat_age_s=0.2)
    progress = {rank: late if rank == 1 else waits for rank in range(nodes)}
    good = groups.collectives(of, busbw=48.0)  # of 50 GB/s that one card carries
    hung = groups.ended(of, groups.job(of, "ddp"), {}, progress, ended="stalled")
    found = [*of_job(good, of), *of_job(hung, of)]
    return group_report.report("r1", nodes, of, found, [good, hung])


def test_a_healthy_group_passes_on_every_rank_node_and_link() -> None:
    of = groups.group(4)
    jobs = [groups.collectives(of, count, busbw=400.0) for count in (2, 4)]
    found = group_report.report("r1", 4, of, [one for job in jobs for one in of_job(job, of)], jobs)
    assert (found.verdict, found.size) == (Grade.PASS, 4)
    assert [one.verdict for one in found.nodes] == [Grade.PASS] * 4
    assert [one.verdict for one in found.ranks] == [Grade.PASS] * 32
    assert [one.nodes for one in found.links] == [("gpu-0", "gpu-1"), ("gpu-0", "gpu-1", "gpu-2", "gpu-3")]
    assert reading.decode(msgspec.json.encode(found), type=GroupReport) == found


def test_the_rank_that_hangs_fails_its_node_and_no_other() -> None:
    found = stuck()
    assert found.verdict is Grade.FAIL
    assert [one.verdict for one in found.nodes] == [Grade.PASS, Grade.FAIL, Grade.PASS]
    assert [one.verdict for one in found.ranks][1] is Grade.FAIL


def test_a_failure_that_names_nobody_leaves_all_inconclusive() -> None:
    of = groups.group(2, 1)
    more = {"hashes_equal": False, "differing": [0, 1], "first_step": 3, "majority": False}
    job = groups.ddp(of, **more)
    found = group_report.report("r1", 2, of, of_job(job, of), [job])
    assert found.verdict is Grade.FAIL
    assert [one.verdict for one in found.nodes] == [Grade.INCONCLUSIVE] * 2
    assert group_report.unattributed(found.findings)


def test_the_report_of_a_node_names_another_that_failed_and_does_not_pass() -> None:
    found = stuck()
    own = group_report.for_node(found, "gpu-1")
    other = group_report.for_node(found, "gpu-0")
    assert [one.verdict for one in own if one.code == "group-hang-rank"] == [Grade.FAIL]
    (seen,) = [one for one in other if one.code == "group-hang-rank"]
    assert (seen.verdict, seen.gpu) == (Grade.INCONCLUSIVE, None)
    assert "rank 1 (gpu-1 GPU 0)" in seen.message
    assert seen.metric.endswith("(gpu-1)")


def test_no_finding_is_no_pass() -> None:
    of = groups.group(2)
    found = group_report.report("r1", 2, of, (), ())
    assert (found.verdict, found.findings[0].finding.code) == (Grade.INCONCLUSIVE, "group-not-run")
    assert [one.verdict for one in found.nodes] == [Grade.INCONCLUSIVE] * 2


def test_a_member_that_never_came_is_named_with_advice() -> None:
    """C17.2: DNS, port 29500."""
    (found,) = group_report.never_came({2: "index 2"}, 3, 600.0, "gpu-0:29500")
    assert (found.finding.verdict, found.finding.code) == (Grade.INCONCLUSIVE, "group-rendezvous")
    assert "index 2 (index 2 of 3) did not connect within 600 s." in found.finding.message
    assert "nc -vz MASTER_ADDR 29500" in found.finding.message


def test_planned_jobs_that_did_not_run_are_listed() -> None:
    of = groups.group(2)
    (found,) = group_report.not_run([groups.job(of, "ddp")], "gpu-1 was lost")
    assert found.finding.verdict is Grade.INCONCLUSIVE
    assert found.finding.message == "ddp on 2 nodes was not run: gpu-1 was lost."


def test_a_slow_rank_counts_when_it_is_slow_twice() -> None:
    of = groups.group(2, 1)

    def once(slow: float) -> tuple[group_report.GroupFinding, ...]:
        job = groups.job(of, "ddp")
        said = [{**groups.results.ddp(1)[0], "local_ms": [ms] * 5} for ms in (2.0, slow)]
        return of_job(groups.done(of, job, said), of)

    assert group_report.needs_another(once(9.0))
    assert not group_report.needs_another(once(2.0))
    chance = group_report.confirmed([once(9.0), once(2.0), once(2.0)])
    assert [one.finding.verdict for one in chance if one.rank == 1] == [Grade.WARN]
    (certain,) = [one for one in group_report.confirmed([once(9.0), once(2.0), once(9.0)]) if one.rank == 1]
    assert (certain.finding.verdict, certain.nodes, certain.finding.gpu) == (Grade.FAIL, ("gpu-1",), "GPU-1-0")
    assert not certain.finding.confirm
