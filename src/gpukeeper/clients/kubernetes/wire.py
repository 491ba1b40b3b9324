"""The fields that are read of API objects; all other fields are skipped while decoding.

Times stay text: a server may send year 1 or nothing, and one bad time must not invalidate its page.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.unknown import Unknown

EPOCH = datetime(1970, 1, 2, tzinfo=UTC)


class Wire(msgspec.Struct, frozen=True, rename="camel", gc=False, kw_only=True):
    pass


class Owner(Wire, frozen=True):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class Meta(Wire, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    owner_references: tuple[Owner, ...] | None = None
    finalizers: tuple[str, ...] | None = None

    @property
    def owner(self) -> Owner | None:
        """The one that controls it."""
        return next((one for one in self.owner_references or () if one.controller), None)


class StatusCondition(Wire, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class Resources(Wire, frozen=True):
    requests: Mapping[str, str | int | float] | None = None
    limits: Mapping[str, str | int | float] | None = None


class Container(Wire, frozen=True):
    name: str = ""
    image: str = ""
    resources: Resources | None = None
    restart_policy: str = ""  # Always: an init container that runs beside the others


class ResourceClaimRef(Wire, frozen=True):
    name: str = ""


class PodSpec(Wire, frozen=True):
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] | None = None
    node_name: str = ""
    termination_grace_period_seconds: int | None = None
    restart_policy: str = ""
    resource_claims: tuple[ResourceClaimRef, ...] | None = None


class Terminated(Wire, frozen=True):
    exit_code: int = 0
    reason: str = ""
    started_at: str | None = None
    finished_at: str | None = None


class Running(Wire, frozen=True):
    started_at: str | None = None


class Waiting(Wire, frozen=True):
    reason: str = ""
    message: str = ""


class ContainerState(Wire, frozen=True):
    waiting: Waiting | None = None
    terminated: Terminated | None = None
    running: Running | None = None


class ContainerStatus(Wire, frozen=True):
    name: str = ""
    state: ContainerState | None = None
    last_state: ContainerState | None = None
    restart_count: int = 0


class PodStatus(Wire, frozen=True):
    phase: str = ""
    reason: str = ""
    start_time: str | None = None
    conditions: tuple[StatusCondition, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None
    init_container_statuses: tuple[ContainerStatus, ...] | None = None


class Pod(Wire, frozen=True, gc=True):
    metadata: Meta = Meta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Template(Wire, frozen=True):
    """Of pods. `metadata` is the template's own: labels for the pods."""

    metadata: Meta | None = None
    spec: PodSpec | None = None


class RunPolicy(Wire, frozen=True):
    """Of the training operator's kinds."""

    ttl_seconds_after_finished: int | None = None
    clean_pod_policy: str | None = None
    suspend: bool | None = None
    managed_by: str | None = None


class ReplicaSpec(Wire, frozen=True):
    replicas: int | None = None
    template: Template | None = None


class JobTemplateSpec(Wire, frozen=True):
    template: Template | None = None
    ttl_seconds_after_finished: int | None = None  # written at the wrong level: a JobSet removes its Jobs itself


class JobTemplate(Wire, frozen=True):
    spec: JobTemplateSpec | None = None


class ReplicatedJob(Wire, frozen=True):
    name: str = ""
    replicas: int | None = None
    template: JobTemplate | None = None


class RayGroup(Wire, frozen=True):
    replicas: int | None = None
    suspend: bool | None = None
    template: Template | None = None


class RayClusterSpec(Wire, frozen=True):
    head_group_spec: RayGroup | None = None
    worker_group_specs: tuple[RayGroup, ...] | None = None


class ClaimRetention(Wire, frozen=True):
    when_scaled: str = ""
    when_deleted: str = ""


class Selector(Wire, frozen=True):
    match_labels: Mapping[str, str] | None = None


class RuntimeRef(Wire, frozen=True):
    name: str = ""
    kind: str = "ClusterTrainingRuntime"


class Spec(Wire, frozen=True):
    """Of every root kind together: names mean the same in all of them."""

    suspend: bool | None = None
    managed_by: str | None = None
    ttl_seconds_after_finished: int | None = None
    replicas: int | None = None
    selector: Selector | None = None  # Job, Deployment, StatefulSet, DaemonSet: which pods are its
    template: Template | None = None  # the same
    run_policy: RunPolicy | None = None
    runtime_ref: RuntimeRef = RuntimeRef()  # TrainJob
    clean_pod_policy: str | None = None  # a second one, of MPIJob
    replicated_jobs: tuple[ReplicatedJob, ...] | None = None  # JobSet
    pytorch_replica_specs: Mapping[str, ReplicaSpec] | None = msgspec.field(default=None, name="pytorchReplicaSpecs")
    tf_replica_specs: Mapping[str, ReplicaSpec] | None = None
    mpi_replica_specs: Mapping[str, ReplicaSpec] | None = None
    xgb_replica_specs: Mapping[str, ReplicaSpec] | None = None
    paddle_replica_specs: Mapping[str, ReplicaSpec] | None = None
    jax_replica_specs: Mapping[str, ReplicaSpec] | None = None
    ray_cluster_spec: RayClusterSpec | None = None  # RayJob
    head_group_spec: RayGroup | None = None  # RayCluster
    worker_group_specs: tuple[RayGroup, ...] | None = None
    cluster_selector: Mapping[str, str] | None = None
    shutdown_after_job_finishes: bool | None = None
    deletion_strategy: Mapping[str, Any] | None = None
    persistent_volume_claim_retention_policy: ClaimRetention | None = None


class JobCount(Wire, frozen=True):
    name: str = ""
    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0


class Status(Wire, frozen=True):
    conditions: tuple[StatusCondition, ...] | None = None
    start_time: str | None = None
    completion_time: str | None = None
    end_time: str | None = None  # RayJob
    job_status: str = ""  # RayJob: stays RUNNING past a deadline; not to be judged by
    job_deployment_status: str = ""  # RayJob
    ray_cluster_name: str = ""
    active: int | None = None
    ready: int | None = None  # Job: pods
    succeeded: int | None = None
    failed: int | None = None
    restarts: int | None = None  # JobSet
    replicated_jobs_status: tuple[JobCount, ...] | None = None  # JobSet
    jobs_status: tuple[JobCount, ...] | None = None  # TrainJob
    replicas: int | None = None


class Root(Wire, frozen=True, gc=True):
    """An object of any kind but Pod."""

    api_version: str = ""  # an item of a list has neither
    kind: str = ""
    metadata: Meta = Meta()
    spec: Spec = Spec()
    status: Status = Status()


class ListMeta(Wire, frozen=True):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


def when(text: str | None) -> datetime | Unknown | None:
    """A time of the API. Absent: None. Year 1, before 1970 or garbled: Unknown."""
    if not text:
        return None
    try:
        at = reading.moment(text)
    except ValueError as problem:
        return Unknown(f"{text[:40]!r} {problem}")
    if at < EPOCH:
        return Unknown(f"{text[:40]} is not a plausible time")
    return at
