"""Several nodes as one run, of which none exists: every job is complete, except where a planted fault takes part.

A job over several nodes hangs if one of `bad` is among them, and no rank is to blame: each passed its own steps. So the
story has to search, as with a real network card that loses packets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench
from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet import group_plan
from gpukeeper.acceptance.fleet.group_jobs import Job, JobResult, Member, RankProgress, RankResult, ranks_of
from gpukeeper.acceptance.fleet.group_judge import Limits
from gpukeeper.acceptance.group.membership import Membership
from gpukeeper.acceptance.group.session import GroupStory
from gpukeeper.acceptance.record import GroupReport, ProbeFailure, ProbeReply, ProbeRequest

HUNG = "it was stopped in the middle of a collective"


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
        replies = dict[str, ProbeReply]() if hangs else await _completed(job, len(places))
        step = RankProgress(stage=job.probe, step=3, what="all_reduce", state="S") if hangs else RankProgress()
        ranks = tuple(
            RankResult(
                rank=rank,
                member=index,
                device=device.uuid,
                reply=replies.get(str(rank)) or ProbeFailure(kind="timeout", words=HUNG),
                progress=step,
            )
            for rank, (index, device) in enumerate(places)
        )
        return JobResult(job=job, ranks=ranks, ended="stalled" if hangs else "", seconds=job.stall_s if hangs else 1.0)


async def _completed(job: Job, world: int) -> Mapping[str, ProbeReply]:
    bench = SimulatedWorkbench(gpus=world, seed=job.number)
    machine = await bench.machine()
    assert isinstance(machine.gpus, tuple), "a simulated machine knows its GPUs"
    return await bench.together([one.uuid for one in machine.gpus], ProbeRequest(probe=job.probe, params=job.params))


async def simulated_report(run: str, group: SimulatedGroup, size: int, wish: RunRequest, limits: Limits) -> GroupReport:
    who = Membership(index=0, size=size, address="simulated", port=1)
    story = GroupStory(run, who, group, group_plan.settings(wish), wish, limits, lambda words: None)
    return await story.report(asyncio.Event())
