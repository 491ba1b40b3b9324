"""`gpukeeper top`: GPUs, holders, utilization and next actions, live on the whole screen. Changes nothing.

Data is gathered in a thread of its own, so that a driver or platform that hangs freezes neither keys nor screen.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from gpukeeper.engine.view import observe_fleet
from gpukeeper.interfaces.cli.plan import read_daemon_plan
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal.messages import overwrites
from gpukeeper.interfaces.terminal.session import narrowed, opened, span
from gpukeeper.interfaces.terminal.top_screen import ENDED, INTERRUPTED, QUIT, Age, Display, Screen, picture, scrolled
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.views.fleet import SORTS, TopView, top_view, with_daemon_plan, with_notes

LEAST, REDRAW = 0.5, 1.0  # seconds
LEAVE = 1.0  # seconds that a refresh in progress gets to end; then the program exits without it
LATE = timedelta(seconds=10)
Gather = Callable[[], TopView]


def top(
    policy: o.PolicyFile = None,
    platform: o.OnPlatform = None,
    owner: o.Owner = None,
    every: Annotated[str, typer.Option("--every", metavar="DURATION", help="Refresh interval.")] = "2s",
    sort: Annotated[
        str, typer.Option("--sort", metavar="COLUMN", help="Initial sort order: gpu, use, memory, owner or next.")
    ] = "gpu",
    demo: Annotated[
        bool, typer.Option("--demo", help="Show a simulated fleet; each refresh advances it by ten minutes.")
    ] = False,
) -> None:
    """Show all GPUs live, with their owners and next actions. Press q to quit."""
    if sort not in SORTS:
        raise UsageError(f'--sort "{sort}" is not one of: {", ".join(SORTS)}')
    pause = span(every, "--every")
    assert pause is not None
    if not _is_terminal():
        raise UsageError(
            "top needs a terminal. Without one: gpukeeper observe --gpus; for programs: gpukeeper observe --gpus --json"
        )
    screen = Screen()
    source = _demo if demo else lambda: _own(policy, platform, narrowed(Narrow(owner=owner)))
    gathering = Gathering(source, max(LEAST, pause.total_seconds()), screen.wake)
    with screen.opened():
        gathering.start()
        code = _run(screen, gathering, Display(sort))
    gathering.leave(code)
    raise typer.Exit(code)


def _is_terminal() -> bool:
    return sys.stdin.isatty() and overwrites(sys.stdout)


def _run(screen: Screen, gathering: Gathering, display: Display) -> int:
    """Until a key or signal ends it: the exit code."""
    while True:
        view = gathering.view()
        screen.draw(picture(view, display, gathering.age(), *screen.size))
        for event in screen.wait(REDRAW):
            if event in (QUIT, INTERRUPTED):
                return 0
            if event == ENDED:
                return 1
            if event == "s":
                display = display._replace(sort=SORTS[(SORTS.index(display.sort) + 1) % len(SORTS)], first=0)
            elif event == "r":
                display = display._replace(reverse=not display.reverse, first=0)
            display = scrolled(display, event, len(view.gpus) if view is not None else 1)


@dataclass
class Gathering:
    """A thread that gathers again and again. Its last result, and how old that is, can be read at any time."""

    source: Callable[[], AbstractContextManager[Gather]]
    every: float
    wake: Callable[[], None]
    _found: tuple[TopView, float] | None = None  # with the steady time at which it was complete
    _begun: float | None = None  # steady time; None: it rests
    _problem: str = ""
    _failed: BaseException | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._gather, name="top", daemon=True)
        self._thread.start()

    def view(self) -> TopView | None:
        """The newest. Raises what kept the first one from being gathered."""
        if self._failed is not None:
            raise self._failed
        return None if self._found is None else self._found[0]

    def age(self) -> Age:
        now, found, begun = time.monotonic(), self._found, self._begun
        data = None if found is None else timedelta(seconds=now - found[1])
        gathering = None if begun is None else timedelta(seconds=now - begun)
        return Age(data, gathering, gathering is not None and gathering >= LATE, self._problem)

    def leave(self, code: int) -> None:
        """A call that hangs must not keep the program from ending; the terminal is restored already."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(LEAVE)
            if self._thread.is_alive():
                os._exit(code)

    def _gather(self) -> None:
        try:
            with self.source() as gather:
                while not self._stop.is_set():
                    took = self._once(gather)
                    self._stop.wait(max(self.every, took))  # at most half of the time is spent gathering
        except BaseException as problem:  # raised where the screen is
            self._failed = problem
            self.wake()

    def _once(self, gather: Gather) -> float:
        begun = self._begun = time.monotonic()
        try:
            self._found, self._problem = (gather(), time.monotonic()), ""
        except KeeperError as problem:
            if self._found is None:
                raise
            self._problem = str(problem).partition("\n")[0]
        self._begun = None
        self.wake()
        return time.monotonic() - begun


@contextmanager
def _own(policy: Path | None, platform: str | None, narrow: Narrow) -> Iterator[Gather]:
    """What is seen from here, joined with what the daemon sends to users who may not read its ledger."""
    notes: list[str] = []
    with opened(policy, write=False, only=platform, quiet=False, tell=notes.append) as session:

        async def look() -> TopView:
            found = await observe_fleet(session.keeper, session.book)
            paused = await session.ledger.paused()
            return top_view(found, session.book, narrow, session.keeper.clock.now(), paused)

        def gather() -> TopView:
            view, by_daemon = asyncio.run(look()), read_daemon_plan(policy, platform, narrow)
            return with_notes(view, notes) if by_daemon is None else with_daemon_plan(view, by_daemon)

        yield gather


@contextmanager
def _demo() -> Iterator[Gather]:
    from gpukeeper.wiring.demo import simulated_fleet  # 200 ms, which help and completion do not need

    with simulated_fleet() as fleet:
        yield lambda: top_view(fleet.snapshot(), fleet.book, Narrow(), fleet.now())
