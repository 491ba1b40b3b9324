"""Services that an acceptance run left behind: nothing owns them, so they stay when its pods are gone. Reported with
the command that deletes them; gpukeeper removes no Service. Where Services may not be listed, none is reported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from datetime import datetime, timedelta

import msgspec

from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.identity import Ref, Seen
from gpukeeper.model.subject import Gone, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import acceptance
from gpukeeper.platforms.kubernetes.connect import QUICK, Cluster
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.namespaces import NamespaceFacts
from gpukeeper.platforms.kubernetes.translate import (
    CLUSTER,
    ONLY_RUN,
    SHOWN,
    Observation,
    TranslationSettings,
    owner_of,
)
from gpukeeper.platforms.kubernetes.walk import WalkSettings
from gpukeeper.platforms.kubernetes.wire import Meta, Wire, when

SERVICE = Kind(kind="Service", plural="services", versions=("v1",), runs=True)
OF_RUNS = f"app in ({','.join(sorted(acceptance.APPS))})"
HEADLESS = "None"
ONLY_REPORTED = "gpukeeper does not remove Services; delete it with kubectl"


class _Spec(Wire, frozen=True):
    cluster_ip: str = msgspec.field(default="", name="clusterIP")
    selector: Mapping[str, str] | None = None


class Service(Wire, frozen=True, gc=True):
    metadata: Meta = Meta()
    spec: _Spec = _Spec()


class _Any(Wire, frozen=True):
    """That there is one is enough."""


async def left_by_runs(cluster: Cluster, wanted: WalkSettings, now: datetime) -> AsyncIterator[Service]:
    """Those whose run has ended and that have no pods left."""
    for namespace in wanted.named or (None,):
        listed = cluster.pages(
            SERVICE.path("v1", namespace), Service, limit=wanted.page, deadline=QUICK, labelSelector=OF_RUNS
        )
        try:
            async for page in listed:
                for one in page.items:
                    if wanted.covers(one.metadata.namespace) and await _is_left(cluster, one, now):
                        yield one
        except PlatformError:
            continue  # nothing is decided by them: no right on Services is no reason to doubt the rest


async def read(cluster: Cluster, ref: Ref, now: datetime) -> Service | Gone | Unknown:
    try:
        found = await cluster.get(SERVICE.path("v1", ref.namespace, ref.name), Service)
        if found.metadata.uid == ref.uid:
            left = await _is_left(cluster, found, now)
            return found if left else Unknown("it is no longer a Service that an acceptance run left behind")
    except ApiError as error:
        if not error.is_not_found:
            return Unknown(str(error))
    except PlatformError as error:
        return Unknown(str(error))
    return Gone(ref, now)


async def _is_left(cluster: Cluster, service: Service, now: datetime) -> bool:
    meta, chosen = service.metadata, service.spec.selector
    if meta.owner_references or meta.deletion_timestamp or service.spec.cluster_ip != HEADLESS or not chosen:
        return False  # it goes with its owner, or is going, or serves something else
    if acceptance.ending_of(SERVICE, meta, now)[0].over is not True:
        return False
    labels = ",".join(f"{key}={value}" for key, value in chosen.items())
    pods = cluster.pages(POD.path("v1", meta.namespace), _Any, limit=1, deadline=QUICK, labelSelector=labels)
    async with aclosing(pods):
        return not [one async for page in pods for one in page.items]


def subject_of(service: Service, namespace: NamespaceFacts, at: Observation, settings: TranslationSettings) -> Subject:
    meta = service.metadata
    owned = owner_of(meta, namespace, settings.owner_labels)
    created = when(meta.creation_timestamp)
    age = "of unknown age"
    if isinstance(created, datetime):
        age = f"created {in_words(max(at.now - created, timedelta()))} ago"
    whose = owned.owner[:SHOWN] if isinstance(owned.owner, str) else "unknown"
    label = (meta.labels or {}).get("app", "")
    words = (
        f"a headless Service of an acceptance run (app={label}), {age}, owner {whose}: no pod of the run is left."
        f" gpukeeper does not remove Services; delete it with kubectl -n {meta.namespace} delete service {meta.name}"
    )
    return Subject(
        seen=Seen(at.ref(SERVICE, meta), ONLY_RUN, meta.resource_version, at.now),
        shape=Shape.REMNANT,
        state=State.ENDED,
        owner=owned.owner,
        owner_verified=owned.verified,
        class_=CLUSTER,
        environment=namespace.environment,
        created=created if created is not None else Unknown("the cluster reports no creation time"),
        size=0,
        evidence=owned.evidence,
        findings=(*owned.findings, words),
        labels=meta.labels or {},
    )
