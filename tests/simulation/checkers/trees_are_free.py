"""Promise 8: no tree goes that is in use, beside work, or younger than the policy says, at the look and at the act."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from gpukeeper.lifecycle.budget import TREES
from gpukeeper.model.event import Intended
from gpukeeper.platforms.simulated.world import LogEntry
from tests.simulation.harness import Run

TAKEN = ("done", "halfway")


def violations(run: Run) -> Iterator[str]:
    clock_was_wrong = any(h.effect == "clock jumps" for h in run.world.log)
    for i, act in run.acts():
        intent = run.intent(act.step)
        read = run.last_look(act.uid, i)
        if intent is None or read is None or intent.rule not in TREES:
            continue
        yield from _free(intent, read[1], "when it was looked at")
        if act.effect in TAKEN:
            yield from _free(intent, act, "at that moment")
        if not clock_was_wrong:
            yield from _old_enough(run, intent, read[1])


def _free(intent: Intended, entry: LogEntry, when: str) -> Iterator[str]:
    assert intent.ref is not None
    if entry.in_use:
        yield f"{intent.ref.name} was deleted, and in use {when}"
    if entry.busy:
        yield f"{intent.ref.name} was deleted, and work ran beside it {when}"


def _old_enough(run: Run, intent: Intended, read: LogEntry) -> Iterator[str]:
    """A full disk shortens ages, and only a full one."""
    assert intent.ref is not None
    if intent.rule != "temporary_tree" or not isinstance(read.last_used, datetime):
        return
    named, unused = run.policy.temporary[0], read.at - read.last_used
    least = named.older_than if read.full < run.policy.disk.low else named.under_pressure
    if unused + timedelta(seconds=1) < least:
        yield f"{intent.ref.name} was deleted, unused for {unused} on a disk that is {read.full:.0%} full"
