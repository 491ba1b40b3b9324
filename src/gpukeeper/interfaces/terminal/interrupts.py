"""Progress of `apply`: lines while it runs, and what was done when it is interrupted."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gpukeeper.engine.keeper import Keeper
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.model.decision import Plan
from gpukeeper.model.event import Closed, GpuChecked, WarningSent

INTERRUPTED = 130  # exit code
EVERY = 15.0  # seconds between two lines where no terminal shows each step
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Progress:
    def __init__(self, keeper: Keeper, *, quiet: bool) -> None:
        self._keeper, self._quiet = keeper, quiet
        self._steps = 0
        self._acting = False
        self._said = 0.0  # loop time
        self._results: Counter[str] = Counter()
        self.interrupted = False

    def begin(self, plan: Plan) -> bool:
        """From now on something is changed."""
        self._steps += len(plan.steps)
        self._acting, self._said = True, asyncio.get_running_loop().time()
        return True

    def add(self, line: Closed | WarningSent | GpuChecked) -> None:
        self._results[str(getattr(line, "result", "warned"))] += 1
        if self._quiet or line.ref is None:
            return
        show.progress_line(f"{self._results.total()} done: {line.ref.path}")
        now = asyncio.get_running_loop().time()
        if now - self._said >= EVERY:
            self._said = now
            print_message(f"So far: {self.words}")

    @property
    def words(self) -> str:
        parts = ", ".join(f"{count} {result}" for result, count in sorted(self._results.items()))
        return f"{self._results.total()} of {self._steps} steps{f' ({parts})' if parts else ''}"

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The first signal ends it after the steps in progress, the second at once; before the first step, one does."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end() -> None:
            if self._acting and not self.interrupted:
                self.interrupted = self._keeper.permission.stopping = True
                print_message("Stopping after the steps in progress. Press Ctrl-C again to exit at once.")
                return
            self.interrupted = True
            task.cancel()

        for one in SIGNALS:
            loop.add_signal_handler(one, end)
        try:
            yield
        except asyncio.CancelledError:
            if not self.interrupted:
                raise
            if self._acting:
                print_message(f"Ended after {self.words}. To see the record: gpukeeper ledger list")
            raise KeyboardInterrupt from None
        finally:
            for one in SIGNALS:
                loop.remove_signal_handler(one)
