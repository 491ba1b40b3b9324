"""What the engine did on a simulated fleet, replayed from its ledger: the same stops, at the same passes.

The proof that `backtest ledger` decides as the daemon does, from its records alone: with GPUs that become scarce, a
budget that defers, and a breaker that opens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from gpukeeper.backtest.replays import Compared, compare_together
from gpukeeper.config.load import load_text
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.ledger.in_memory import InMemoryLedger, InMemorySignals
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.signals import open_signals
from gpukeeper.lifecycle.replay import GIVEN
from gpukeeper.lifecycle.replay_outcome import Afterwards, Judging
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Event, Passed
from gpukeeper.model.policy import Policy
from gpukeeper.model.series import Sample
from gpukeeper.platforms.simulated.demo import owners_hold, simulated_keeper
from gpukeeper.platforms.simulated.users import demo_world
from gpukeeper.platforms.simulated.world import VirtualLoop, run_virtually
from gpukeeper.traces.recorded import RecordedTrace
from gpukeeper.wiring.demo import DEMO_POLICY

pytestmark = pytest.mark.slow

STOPPING = ("idle", "max_runtime")
Stops = dict[str, tuple[datetime, str]]
WIDE = "budget: {per_pass: 1000, per_hour: 1000}\n"
TIGHT = "budget: {per_pass: 1, per_hour: 3}\n"
BREAKS = "budget: {per_pass: 1, per_hour: 2}\nbreaker: {running: 1%, floor: 1}\n"


class _Copied(InMemorySignals):
    """Also keeps every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sample] = []

    async def add(self, samples: Sequence[Sample]) -> None:
        self.samples += samples
        await super().add(samples)


def lived(seed: int, length: timedelta, policy: Policy, path: Path) -> list[Event]:
    """The journal of a daemon. Its ledger is at `path`."""
    loop = VirtualLoop()
    world = demo_world(seed, loop)
    signals = _Copied()
    keeper, book = replace(simulated_keeper(world), signals=signals), Rulebook(policy)

    async def live() -> None:
        stop = asyncio.Event()
        loop.call_later(length.total_seconds(), stop.set)
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(Watch(keeper, lambda: book, stop, lambda report: None)))
            group.create_task(owners_hold(keeper, book, world, stop))

    run_virtually(live(), loop)
    assert isinstance(keeper.ledger, InMemoryLedger)
    lines = list(keeper.ledger.lines)
    asyncio.run(_store(path, lines, signals.samples))
    return lines


async def _store(path: Path, lines: Sequence[Event], samples: Sequence[Sample]) -> None:
    ledger = open_ledger(path, write=True)
    await ledger.append(lines)
    ledger.close()
    signals = open_signals(path, write=True)
    await signals.add(samples)
    signals.close()


def stopped(lines: Sequence[Event]) -> Stops:
    found: Stops = {}
    for line in lines:
        if not isinstance(line, Closed) or line.ref is None or line.rule not in STOPPING:
            continue
        if line.action is Action.STOP and line.result is Result.RECLAIMED:
            found.setdefault(line.ref.name, (line.at, line.rule))
    return found


def replayed(path: Path, policy: Policy) -> tuple[Compared, Stops]:
    found = compare_together(RecordedTrace(path), policy, (GIVEN,), Judging())
    return found, {one.name: (one.stop.at, one.stop.rule) for one in found.runs[GIVEN] if one.stop is not None}


def _policy(limits: str) -> Policy:
    # A replay knows of a run only whether all its warnings were delivered, not when an owner was reached later.
    return load_text(DEMO_POLICY.replace("require_delivery: true", "require_delivery: false") + limits, "policy").policy


@pytest.mark.parametrize(("seed", "limits"), [(7, WIDE), (9, TIGHT), (3, TIGHT), (7, BREAKS)])
def test_a_replay_of_the_records_stops_the_same_work_at_the_same_pass_by_the_same_rule(
    seed: int, limits: str, private: Path
) -> None:
    policy = _policy(limits)
    lines = lived(seed, timedelta(days=2), policy, private / "ledger.db")
    passes, stops = [line for line in lines if isinstance(line, Passed)], stopped(lines)
    assert len(stops) > 5
    assert {line.scarce for line in passes} == {False, True}
    found, again = replayed(private / "ledger.db", policy)
    assert again == stops
    assert bool(found.limits) == any(line.deferred for line in passes) == (limits != WIDE)
    opened = any(one.opened for one in found.limits.values())
    assert opened == any(line.breaker is not None for line in passes) == (limits == BREAKS)
    assert not found.unsettled


def test_what_gpukeeper_did_stop_is_censored_because_nobody_knows_what_it_would_have_done(private: Path) -> None:
    policy = _policy(WIDE)
    lived(9, timedelta(days=1), policy, private / "ledger.db")
    found, _stops = replayed(private / "ledger.db", policy)
    judged = [one.stop.afterwards for one in found.runs[GIVEN] if one.stop is not None]
    assert judged
    assert set(judged) == {Afterwards.CENSORED}


def test_a_replay_under_another_policy_differs(private: Path) -> None:
    """So that the tests above could fail."""
    policy = _policy(WIDE)
    stops = stopped(lived(9, timedelta(days=1), policy, private / "ledger.db"))
    longer = {name: msgspec.structs.replace(one, idle=None) for name, one in policy.classes.items()}
    assert stops
    assert replayed(private / "ledger.db", msgspec.structs.replace(policy, classes=longer))[1] != stops
    never = msgspec.structs.replace(policy.demand, idle_factor=1.0)
    assert replayed(private / "ledger.db", msgspec.structs.replace(policy, demand=never))[1] != stops


@pytest.fixture
def private(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path
