"""What the report of one node gets from the group that it was part of."""

from __future__ import annotations

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.group.agent import AgentResult
from gpukeeper.acceptance.group.members import Membership
from gpukeeper.acceptance.record import Finding, GroupFinding, GroupReport, ProbeFailure, SubjectVerdict
from gpukeeper.interfaces.cli.accept_run import merged, without_group
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.accept_bench import Bench, figure_check, run

WHO = Membership(index=0, size=2, address="gpu-0", port=29500)


def group(node: str, verdict: Grade, *blamed: str) -> GroupReport:
    finding = Finding(check="group", metric="collectives on 2 nodes", verdict=verdict, code="x", message="Said.")
    return GroupReport(
        run="r1",
        size=2,
        verdict=verdict,
        reason="Said.",
        nodes=tuple(SubjectVerdict(nodes=(name,), verdict=verdict, reason="Said.") for name in (node, "other")),
        findings=(GroupFinding(finding=finding, nodes=blamed),),
    )


def test_the_verdict_of_the_node_includes_the_group() -> None:
    own, _ = run(Bench(), [figure_check("gemm")])
    assert own.verdict is Grade.PASS
    seen = {}
    for verdict, blamed in ((Grade.PASS, ()), (Grade.FAIL, (own.node,)), (Grade.FAIL, ("other",)), (Grade.FAIL, ())):
        result = AgentResult(group(own.node, verdict, *blamed), None, ({"check": "group_ddp"},), {})
        found = merged(own, result, RunRequest(), WHO)
        seen[verdict, blamed] = found.verdict
        assert found.group == result.report
        assert found.records == (*own.records, {"check": "group_ddp"})
        assert found.programme[-1] == "group"
    assert seen == {
        (Grade.PASS, ()): Grade.PASS,
        (Grade.FAIL, (own.node,)): Grade.FAIL,
        (Grade.FAIL, ("other",)): Grade.INCONCLUSIVE,
        (Grade.FAIL, ()): Grade.INCONCLUSIVE,
    }


def test_a_node_that_lost_the_group_is_not_accepted() -> None:
    own, _ = run(Bench(), [figure_check("gemm")])
    failure = ProbeFailure(kind="rendezvous", words="nobody came")
    found = merged(own, AgentResult(None, failure, (), {}), RunRequest(), WHO)
    assert found.verdict is Grade.INCONCLUSIVE
    assert found.findings[-1].check == "group"
    assert found.group is None


def test_only_the_group_selects_no_other_check_of_the_node() -> None:
    assert without_group(RunRequest(only=("group",))).only == ("environment",)
    assert without_group(RunRequest(only=("group", "gemm"))).only == ("gemm",)
    assert without_group(RunRequest()).only == ()
