"""Whether steps may be taken at all. Checked before each step; a pause by users is in the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STOPPING = "gpukeeper is being stopped"


@dataclass
class Permission:
    stopping: bool = False  # no new step begins; the one in progress is finished
    why_not: Callable[[], str | None] = lambda: None  # a sentence while another instance acts instead of this one
