"""The TTL field by which a controller removes finished objects: its place and its parsing."""

from __future__ import annotations

from datetime import timedelta

from gpukeeper.model import reading
from gpukeeper.model.unknown import Unknown

TTL = "gpukeeper.io/ttl"  # of any kind: gpukeeper itself removes it
TTL_NAME = "ttlSecondsAfterFinished"
FIELD_TTL, RUN_POLICY_TTL = f"spec.{TTL_NAME}", f"spec.runPolicy.{TTL_NAME}"
BY_RETENTION = (
    f"gpukeeper removes it after the policy's retention; for this object only: annotation {TTL}: 1h"  # a remedy
)
NOT_CHECKED = Unknown(f"it was not checked whether the TrainJob of this cluster has {FIELD_TTL}")
SHOWN = 40  # characters of quoted text in a message


def seconds(field: str, value: int | None) -> timedelta | Unknown | None:
    if value is None:
        return None
    if value < 0:
        return Unknown(f"{field}={value} is negative")
    if value > reading.SPAN_MAX.total_seconds():
        return Unknown(f"{field}={str(value)[:SHOWN]!r} is longer than 100 years")
    return timedelta(seconds=value)
