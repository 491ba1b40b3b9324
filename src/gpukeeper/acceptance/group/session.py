"""The story of several nodes as one run: meet, run the planned jobs, judge each, search if none is to blame, report.

Every node calls `take_part`. On the node with index 0 it also coordinates. A simulated group has no nodes: every job
is complete, except where a planted fault takes part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from typing import Protocol

import msgspec

from gpukeeper.acceptance.bench.probing import ProbeLauncher
from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench
from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet import group_jobs, group_judge, group_report
from gpukeeper.acceptance.fleet.group_jobs import (
    GroupSettings,
    Job,
    JobResult,
    Member,
    RankProgress,
    RankResult,
    ranks_of,
)
from gpukeeper.acceptance.fleet.group_judge import Group, Limits
from gpukeeper.acceptance.fleet.search import Outcome, Search
from gpukeeper.acceptance.group.agent import Agent, AgentResult
from gpukeeper.acceptance.group.coordinator import SILENT_S, Coordinator
from gpukeeper.acceptance.group.members import Membership
from gpukeeper.acceptance.judging import verdicts
from gpukeeper.acceptance.judging.replies import broken_finding
from gpukeeper.acceptance.record import (
    Finding,
    GroupFinding,
    GroupReport,
    ProbeFailure,
    ProbeReply,
    ProbeRequest,
    ProbeResult,
    Remedy,
    Report,
)
from gpukeeper.model.gpu import Grade, rank
from gpukeeper.model.unknown import Unknown

ATTEMPTS = 3
FROM_NODES = 3  # a search needs another partner
SLOW_PAIR = 0.8  # of the median of the pairs of one round
Progress = Callable[[str], None]


async def take_part(
    run: str,
    who: Membership,
    member: Member,
    bench: ProbeLauncher,
    wish: RunRequest,
    limits: Limits,
    stop: asyncio.Event,
    *,
    tell: Progress = lambda words: None,
    silent_s: float = SILENT_S,
) -> AgentResult:
    """What this node has of the run. Never raises for what another node does."""
    wanted = group_jobs.settings_of(wish)
    agent = Agent(run, who, member, bench, wanted.rendezvous_s)
    if who.index:
        return await agent.run(stop=stop)
    try:
        async with Coordinator(run, who, silent_s=silent_s) as coordinator:
            own = asyncio.create_task(agent.run("127.0.0.1", stop))
            story = GroupStory(run, who, coordinator, wanted, wish, limits, tell)
            try:
                report = await story.report(stop)
                await coordinator.finish(report)
                done = await own
            finally:
                own.cancel()
                await asyncio.gather(own, return_exceptions=True)
    except OSError as error:
        words = f"port {who.port} of this node cannot be used: {error.strerror}: Address already in use"
        return AgentResult(None, ProbeFailure(kind="port_taken", words=words), (), {})
    return AgentResult(report, None, done.records, done.logs)


class Members(Protocol):
    """The nodes of a run and what they do, as its story needs them: group/coordinator.py, or simulated."""

    @property
    def members(self) -> Mapping[int, Member]: ...

    @property
    def lost(self) -> Mapping[int, str]: ...

    async def gather(self, within_s: float, stop: asyncio.Event) -> tuple[int, ...]: ...

    async def run_job(self, job: Job, stop: asyncio.Event) -> JobResult: ...


class GroupStory:
    def __init__(
        self,
        run: str,
        who: Membership,
        coordinator: Members,
        wanted: GroupSettings,
        wish: RunRequest,
        limits: Limits,
        tell: Progress,
    ) -> None:
        self._run, self._who, self._coordinator, self._wanted = run, who, coordinator, wanted
        self._wish, self._limits, self._tell = wish, limits, tell
        self._numbers = count(1)
        self._results: list[JobResult] = []

    async def report(self, stop: asyncio.Event) -> GroupReport:
        missing = await self._coordinator.gather(self._wanted.rendezvous_s, stop)
        group = Group(self._coordinator.members, self._wish, self._limits, self._wanted.line_gbits)
        if missing:
            where = f"{self._who.address} port {self._who.port}"
            names = {index: f"node {index}" for index in missing}
            absent = group_report.never_came(names, self._who.size, self._wanted.rendezvous_s, where)
            return group_report.report(self._run, self._who.size, group, absent, ())
        fit = [index for index, one in group.members.items() if not one.unfit]
        planned = group_jobs.jobs(fit, self._wanted, self._wish)
        found = [*group_report.unfit(group), *await self._all(planned, group, stop)]
        first = [one for one in self._results if one.job.attempt == 1]
        found += group_judge.trend(first, group)
        if (
            self._wanted.search
            and len(fit) >= FROM_NODES
            and group_report.unattributed(found)
            and self._may_go_on(stop)
        ):
            found += await self._search(fit, group, stop)
        return group_report.report(self._run, self._who.size, group, found, self._results)

    def _may_go_on(self, stop: asyncio.Event) -> bool:
        return not stop.is_set() and not self._coordinator.lost

    async def _all(self, planned: Sequence[Job], group: Group, stop: asyncio.Event) -> list[GroupFinding]:
        found: list[GroupFinding] = []
        for at, job in enumerate(planned):
            self._tell(f"{job.probe} on {len(job.members)} nodes ({at + 1} of {len(planned)})")
            found += await self._verified(job, group, stop)
            if not self._may_go_on(stop):
                names = [group.labels[index] for index in self._coordinator.lost]
                why = f"{', '.join(names)} was lost" if names else "the run was interrupted"
                return [*found, *group_report.not_run(planned[at + 1 :], why)]
        return found

    async def _verified(self, job: Job, group: Group, stop: asyncio.Event) -> tuple[GroupFinding, ...]:
        """What fails by a figure that could be chance is run again, as on one node."""
        tries = [await self._once(job, group, stop, 1)]
        while len(tries) < ATTEMPTS and group_report.needs_another(tries[-1]) and self._may_go_on(stop):
            tries.append(await self._once(job, group, stop, len(tries) + 1))
        return group_report.confirmed(tries)

    async def _once(self, job: Job, group: Group, stop: asyncio.Event, attempt: int) -> tuple[GroupFinding, ...]:
        numbered = msgspec.structs.replace(job, number=next(self._numbers), attempt=attempt)
        result = await self._coordinator.run_job(numbered, stop)
        if attempt == 1 and _port_was_taken(result):
            numbered = msgspec.structs.replace(numbered, number=next(self._numbers))
            result = await self._coordinator.run_job(numbered, stop)
        self._results.append(result)
        return group_judge.of_job(result, group)

    async def _search(self, members: Sequence[int], group: Group, stop: asyncio.Event) -> list[GroupFinding]:
        """Pairs and groups, in parallel where they share no node, until the failures have one explanation."""
        names = {group.labels[index]: index for index in members}
        search = Search(names, {}, self._wanted.seed)
        while (trials := search.round()) and self._may_go_on(stop):
            self._tell(f"search for the bad node: {len(trials)} trials")
            jobs = [
                group_jobs.trial(
                    next(self._numbers), [names[one] for one in trial.nodes], self._wanted, self._wish, trial.why
                )
                for trial in trials
            ]
            results = await asyncio.gather(*(self._coordinator.run_job(job, stop) for job in jobs))
            self._results += results
            search.record(_outcomes([trial.number for trial in trials], results, group))
        concluded = search.conclusion()
        faults = [*concluded.nodes, *concluded.links, *concluded.switches]
        return [
            *(_named(str(one.suspect), one.reason, one.suspect.names, names) for one in faults),
            *(_undecided(one.reason) for one in concluded.undecided),
        ]


def _port_was_taken(result: JobResult) -> bool:
    return any(isinstance(one.reply, ProbeFailure) and one.reply.kind == "port_taken" for one in result.ranks)


def _outcomes(numbers: Sequence[int], results: Sequence[JobResult], group: Group) -> list[Outcome]:
    rates = [found[0] if (found := group_judge.rate_of(one, group)) is not None else None for one in results]
    known = sorted(rate for rate in rates if rate is not None)
    median = known[len(known) // 2] if len(known) > 2 and not group.small else 0.0
    return [
        _outcome(number, result, group, slow=rate is not None and rate < SLOW_PAIR * median)
        for number, result, rate in zip(numbers, results, rates, strict=True)
    ]


def _outcome(number: int, result: JobResult, group: Group, *, slow: bool) -> Outcome:
    found = group_judge.of_job(result, group)
    bad = [one.finding for one in found if one.finding.verdict is Grade.FAIL or one.finding.code == "group-hang"]
    if bad or slow:
        return Outcome(number, False, bad[0].message if bad else "slower than the other pairs")
    complete = all(isinstance(one.reply, ProbeResult) for one in result.ranks)
    words = next((one.finding.message for one in found if rank(one.finding.verdict) > rank(Grade.WARN)), "")
    return Outcome(number, True if complete else None, words)


def _named(suspect: str, reason: str, names: Sequence[str], members: Mapping[str, int]) -> GroupFinding:
    finding = Finding(
        check=group_jobs.GROUP,
        metric=f"search {suspect}",
        verdict=Grade.FAIL,
        code="group-search-named",
        message=f"The search names {suspect}: {reason}",
        action=Remedy.RESEAT_OR_CABLE,
    )
    return GroupFinding(finding=finding, nodes=tuple(name for name in names if name in members))


def _undecided(reason: str) -> GroupFinding:
    finding = Finding(
        check=group_jobs.GROUP,
        metric="search",
        verdict=Grade.INCONCLUSIVE,
        code="group-search-undecided",
        message=f"The search cannot decide: {reason}",
        action=Remedy.RETEST,
    )
    return GroupFinding(finding=finding)


def merged(report: Report, result: AgentResult, wish: RunRequest, index: int) -> Report:
    """`index`: of this node. Its verdict is computed again: a node is accepted only if the group did not fail on it."""
    more: tuple[Finding, ...] = ()
    if result.report is not None:
        name = next((one.nodes[0] for one in result.report.nodes if one.nodes[0] == report.node), None)
        more = group_report.for_node(result.report, name or f"{report.node}#{index}")
    if result.failure is not None:
        more = (broken_finding(group_jobs.GROUP, None, result.failure),)
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
        programme=(*report.programme, group_jobs.GROUP),
        group=result.report,
    )


SIMULATED_HANG = "it was stopped in the middle of a collective"


class SimulatedGroup:
    """`size`: of the run; an index without a member never comes."""

    def __init__(self, members: Mapping[int, Member], size: int, bad: Collection[int] = ()) -> None:
        self.members, self._size, self._bad = members, size, frozenset(bad)
        self.lost: Mapping[int, str] = {}

    async def gather(self, within_s: float, stop: asyncio.Event) -> tuple[int, ...]:
        return tuple(index for index in range(self._size) if index not in self.members)

    async def run_job(self, job: Job, stop: asyncio.Event) -> JobResult:
        places = ranks_of(job, self.members)
        hangs = len(job.members) > 1 and not self._bad.isdisjoint(job.members)
        replies = dict[str, ProbeReply]() if hangs else await _completed_job(job, len(places))
        step = RankProgress(stage=job.probe, step=3, what="all_reduce", state="S") if hangs else RankProgress()
        ranks = tuple(
            RankResult(
                rank=rank,
                member=index,
                device=device.uuid,
                reply=replies.get(str(rank)) or ProbeFailure(kind="timeout", words=SIMULATED_HANG),
                progress=step,
            )
            for rank, (index, device) in enumerate(places)
        )
        return JobResult(job=job, ranks=ranks, ended="stalled" if hangs else "", seconds=job.stall_s if hangs else 1.0)


async def _completed_job(job: Job, world: int) -> Mapping[str, ProbeReply]:
    bench = SimulatedWorkbench(gpus=world, seed=job.number)
    machine = await bench.machine()
    assert isinstance(machine.gpus, tuple), "a simulated machine knows its GPUs"
    return await bench.together([one.uuid for one in machine.gpus], ProbeRequest(probe=job.probe, params=job.params))


async def simulated_report(run: str, group: SimulatedGroup, size: int, wish: RunRequest, limits: Limits) -> GroupReport:
    who = Membership(index=0, size=size, address="simulated", port=1)
    story = GroupStory(run, who, group, group_jobs.settings_of(wish), wish, limits, lambda words: None)
    return await story.report(asyncio.Event())
