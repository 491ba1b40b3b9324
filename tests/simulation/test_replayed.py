"""What the engine did on a simulated fleet, replayed from what it recorded: the same stops, at the same passes.

The proof that a backtest decides as the daemon does, from its records alone. High demand is switched off: the journal
does not have when GPUs were scarce.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec
import pytest

from gpukeeper.config.load import load_text
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.schedule import opening
from gpukeeper.ledger.in_memory import InMemoryLedger
from gpukeeper.lifecycle.backtest.replay import Passes, replay
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Decided, Event, Held, Intended, Noticed, Passed, Vanished, WarningSent
from gpukeeper.model.policy import Demand, Policy
from gpukeeper.model.series import Series, Signal
from gpukeeper.model.subject import State
from gpukeeper.model.trace import RecordedRun, RecordedSeries, TraceTime
from gpukeeper.platforms.simulated.clock import VirtualLoop, run_virtually
from gpukeeper.platforms.simulated.fleet import demo_world
from gpukeeper.platforms.simulated.week import owners_hold, simulated_keeper
from gpukeeper.wiring.demo import DEMO_POLICY

NEVER_SCARCE = Demand(above=2.0, below=1.9)
POLICY = msgspec.structs.replace(
    load_text(DEMO_POLICY + "budget: {per_pass: 1000, per_hour: 1000}\n", "policy").policy, demand=NEVER_SCARCE
)
SIGNALS = frozenset(map(str, Signal))
STOPPING = ("idle", "max_runtime")
Stops = dict[str, tuple[datetime, str]]


class Recorded(msgspec.Struct):
    """What is left when the daemon has run: its journal and its signals."""

    begin: datetime
    end: datetime
    lines: list[Event]
    series: dict[str, tuple[Series, ...]]


def lived(seed: int, length: timedelta) -> Recorded:
    loop = VirtualLoop()
    world = demo_world(seed, loop)
    keeper, book = simulated_keeper(world), Rulebook(POLICY)
    begin = world.clock.now()

    async def live() -> dict[str, tuple[Series, ...]]:
        stop = asyncio.Event()
        loop.call_later(length.total_seconds(), stop.set)
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(Watch(keeper, lambda: book, stop, lambda report: None)))
            group.create_task(owners_hold(keeper, book, world, stop))
        keys = sorted({line.ref.key for line in ledger.lines if isinstance(line, Noticed) and line.ref is not None})
        return dict(await keeper.signals.series(keys, begin, world.clock.now()))

    ledger = keeper.ledger
    assert isinstance(ledger, InMemoryLedger)
    series = run_virtually(live(), loop)
    return Recorded(begin, world.clock.now(), list(ledger.lines), series)


def stopped(lines: Sequence[Event]) -> Stops:
    found: Stops = {}
    for line in lines:
        if not isinstance(line, Closed) or line.ref is None or line.rule not in STOPPING:
            continue
        if line.action is Action.STOP and line.result is Result.RECLAIMED:
            found.setdefault(line.ref.key, (line.at, line.rule))
    return found


def replayed(recorded: Recorded, policy: Policy) -> Stops:
    found: Stops = {}
    for key, series in recorded.series.items():
        lines = [line for line in recorded.lines if line.ref is not None and line.ref.key == key]
        first = next((line for line in lines if isinstance(line, Noticed) and line.state is State.RUNNING), None)
        devices = tuple(sorted({one.device for one in series if one.signal is Signal.GPU}))
        if first is None or first.ref is None or not devices:
            continue
        run = RecordedRun(
            name=first.ref.name,
            started=first.started or first.at,
            ended=None,
            devices=devices,
            series=tuple(_recorded(one) for one in series if one.missing is None),
            owner=first.owner,
            class_=first.class_ or "unknown",
            platform=first.ref.platform,
            place=first.ref.place,
            namespace=first.ref.namespace,
            kind=first.ref.kind,
            holds=tuple(line.hold for line in lines if isinstance(line, Held)),
            absent=tuple(one.signal for one in series if one.missing is not None),
            reachable=not any(isinstance(line, WarningSent) and not line.delivered for line in lines),
        )
        passes = [line.at for line in recorded.lines if _is_pass(line, run)]
        own = [line.at for line in lines if isinstance(line, Decided | WarningSent | Intended)]
        times = Passes(policy.schedule.every, opening(policy.schedule), sorted({*passes, *own}))
        time = TraceTime(first.at, _end(first, lines, recorded.end))
        stop = replay(run, Rulebook(policy), times, time, SIGNALS).stop
        if stop is not None:
            found[key] = (stop.at, stop.rule)
    return found


def _recorded(one: Series) -> RecordedSeries:
    return RecordedSeries(one.signal, one.device, one.start, array("f", one.minutes), one.slice)


def _is_pass(line: Event, run: RecordedRun) -> bool:
    return isinstance(line, Passed) and (line.platform, line.place) == (run.platform, run.place)


def _end(first: Noticed, lines: Sequence[Event], end: datetime) -> datetime:
    """Just after it was stopped or removed, or when it was seen to have ended."""
    for line in lines:
        if isinstance(line, Closed) and line.action in (Action.STOP, Action.REMOVE):
            return line.at + timedelta(microseconds=1)
        if isinstance(line, Vanished) or (isinstance(line, Noticed) and line is not first):
            return line.at
    return end


@pytest.mark.parametrize("seed", [7, 9])
def test_a_replay_of_the_records_stops_the_same_work_at_the_same_pass_by_the_same_rule(seed: int) -> None:
    recorded = lived(seed, timedelta(days=2))
    stops = stopped(recorded.lines)
    assert len(stops) > 10
    assert replayed(recorded, POLICY) == stops


def test_a_replay_under_another_policy_differs() -> None:
    """So that the test above could fail."""
    recorded = lived(9, timedelta(days=1))
    longer = {name: msgspec.structs.replace(one, idle=None) for name, one in POLICY.classes.items()}
    stops = stopped(recorded.lines)
    assert stops
    assert replayed(recorded, msgspec.structs.replace(POLICY, classes=longer)) != stops
