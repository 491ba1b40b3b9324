"""Which jobs several nodes run as one, what each rank left behind, and which rank a hang is due to. Pure.

Collectives over growing numbers of nodes, then training over all. The small numbers come first: if two nodes cannot
exchange data, 64 cannot either. Jobs and results are plain JSON: they travel between the nodes, and into reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpukeeper.acceptance.check import Check, CheckContext, CheckSize, RunMode, RunRequest, params_of
from gpukeeper.acceptance.checks import collectives, ddp, throughput
from gpukeeper.acceptance.record import Machine, ProbeReply, Thresholds, Values
from gpukeeper.model.errors import UsageError


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


GROUP = "group"
PROBES = ("collectives", "ddp", "throughput")
_ROUNDS = 20  # twice the ranks, as on one node, would be thousands
_FEW = 5
_SIZES: Mapping[str, CheckSize] = {
    "collectives": CheckSize(
        depth=0,
        seconds=30,
        worth=1,
        what="five collectives of 1 GiB",
        params={"ops": list(collectives.OPS), "sizes": [collectives.PLATEAU], "rounds": _ROUNDS},
        small={"sizes": [2**18], "rounds": 6},
    ),
    "growing": CheckSize(
        depth=0,
        seconds=15,
        worth=1,
        what="all-reduce of 1 GiB",
        params={"ops": [collectives.MAIN], "sizes": [collectives.PLATEAU], "rounds": _FEW},
        small={"sizes": [2**18], "rounds": 4},
    ),
    "ddp": ddp.CHECK.servings[0],
    "throughput": throughput.CHECK.servings[0],
}
_CHECKED = {"collectives": "collectives", "growing": "collectives", "ddp": "ddp", "throughput": "throughput"}


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What can be set for several nodes as one run (--set group.NAME=VALUE)."""

    probes: tuple[str, ...] = PROBES
    growing: bool = True  # collectives over 2, 4, 8, … nodes, too
    search: bool = True  # search for the bad node if the group fails and none is named
    rendezvous_s: float = 600.0  # until all nodes must have connected
    deadline_s: float = 240.0  # of one job
    stall_s: float = 120.0  # no rank begins a step for so long: it hangs
    line_gbits: float = 0.0  # of one network card; 0: as the kernel reports it
    seed: int = 1


_FOR_CPU = {"probes": ["collectives", "ddp"], "deadline_s": 120.0, "stall_s": 60.0}
# Only for its name and parameters: what it runs depends on the other nodes.
CHECK = Check(
    name=GROUP,
    title="Several nodes as one run",
    proves="Collectives and training over all nodes give the correct value in every element on every rank, at the speed"
    " of their network.",
    cannot="Does not test paths between nodes that no job used.",
    how=RunMode.TOGETHER,
    servings=(
        CheckSize(
            depth=0,
            seconds=120,
            worth=1,
            what="collectives over 2, 4, 8, … nodes and over all; training over all",
            params=msgspec.to_builtins(GroupSettings()),
            small=_FOR_CPU,
        ),
    ),
    interpret=lambda trial, context: (),
)


def settings_of(wish: RunRequest) -> GroupSettings:
    small = _FOR_CPU if wish.device == "cpu" else {}
    given = {**small, **wish.params.get(GROUP, {})}
    try:
        found = msgspec.convert(given, GroupSettings, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"--set group: {error}. Nothing was run.") from error
    problems = [
        f'unknown probe "{one}"; valid values: {", ".join(PROBES)}' for one in found.probes if one not in PROBES
    ]
    problems += ["probes is empty, so nothing would be tested"] if not found.probes else []
    problems += [
        f"{name} must be 1 or more" for name in ("rendezvous_s", "deadline_s", "stall_s") if getattr(found, name) < 1
    ]
    if problems:
        raise UsageError(f"--set group: {'; '.join(problems)}. Nothing was run.")
    return found


def counts(nodes: int) -> tuple[int, ...]:
    """2, 4, 8, … and all of them."""
    found = []
    count = 2
    while count < nodes:
        found.append(count)
        count *= 2
    return (*found, nodes) if nodes > 1 else ()


def jobs(members: Sequence[int], wanted: GroupSettings, wish: RunRequest) -> tuple[Job, ...]:
    """In the order in which they run. Fewer than two members: none."""
    if len(members) < 2:
        return ()
    found: list[tuple[str, int]] = []
    if "collectives" in wanted.probes:
        growing = counts(len(members))[:-1] if wanted.growing else ()
        found += [("growing", count) for count in growing]
        found.append(("collectives", len(members)))
    found += [(name, len(members)) for name in wanted.probes if name != "collectives"]
    return tuple(
        job(number, size, tuple(members[:count]), wanted, wish, f"{count} of {len(members)} nodes")
        for number, (size, count) in enumerate(found, start=1)
    )


def trial(number: int, members: Sequence[int], wanted: GroupSettings, wish: RunRequest, why: str) -> Job:
    """One step of the search for a bad node."""
    return job(number, "growing", tuple(members), wanted, wish, why)


def job(number: int, size: str, members: tuple[int, ...], wanted: GroupSettings, wish: RunRequest, why: str) -> Job:
    return Job(
        number=number,
        probe=_CHECKED[size],
        members=members,
        why=why,
        params={**_params(size, wish), "timeout_s": wanted.deadline_s, "watch": True},
        deadline_s=wanted.deadline_s,
        stall_s=wanted.stall_s,
    )


def _params(size: str, wish: RunRequest) -> Values:
    context = CheckContext(wish=wish, machine=Machine(node=GROUP, gpus=()), gpus=(), limits=lambda *_: Thresholds())
    found: dict[str, Any] = params_of(_CHECKED[size], _SIZES[size], context)
    if size == "growing":
        found["ops"] = [collectives.MAIN]
    return found


HEARTBEAT_LOST_S = 5.0  # without a heartbeat, while others have one
JOINED = ("", "start", "rendezvous")  # stages before the ranks have met
_STATES = {
    "T": "it is stopped by a signal",
    "t": "it is stopped by a debugger",
    "D": "it waits in the kernel and cannot be interrupted: a driver, a disk or a network mount does not respond",
    "Z": "it has ended",
}


@dataclass(frozen=True)
class Blame:
    """`ranks`: empty if none can be named. `why`: a sentence."""

    ranks: tuple[int, ...]
    why: str


# In a collective every rank waits for the last one. So the rank to blame is the one that did not arrive: it never
# started, its process does not run, or it began fewer steps (collectives) than the others. If all began the same one,
# no rank is to blame: the network between them is.
def blame_for_hang(progress: Mapping[int, RankProgress]) -> Blame:
    """`progress` by rank, of all ranks of the job."""
    for find in (_never_started, _never_met, _not_running, _by_recorder, _by_steps):
        found = find(progress)
        if found is not None and len(found.ranks) < len(progress):
            return found
    return Blame(
        (), f"All {len(progress)} ranks had begun the same step{_where_all_are(progress)}, and none completed it."
    )


def describe_progress(progress: RankProgress) -> str:
    """The last step of a rank, in words."""
    if progress.step is not None:
        return f"step {progress.step}" + (f" ({progress.what})" if progress.what else "")
    return f"stage {progress.stage!r}" if progress.stage else "not started"


def _never_started(progress: Mapping[int, RankProgress]) -> Blame | None:
    ranks = tuple(rank for rank, one in progress.items() if not one.stage)
    return Blame(ranks, "Its program had not started when the others waited for it.") if ranks else None


def _never_met(progress: Mapping[int, RankProgress]) -> Blame | None:
    """Some wait in the rendezvous for one that does not come."""
    waiting = [rank for rank, one in progress.items() if one.stage == "rendezvous"]
    ranks = tuple(rank for rank, one in progress.items() if one.stage == "start")
    return Blame(ranks, "It had not joined when the others waited in the rendezvous.") if ranks and waiting else None


def _not_running(progress: Mapping[int, RankProgress]) -> Blame | None:
    def silent(one: RankProgress) -> bool:
        return one.state in ("T", "t", "Z") or (
            one.heartbeat_age_s is not None and one.heartbeat_age_s > HEARTBEAT_LOST_S
        )

    alive = any(
        one.heartbeat_age_s is not None and one.heartbeat_age_s <= HEARTBEAT_LOST_S for one in progress.values()
    )
    ranks = tuple(rank for rank, one in progress.items() if silent(one))
    if not ranks or not alive:
        return None
    first = progress[ranks[0]]
    state = _STATES.get(first.state, "")
    return Blame(ranks, f"Its process does not run{f': {state}' if state else ''}. Last: {describe_progress(first)}.")


def _by_recorder(progress: Mapping[int, RankProgress]) -> Blame | None:
    """NCCL's own record: which collectives a rank began, and which it completed."""
    if found := _behind(progress, lambda one: one.arrived):
        ranks, least, most = found
        return Blame(ranks, f"NCCL's flight recorder: it began {least} collectives, the others {most}.")
    if found := _behind(progress, lambda one: one.completed):
        ranks, least, most = found
        return Blame(ranks, f"NCCL's flight recorder: it completed {least} collectives, the others {most}.")
    return None


def _by_steps(progress: Mapping[int, RankProgress]) -> Blame | None:
    found = _behind(progress, lambda one: one.step if one.stage not in JOINED else None)
    if found is None:
        return None
    ranks, least, most = found
    state = _STATES.get(progress[ranks[0]].state, "")
    extra = f" Its process: {state}." if state else ""
    return Blame(
        ranks, f"It was still in step {least} ({progress[ranks[0]].what}); the others waited in {most}.{extra}"
    )


def _behind(
    progress: Mapping[int, RankProgress], count: Callable[[RankProgress], int | None]
) -> tuple[tuple[int, ...], int, int] | None:
    """The ranks with the smallest count, that count and the largest one; None if one is unknown or all are equal."""
    counts = {rank: count(one) for rank, one in progress.items()}
    known = [number for number in counts.values() if number is not None]
    if len(known) < len(counts) or not known or min(known) == max(known):
        return None
    return tuple(rank for rank, number in counts.items() if number == min(known)), min(known), max(known)


def _where_all_are(progress: Mapping[int, RankProgress]) -> str:
    words = {describe_progress(one) for one in progress.values()}
    return f", {words.pop()}" if len(words) == 1 else ""
