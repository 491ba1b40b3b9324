"""Everything that was read about one object, to explain why it still exists."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.controller_state import ControllerReport
from gpukeeper.platforms.kubernetes.kinds.kind import NoRuntime, RootFacts, RuntimeTtl, TreeNode
from gpukeeper.platforms.kubernetes.kinds.ttl import NOT_CHECKED
from gpukeeper.platforms.kubernetes.tree import Climb, Descendants


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

    @property
    def of_top(self) -> RootFacts:
        """What its kind needs to explain why the top still exists."""
        report = self.reports.get(self.top.kind.controller.name)
        return RootFacts(
            root=self.top,
            children=self.below.of(self.top.meta.uid),
            runtime=self.runtime,
            release=None if report is None else report.version,
            now=self.now,
        )
