"""A keeper of a private engine, with a ledger in memory and a clock that a test sets forward: hours pass at once.

The engine, its containers, processes and files are real. What gpukeeper says is not believed: tests ask the engine.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from gpukeeper.clients.docker import Engine
from gpukeeper.config.load import load_text
from gpukeeper.engine.act import take
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.observe import survey
from gpukeeper.engine.reclaim import PassReport, reclaim
from gpukeeper.engine.requests import Reply, Request, fulfil
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.lifecycle.decide import REQUEST
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, Evidence, Step
from gpukeeper.model.event import Captured, Closed, WarningSent
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.catalog import owner_channels
from gpukeeper.notify.messages import Messages
from gpukeeper.platforms.docker.adapter import DockerPlatform
from tests.real.docker.private_engine import PrivateEngine

SOMEBODY, UID = "nobody", "65534"  # a person whom every machine knows, above the uids of services
SOMEBODY_ELSE = "daemon"
MINE = {"owner": SOMEBODY}  # the policies here trust this label, as a site does whose wrapper sets it
_LIMITS = {
    "idle": "10m",
    "after_idle": "remove",
    "max_runtime": "100h",
    "on_max_runtime": "stop",
    "start_grace": "0s",
    "never_started": "30m",
    "grace": "5s",
}
POLICY: dict[str, Any] = {
    "mode": "enforce",
    "scope": {"docker": {}},
    "owner_labels": ["owner"],
    "retention": {"succeeded": "1h", "failed": "2h", "stopped": "1h"},
    "breaker": {"running": "100%", "vanished": "100%", "floor": 100},
    "warnings": {"idle": ["50%"], "runtime": ["50%"], "lead": "0s", "undelivered": "0s", "require_delivery": False},
    "activity": {"settle": "0s"},
    "classes": dict.fromkeys(("docker", "managed", "compose", "unknown", "serving", "api"), _LIMITS),
    "gpu": {"settle": "1s"},
    # Not the events: an engine asked for those until a time ahead waits for it.
    "capture": {"what": ["manifest", "logs", "reports"]},
}
T = TypeVar("T")


def policy(**changes: Any) -> str:
    """A policy file with short limits. Sections are merged; `limits` change every class above."""
    made = copy.deepcopy(POLICY)
    for limits in made["classes"].values():
        limits.update(changes.get("limits", {}))
    for name, value in changes.items():
        if name == "classes":
            for one, limits in value.items():
                made["classes"][one] = {**made["classes"].get(one, {}), **limits}
        elif name != "limits":
            made[name] = {**made[name], **value} if isinstance(made.get(name), dict) else value
    return json.dumps(made)  # YAML too


class LaterClock:
    """The real time, and what a test added to it."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


class Harness:
    def __init__(self, engine: PrivateEngine, whole_policy: str = "", **changes: Any) -> None:
        self.engine, self.clock = engine, LaterClock()
        self.book = Rulebook(load_text(whole_policy or policy(**changes), "test").policy)
        self.ledger, self.signals, self.evidence = InMemoryLedger(), InMemorySignals(), InMemoryEvidence()
        self.platform = DockerPlatform(
            Engine(engine.host, {}),
            "here",
            self.clock,
            self._inventory,
            self.book.policy,
        )
        self.keeper = self._keeper()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(work)

    def later(self, **span: float) -> None:
        """A new process over the same ledger: one that runs on would distrust such a clock, rightly."""
        self.clock.ahead += timedelta(**span)
        self.keeper = self._keeper()

    def again(self) -> PassReport:
        """One pass that acts."""
        self.platform.records.forget()  # nobody hears the engine's events here, so that each look asks anew
        return self.run(reclaim(self.keeper, self.platform, self.book))

    def ask(self, who: str, verb: str, workload: str, **more: Any) -> Reply:
        return self.run(fulfil(self.keeper, self.book, who, Request(verb=verb, workload=workload, **more)))

    def decisions(self) -> dict[str, Decision]:
        """By name, without doing anything."""
        self.platform.records.forget()
        found = self.run(survey(self.keeper, self.platform, self.book))
        return {one.seen.ref.name: one for one in found.decisions}

    def step(self, name: str) -> Step:
        """What a pass would do to it now."""
        return Step("9.1", self.decisions()[name])

    def asked(self, name: str, action: Action) -> Step:
        """What a person asks for: no rule has to be due."""
        grace = timedelta(seconds=5)
        return Step(
            "9.1", Decision(seen=self.subject(name).seen, action=action, rule=REQUEST, reason="asked for", grace=grace)
        )

    def take(self, step: Step) -> Closed:
        return self.run(take(self.keeper, self.platform, step, self.book, 9))

    def subject(self, name: str) -> Subject:
        """As a list shows it."""
        return self.subjects()[name]

    def subjects(self) -> dict[str, Subject]:
        async def read() -> dict[str, Subject]:
            pages = [page async for page in self.platform.observe(self.book.policy.scope["docker"])]
            return {one.ref.name: one for page in pages for one in page.subjects}

        return self.run(read())

    def looked(self, name: str) -> Subject:
        """As a closer look shows it."""
        found = self.run(self.platform.read(self.subject(name).ref))
        assert isinstance(found, Subject), found
        return found

    def measured(self, name: str, gpu: float = 0.0, minutes: int = 40, **others: float) -> None:
        """The last minutes, as `serve` would have measured them."""
        subject = self.subject(name)
        assert not isinstance(subject.devices, Unknown)
        now = self.clock.now()
        samples = []
        for ago in reversed(range(minutes)):
            at, since = now - timedelta(minutes=ago), now - timedelta(minutes=ago + 1)
            samples += [Sample(subject.ref.key, Signal.GPU, uuid, at, gpu, since=since) for uuid in subject.devices]
            rest = (Signal.CPU, Signal.NETWORK, Signal.DISK, Signal.TERMINAL)
            samples += [
                Sample(subject.ref.key, signal, "", at, others.get(signal, 0.0), since=since) for signal in rest
            ]
        self.run(self.signals.add(samples))

    def outcomes(self, name: str) -> list[Closed]:
        return [one for one in self._lines(Closed) if one.ref is not None and one.ref.name == name]

    def warnings(self, name: str) -> list[WarningSent]:
        return [one for one in self._lines(WarningSent) if one.ref is not None and one.ref.name == name]

    def captured(self, name: str) -> Mapping[str, bytes]:
        """The last evidence of it."""
        taken = [one for one in self._lines(Captured) if one.ref is not None and one.ref.name == name]
        found: Evidence = self.evidence.saved[taken[-1].evidence]
        return found.files

    def due(self, name: str) -> Action:
        return self.decisions()[name].action

    def _lines(self, kind: type[T]) -> list[T]:
        return [line for line in self.ledger.lines if isinstance(line, kind)]

    def _keeper(self) -> Keeper:
        return Keeper(
            platforms=(self.platform,),
            ledger=self.ledger,
            signals=self.signals,
            evidence=self.evidence,
            notifier=Messages(owner_channels((self.platform,))),
            clock=self.clock,
        )

    async def _inventory(self) -> Any:
        return self.engine.inventory()


def ended(engine: PrivateEngine, name: str, code: int = 0, **how: Any) -> str:
    """A container that did its work and ended, with this exit code."""
    made = engine.run(name, cmd=["sh", "-c", f"echo {name} was here; exit {code}"], **how)
    engine.until(lambda: engine.state(name) == "exited", f"{name} ended")
    return made
