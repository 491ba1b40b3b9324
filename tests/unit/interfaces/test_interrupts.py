"""How far an `apply` has come: said now and then while it takes long, and when it is ended the hard way."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from gpukeeper.blocking import SystemClock
from gpukeeper.engine.keeper import Keeper
from gpukeeper.interfaces.cli import apply
from gpukeeper.interfaces.cli.apply import Progress
from gpukeeper.ledger.in_memory import InMemoryEvidence, InMemoryLedger, InMemorySignals
from gpukeeper.model.decision import Action, Plan, Result, Step
from gpukeeper.model.event import Closed
from gpukeeper.notify.messages import Messages
from tests.unit.lifecycle.examples import EVAL, NOW, decision


def plan(steps: int) -> Plan:
    return Plan("digest", NOW, tuple(Step(f"1.{n}", decision(n)) for n in range(steps)))


def closed(result: Result = Result.RECLAIMED) -> Closed:
    told: dict[str, Any] = {"step": "1.1", "action": Action.REMOVE, "rule": "retention", "reason": "over"}
    return Closed(at=NOW, ref=EVAL, result=result, incarnation="run-1", **told)


@pytest.fixture
def keeper() -> Keeper:
    stores = {"ledger": InMemoryLedger(), "signals": InMemorySignals(), "evidence": InMemoryEvidence()}
    return Keeper(platforms=(), notifier=Messages(()), clock=SystemClock(), **stores)  # type: ignore[arg-type]


@pytest.mark.parametrize(("every", "said"), [(0.0, True), (3600.0, False)])
def test_lines_come_only_when_it_takes_long(
    keeper: Keeper, every: float, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(apply, "EVERY", every)

    async def story() -> None:
        run = Progress(keeper, quiet=False)
        run.begin(plan(5))
        run.add(closed())
        run.add(closed(Result.REFUSED))

    asyncio.run(story())
    told = capsys.readouterr()
    assert told.out == "", "not among the results"
    assert ("So far: 2 of 5 steps (1 reclaimed, 1 refused)" in told.err) is said


def test_the_second_signal_ends_it_at_once_and_shows_what_was_done(
    keeper: Keeper, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story(*, acting: bool) -> None:
        run = Progress(keeper, quiet=True)
        with run.interruptible():
            if acting:
                run.begin(plan(5))
                run.add(closed())
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(story(acting=True))
    assert keeper.permission.stopping, "no step begins after the first one"
    assert "Ended after 1 of 5 steps (1 reclaimed). To see the record: gpukeeper ledger list" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(story(acting=False))
    assert capsys.readouterr().err == "", "nothing was changed yet"
