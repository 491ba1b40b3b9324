"""Is it over, how did it end, and when? Pure; `now` is the server's.

By the condition that its controller writes last, never by counts or age: a Job that succeeded after retries has failed
pods, and announcements (SuccessCriteriaMet, FailureTarget) come before the end. A time that nothing can have happened
at is Unknown; then the rules count from when it was first seen ended, which is later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec

from gpukeeper.model.subject import Outcome
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.ray import RAYJOB
from gpukeeper.platforms.kubernetes.wire import EPOCH, Condition, Meta, Pod, Root, Terminated, when

SKEW = timedelta(minutes=5)  # clocks of a cluster differ; beyond this a time is wrong
OVER_PHASES = {"Succeeded": Outcome.SUCCEEDED, "Failed": Outcome.FAILED}
DISRUPTED = "DisruptionTarget"
OUT_OF_MEMORY = "OOMKilled"
REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
# Of a RayJob, by jobDeploymentStatus; its jobStatus stays RUNNING past a deadline.
RAY_GOES_ON = frozenset({"", "Initializing", "Running", "Suspending", "Suspended", "Retrying", "Waiting"})
RAY_OUTCOMES = {"SUCCEEDED": Outcome.SUCCEEDED, "FAILED": Outcome.FAILED, "STOPPED": Outcome.STOPPED}


class Ending(msgspec.Struct, frozen=True):
    """`at` None: over, and nobody wrote when."""

    over: bool | Unknown = False
    outcome: Outcome | Unknown | None = None
    at: datetime | Unknown | None = None
    how: str = ""  # of what failed, in a few words


GOES_ON = Ending()


def of_root(kind: Kind, root: Root, now: datetime) -> Ending:
    if kind == RAYJOB:
        return _of_rayjob(root, now)
    said = [one for one in root.status.conditions or () if one.type in kind.failed or one.type in kind.succeeded]
    over = [one for one in said if one.status == "True"]
    if not over:
        odd = next((one for one in said if one.status != "False"), None)
        return GOES_ON if odd is None else Ending(Unknown(f"its condition {odd.type} is {odd.status[:20]!r}"))
    # Both at once: it counts as what is kept longer.
    failed = any(one.type in kind.failed for one in over)
    written = _latest(one.last_transition_time for one in over)
    return Ending(
        over=True,
        outcome=Outcome.FAILED if failed else Outcome.SUCCEEDED,
        at=_first_usable((written, when(root.status.completion_time)), root.metadata, now),
        how=next((_reason(one) for one in over if one.type in kind.failed), ""),
    )


def of_pod(pod: Pod, now: datetime) -> Ending:
    """Its end is the latest of all its containers; Ready says nothing about it."""
    status = pod.status
    outcome = OVER_PHASES.get(status.phase)
    if outcome is None:
        return GOES_ON
    ended = [
        one.state.terminated
        for one in (*(status.init_container_statuses or ()), *(status.container_statuses or ()))
        if one.state is not None and one.state.terminated is not None
    ]
    at = _latest(one.finished_at for one in ended)
    disrupted = (one.last_transition_time for one in status.conditions or () if _is(one, DISRUPTED))
    how = _exit_in_words(ended) if outcome is Outcome.FAILED else ""
    return Ending(True, outcome, _first_usable((at, _latest(disrupted)), pod.metadata, now), how)


def _exit_in_words(ended: Iterable[Terminated]) -> str:
    """Of the container that ran out of memory, else of the first that failed."""
    failed = sorted((one for one in ended if one.exit_code), key=lambda one: one.reason != OUT_OF_MEMORY)
    if not failed:
        return ""
    return f"exit code {failed[0].exit_code}{', out of memory' if failed[0].reason == OUT_OF_MEMORY else ''}"


def _reason(condition: Condition) -> str:
    """The word of a controller, such as BackoffLimitExceeded; not one that only says once more that it failed."""
    word = condition.reason
    return word if REASON.fullmatch(word) and not word.endswith("Failed") else ""


def usable(at: datetime | Unknown | None, meta: Meta, now: datetime) -> datetime | Unknown | None:
    """A time that it can have happened at: not in the future, and not before the thing was there."""
    if not isinstance(at, datetime):
        return at
    if at < EPOCH:
        return Unknown(f"{at.isoformat()} is no time that anything happened at")
    if at > now + SKEW:
        return Unknown(f"{at.isoformat()} is in the future")
    created = when(meta.creation_timestamp)
    if isinstance(created, datetime) and at < created - SKEW:
        return Unknown(f"{at.isoformat()} is before its creation")
    return at


def _of_rayjob(root: Root, now: datetime) -> Ending:
    status = root.status
    stands = status.job_deployment_status
    if stands in RAY_GOES_ON:
        return GOES_ON
    if stands == "ValidationFailed":
        return Ending(True, Outcome.FAILED, None)
    at = usable(when(status.end_time), root.metadata, now)
    if stands == "Failed":
        return Ending(True, Outcome.FAILED, at)
    if stands == "Complete":
        how = RAY_OUTCOMES.get(status.job_status)
        return Ending(
            True, how if how is not None else Unknown(f"it is complete, and its job {status.job_status[:20]!r}"), at
        )
    return Ending(Unknown(f"its deployment status is {stands[:40]!r}, which gpukeeper does not know"))


def _latest(times: Iterable[str | None]) -> datetime | Unknown | None:
    """One that cannot be read may be the latest."""
    latest: datetime | None = None
    for text in times:
        at = when(text)
        if isinstance(at, Unknown):
            return at
        if at is not None and (latest is None or at > latest):
            latest = at
    return latest


def _first_usable(times: Iterable[datetime | Unknown | None], meta: Meta, now: datetime) -> datetime | Unknown | None:
    """Else why the first that was written is none."""
    why: Unknown | None = None
    for time in times:
        at = usable(time, meta, now)
        if isinstance(at, datetime):
            return at
        if why is None:
            why = at
    return why


def _is(condition: Condition, type_: str) -> bool:
    return condition.type == type_ and condition.status == "True"
