"""Workloads that an acceptance run left behind. Their kinds never finish, so they end with their run. Pure.

The labels are claims: they only select candidates, and nothing ends before the recorded end of the run, or one day.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from gpukeeper.model.durations import in_words
from gpukeeper.model.subject import Outcome
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.ending import NOT_ENDED, Ending, usable
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.marks import moment
from gpukeeper.platforms.kubernetes.wire import Meta, when

APPS = frozenset({"gpu-accept-daemon", "gpu-accept-ddp", "gpu-acceptance-test", "gpu-cluster-test"})
ROLES = frozenset({"master", "worker"})
MODES = frozenset({"single-gpu", "multi-gpu-single-node", "multi-node-ddp"})
RUN_ENDED = "gpukeeper.io/run-ended"
RUN_LIMIT = timedelta(hours=24)


def is_run(kind: Kind, labels: Mapping[str, str] | None) -> bool:
    return labels is not None and _is_marked(labels) and kind.in_runs


def _is_marked(labels: Mapping[str, str]) -> bool:
    if labels.get("app") in APPS:
        return True
    return labels.get("cleanup") == "auto" and (labels.get("role") in ROLES or labels.get("mode") in MODES)


def ending_of(kind: Kind, meta: Meta, now: datetime) -> tuple[Ending, tuple[str, ...]]:
    """The end of a workload that `is_run` and whose kind never finishes, and findings about it."""
    recorded = (meta.annotations or {}).get(RUN_ENDED)
    if recorded is not None:
        at = usable(moment(RUN_ENDED, recorded), meta, now)
        if isinstance(at, Unknown):
            return NOT_ENDED, (
                f"the end of its acceptance run cannot be read ({at.why}); it is kept until {RUN_ENDED} is fixed",
            )
        return (Ending(True, Outcome.STOPPED, at) if at is not None and at <= now else NOT_ENDED), ()
    created = when(meta.creation_timestamp)
    if not isinstance(created, datetime) or now - created <= RUN_LIMIT:
        return NOT_ENDED, ()
    words = f"an acceptance run ends within a day; this {kind.kind} was created {in_words(now - created)} ago"
    return Ending(True, Outcome.STOPPED, created + RUN_LIMIT), (words,)
