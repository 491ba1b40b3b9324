"""Which jobs several nodes run as one: collectives over growing numbers of them, training over all. Pure.

The small numbers come first: if two nodes cannot exchange data, 64 cannot either, and the difference between the
numbers is a result of its own. Parameters are those of the checks on one node, with fewer rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpukeeper.acceptance.check import Check, CheckContext, CheckSize, RunMode, RunRequest, params_of
from gpukeeper.acceptance.checks import collectives, ddp, throughput
from gpukeeper.acceptance.fleet.group_jobs import Job
from gpukeeper.acceptance.record import Machine, Thresholds, Values
from gpukeeper.model.errors import UsageError

NAME = "group"
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
    name=NAME,
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


def settings(wish: RunRequest) -> GroupSettings:
    small = _FOR_CPU if wish.device == "cpu" else {}
    given = {**small, **wish.params.get(NAME, {})}
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
    context = CheckContext(wish=wish, machine=Machine(node=NAME, gpus=()), gpus=(), limits=lambda *_: Thresholds())
    found: dict[str, Any] = params_of(_CHECKED[size], _SIZES[size], context)
    if size == "growing":
        found["ops"] = [collectives.MAIN]
    return found
