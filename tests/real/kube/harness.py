"""A keeper over a real cluster, with a ledger in memory and a clock that a test sets forward: days pass at once.

The API server, its controllers and its objects are real. What gpukeeper says is not believed: tests ask the server.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.config.load import load_text
from gpukeeper.engine.act import take
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.observe import survey
from gpukeeper.engine.reclaim import PassReport, reclaim
from gpukeeper.engine.requests import Reply, Request, fulfil
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Decision, Step
from gpukeeper.model.event import Closed
from gpukeeper.model.ports import Meter
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Subject
from gpukeeper.notify.catalog import owner_channels
from gpukeeper.notify.messages import Messages
from gpukeeper.platforms.kubernetes.adapter import KubernetesPlatform
from gpukeeper.platforms.kubernetes.settings import settings_of

POLICY: dict[str, Any] = {
    "mode": "enforce",
    "retention": {"succeeded": "1h", "failed": "2h", "stopped": "1h"},
    "breaker": {"running": "100%", "vanished": "100%", "floor": 100},
    "warnings": {"idle": ["50%"], "runtime": ["50%"], "lead": "0s", "undelivered": "0s", "require_delivery": False},
    "activity": {"settle": "0s", "signals": []},
    "kubernetes": {"requests": 1000, "burst": 1000},
    "budget": {"per_pass": 1000, "per_hour": 100000},
}
T = TypeVar("T")


def policy(namespaces: Sequence[str], **changes: Any) -> str:
    """A policy file with short limits for these namespaces. Sections are merged."""
    made = copy.deepcopy(POLICY)
    made["scope"] = {"kubernetes": {"namespaces": list(namespaces)}}
    for name, value in changes.items():
        made[name] = {**made[name], **value} if isinstance(made.get(name), dict) else value
    return json.dumps(made)  # YAML too


def minute_of(subject: Subject, device: str, at: datetime, value: float) -> Sample:
    """A reading of one GPU for the whole minute before `at`, so that one per minute leaves no gap."""
    return Sample(subject.ref.key, Signal.GPU, device, at, value, since=at - timedelta(minutes=1))


class LaterClock:
    """The real time, and what a test added to it."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


class Harness:
    """`kubeconfig`: of the account that gpukeeper has."""

    def __init__(self, kubeconfig: Path, *namespaces: str, meter: Meter | None = None, **changes: Any) -> None:
        self.clock, self.kubeconfig, self.meter = LaterClock(), kubeconfig, meter
        self.book = Rulebook(load_text(policy(namespaces, **changes), "test").policy)
        self.ledger, self.signals, self.evidence = InMemoryLedger(), InMemorySignals(), InMemoryEvidence()
        settings = settings_of(self.book.policy)
        self.cluster = Cluster.from_environment(
            {"KUBECONFIG": str(kubeconfig)}, settings.context, settings.requests, settings.burst
        )
        self.platform = KubernetesPlatform(self.cluster, self.clock, self.book.policy)
        self.keeper = self._keeper()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(work)

    def later(self, **span: float) -> None:
        """A new process over the same ledger: one that runs on would distrust such a clock, rightly."""
        self.clock.ahead += timedelta(**span)
        self.keeper = self._keeper()

    def again(self, **more: Any) -> PassReport:
        """One pass that acts."""
        return self.run(reclaim(self.keeper, self.platform, self.book, **more))

    def ask(self, who: str, verb: str, workload: str, *, attended: bool = False, **more: Any) -> Reply:
        """`attended`: a person says yes to what would be done."""
        asked = Request(verb=verb, workload=workload, confirm=attended, **more)
        reply = self.run(fulfil(self.keeper, self.book, who, asked))
        if not attended or not reply.token:
            return reply
        return self.run(fulfil(self.keeper, self.book, who, msgspec.structs.replace(asked, token=reply.token)))

    def decisions(self) -> dict[str, Decision]:
        """By kind and name ("trainjob/run"), without doing anything."""
        found = self.run(survey(self.keeper, self.platform, self.book))
        assert not found.unseen, found.unseen
        return {f"{one.seen.ref.kind}/{one.seen.ref.name}": one for one in found.decisions}

    def subjects(self) -> dict[str, Subject]:
        async def all_of_them() -> list[Subject]:
            scope = self.book.policy.scope["kubernetes"]
            return [one async for page in self.platform.observe(scope) for one in page.subjects]

        return {f"{one.ref.kind}/{one.ref.name}": one for one in self.run(all_of_them())}

    def step(self, name: str) -> Step:
        """What a pass would do to it now."""
        return Step("9.1", self.decisions()[name])

    def take(self, step: Step) -> Closed:
        """Take a step that was planned earlier."""
        return self.run(take(self.keeper, self.platform, step, self.book, 9))

    def measure(self, name: str, value: float, minutes: int) -> None:
        """As if its GPUs had been measured every minute so far: `value` percent."""
        subject, now = self.subjects()[name], self.clock.now()
        assert isinstance(subject.devices, tuple)
        samples = [
            minute_of(subject, device, now - timedelta(minutes=ago), value)
            for device in subject.devices
            for ago in reversed(range(minutes + 1))  # the oldest first, as they come
        ]
        self.run(self.signals.add(samples))

    def outcomes(self) -> list[Closed]:
        return [line for line in self.ledger.lines if isinstance(line, Closed)]

    def _keeper(self) -> Keeper:
        return Keeper(
            platforms=(self.platform,),
            ledger=self.ledger,
            signals=self.signals,
            evidence=self.evidence,
            notifier=Messages(owner_channels((self.platform,))),
            clock=self.clock,
            meter=self.meter,
        )
