"""The policies of a comparison: the given one, and the same with another idle time and another GPU threshold."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import timedelta

import msgspec

from gpukeeper.model.durations import in_words
from gpukeeper.model.policy import PlaceScope, Policy


class Variant(msgspec.Struct, frozen=True, order=True):
    """None: as in the given policy. `threshold` in percent."""

    window: timedelta | None = None
    threshold: float | None = None

    @property
    def words(self) -> str:
        parts = [] if self.window is None else [f"idle {in_words(self.window)}"]
        parts += [] if self.threshold is None else [f"GPU below {self.threshold:g}%"]
        return ", ".join(parts) or "this policy"


GIVEN = Variant()


def applied(policy: Policy, variant: Variant) -> Policy:
    """The idle time is that of every class that has one. Classes without one stay without."""
    classes = policy.classes
    if variant.window is not None:
        window = variant.window
        classes = {
            name: one if one.idle is None else msgspec.structs.replace(one, idle=window)
            for name, one in classes.items()
        }
    activity = policy.activity
    if variant.threshold is not None:
        activity = msgspec.structs.replace(activity, gpu=variant.threshold)
    return msgspec.structs.replace(policy, classes=classes, activity=activity)


def covering(policy: Policy, platforms: Collection[str]) -> Policy:
    """With a scope that covers all recorded work: a trace of another place is judged, too."""
    return msgspec.structs.replace(policy, scope={name: PlaceScope() for name in platforms})


def grid(windows: Collection[timedelta], thresholds: Collection[float]) -> Iterator[Variant]:
    """All combinations; an empty side stays as in the given policy."""
    for threshold in (*sorted(thresholds),) or (None,):
        for window in (*sorted(windows),) or (None,):
            yield Variant(window, threshold)
