"""Whether steps may be taken at all. Asked before each step; a pause of people is in the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STOPPING = "gpukeeper is being stopped"


@dataclass
class Permission:
    stopping: bool = False  # no step begins any more; the one under way is finished
    why_not: Callable[[], str | None] = lambda: None  # a sentence while another instance acts instead of this one
