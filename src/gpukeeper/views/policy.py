"""The policy in effect: every value with its origin, and the sentence."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.model.policy import Mode


class PolicySetting(msgspec.Struct, frozen=True):
    setting: str
    value: Any
    origin: str


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
    """`settings`: empty for readers who may see the sentence only."""

    source: str
    digest: str
    mode: Mode
    sentence: str
    warnings: tuple[str, ...] = ()
    settings: tuple[PolicySetting, ...] = ()
