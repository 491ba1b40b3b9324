"""The policy in effect: every value with its origin, the sentence, and what the last change changed."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from gpukeeper.model.event import PolicyChange
from gpukeeper.model.policy import Mode


class PolicySetting(msgspec.Struct, frozen=True):
    setting: str
    value: Any
    origin: str


class LastPolicyChange(msgspec.Struct, frozen=True, kw_only=True):
    """When another policy came into effect, and what differs. `hidden`: how many differ that only admins see."""

    at: datetime
    before: str  # its digest
    digest: str
    changes: tuple[PolicyChange, ...]
    hidden: int = 0


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
    """`settings`: empty for readers who may see the sentence only; they get no `change` either. `change` None: none
    since `recorded_since`. That None: nothing is recorded yet."""

    source: str
    digest: str
    mode: Mode
    sentence: str
    warnings: tuple[str, ...] = ()
    settings: tuple[PolicySetting, ...] = ()
    recorded_since: datetime | None = None
    change: LastPolicyChange | None = None
