"""The report of one node with what the group of all nodes found. Pure."""

from __future__ import annotations

import msgspec

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet import group_plan, group_report
from gpukeeper.acceptance.group.agent import AgentResult
from gpukeeper.acceptance.judging import messages, verdicts
from gpukeeper.acceptance.record import Finding, Report
from gpukeeper.model.unknown import Unknown


def merged(report: Report, result: AgentResult, wish: RunRequest, index: int) -> Report:
    """`index`: of this node. Its verdict is computed again: a node is accepted only if the group did not fail on it."""
    more: tuple[Finding, ...] = ()
    if result.report is not None:
        name = next((one.nodes[0] for one in result.report.nodes if one.nodes[0] == report.node), None)
        more = group_report.for_node(result.report, name or f"{report.node}#{index}")
    if result.failure is not None:
        more = (messages.broken_finding(group_plan.NAME, None, result.failure),)
    gpus = () if isinstance(report.machine.gpus, Unknown) else verdicts.wanted(report.machine.gpus, wish.gpus)
    findings = (*report.findings, *more)
    verdict, reason = verdicts.of_run(wish, gpus, findings, interrupted=report.interrupted)
    busy = {one.gpu: one.busy for one in report.tallies}
    tallies = tuple(
        msgspec.structs.replace(one, busy=busy.get(one.gpu)) for one in verdicts.of_gpus(gpus, findings, {}, 0.0)
    )
    return msgspec.structs.replace(
        report,
        verdict=verdict,
        reason=reason,
        findings=findings,
        tallies=tallies,
        records=(*report.records, *result.records),
        programme=(*report.programme, group_plan.NAME),
        group=result.report,
    )
