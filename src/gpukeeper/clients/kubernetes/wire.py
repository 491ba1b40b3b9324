"""The fields that are read of API objects; all other fields are skipped while decoding.

Times stay text: a server may send year 1 or nothing, and one bad time must not invalidate its page. A pass decodes all
pods of a cluster: what only few readers need is in the Detailed types.
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

    @property
    def controller(self) -> str:
        """The uid of the one that controls it. Empty: none. The controller is in the same namespace."""
        owner = self.owner
        return "" if owner is None else owner.uid


class PartialMetadata(Wire, frozen=True, gc=True):
    """Metadata only, of any kind."""

    metadata: Meta = Meta()


class ChangedObject(PartialMetadata, frozen=True, gc=True):
    """What a watch that only triggers reads needs of an object."""

    kind: str = ""


class StatusCondition(Wire, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class PartialStatus(Wire, frozen=True):
    conditions: tuple[StatusCondition, ...] | None = None


class PartialObject(PartialMetadata, frozen=True, gc=True):
    """Metadata and conditions, of any kind."""

    status: PartialStatus = PartialStatus()


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
    signal: int = 0
    reason: str = ""
    message: str = ""
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
    ready: bool = False

    @property
    def waiting(self) -> Waiting | None:
        return None if self.state is None else self.state.waiting

    @property
    def running(self) -> Running | None:
        return None if self.state is None else self.state.running

    @property
    def terminated(self) -> Terminated | None:
        return None if self.state is None else self.state.terminated

    @property
    def terminated_before(self) -> Terminated | None:
        """Its last run but this."""
        return None if self.last_state is None else self.last_state.terminated


class PodStatus(Wire, frozen=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    start_time: str | None = None
    conditions: tuple[StatusCondition, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None
    init_container_statuses: tuple[ContainerStatus, ...] | None = None


class Pod(PartialMetadata, frozen=True, gc=True):
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Template(Wire, frozen=True):
    """Of pods. `metadata` is the template's own: labels for the pods."""

    metadata: Meta | None = None
    spec: PodSpec | None = None


class Reference(Wire, frozen=True):
    """Of an object in the same namespace."""

    name: str = ""
    uid: str = ""


class Variable(Wire, frozen=True):
    name: str = ""
    value: str = ""
    value_from: object = None


class VariableSource(Wire, frozen=True):
    config_map_ref: Reference | None = None
    secret_ref: Reference | None = None


class DetailedContainer(Container, frozen=True):
    env: tuple[Variable, ...] | None = None
    env_from: tuple[VariableSource, ...] | None = None


class Requirement(Wire, frozen=True):
    key: str = ""
    values: tuple[str, ...] | None = None


class Term(Wire, frozen=True):
    match_fields: tuple[Requirement, ...] | None = None


class Terms(Wire, frozen=True):
    node_selector_terms: tuple[Term, ...] = ()


class NodeAffinity(Wire, frozen=True):
    required: Terms | None = msgspec.field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")


class Affinity(Wire, frozen=True):
    node_affinity: NodeAffinity | None = None


class Taint(Wire, frozen=True, omit_defaults=True):
    """Of a node. It is also written: others stay as they were read."""

    key: str = ""
    effect: str = ""
    value: str = ""
    time_added: str = ""

    @property
    def blocks(self) -> bool:
        return self.effect in {"NoSchedule", "NoExecute"}

    @property
    def words(self) -> str:
        """As kubectl writes it."""
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"


class Toleration(Wire, frozen=True):
    """Empty: tolerates everything."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def covers(self, taint: Taint) -> bool:
        if self.effect and self.effect != taint.effect:
            return False
        if self.operator == "Exists":
            return not self.key or self.key == taint.key
        return self.key == taint.key and self.value == taint.value


class DetailedPodSpec(PodSpec, frozen=True):
    containers: tuple[DetailedContainer, ...] = ()
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] | None = None


class DetailedPod(Pod, frozen=True, gc=True):
    spec: DetailedPodSpec = DetailedPodSpec()


class DetailedTemplate(Template, frozen=True):
    spec: DetailedPodSpec | None = None


class DaemonSetSpec(Wire, frozen=True):
    template: DetailedTemplate = DetailedTemplate()


class DaemonSetStatus(Wire, frozen=True):
    desired_number_scheduled: int = 0
    number_ready: int = 0


class DaemonSet(PartialMetadata, frozen=True, gc=True):
    spec: DaemonSetSpec = DaemonSetSpec()
    status: DaemonSetStatus = DaemonSetStatus()


class Image(Wire, frozen=True):
    names: tuple[str, ...] | None = None


class NodeInfo(Wire, frozen=True):
    system_uuid: str = msgspec.field(default="", name="systemUUID")


class NodeSpec(Wire, frozen=True):
    unschedulable: bool = False
    taints: tuple[Taint, ...] | None = None


class NodeStatus(PartialStatus, frozen=True):
    allocatable: Mapping[str, str] | None = None
    capacity: Mapping[str, str] | None = None
    images: tuple[Image, ...] | None = None
    node_info: NodeInfo = NodeInfo()


class Node(PartialMetadata, frozen=True, gc=True):
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Event(PartialMetadata, frozen=True, gc=True):
    involved_object: Reference = Reference()
    type: str = ""
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None

    @property
    def at(self) -> datetime | None:
        times = (when(self.last_timestamp), when(self.event_time), when(self.metadata.creation_timestamp))
        return next((one for one in times if isinstance(one, datetime)), None)


class QuotaAmounts(Wire, frozen=True):
    hard: Mapping[str, str] | None = None
    used: Mapping[str, str] | None = None


class Quota(PartialMetadata, frozen=True, gc=True):
    """A ResourceQuota. Its status may lag behind the spec."""

    spec: QuotaAmounts = QuotaAmounts()
    status: QuotaAmounts = QuotaAmounts()


class Limit(Wire, frozen=True):
    type: str = ""
    max: Mapping[str, str] | None = None
    default: Mapping[str, str] | None = None


class LimitSpec(Wire, frozen=True):
    limits: tuple[Limit, ...] | None = None


class LimitRange(PartialMetadata, frozen=True, gc=True):
    spec: LimitSpec = LimitSpec()


class Secret(Wire, frozen=True):
    """Without its data, which is not kept."""

    type: str = ""


class AccessReviewStatus(Wire, frozen=True):
    allowed: bool = False


class AccessReview(Wire, frozen=True):
    status: AccessReviewStatus = AccessReviewStatus()


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


class Status(PartialStatus, frozen=True):
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


class Root(PartialMetadata, frozen=True, gc=True):
    """An object of any kind but Pod."""

    api_version: str = ""  # an item of a list has neither
    kind: str = ""
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


def condition(conditions: tuple[StatusCondition, ...] | None, type_: str) -> StatusCondition | None:
    return next((one for one in conditions or () if one.type == type_), None)


def count(quantities: Mapping[str, str | int | float] | Mapping[str, str] | None, resource: str) -> int | None:
    """Of GPUs: whole numbers. None: the resource is not there, or cannot be read."""
    found = (quantities or {}).get(resource)
    try:
        return None if found is None else reading.whole(str(found))
    except ValueError:
        return None
