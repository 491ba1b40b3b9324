"""What a namespace defines for everything in it: owner, environment, and whether it is held. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from fnmatch import fnmatchcase

import msgspec

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.marks import excluded
from gpukeeper.platforms.kubernetes.wire import Meta

ENVIRONMENT = "gpukeeper.io/environment"
PART_OF, PROFILE, PROFILE_OWNER = "app.kubernetes.io/part-of", "kubeflow-profile", "owner"


class NamespaceFacts(msgspec.Struct, frozen=True):
    environment: str | Unknown | None = None
    owner: str | Unknown | None = None
    evidence: str = ""  # a sentence: why it is that owner's
    held: str | None = None  # a mark that holds all running work in it


def facts_of(meta: Meta, environments: Mapping[str, str], now: datetime) -> NamespaceFacts:
    """`environments`: pattern of names to environment, the first that fits; the namespace's own label wins."""
    labels, annotations = meta.labels or {}, meta.annotations or {}
    environment = labels.get(ENVIRONMENT) or next(
        (given for pattern, given in environments.items() if fnmatchcase(meta.name, pattern)), None
    )
    # Profiles are created by their controller; their users cannot change the namespace itself.
    owner = annotations.get(PROFILE_OWNER, "").strip() if labels.get(PART_OF) == PROFILE else ""
    held = excluded(annotations, now)
    return NamespaceFacts(
        environment=environment,
        owner=owner or None,
        evidence=f"namespace {meta.name} is the Kubeflow profile of {owner}" if owner else "",
        held=None if held is None else f"namespace {meta.name} has {held}",
    )


def unreadable(name: str, why: str) -> NamespaceFacts:
    """Its label may name any environment, its profile any owner, and its mark may hold what runs in it."""
    unknown = Unknown(f"namespace {name} could not be read: {why}")
    return NamespaceFacts(environment=unknown, owner=unknown, held=unknown.why)
