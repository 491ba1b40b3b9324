"""Several nodes as one run, as plain values: members, jobs and results of ranks; healthy unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet.group_jobs import Fabric, Job, JobResult, Member, RankDevice, RankProgress, RankResult
from gpukeeper.acceptance.fleet.group_judge import Group
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.record import ProbeFailure, ProbeResult
from tests.unit.acceptance import machines
from tests.unit.acceptance.checks import results

NDR = Fabric(kind="infiniband", gbits=400.0, cards=8)


def members(nodes: int = 2, gpus: int = 8, name: str = machines.H200, fabric: Fabric = NDR) -> dict[int, Member]:
    return {
        index: Member(
            index=index,
            node=f"gpu-{index}",
            devices=tuple(RankDevice(uuid=f"GPU-{index}-{i}", index=i, name=name) for i in range(gpus)),
            fabric=fabric,
        )
        for index in range(nodes)
    }


def group(nodes: int = 2, gpus: int = 8, device: str = "cuda", **more: Any) -> Group:
    return Group(members(nodes, gpus, **more), RunRequest(device=device), reference.limits)


def job(of: Group, probe: str = "collectives", nodes: int | None = None, **more: Any) -> Job:
    return Job(number=1, probe=probe, members=tuple(list(of.members)[:nodes]), why="", **more)


def done(of: Group, asked: Job, said: Sequence[dict[str, Any]], **more: Any) -> JobResult:
    """Every rank returned a result."""
    world = len(said)
    who = {"world": world, "backend": "gloo" if of.small else "nccl"}
    answers = {rank: ProbeResult(result={"rank": rank, **who, **one}) for rank, one in enumerate(said)}
    return ended(of, asked, answers, **more)


def ended(
    of: Group,
    asked: Job,
    answers: Mapping[int, ProbeResult | ProbeFailure],
    progress: Mapping[int, RankProgress] | None = None,
    **more: Any,
) -> JobResult:
    places = [(index, device.uuid) for index in asked.members for device in of.members[index].devices]
    ranks = tuple(
        RankResult(
            rank=rank,
            member=index,
            device=uuid,
            reply=answers.get(rank, ProbeFailure(kind="timeout", words=f"timeout: no record of rank {rank}")),
            progress=(progress or {}).get(rank, RankProgress(stage="end")),
        )
        for rank, (index, uuid) in enumerate(places)
    )
    return JobResult(job=asked, ranks=ranks, seconds=10.0, **more)


def collectives(of: Group, nodes: int | None = None, *, busbw: float = 386.0, **more: Any) -> JobResult:
    asked = job(of, nodes=nodes)
    ranks = sum(len(of.members[index].devices) for index in asked.members)
    said = {"algorithms": {"all_reduce": "TREE/SIMPLE"}, "transports": {"NET/IB": 8}, "local_ms": [2.0] * 8}
    said |= {"latency_us": [30.0] * 5, **more}
    return done(of, asked, [{**one, **said} for one in results.collectives(ranks, busbw=busbw)])


def ddp(of: Group, **more: Any) -> JobResult:
    asked = job(of, "ddp")
    ranks = sum(len(of.members[index].devices) for index in asked.members)
    return done(of, asked, results.ddp(ranks, **{"local_ms": [1.0] * 30, **more}))
