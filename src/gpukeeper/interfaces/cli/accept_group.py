"""`gpukeeper accept --together`: this node as one of several, after its own checks; the result goes into its report."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from gpukeeper.acceptance.bench.probing import ProbeLauncher
from gpukeeper.acceptance.check import ALWAYS, RunRequest
from gpukeeper.acceptance.fleet import group_plan
from gpukeeper.acceptance.fleet.group_jobs import Member, RankDevice
from gpukeeper.acceptance.fleet.group_judge import Limits
from gpukeeper.acceptance.group.fabric import read_fabric
from gpukeeper.acceptance.group.membership import Membership, read_membership
from gpukeeper.acceptance.group.node_report import merged
from gpukeeper.acceptance.group.session import take_part
from gpukeeper.acceptance.judging import verdicts
from gpukeeper.acceptance.record import Report
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.model.errors import UsageError
from gpukeeper.model.grade import Grade
from gpukeeper.model.unknown import Unknown
from gpukeeper.wiring.benches import interpreter


@dataclass(frozen=True)
class GroupRun:
    run: str  # what all nodes must know
    who: Membership
    wish: RunRequest
    python: str | None


def read_group(wish: RunRequest, run: str, python: str | None, environ: Mapping[str, str]) -> GroupRun:
    """Refuses what cannot work before anything runs. `run`: empty if it was not started by a launcher."""
    if wish.device == "simulated":
        raise UsageError("--together needs --device cuda or cpu: simulated nodes have no network. Nothing was run.")
    group_plan.settings(wish)
    found = read_membership(environ, socket.gethostname())
    print_message(f"one of {found.size} nodes: {', '.join(found.notes)}")
    run = run or environ.get("GPUKEEPER_RUN") or f"{found.address}:{found.port}/{found.size}"
    return GroupRun(run, found, wish, python)


def without_group(wish: RunRequest) -> RunRequest:
    """For the checks of this node alone: `--check group` selects none of them."""
    only = tuple(name for name in wish.only if name != group_plan.NAME)
    return msgspec.structs.replace(wish, only=only or (ALWAYS[:1] if wish.only else ()))


async def with_group(
    report: Report, group: GroupRun, limits: Limits, stop: asyncio.Event
) -> tuple[Report, dict[str, str]]:
    """The report with the findings of the group, and the logs of its ranks."""
    who, wish = group.who, group.wish
    gpus = report.machine.gpus
    shown = () if isinstance(gpus, Unknown) else verdicts.wanted(gpus, wish.gpus)
    found = interpreter(group.python)
    unfit = found.why if isinstance(found, Unknown) else "" if shown else "it has no GPU"
    if report.verdict is Grade.FAIL and report.device == "cuda":
        unfit = f"its own checks failed: {report.reason}"
    member = Member(
        index=who.index,
        node=report.node,
        devices=tuple(
            RankDevice(uuid=gpu.uuid, index=gpu.index, name=gpu.name if isinstance(gpu.name, str) else "")
            for gpu in shown
        ),
        fabric=read_fabric(),
        unfit=unfit,
    )
    bench = ProbeLauncher(found if isinstance(found, str) else "", wish.device)
    result = await take_part(group.run, who, member, bench, wish, limits, stop, tell=print_message)
    return merged(report, result, wish, who.index), result.logs
