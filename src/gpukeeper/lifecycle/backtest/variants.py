"""The policies of a comparison: the given one, and the same with another idle time, GPU threshold, other signals that
count as use, or other times at which passes act."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from datetime import timedelta

import msgspec

from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.durations import in_words
from gpukeeper.model.policy import OnLimit, PlaceScope, Policy
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown

NOTHING = timedelta()


class Variant(msgspec.Struct, frozen=True, order=True):
    """None: as in the given policy. `threshold` in percent. `at`: cron words, when passes act."""

    window: timedelta | None = None
    threshold: float | None = None
    signals: tuple[str, ...] | None = None
    at: str | None = None

    @property
    def words(self) -> str:
        parts = [] if self.window is None else [f"idle {in_words(self.window)}"]
        parts += [] if self.threshold is None else [f"GPU below {self.threshold:g}%"]
        parts += [] if self.signals is None else [f"signals {', '.join(self.signals) or 'none'}"]
        parts += [] if self.at is None else [f"acts at {self.at}"]
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
    if variant.signals is not None:
        activity = msgspec.structs.replace(activity, signals=variant.signals)
    schedule = policy.schedule
    if variant.at is not None:
        schedule = msgspec.structs.replace(schedule, at=variant.at)
    return msgspec.structs.replace(policy, classes=classes, activity=activity, schedule=schedule)


def may_stop_idle(book: Rulebook, subject: Subject) -> bool:
    """Whether the idle rule stops work like this at all."""
    limits = book.settings(subject).limits
    if isinstance(limits, Unknown):
        return True
    return limits.on_idle is OnLimit.STOP and (limits.idle is not None or limits.idle_when_large is not None)


def deciding(book: Rulebook, subject: Subject) -> Hashable:
    """What of a policy decides about this work, as far as variants differ: two that have it in common do the same to
    it. An idle time after which it is only reported makes no difference."""
    limits, policy = book.settings(subject).limits, book.policy
    if not isinstance(limits, Unknown) and limits.idle is not None and limits.on_idle is OnLimit.REPORT:
        limits = msgspec.structs.replace(limits, idle=NOTHING)
    return limits, policy.activity, policy.schedule


def covering(policy: Policy, platforms: Collection[str]) -> Policy:
    """With a scope that covers all recorded work: a trace of another place is judged, too."""
    return msgspec.structs.replace(policy, scope={name: PlaceScope() for name in platforms})


def grid(windows: Collection[timedelta], thresholds: Collection[float]) -> Iterator[Variant]:
    """All combinations; an empty side stays as in the given policy."""
    for threshold in (*sorted(thresholds),) or (None,):
        for window in (*sorted(windows),) or (None,):
            yield Variant(window, threshold)
