"""Promise 7: what is due and reachable is reclaimed in bounded time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from gpukeeper.model.event import Held, Passed
from gpukeeper.model.subject import Category, Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.world import Thing
from tests.simulation.harness import Run

SLACK = timedelta(minutes=50)


def violations(run: Run) -> Iterator[str]:
    passes = [x for x in run.lines if isinstance(x, Passed)]
    if not passes or run.end - passes[-1].at > timedelta(minutes=15):
        yield "no pass happened in the last 15 minutes"
        return
    for where, here in run.world.things.items():
        mine = [x for x in passes if (x.platform, x.place) == where]
        if any(x.breaker for x in mine[-6:]) or any(x.deferred for x in mine[-3:]):
            continue  # refused or deferred on purpose; the ledger says so
        for thing in here.values():
            due = _due(run, thing)
            if due is not None and run.end > due + SLACK and not _held_lately(run, thing):
                yield f"{thing.ref.path} ({thing.ref.uid}) was due {run.end - due} ago and is still there"


def _due(run: Run, thing: Thing) -> datetime | None:
    """A plain second opinion on the clearest cases: ended work and forgotten containers."""
    scope = run.policy.scope[thing.ref.platform]
    if thing.needed is not None:
        return None
    if thing.root is not None or (thing.ref.namespace and not {"*", thing.ref.namespace} & set(scope.namespaces)):
        return None
    if thing.shape is Shape.TREE:
        return _tree_due(run, thing)
    if thing.shape is not Shape.WORKLOAD or thing.marks.ttl is not None:
        return None
    if isinstance(thing.marks.keep_alive, Unknown):
        return None  # kept until somebody mends that
    if thing.state is State.ENDED and thing.ended is not None and thing.outcome is not None:
        return thing.ended + getattr(run.policy.retention, thing.outcome.value)
    limits = run.policy.classes[thing.class_]
    if thing.state is State.RUNNING and limits.max_runtime is not None and thing.started is not None:
        return thing.started + max(limits.max_runtime, timedelta(minutes=100))
    return None


def _tree_due(run: Run, tree: Thing) -> datetime | None:
    """Of trees that need no more than to be closed and old."""
    if tree.category is Category.TEMPORARY or tree.in_use or tree.last_used is None:
        return None
    older_than = run.policy.kept[tree.category.value].older_than
    return None if older_than is None else tree.last_used + older_than


def _held_lately(run: Run, thing: Thing) -> bool:
    """Held within the last hours, by what was written; holds delay and are allowed to."""
    uids = {x.ref.uid for x in run.lines if isinstance(x, Held) and x.ref and x.hold.until > run.end - 2 * SLACK}
    return thing.ref.uid in uids
