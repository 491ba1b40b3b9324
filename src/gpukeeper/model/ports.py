"""Protocols that more than one layer needs (the time, measurements, bytes on disk), and messages to people: to whom
each goes, and whether it was delivered. Channels deliver them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Protocol

import msgspec

from gpukeeper.model.series import Sample, Series
from gpukeeper.model.subject import Ref, Subject
from gpukeeper.model.unknown import Unknown


class MessageKind(StrEnum):
    NOTICE = "notice"  # to an owner: nothing follows from it
    WARNING = "warning"  # to an owner: what will happen, when, and how to prevent it
    STOPPED = "stopped"  # to an owner: it was stopped, and how to bring it back
    LOSS = "loss"  # to an owner: something was lost
    BREAKER = "breaker"
    COMPLAINT = "complaint"  # about a workload
    GPU = "gpu"  # it was not given back clean
    ACCEPTANCE = "acceptance"  # an acceptance run failed
    OVERDUE = "overdue"  # due, and mode plan does nothing about it
    FAILURE = "failure"  # passes fail or do not happen
    TEST = "test"  # of `gpukeeper notify test`

    @property
    def category(self) -> Category:
        """What people see first of a message."""
        return _CATEGORIES.get(self, Category.ALERT)


class Category(StrEnum):
    NOTICE = "NOTICE"
    WARNING = "WARNING"
    ALERT = "ALERT"
    STOPPED = "STOPPED"


_CATEGORIES = {
    MessageKind.NOTICE: Category.NOTICE,
    MessageKind.TEST: Category.NOTICE,
    MessageKind.WARNING: Category.WARNING,
    MessageKind.STOPPED: Category.STOPPED,
}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    kind: MessageKind
    about: str  # path of a workload, a place or a GPU
    text: str
    at: datetime
    key: str = ""  # messages to admins with the same kind and key are one message that repeats
    owner: str | None = None
    subject: Subject | None = None  # what it is about, while it exists
    ref: Ref | None = None  # the workload that it is about: its page is linked
    link: str = ""  # of that page; empty: there is none
    host: str = ""  # where commands in the text work; empty: not about a workload
    until: datetime | None = None  # it is of no use any more after this


class Delivered(msgspec.Struct, frozen=True):
    """A person can read it now: it is on a terminal, or the mail server or chat service of the recipient has accepted
    it. Written to a log file or handed to another program is enough for admins, never for owners."""


class NotDelivered(msgspec.Struct, frozen=True):
    why: str
    transient: bool = False  # another attempt may succeed
    recipient: bool = False  # the channel works, and only this recipient cannot be reached


class Delivery(msgspec.Struct, frozen=True):
    """What became of one message to one person, over all channels."""

    channels: tuple[str, ...] = ()  # the names of those that delivered it
    failed: tuple[str, ...] = ()  # of the others: name and reason

    @property
    def why_not(self) -> str:
        return "; ".join(self.failed)


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
