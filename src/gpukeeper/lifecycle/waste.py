"""GPUs that a running workload holds and does not use. Pure; a report from which nothing follows.

Unlike the idle rule it uses GPU use alone, of every class, held and exempt work included: no one is warned or
stopped by it. What was not measured is not reported as waste.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from gpukeeper.lifecycle.activity import MINUTE, Use, assess_use
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import View
from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Shape, State
from gpukeeper.model.unknown import Unknown

AFTER = timedelta(minutes=30)
FAR = timedelta(hours=4)  # how far back its last use is searched
_LIVE = (State.RUNNING, State.PAUSED)


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """One workload and the GPUs that it does not use. `at_least`: it may be longer; no use was ever seen."""

    ref: Ref
    owner: str | Unknown | None
    class_: str | Unknown
    devices: tuple[str, ...]
    since: datetime
    at_least: bool


def wasted(view: View, book: Rulebook, now: datetime) -> Waste | None:
    """None: it uses its GPUs, has none, was not measured long enough, or is never touched anyway."""
    subject = view.subject
    if subject.shape is not Shape.WORKLOAD or subject.root is not None or subject.state not in _LIVE:
        return None
    if isinstance(subject.devices, Unknown) or not subject.devices or not view.series:
        return None
    untouchable = book.settings(subject).untouchable
    if not isinstance(untouchable, Unknown) and untouchable:
        return None
    # The present minute is not over, so that it takes one more.
    judged = assess_use(view.series, subject.devices, book.gpu_alone, AFTER + MINUTE, now, FAR)
    if judged.use is not Use.QUIET or judged.since is None or now - judged.since < AFTER:
        return None
    return Waste(
        ref=subject.ref,
        owner=subject.owner,
        class_=subject.class_,
        devices=subject.devices,
        since=judged.since,
        at_least=judged.used is None,
    )
