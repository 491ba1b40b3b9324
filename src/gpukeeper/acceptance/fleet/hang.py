"""Which rank a hang is due to, from what each rank left behind. Pure.

In a collective every rank waits for the last one. So the rank to blame is the one that did not arrive: it never
started, its process does not run, or it began fewer steps (collectives) than the others. If all began the same one, no
rank is to blame: the network between them is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpukeeper.acceptance.fleet.group_jobs import RankProgress

SILENT_S = 5.0  # without a heartbeat, while others have one
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


def blame(progress: Mapping[int, RankProgress]) -> Blame:
    """`progress` by rank, of all ranks of the job."""
    for find in (_never_started, _never_met, _not_running, _by_recorder, _by_steps):
        found = find(progress)
        if found is not None and len(found.ranks) < len(progress):
            return found
    return Blame((), f"All {len(progress)} ranks had begun the same step{_last(progress)}, and none completed it.")


def describe(progress: RankProgress) -> str:
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
        return one.state in ("T", "t", "Z") or (one.heartbeat_age_s is not None and one.heartbeat_age_s > SILENT_S)

    alive = any(one.heartbeat_age_s is not None and one.heartbeat_age_s <= SILENT_S for one in progress.values())
    ranks = tuple(rank for rank, one in progress.items() if silent(one))
    if not ranks or not alive:
        return None
    first = progress[ranks[0]]
    state = _STATES.get(first.state, "")
    return Blame(ranks, f"Its process does not run{f': {state}' if state else ''}. Last: {describe(first)}.")


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


def _last(progress: Mapping[int, RankProgress]) -> str:
    words = {describe(one) for one in progress.values()}
    return f", {words.pop()}" if len(words) == 1 else ""
