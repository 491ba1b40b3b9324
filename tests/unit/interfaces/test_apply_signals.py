"""Ctrl-C during `apply`: no step begins after it, also where nothing of the step in progress had to wait."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from gpukeeper.interfaces.cli.apply import SIGNALS, Progress

NO_STEPS: Any = SimpleNamespace(steps=())


@pytest.mark.parametrize("number", SIGNALS)
def test_no_step_begins_after_a_signal_although_the_event_loop_had_no_turn(number: signal.Signals) -> None:
    keeper: Any = SimpleNamespace(permission=SimpleNamespace(stopping=False))
    progress = Progress(keeper, quiet=True)

    async def work() -> None:
        with progress.interruptible():
            progress.begin(NO_STEPS)
            os.kill(os.getpid(), number)
            assert keeper.permission.stopping
            assert not progress.interrupted
            for _ in range(3):
                await asyncio.sleep(0)
            assert progress.interrupted, "and the person is answered"

    before = [signal.getsignal(one) for one in SIGNALS]
    asyncio.run(work())
    assert [signal.getsignal(one) for one in SIGNALS] == before
