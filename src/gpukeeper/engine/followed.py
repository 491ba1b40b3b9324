"""Removals that a platform accepted from this process and that take their time: what each of them gives back.

Bounded: by the open intents of each place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gpukeeper.model.identity import PlaceKey, Ref
from gpukeeper.model.unknown import Unknown


class FollowedRemoval(NamedTuple):
    ref: Ref
    gpus: int | Unknown
    size: int | Unknown


@dataclass
class Followed:
    _by_step: dict[str, FollowedRemoval] = field(default_factory=dict)

    def note(self, step: str, removal: FollowedRemoval) -> None:
        self._by_step[step] = removal

    def take(self, step: str) -> FollowedRemoval | None:
        return self._by_step.pop(step, None)

    def keep_only(self, place: PlaceKey, steps: Collection[str]) -> None:
        """Those whose intents are still open; another process may have settled some."""
        self._by_step = {
            step: one
            for step, one in self._by_step.items()
            if (one.ref.platform, one.ref.place) != place or step in steps
        }

    def keys(self) -> Iterable[str]:
        return [one.ref.key for one in self._by_step.values()]
