"""Protocols that more than one layer needs: the time, measurements, and where measurements are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

from gpukeeper.model.series import Sample, Series
from gpukeeper.model.storage import StorageBytes
from gpukeeper.model.subject import Subject


class Clock(Protocol):
    def now(self) -> datetime:
        """Aware, UTC."""
        ...


class Meter(Protocol):
    async def read(self, subjects: Sequence[Subject]) -> Sequence[Sample]: ...


class StorageReader(Protocol):
    """A place with images and logs. Its reads may take minutes: no pass waits for one."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> str: ...
    async def read_storage(self) -> StorageBytes:
        """PlatformError: it could not be read."""
        ...


class Signals(Protocol):
    async def add(self, samples: Sequence[Sample]) -> None: ...
    async def series(
        self, keys: Sequence[str], since: datetime, until: datetime
    ) -> Mapping[str, tuple[Series, ...]]: ...
