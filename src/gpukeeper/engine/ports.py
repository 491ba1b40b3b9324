"""What the engine needs of the world, as Protocols. Async; every implementation gives each call a deadline.

A platform answers with values. What it could not learn is Unknown; what it could not list is in Snapshot.unseen.
It raises PlatformError only when nothing at all can be said.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol, TypeAlias

from gpukeeper.model.condition import Condition
from gpukeeper.model.decision import (
    Accepted,
    Action,
    Changed,
    Evidence,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
)
from gpukeeper.model.diagnosis import Diagnosis
from gpukeeper.model.event import Event, Intended
from gpukeeper.model.identity import Ref
from gpukeeper.model.memory import Hold, Memory, Warned
from gpukeeper.model.message import Message
from gpukeeper.model.policy import PlaceScope, Policy
from gpukeeper.model.ports import Clock, Meter, Signals
from gpukeeper.model.subject import Gone, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.usage import UsageFold

PlaceKey: TypeAlias = tuple[str, str]  # platform and place


class Platform(Protocol):
    """One place of one platform: a Docker host, a cluster, a Ray node, this machine."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def guards(self) -> Mapping[Action, Guard]:
        """The verbs it offers. What is not here is reported, never done."""
        ...

    @property
    def precise(self) -> bool:
        """Its hints name everything that may have changed, so that a pass may look at just that."""
        ...

    def at_once(self, kind: str) -> int:
        """How many steps on things of that kind that are over may be under way at once. More than one where they do not
        disturb each other, and where a look for many costs as much as one for a single step."""
        ...

    @property
    def local(self) -> bool:
        """Its workloads run on this machine, so that their GPUs can be looked at here."""
        ...

    @property
    def tidies(self) -> bool:
        """It removes by itself what ended, so that the absence of such a thing is no sign of a broken world."""
        ...

    def follow(self, policy: Policy) -> None:
        """A policy that changed counts from the next look on."""
        ...

    def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        """Pages, so that memory follows the page."""
        ...

    def wake(self) -> AsyncIterator[Ref | None]:
        """Hints that something changed (None: somewhere). Never facts. Ends when the platform has none."""
        ...

    async def look(self, ref: Ref) -> Subject | Gone | Unknown:
        """By uid. Gone only when it is provably not there."""
        ...

    async def look_by_id(self, uid: str) -> Subject | Gone | Unknown:
        """A workload by the id that its processes carry on this machine. Unknown where they carry none."""
        ...

    async def gone(self, refs: Sequence[Ref]) -> Sequence[Gone]:
        """Of these, the ones that are provably not there; asked for in bulk, by uid. What could not be checked is left
        out, like what exists."""
        ...

    async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown: ...

    async def act(self, step: Step, fresh: Subject) -> Accepted | Changed | Refused | Unknown:
        """One verb on exactly `fresh`. For an ATOMIC verb the platform refuses if it changed since."""
        ...

    def batch(self, refs: Sequence[Ref]) -> AbstractAsyncContextManager[None]:
        """Steps on all of these follow, inside: what they need may be read for all of them at once."""
        ...

    async def tell(self, subject: Subject, message: str) -> bool:
        """Tell whoever sits inside the workload. False: nobody does, or there is no way in."""
        ...

    async def announce(self, subject: Subject, message: str, warned: Warned) -> None:
        """Leave a warning on the thing itself, where its owner and another instance of gpukeeper find it. A place that
        keeps no such notes does nothing: the ledger has it."""
        ...

    async def hold(self, subject: Subject, until: datetime | None) -> Accepted | Refused | Unknown | None:
        """Write a hold onto the thing itself, or take it off. Answers None where only the ledger keeps holds."""
        ...

    async def parts(self, words: str) -> Sequence[Ref]:
        """Parts of workloads that are called so. Only whole workloads are observed; parts are for who asks for one."""
        ...

    async def diagnose(self, ref: Ref) -> Diagnosis | Unknown:
        """What it is part of and made of, and what keeps it there. Looks only."""
        ...

    async def take_back(self, ref: Ref, evidence: Evidence) -> None:
        """A stop was interrupted and did not come about: undo what it changed on the way. It runs on as it was."""
        ...

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        """Bring back what gpukeeper stopped (no evidence) or removed (from its evidence)."""
        ...


def key_of(platform: Platform) -> PlaceKey:
    """By which everything that is kept for a place is found again."""
    return platform.name, platform.place


class Gpus(Protocol):
    """The GPUs of the machine we run on."""

    async def shares(self) -> Mapping[str, float] | Unknown:
        """What each GPU or slice weighs, by uuid: a whole GPU 1, a slice its part of one. A GPU that is cut is not
        listed itself."""
        ...

    async def condition(self, uuid: str, since: datetime) -> Condition | Unknown:
        """Who has that GPU or slice open, and what driver and kernel say about it since then."""
        ...

    async def reset(self, uuid: str) -> Accepted | Refused | Unknown:
        """That one whole GPU, after letting go of it ourselves. Refused while anybody has it open."""
        ...


class Notifier(Protocol):
    async def to_owner(self, message: Message) -> Sequence[str]:
        """The channels that delivered it; none: it was not delivered."""
        ...


class Ledger(Protocol):
    """Journal and state. `append` returns when the lines are durable."""

    async def append(self, lines: Sequence[Event]) -> None: ...
    async def memories(self, keys: Iterable[str]) -> Mapping[str, Memory]:
        """Of those keys; one that nothing is remembered of is absent."""
        ...

    async def present(self, platform: str, place: str) -> Mapping[str, Ref]:
        """By key: what was noticed there and has not vanished."""
        ...

    async def decided(self, keys: Iterable[str]) -> Mapping[str, str]:
        """The last recorded decision of each, as `action rule verdict`."""
        ...

    async def open_intents(self, platform: str, place: str) -> Sequence[Intended]: ...
    async def acts_since(self, since: datetime, rules: frozenset[str], *, but: bool = False) -> int:
        """Intents of these rules, or of all but these, written since then on any place."""
        ...

    async def holds_of(self, owner: str, since: datetime) -> Mapping[str, tuple[Hold, ...]]:
        """By key: the holds on this owner's workloads that were taken since then, gone workloads included."""
        ...

    async def about(self, words: str) -> Sequence[Event]:
        """Every line about the things whose path or uid ends with these words, oldest first."""
        ...

    async def next_pass(self) -> int: ...
    async def last_line_at(self, before: datetime | None = None) -> datetime | None:
        """When the last line was written, or the newest one that is not later than this."""
        ...

    async def paused(self) -> str | None:
        """Why everything is paused, or None. Asked before each step."""
        ...

    def lease(self, platform: str, place: str) -> AbstractAsyncContextManager[None]:
        """Raises LeaseHeld when another pass is at work there."""
        ...


class EvidenceStore(Protocol):
    async def save(self, ref: Ref, step: str, at: datetime, evidence: Evidence) -> str | Unknown:
        """Durable when it returns. The string names it."""
        ...

    async def load(self, name: str) -> Evidence | Unknown: ...


class UsageStore(Protocol):
    """Where the hours of GPUs are kept."""

    async def record(self, found: UsageFold) -> None:
        """In one transaction. Recording the same again changes nothing."""
        ...


@dataclass(frozen=True, eq=False)
class Ports:
    """All of them together."""

    platforms: tuple[Platform, ...]
    ledger: Ledger
    signals: Signals
    evidence: EvidenceStore
    notifier: Notifier
    clock: Clock
    meter: Meter | None = None
    recall: Meter | None = None  # knows the past too: asked by a look that no daemon measured for
    gpus: Gpus | None = None
    usage: UsageStore | None = None  # None: how GPUs are used is not recorded
    host: str = field(default_factory=socket.gethostname)  # where `gpus` are

    def platform_at(self, ref: Ref) -> Platform | None:
        """The one that looks after it; None: not reachable from here."""
        return next((one for one in self.platforms if key_of(one) == (ref.platform, ref.place)), None)
