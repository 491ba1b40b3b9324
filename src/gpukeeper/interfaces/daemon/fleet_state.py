"""What the web server of a fleet knows of every machine: its last view, and when the machine confirmed it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec

from gpukeeper.ledger.copy.watcher import MachineHead
from gpukeeper.views.fleet_copy import aged, read_view
from gpukeeper.views.live import MachineView

LONGEST = 100 * 365 * 86400.0  # seconds of an age
JITTER = timedelta(seconds=2)
OLD = timedelta(minutes=2)  # a view that its machine did not confirm for longer is not shown as present


class FleetState:
    """What is known of every machine. Implements Observer: the watcher's thread calls it, the event loop reads it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Callable[[str], None]) -> None:
        self._loop, self._log = loop, log
        self.views: dict[str, MachineView] = {}  # as last read
        self.seen: dict[str, datetime] = {}  # when each of them was last confirmed, by our clock
        self.silent: dict[str, str] = {}  # machines without a view, and why
        self.problem = "it was not read yet"
        self.changed = asyncio.Event()
        self.on_replied: Callable[[int], None] = lambda request: None
        self._unreadable: dict[str, str] = {}
        self._shown: dict[str, tuple[tuple[MachineView, datetime, bool], MachineView]] = {}  # and what it was made of

    def on_round(self, heads: tuple[MachineHead, ...]) -> None:
        self._later(lambda: self._round(heads, datetime.now(UTC)))

    def on_view(self, machine: str, body: str | None) -> None:
        try:
            view = None if body is None else read_view(machine, body)
            why = "" if view is not None else "its view is too large"
        except (msgspec.MsgspecError, ValueError) as problem:
            view, why = None, f"its view could not be read ({problem}); is it another version of gpukeeper?"
        if why:
            self._log(f"{machine}: {why}")
        self._later(lambda: self._view(machine, view, why))

    def on_reply(self, request: int) -> None:
        self._later(partial(self.on_replied, request))

    def on_problem(self, words: str) -> None:
        self._later(lambda: self._problem(words))

    def _later(self, work: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(work)

    def _problem(self, words: str) -> None:
        if words != self.problem:
            self.problem = words
            self.changed.set()

    def _view(self, machine: str, view: MachineView | None, why: str) -> None:
        if view is None:
            self._unreadable[machine] = why
        else:
            self._unreadable.pop(machine, None)
            self.views[machine] = view

    def _round(self, heads: tuple[MachineHead, ...], now: datetime) -> None:
        """A machine that is not in the database any more, or whose view cannot be read, gets older."""
        for one in heads:
            if one.view_ago is not None and one.machine not in self._unreadable:
                self._confirm(one.machine, now - timedelta(seconds=min(one.view_ago, LONGEST)))
        silent = [one for one in heads if one.machine not in self.views or one.machine in self._unreadable]
        self.silent = {one.machine: self._why_silent(one) for one in silent}
        self.changed.set()

    def _confirm(self, machine: str, seen: datetime) -> None:
        """Computed from an age, so that the same moment is a little different each time."""
        if machine not in self.seen or abs(seen - self.seen[machine]) > JITTER:
            self.seen[machine] = seen

    def _why_silent(self, head: MachineHead) -> str:
        if head.machine in self._unreadable:
            return self._unreadable[head.machine]
        if head.seen_ago is None:
            return "it was added to the fleet database and has not connected yet"
        return "it has connected, and has not sent a view yet"

    def present(self, now: datetime) -> dict[str, MachineView]:
        """As they are shown: what is old is marked, with the time of the last confirmation by our clock."""
        found = {}
        for machine, view in self.views.items():
            seen = self.seen.get(machine, view.at)
            made = (view, seen, now - seen > OLD)
            if machine not in self._shown or self._shown[machine][0] != made:
                self._shown[machine] = (made, aged(view, seen) if made[2] else msgspec.structs.replace(view, at=seen))
            found[machine] = self._shown[machine][1]
        return found

    def is_old(self, machine: str, now: datetime) -> bool:
        return machine in self.seen and now - self.seen[machine] > OLD
