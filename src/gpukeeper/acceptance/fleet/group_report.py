"""From the findings of all jobs to the report on the group, and to what the report of one node gets of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpukeeper.acceptance.fleet.group_jobs import GROUP, Job, JobResult, describe_progress
from gpukeeper.acceptance.fleet.group_judge import Group
from gpukeeper.acceptance.judging import verdicts
from gpukeeper.acceptance.judging.replies import broken_finding
from gpukeeper.acceptance.record import (
    Finding,
    GroupFinding,
    GroupReport,
    ProbeFailure,
    ProbeResult,
    Remedy,
    SubjectVerdict,
)
from gpukeeper.model.gpu import Grade, rank, worst


def confirmed(tries: Sequence[Sequence[GroupFinding]]) -> tuple[GroupFinding, ...]:
    """What several tries of one job agree on, as on one node: a FAIL that may be chance counts if it is seen twice."""
    about: dict[tuple[str, str | None, str], GroupFinding] = {}

    def apart(one: GroupFinding) -> Finding:
        """Ranks of several nodes may have the same device: the rank is part of the identity meanwhile."""
        gpu = f"{one.rank}|{one.finding.gpu}|{'|'.join(one.nodes)}"
        about.setdefault((gpu, one.finding.metric, one.finding.check), one)
        return msgspec.structs.replace(one.finding, gpu=gpu)

    settled = verdicts.confirmed([tuple(apart(one) for one in found) for found in tries])
    return tuple(
        msgspec.structs.replace(origin, finding=msgspec.structs.replace(one, gpu=origin.finding.gpu, confirm=False))
        for one in settled
        if (origin := about.get((one.gpu or "", one.metric, one.check))) is not None
    )


def needs_another(found: Iterable[GroupFinding]) -> bool:
    return any(verdicts.needs_another(one.finding) for one in found)


def unattributed(findings: Iterable[GroupFinding]) -> bool:
    """Something failed, and no node is named: a search can find it. A figure without a value to compare it with is
    inconclusive, and no node would be different."""
    return any(
        rank(one.finding.verdict) > rank(Grade.WARN)
        and not one.nodes
        and not one.finding.code.endswith(("-no-yardstick", "-implausible"))
        for one in findings
    )


def never_came(missing: Mapping[int, str], size: int, waited_s: float, where: str) -> tuple[GroupFinding, ...]:
    """Members that did not connect; a rendezvous timeout is no finding about GPUs."""
    words = f"waited {waited_s:g} s at {where} for {len(missing)} of {size} nodes"
    bare = broken_finding(GROUP, None, ProbeFailure(kind="rendezvous", words=words))
    return tuple(
        GroupFinding(
            finding=msgspec.structs.replace(
                bare,
                metric=f"member {name}",
                code="group-rendezvous",
                message=f"{name} (index {index} of {size}) did not connect within {waited_s:g} s. {bare.message}",
            ),
            nodes=(name,),
        )
        for index, name in missing.items()
    )


def unfit(group: Group) -> tuple[GroupFinding, ...]:
    return tuple(
        GroupFinding(
            finding=_inconclusive(
                f"member {group.labels[index]}",
                "group-member-unfit",
                f"{group.labels[index]} took part in no job: {one.unfit.rstrip('.')}.",
            ),
            nodes=(group.labels[index],),
        )
        for index, one in group.members.items()
        if one.unfit
    )


def not_run(jobs: Iterable[Job], why: str) -> tuple[GroupFinding, ...]:
    """Planned jobs without a result: a good verdict must not read as if it included them."""
    return tuple(
        GroupFinding(
            finding=_inconclusive(
                f"{job.probe} on {len(job.members)} nodes",
                "group-not-run",
                f"{job.probe} on {len(job.members)} nodes was not run: {why.rstrip('.')}.",
            )
        )
        for job in jobs
    )


def _inconclusive(metric: str, code: str, message: str) -> Finding:
    return Finding(
        check=GROUP,
        metric=metric,
        verdict=Grade.INCONCLUSIVE,
        code=code,
        message=message,
        action=Remedy.RETEST,
    )


def report(
    run: str, size: int, group: Group, findings: Sequence[GroupFinding], results: Sequence[JobResult]
) -> GroupReport:
    if not findings:
        findings = (GroupFinding(finding=_inconclusive("", "group-not-run", "No job was run over several nodes.")),)
    verdict = worst(one.finding.verdict for one in findings)
    return GroupReport(
        run=run,
        size=size,
        verdict=verdict,
        reason=_reason(verdict, findings),
        nodes=tuple(_node(index, group, findings, results) for index in group.members),
        ranks=_ranks(group, findings, results),
        links=_links(group, findings, results),
        findings=tuple(findings),
        jobs=tuple(_job(one, group) for one in results),
    )


def _reason(verdict: Grade, findings: Sequence[GroupFinding]) -> str:
    if verdict is Grade.PASS:
        passed = sum(one.finding.verdict is Grade.PASS for one in findings)
        return f"All {passed} findings passed."
    of_worst = [one for one in findings if one.finding.verdict is verdict]
    more = f" ({len(of_worst) - 1} more like it)" if len(of_worst) > 1 else ""
    return f"{of_worst[0].finding.message}{more}" if of_worst else "Nothing was tested."


def _node(index: int, group: Group, findings: Sequence[GroupFinding], results: Sequence[JobResult]) -> SubjectVerdict:
    name = group.labels[index]
    took_part = any(one.member == index and isinstance(one.reply, ProbeResult) for job in results for one in job.ranks)
    own = [one for one in findings if name in one.nodes]
    if not took_part and not any(rank(one.finding.verdict) > rank(Grade.WARN) for one in own):
        return SubjectVerdict(nodes=(name,), verdict=Grade.INCONCLUSIVE, reason=f"{name} completed no job.")
    shared = [one for one in findings if not one.nodes]
    return _verdict((name,), own, shared)


def _verdict(nodes: tuple[str, ...], own: Sequence[GroupFinding], shared: Sequence[GroupFinding]) -> SubjectVerdict:
    """Its own findings, and the group's: what failed without a culprit leaves every member inconclusive."""
    grades = [one.finding.verdict for one in own]
    open_ = [one for one in shared if rank(one.finding.verdict) > rank(Grade.WARN)]
    grades += [Grade.INCONCLUSIVE] if open_ else [Grade.PASS]
    verdict = worst(grades)
    shown = [one for one in own if one.finding.verdict is verdict] or open_
    reason = shown[0].finding.message if shown and verdict is not Grade.PASS else "No finding against it."
    return SubjectVerdict(nodes=nodes, verdict=verdict, reason=reason)


def _ranks(group: Group, findings: Sequence[GroupFinding], results: Sequence[JobResult]) -> tuple[SubjectVerdict, ...]:
    """Of every device that was a rank in a job: numbered as in the largest job."""
    largest = max(results, key=lambda one: len(one.job.members), default=None)
    found = []
    for one in largest.ranks if largest is not None else ():
        name = group.labels[one.member]
        own = [each for each in findings if name in each.nodes and each.finding.gpu in (None, one.device)]
        base = _verdict((name,), own, [each for each in findings if not each.nodes])
        if not isinstance(one.reply, ProbeResult) and rank(base.verdict) < rank(Grade.INCONCLUSIVE):
            words = f"It has no result of {largest.job.probe if largest else ''}: {_last_line(one.reply.words)}"
            base = msgspec.structs.replace(base, verdict=Grade.INCONCLUSIVE, reason=words)
        found.append(msgspec.structs.replace(base, rank=one.rank, gpu=one.device, last=describe_progress(one.progress)))
    return tuple(found)


def _last_line(words: str) -> str:
    return (words.strip().splitlines() or ["no output"])[-1]


def _links(group: Group, findings: Sequence[GroupFinding], results: Sequence[JobResult]) -> tuple[SubjectVerdict, ...]:
    """Which nodes exchanged data with each other, and how that ended; the last job over the same nodes counts."""
    found: dict[tuple[str, ...], SubjectVerdict] = {}
    for result in results:
        if result.job.probe != "collectives":
            continue
        nodes = group.nodes(result.job.members)
        complete = bool(result.ranks) and all(isinstance(one.reply, ProbeResult) for one in result.ranks)
        suffix = f"on {len(nodes)} nodes"
        bad = [
            one
            for one in findings
            if one.finding.metric.endswith(suffix)
            and one.finding.metric.startswith("collectives")
            and rank(one.finding.verdict) > rank(Grade.PASS)
            and (not one.nodes or set(one.nodes) <= set(nodes))
        ]
        verdict = worst([one.finding.verdict for one in bad] or [Grade.PASS if complete else Grade.INCONCLUSIVE])
        reason = bad[0].finding.message if bad else "Every element was correct." if complete else "It has no result."
        found[nodes] = SubjectVerdict(nodes=nodes, verdict=verdict, reason=reason)
    return tuple(found.values())


def _job(result: JobResult, group: Group) -> dict[str, object]:
    job = result.job
    return {
        "number": job.number,
        "probe": job.probe,
        "attempt": job.attempt,
        "why": job.why,
        "nodes": list(group.nodes(job.members)),
        "ended": result.ended or "by itself",
        "seconds": round(result.seconds, 3),
    }


def for_node(found: GroupReport, node: str) -> tuple[Finding, ...]:
    """For the report of one node. What fails on another node, or on nobody in particular, is no FAIL of this one: the
    group could not be tested, so this node is not accepted by it."""
    return tuple(_seen_from(one, node) for one in found.findings)


def _seen_from(one: GroupFinding, node: str) -> Finding:
    finding = one.finding
    if one.nodes == (node,) or (node in one.nodes and finding.verdict is not Grade.FAIL):
        return finding
    kept = None if one.nodes and node not in one.nodes else finding.gpu
    changes: dict[str, object] = {"gpu": kept, "metric": _metric(one, node)}
    if rank(finding.verdict) <= rank(Grade.PASS):
        return msgspec.structs.replace(finding, **changes)
    if one.nodes and node not in one.nodes and finding.verdict is Grade.WARN:
        changes |= {"verdict": Grade.SKIPPED, "action": Remedy.NONE}
    elif finding.verdict is Grade.FAIL:
        changes |= {"verdict": Grade.INCONCLUSIVE, "confirm": False, "action": Remedy.RETEST}
        changes["evidence"] = {**finding.evidence, "group_verdict": finding.verdict}
    return msgspec.structs.replace(finding, **changes)


def _metric(one: GroupFinding, node: str) -> str:
    """Findings about several nodes have the same metric: the name keeps them apart in the report of one."""
    others = [name for name in one.nodes if name != node]
    return f"{one.finding.metric} ({', '.join(others)})" if others else one.finding.metric
