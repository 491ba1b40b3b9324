"""Several nodes as one run, as values: its members, a job over some of them, and what each rank left behind.

Plain JSON: they travel between the nodes, and into reports.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpukeeper.acceptance.record import ProbeReply, Values


class RankDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank runs on: a GPU, or in CPU mode a CPU. `name`: empty if the driver does not report it."""

    uuid: str
    index: int
    name: str = ""


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """The network cards of a node that can carry a collective. `kind`: infiniband, ethernet, or empty if unknown."""

    kind: str = ""
    gbits: float | None = None  # of one card; None: unknown
    cards: int = 0


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `unfit`: why it takes part in no job, a sentence; it is reported and never passes."""

    index: int
    node: str
    devices: tuple[RankDevice, ...] = ()
    fabric: Fabric = Fabric()
    unfit: str = ""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One probe over some members, one rank for each of their devices, in the order of `members`."""

    number: int
    probe: str
    members: tuple[int, ...]
    why: str
    params: Values = {}
    deadline_s: float = 240.0
    stall_s: float = 120.0  # no rank began a step for so long: it hangs
    attempt: int = 1


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank came. None and empty: not known."""

    stage: str = ""  # start, rendezvous, the name of the probe, end
    step: int | None = None  # steps begun; every rank of a job counts the same ones
    what: str = ""  # the step, in words
    step_age_s: float | None = None  # since it began
    heartbeat_age_s: float | None = None  # since the process last ran
    state: str = ""  # of the process, as Linux has it: R, S, D, T, Z
    arrived: int | None = None  # collectives that NCCL's flight recorder shows as begun
    completed: int | None = None  # and as completed
    where: str = ""  # the line of the program that it was in


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank: which member and device it ran on, its reply, how far it came."""

    rank: int
    member: int
    device: str
    reply: ProbeReply
    progress: RankProgress = RankProgress()


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has ended. `ended`: empty if by itself; else stalled, deadline, lost or interrupted."""

    job: Job
    ranks: tuple[RankResult, ...] = ()
    ended: str = ""
    lost: Mapping[str, str] = {}  # by index of a member that was lost: why
    seconds: float = 0.0


def ranks_of(job: Job, members: Mapping[int, Member]) -> tuple[tuple[int, RankDevice], ...]:
    """By rank: the member and the device."""
    return tuple((index, device) for index in job.members for device in members[index].devices)


def labels(members: Mapping[int, Member]) -> dict[int, str]:
    """A name for each member that no other has: nodes may have the same host name."""
    names = [one.node for one in members.values()]
    return {index: one.node if names.count(one.node) == 1 else f"{one.node}#{index}" for index, one in members.items()}
