"""Where the dashboard gets what it shows, and whom it asks: one daemon over its link, or the copy of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import Answer, Condition, Credentials, Demo, SiteSettings
from gpukeeper.views.live import Delta, MachineView


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`key`: signs cookies. `anonymous`: reading needs no login."""

    key: bytes
    anonymous: bool
    session_seconds: int
    version: str
    demo: Demo | None = None
    site: SiteSettings = SiteSettings()
    fleet: bool = False  # many machines, over their copy


Listener = Callable[[str, Delta, MachineView], None]


class Source(Protocol):
    @property
    def settings(self) -> SourceSettings: ...
    @property
    def revocations(self) -> int:
        """Another number than before: a login was revoked since, and whose login it is must be asked again."""
        ...

    @property
    def machines(self) -> Mapping[str, MachineView]:
        """The newest view of each, by name. Empty until the first arrives."""
        ...

    @property
    def condition(self) -> Condition: ...

    async def ask(self, credentials: Credentials, machine: str, request: Request) -> Answer:
        """Raises SourceLost when no answer can come."""
        ...

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls it with every change, until the returned function is called."""
        ...

    async def closed(self) -> None:
        """Returns when nothing can come any more."""
        ...


class SourceLost(Exception):
    """The daemon does not answer."""


class Machines:
    """The newest view of each machine, and who wants to know what changes."""

    def __init__(self) -> None:
        self.views: dict[str, MachineView] = {}
        self._listeners: set[Listener] = set()
        self.arrived = asyncio.Event()

    def change(self, delta: Delta, after: MachineView) -> None:
        self.views[after.machine] = after
        self.arrived.set()
        for listener in tuple(self._listeners):
            listener(after.machine, delta, after)

    def listen(self, listener: Listener) -> Callable[[], None]:
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)
