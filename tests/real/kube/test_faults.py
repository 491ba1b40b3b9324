"""Passes through a network that refuses, loses, cuts, delays and lies, while others change what they look at.

Each seed is a namespace, a proxy and a gpukeeper of its own; all of them run at once, because a step whose outcome is
not known waits for half a minute. What happens to a question follows from the seed, the question and how often it was
asked before, so that a seed tells the same story again. Afterwards the API server is asked, never gpukeeper.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.engine.reclaim import PassReport, reclaim
from gpukeeper.model.decision import Accepted, Action, Changed, Refused, Result
from gpukeeper.model.event import Closed, Intended
from gpukeeper.model.subject import Gone, Ref, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.adapter import KubernetesPlatform
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.objects import ReadObject
from tests.real.kube import objects
from tests.real.kube.api import Api
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.endings import ended_pod, text, unplaced
from tests.real.kube.harness import Harness
from tests.real.kube.proxy import Asked, Cut, Fault, First, Jumble, Late, Lose, Proxy, Say, Swallow, proxy

SEEDS = [int(os.environ["SEED"])] if os.environ.get("SEED") else list(range(30))
DUE = ("run-0", "run-1", "run-2")  # pods that ended; two Jobs come with them
WAITS = 1  # deletes of one seed whose outcome is unknown at once: each costs half a minute
HOLD = "gpukeeper.io/hold-until"
DELETES: tuple[Callable[[], Fault | None], ...] = (
    lambda: None,
    lambda: None,
    lambda: Say(409),
    lambda: Say(429, retry_after=1),
    Lose,
    lambda: Late(0.3),
    lambda: Say(500),
    lambda: Lose(delivered=False),
    Swallow,
)
READS: tuple[Callable[[], Fault | None], ...] = (
    *(lambda: None,) * 40,
    lambda: Say(429, retry_after=1),
    lambda: Say(500),
    lambda: Say(503),
    lambda: Say(404, "404 page not found"),
    lambda: Say(403, "not you"),
    Cut,
    Lose,
    lambda: Late(0.3),
)
LISTS: tuple[Callable[[], Fault | None], ...] = (*READS[20:], lambda: Say(410), Cut, Cut)
WATCHES: tuple[Callable[[], Fault | None], ...] = (
    lambda: None,
    lambda: Say(410),
    lambda: Say(500),
    lambda: Cut(1),
    lambda: Cut(3),
    lambda: Jumble(twice=True),
    lambda: Jumble(swapped=True),
    lambda: Lose(delivered=False),
)


@dataclass
class World:
    """One namespace, and what must still be there at the end."""

    api: Api
    namespace: str
    seed: int
    lines: Sequence[object] = ()  # of the ledger
    kept: dict[str, tuple[str, str]] = field(default_factory=dict)  # by uid: kind and name
    elsewhere: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    faults: bool = True

    def build(self) -> None:
        far = text(datetime.now(UTC) + timedelta(hours=20))
        for name in (*DUE, "anew", "held-late"):
            ended_pod(self.api, self.namespace, name)
        for name in ("job-0", "job-1"):
            self.api.create(objects.job(name, parallelism=0, gpus=0), self.namespace)
            self.api.wait_condition("jobs", self.namespace, name, "Complete")
        self.keep(ended_pod(self.api, self.namespace, "held", annotations={HOLD: far}))
        label = {"kueue.x-k8s.io/multikueue-origin": "manager"}
        self.keep(ended_pod(self.api, self.namespace, "foreign", labels=label))
        self.keep(ended_pod(self.api, self.elsewhere, f"outside-{self.seed}"), "outside")
        self.running("runs")

    def running(self, name: str) -> None:
        made = self.api.create(unplaced(name), self.namespace)
        self.keep(made)
        self.api.patch("pods", self.namespace, name, {"status": {"phase": "Running"}}, subresource="status")

    def keep(self, made: Mapping[str, Any], where: str = "") -> None:
        self.kept[made["metadata"]["uid"]] = (where or "inside", made["metadata"]["name"])

    # What others do, just before a delete arrives

    def make_anew(self) -> None:
        """Its owner started it again under the same name."""
        self.api.delete("pods", self.namespace, "anew", grace=0)
        self.running("anew")

    def hold_late(self) -> None:
        hold = {HOLD: text(datetime.now(UTC) + timedelta(hours=20))}
        self.keep(self.api.patch("pods", self.namespace, "held-late", {"metadata": {"annotations": hold}}))

    def touch(self, name: str) -> None:
        """Something that changes nothing a rule goes by."""
        with suppress(AssertionError):
            self.api.patch("pods", self.namespace, name, {"metadata": {"annotations": {"note": str(self.seed)}}})

    # The rule of the proxy

    def rule(self, asked: Asked) -> Fault | None:
        if asked.method == "DELETE":
            self._has_an_intent(asked)
        what = f"{asked.method} {asked.is_watch} {asked.path.replace(self.namespace, 'x')} {'continue' in asked.query}"
        self.counts[what] += 1
        if asked.method == "DELETE" and self.counts[what] == 1:
            if asked.path.endswith("/anew"):
                return First(self.make_anew)
            if asked.path.endswith("/held-late"):
                return First(self.hold_late)
            if asked.path.endswith("/run-0") and self.seed % 2:
                return First(lambda: self.touch("run-0"))
        if not self.faults:
            return None
        chance = random.Random(f"{self.seed} {what} {self.counts[what]}")
        if asked.is_watch:
            return chance.choice(WATCHES)()
        if asked.method == "DELETE":
            return self._within_time(chance.choice(DELETES)())
        if asked.method != "GET":
            return None
        return chance.choice(LISTS if asked.is_list else READS)()

    def _within_time(self, fault: Fault | None) -> Fault | None:
        if fault in (Say(500), Lose(delivered=False), Swallow()):
            self.counts["waits"] += 1
            return fault if self.counts["waits"] <= WAITS else None
        return fault

    def _has_an_intent(self, asked: Asked) -> None:
        """By the uid that the delete names, at the moment when it arrives."""
        uid = (json.loads(asked.body or b"{}").get("preconditions") or {}).get("uid")
        closed = {line.step for line in list(self.lines) if isinstance(line, Closed)}
        meant = [line for line in list(self.lines) if isinstance(line, Intended) and line.step not in closed]
        if not any(line.ref is not None and line.ref.uid == uid for line in meant):
            self.problems.append(f"{asked.method} {asked.path} of uid {uid} came without an open intent")

    # What the API server says afterwards

    def check(self, *, all_gone: bool) -> list[str]:
        there = {(one["metadata"]["uid"]): one["metadata"]["name"] for one in self._everything()}
        said = list(self.problems)
        said += [f"{name} ({uid}) is gone and had to stay" for uid, (_, name) in self.kept.items() if uid not in there]
        reclaimed = [line for line in self.lines if isinstance(line, Closed) and line.result is Result.RECLAIMED]
        said += [
            f"{one.ref.name} is called reclaimed and is there" for one in reclaimed if one.ref and one.ref.uid in there
        ]
        if all_gone:
            left = {name for uid, name in there.items() if uid not in self.kept}
            said += [f"{name} is due and is still there" for name in sorted(left) if not name.startswith("outside")]
        return [f"seed {self.seed}: {one}" for one in said]

    def _everything(self) -> list[dict[str, Any]]:
        inside = [*self.api.list("pods", self.namespace), *self.api.list("jobs", self.namespace)]
        return inside + self.api.list("pods", self.elsewhere)


Platform = Callable[..., KubernetesPlatform]


class Careless(KubernetesPlatform):
    """Deletes by name, as most tools do: without conditions."""

    async def _act(
        self, kind: Kind, action: Action, fresh: Subject, looked: ReadObject
    ) -> Accepted | Changed | Refused | Unknown:
        version = await self._discovery.served(kind)
        assert isinstance(version, str)
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        await self._cluster.delete(path, {"propagationPolicy": "Background"})
        return Accepted()


class Credulous(KubernetesPlatform):
    """Takes the answer to a delete for its outcome."""

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        if ref.uid in self._removals._following:
            return Gone(ref, self._clock.now())
        return await super().read(ref)


async def story(world: World, between: Proxy, plane: ControlPlane, platform: Platform, passes: int) -> list[str]:
    """Passes through faults, then two without."""
    await asyncio.to_thread(world.build)
    between.rule = world.rule
    harness = Harness(
        plane.kubeconfig(server=between.address),
        world.namespace,
        classes={"cluster": {"grace": "0s"}},
        kubernetes={"requests": 1000, "burst": 1000, "page": 3},
    )
    harness.platform = platform(harness.cluster, harness.clock, harness.book.policy)
    world.lines = harness.ledger.lines
    harness.later(minutes=61)
    listening = asyncio.create_task(_listen(harness.platform)) if world.seed % 2 else None
    for _ in range(passes):
        await _pass(harness)
        harness.later(minutes=21)  # what came to nothing is tried again
    said = await asyncio.to_thread(world.check, all_gone=False)
    world.faults = False
    for _ in range(2):
        await _pass(harness)
        harness.later(minutes=21)
    if listening is not None:
        assert not listening.done(), listening.result()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    return said or await asyncio.to_thread(world.check, all_gone=True)


async def _pass(harness: Harness) -> PassReport:
    return await reclaim(harness.keeper, harness.platform, harness.book)


async def _listen(platform: KubernetesPlatform) -> None:
    async for _ in platform.wake():
        pass


@dataclass
class Told:
    problems: list[str]
    faults: Counter[str]
    results: Counter[Result]


def tell(
    plane: ControlPlane,
    new_namespace: Callable[..., str],
    seeds: Sequence[int],
    platform: Platform = KubernetesPlatform,
    passes: int = 2,
    rule: Callable[[World], Callable[[Asked], Fault | None]] | None = None,
) -> Told:
    elsewhere = new_namespace("elsewhere")
    with ExitStack() as stack:
        worlds = [World(plane.api, new_namespace(), seed, elsewhere=elsewhere) for seed in seeds]
        proxies = [stack.enter_context(proxy(plane)) for _ in worlds]

        async def all_of_them() -> list[list[str]]:
            return await asyncio.gather(
                *(story(world, one, plane, platform, passes) for world, one in zip(worlds, proxies, strict=True))
            )

        if rule is not None:
            for world in worlds:
                world.rule = rule(world)  # type: ignore[method-assign]
        problems = [one for said in asyncio.run(all_of_them()) for one in said]
        lines = [line for world in worlds for line in world.lines if isinstance(line, Closed)]
        return Told(
            problems,
            Counter(what for one in proxies for what, _ in one.done),
            Counter(line.result for line in lines),
        )


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.timeout(600)
# Hundreds of requests are cancelled by their deadline, some while they connect. Rarely (seen once in three whole runs)
# such a connection was closed by the garbage collector only; the pool of the client does not know it any more.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_nothing_is_lost_and_nothing_is_claimed(plane: ControlPlane, new_namespace: Callable[..., str]) -> None:
    """No running, held or foreign thing goes, nothing without an intent; reclaimed is gone; and in the end all that is
    due goes."""
    before = open_descriptors()
    told = tell(plane, new_namespace, SEEDS)
    gc.collect()  # here, and not in a test after this one
    assert open_descriptors() <= before
    assert told.problems == []
    if len(SEEDS) > 1:
        assert {"Say", "Swallow", "Lose", "Cut", "Late", "First", "Jumble"} == told.faults.keys()
        assert told.results[Result.RECLAIMED] >= 5 * len(SEEDS) - told.results[Result.UNKNOWN], told.results
        assert told.results[Result.CHANGED] >= 2 * len(SEEDS), told.results
        assert told.results[Result.STILL_THERE] > 0, told.results


def test_the_checker_finds_deletes_without_conditions(plane: ControlPlane, new_namespace: Callable[..., str]) -> None:
    told = tell(plane, new_namespace, range(2), Careless, passes=1, rule=only_changes)
    assert any("anew" in one and "had to stay" in one for one in told.problems), told.problems
    assert any("held-late" in one and "had to stay" in one for one in told.problems), told.problems
    assert any("without an open intent" in one for one in told.problems), told.problems


def only_changes(world: World) -> Callable[[Asked], Fault | None]:
    """Without faults: what others do is enough."""
    world.faults = False
    return world.rule


def test_the_checker_finds_a_claim_that_is_not_so(plane: ControlPlane, new_namespace: Callable[..., str]) -> None:
    def lies(world: World) -> Callable[[Asked], Fault | None]:
        return lambda asked: Swallow() if asked.method == "DELETE" else None

    told = tell(plane, new_namespace, range(1), Credulous, passes=1, rule=lies)
    assert any("called reclaimed and is there" in one for one in told.problems), told.problems
