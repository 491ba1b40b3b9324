"""A message to people, its audience, and whether it was delivered. Channels deliver it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

from gpukeeper.model.subject import Subject


class Audience(StrEnum):
    OWNER = "owner"
    ADMIN = "admin"


class MessageKind(StrEnum):
    WARNING = "warning"  # to an owner: what will happen, when, and how to prevent it
    LOSS = "loss"  # to an owner: something was lost
    BREAKER = "breaker"
    COMPLAINT = "complaint"  # about a workload
    GPU = "gpu"  # it was not given back clean
    OVERDUE = "overdue"  # due, and mode plan does nothing about it
    FAILURE = "failure"  # passes fail or do not happen


class Message(msgspec.Struct, frozen=True, kw_only=True):
    kind: MessageKind
    about: str  # path of a workload, a place or a GPU
    text: str
    at: datetime
    key: str = ""  # messages to admins with the same kind and key are one message that repeats
    owner: str | None = None
    subject: Subject | None = None  # what it is about, while it exists


class Delivered(msgspec.Struct, frozen=True):
    """A person can read it now. Accepted by a queue or written to a log file is enough for admins, never for owners."""


class NotDelivered(msgspec.Struct, frozen=True):
    why: str
