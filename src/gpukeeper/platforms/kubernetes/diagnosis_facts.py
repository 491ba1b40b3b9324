"""Everything that was read about one object, to explain why it still exists."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.controller_state import ControllerReport
from gpukeeper.platforms.kubernetes.kinds.ttl import NOT_CHECKED
from gpukeeper.platforms.kubernetes.tree import Climb, Descendants, TreeNode


class RuntimeTtl(msgspec.Struct, frozen=True):
    """A TTL in the runtime that it is made from."""

    runtime: str
    seconds: int


class NoRuntime(msgspec.Struct, frozen=True):
    """It names a runtime that does not exist."""

    kind: str
    name: str
    namespaced: bool


class DiagnosisFacts(msgspec.Struct, frozen=True, kw_only=True):
    node: TreeNode
    top: TreeNode  # the root, as far as it could be climbed to; may be the node itself
    climb: Climb
    below: Descendants  # of the top
    reports: Mapping[str, ControllerReport]  # of controllers, by their name
    now: datetime
    runtime: RuntimeTtl | NoRuntime | Unknown | None = None
    ttl_field: bool | Unknown = NOT_CHECKED  # whether the served version of a kind has one, where releases differ
    events: tuple[str, ...] | Unknown = ()
    clashes: Mapping[str, tuple[str, ...] | Unknown] = {}  # by controller

    @property
    def is_top(self) -> bool:
        return self.node.meta.uid == self.top.meta.uid
