"""A place with two nodes whose trees can really be removed, in memory: their bytes and disks follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Accepted, Action, Guard, NothingToCapture, Snapshot
from gpukeeper.model.policy import Kept, Mode, PlaceScope, Policy
from gpukeeper.model.subject import Category, Disk, Gone, Ref, Seen, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

NOW = datetime.fromisoformat("2026-03-02T08:00:00+00:00")
HOUR, GIB = timedelta(hours=1), 1024**3
SIZE = 100 * GIB
POLICY = Policy(
    mode=Mode.ENFORCE,
    scope={"ray": PlaceScope()},
    kept={Category.DEAD_SESSION.value: Kept(older_than=HOUR)},
)


class Stopped:
    """A clock that stands still."""

    def now(self) -> datetime:
        return NOW


def seen(kind: str, name: str, node: str = "") -> Seen:
    return Seen(Ref("ray", "lab", kind, name, f"uid-{node}{name}", node), "1", "1", NOW)


def node(name: str, temporary: int | Unknown = 0, used: float = 0.5, **facts: Any) -> Subject:
    known: dict[str, Any] = {
        "disk": Disk("/", used, 0.1),
        "labels": {"disk_size": str(SIZE), "disk_free": str(int(SIZE * (1 - used))), "sessions_live": "1"},
    }
    return Subject(
        seen=seen("node", name),
        shape=Shape.NODE,
        state=State.RUNNING,
        class_="node",
        created=NOW,
        size=temporary,
        **(known | facts),
    )


def disk(name: str = "/", used: float = 0.81, **facts: Any) -> Subject:
    labels = {"disk_size": str(SIZE), "disk_free": str(int(SIZE * (1 - used))), "held_open": str(3 * GIB)}
    known: dict[str, Any] = {"disk": Disk(name, used, None), "labels": labels, "size": int(SIZE * used)}
    return Subject(
        seen=Seen(Ref("host", "node-3", "disk", name, "2049"), "1", "", NOW),
        shape=Shape.NODE,
        state=Unknown("a disk neither begins nor ends", by_design=True),
        class_="disk",
        created=NOW,
        **(known | facts),
    )


def tree(name: str, on: str, size: int | Unknown = GIB, unused: timedelta = 5 * HOUR, **facts: Any) -> Subject:
    known: dict[str, Any] = {"category": Category.DEAD_SESSION, "state": State.ENDED}
    return Subject(
        seen=seen("session", name, on),
        shape=Shape.TREE,
        class_="session",
        created=NOW,
        size=size,
        last_used=NOW - unused,
        **(known | facts),
    )


class Workers:
    """Nodes with trees. A removal gives the bytes back to its node, and to its disk."""

    name, place = "ray", "lab"
    precise = tidies = False
    local = True
    guards: Mapping[Action, Guard] = {Action.REMOVE: Guard.ATOMIC}

    def __init__(self, *subjects: Subject) -> None:
        self.there = {one.ref.key: one for one in subjects}

    def at_once(self, kind: str) -> int:
        return 1

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        yield Snapshot(self.name, self.place, NOW, tuple(self.there.values()))

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        return self.there.get(ref.key, Gone(ref, NOW))

    async def capture(self, subject: Subject, what: Sequence[str]) -> NothingToCapture:
        return NothingToCapture("it has no logs")

    def batch(self, refs: Sequence[Ref]) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def act(self, step: Any, fresh: Subject) -> Accepted:
        gone = self.there.pop(fresh.ref.key)
        owner = self.there[f"ray/lab/uid-{gone.ref.namespace}"]
        if isinstance(gone.size, int) and isinstance(owner.size, int) and owner.disk is not None:
            emptier = msgspec.structs.replace(owner.disk, used=owner.disk.used - gone.size / SIZE)
            left = msgspec.structs.replace(owner, size=owner.size - gone.size, disk=emptier)
            self.there[owner.ref.key] = left
        return Accepted(bytes_back=gone.size)


def session(*platforms: Any, policy: Policy = POLICY) -> Any:
    nobody: Any = None
    keeper = Keeper(platforms, InMemoryLedger(), InMemorySignals(), InMemoryEvidence(), nobody, Stopped())
    loaded = SimpleNamespace(policy=policy, source="policy.yaml")
    given = {"keeper": keeper, "book": Rulebook(policy), "loaded": loaded, "evidence": keeper.evidence, "user": "root"}
    return SimpleNamespace(**given, owners_notified=nullcontext)


def passed(platform: Any, policy: Policy = POLICY) -> Any:
    """What a real pass over it reports."""
    from gpukeeper.engine.reclaim import reclaim

    one = session(platform, policy=policy)
    return asyncio.run(reclaim(one.keeper, platform, one.book))
