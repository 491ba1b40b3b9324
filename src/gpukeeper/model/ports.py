"""Protocols that more than one layer needs: the time, measurements, where measurements are kept, and bytes on disk,
by which nothing is decided and which no pass reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from gpukeeper.model.series import Sample, Series
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown


class ImageBytes(msgspec.Struct, frozen=True):
    """`own`: without layers that other images have, too."""

    name: str
    own: int | Unknown


class WorkloadBytes(msgspec.Struct, frozen=True):
    """`written`: outside of volumes. `log`: None if it has none."""

    name: str
    written: int | Unknown
    log: int | Unknown | None


class StorageBytes(msgspec.Struct, frozen=True, kw_only=True):
    """One place at one time. `layers`: of all images, each layer once. `cache`: of image builds; None: has none."""

    at: datetime
    layers: int | Unknown
    images: tuple[ImageBytes, ...] = ()
    workloads: tuple[WorkloadBytes, ...] = ()
    cache: int | None = None


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
