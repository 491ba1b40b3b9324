"""The fields that are read of objects of a cluster; all others are skipped. Times stay text until they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec

from gpukeeper.model import reading


class Wire(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    pass


class OwnerReference(Wire, frozen=True):
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
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] | None = None
    finalizers: tuple[str, ...] | None = None

    @property
    def controller(self) -> str:
        """Its uid. Empty: none. The controller is in the same namespace."""
        return next((one.uid for one in self.owner_references or () if one.controller), "")


class Condition(Wire, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class Taint(Wire, frozen=True):
    key: str = ""
    value: str = ""
    effect: str = ""

    @property
    def blocks(self) -> bool:
        return self.effect in {"NoSchedule", "NoExecute"}

    @property
    def words(self) -> str:
        """As kubectl writes it."""
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"


class NodeSpec(Wire, frozen=True):
    unschedulable: bool = False
    taints: tuple[Taint, ...] | None = None


class NodeState(Wire, frozen=True):
    conditions: tuple[Condition, ...] | None = None
    allocatable: Mapping[str, str] | None = None
    capacity: Mapping[str, str] | None = None


class Node(Wire, frozen=True):
    metadata: Meta = Meta()
    spec: NodeSpec = NodeSpec()
    status: NodeState = NodeState()


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


class Resources(Wire, frozen=True):
    limits: Mapping[str, str | int] | None = None


class Container(Wire, frozen=True):
    name: str = ""
    resources: Resources | None = None


class PodSpec(Wire, frozen=True):
    node_name: str = ""
    containers: tuple[Container, ...] = ()
    affinity: Affinity | None = None


class Waiting(Wire, frozen=True):
    reason: str = ""
    message: str = ""


class Running(Wire, frozen=True):
    started_at: str | None = None


class Terminated(Wire, frozen=True):
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    started_at: str | None = None
    finished_at: str | None = None


class State(Wire, frozen=True):
    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(Wire, frozen=True):
    name: str = ""
    restart_count: int = 0
    ready: bool = False
    state: State = State()
    last_state: State = State()


class PodState(Wire, frozen=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    start_time: str | None = None
    conditions: tuple[Condition, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None


class Pod(Wire, frozen=True):
    metadata: Meta = Meta()
    spec: PodSpec = PodSpec()
    status: PodState = PodState()


class RootState(Wire, frozen=True):
    conditions: tuple[Condition, ...] | None = None
    active: int = 0


class Root(Wire, frozen=True):
    """A Job, DaemonSet, TrainJob, Service, …"""

    metadata: Meta = Meta()
    status: RootState = RootState()


class Reference(Wire, frozen=True):
    kind: str = ""
    name: str = ""
    namespace: str = ""
    uid: str = ""


class Event(Wire, frozen=True):
    involved_object: Reference = Reference()
    reason: str = ""
    message: str = ""
    type: str = ""
    last_timestamp: str | None = None


def condition(conditions: tuple[Condition, ...] | None, type_: str) -> Condition | None:
    return next((one for one in conditions or () if one.type == type_), None)


def at(text: str | None) -> datetime | None:
    """None: it is not set, or cannot be read."""
    try:
        return reading.moment(text) if text else None
    except ValueError:
        return None


def count(quantities: Mapping[str, str | int] | None, resource: str) -> int | None:
    """Of GPUs: whole numbers. None: the resource is not there, or cannot be read."""
    found = (quantities or {}).get(resource)
    try:
        return None if found is None else reading.whole(str(found))
    except ValueError:
        return None
