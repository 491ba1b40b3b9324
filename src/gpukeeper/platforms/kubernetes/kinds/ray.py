"""The kinds of KubeRay: RayCluster, RayJob, RayService."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from gpukeeper.clients.kubernetes.wire import Pod, PodSpec, RayGroup, Root, Spec, when
from gpukeeper.model.decision import Refused
from gpukeeper.model.subject import Cause, Outcome
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.platforms.kubernetes.kinds.builtin import JOB
from gpukeeper.platforms.kubernetes.kinds.kind import (
    BY_RETENTION,
    FIELD_TTL,
    NOT_ENDED,
    QUOTED,
    SERVING,
    START,
    Controller,
    End,
    Ending,
    Finalizer,
    Json,
    Kind,
    Lever,
    SuspendPart,
    WatchedObject,
    WatchedStatus,
    pod_specs,
    seconds,
    usable,
)
from gpukeeper.platforms.kubernetes.kinds.pod import POD

# Of a RayJob, by jobDeploymentStatus; its jobStatus stays RUNNING past a deadline.
ACTIVE = frozenset({"", "Initializing", "Running", "Suspending", "Suspended", "Retrying", "Waiting"})
OUTCOMES = {"SUCCEEDED": Outcome.SUCCEEDED, "FAILED": Outcome.FAILED, "STOPPED": Outcome.STOPPED}
SHUTDOWN = "shutdownAfterJobFinishes"
MARGIN = timedelta(seconds=60)
_DELETES = frozenset({"DeleteWorkers", "DeleteCluster", "DeleteSelf"})
CONTROLLER = Controller(
    "KubeRay",
    ("kuberay-operator",),
    "ray-operator-leader",
    ("kuberay-system", "ray-system", "kuberay-operator", "kuberay", "ray", "default"),
    "kuberay",
)
_MANAGER = "ray.io/kuberay-operator"


class _Status(WatchedStatus, frozen=True):
    job_deployment_status: str = ""

    @property
    def stage(self) -> str:
        return self.job_deployment_status


class _WatchedRayJob(WatchedObject, frozen=True, gc=True):
    status: _Status = _Status()


class _RayCluster(Kind, frozen=True):
    def templates(self, spec: Spec) -> Iterator[PodSpec]:
        yield from _groups(spec.head_group_spec, spec.worker_group_specs)


class _RayJob(Kind, frozen=True):
    def ending(self, root: Root, now: datetime) -> Ending:
        status = root.status
        stands = status.job_deployment_status
        if stands in ACTIVE:
            return NOT_ENDED
        if stands == "ValidationFailed":
            return Ending(True, Outcome.FAILED, None)
        at = usable(when(status.end_time), root.metadata, now)
        if stands == "Failed":
            return Ending(True, Outcome.FAILED, at)
        if stands == "Complete":
            how = OUTCOMES.get(status.job_status)
            unknown = Unknown(f"it is complete, but its jobStatus is {status.job_status[:20]!r}")
            return Ending(True, how if how is not None else unknown, at)
        return Ending(Unknown(f"its deployment status is {stands[:40]!r}, which gpukeeper does not know"))

    def templates(self, spec: Spec) -> Iterator[PodSpec]:
        if spec.ray_cluster_spec is not None:
            yield from _groups(spec.ray_cluster_spec.head_group_spec, spec.ray_cluster_spec.worker_group_specs)

    def evidence(self, spec: Spec, ending: Ending) -> Iterator[str]:
        if ending.over is True and (words := cleanup_words(spec, ending)) is not None:
            yield words
        if spec.cluster_selector:
            yield "its RayCluster is shared (clusterSelector) and stays"

    def why_not_stopped(self, root: Root) -> str | None:
        if root.spec.cluster_selector:
            return "it runs on a shared RayCluster, where KubeRay cannot suspend it; it can only be removed"
        if not root.spec.shutdown_after_job_finishes:
            return (
                "KubeRay suspends only a RayJob that deletes its cluster when it finishes; "
                "set its spec.shutdownAfterJobFinishes to true, or remove it"
            )
        return None

    def trim(self, root: Root, living: Sequence[Pod]) -> Sequence[End] | Refused:
        """The cluster that it made. One that a RayJob only borrows is never touched on its account. The pod that
        submitted it is left to end by itself: it has the log of the run, and no GPU."""
        name = root.status.ray_cluster_name
        if root.spec.cluster_selector or not name:
            return Refused("it has no cluster of its own that could be suspended")
        return (SuspendPart(RAYCLUSTER, name),)

    def suspend_manifest(self, spec: Json, labels: Mapping[str, str]) -> Json | Refused:
        if spec.get("clusterSelector"):
            return Refused("it would start at once on a shared RayCluster")
        note = Kind.suspend_manifest(self, spec, labels)
        if isinstance(note, Refused) or spec.get(SHUTDOWN):
            return note
        # KubeRay takes no suspended RayJob without; the note gives the old value back.
        if spec.get("deletionStrategy") or spec.get("deletionPolicy"):
            return Refused("KubeRay does not accept it suspended")
        spec[SHUTDOWN] = True
        return {**note, SHUTDOWN: False}

    def resumed(self, note: Mapping[str, Any]) -> Json:
        return {SHUTDOWN: bool(note[SHUTDOWN])} if SHUTDOWN in note else {}

    def ttl(self, spec: Spec, in_crd: bool | Unknown) -> timedelta | Unknown | None:
        return None  # its field removes its RayCluster only

    def no_end(self, root: Root) -> str:
        status = root.status
        job = status.job_status or "not started"
        return f"its deployment status is {status.job_deployment_status or 'empty'} (job {job})"

    def causes_elsewhere(self, root: Root) -> Iterator[Cause]:
        if root.spec.cluster_selector:
            chosen = ", ".join(f"{key}={value}" for key, value in root.spec.cluster_selector.items())
            words = f"it runs on a RayCluster that it does not own (clusterSelector {chosen})"
            yield Cause(words, "That RayCluster is not removed with it; the rules apply to it separately")

    def causes_of_ttl(
        self, spec: Spec, ending: Ending, in_crd: bool | Unknown, found: timedelta | Unknown | None
    ) -> Sequence[Cause] | None:
        return tuple(_causes_of_ttl(spec, ending))

    def busy_until(self, spec: Spec, ending: Ending) -> datetime | Unknown | None:
        after = _cleanup(spec, ending.outcome)
        if after is None or ending.at is None:
            return None
        if isinstance(after, Unknown):
            return after
        if isinstance(ending.at, Unknown):
            return Unknown(f"KubeRay cleans up {in_words(after)} after the end, but {ending.at.why}")
        return ending.at + after + MARGIN


RAYCLUSTER = _RayCluster(
    kind="RayCluster",
    plural="rayclusters",
    group="ray.io",
    versions=("v1",),
    children=(POD,),
    part_label="ray.io/cluster",
    controller=CONTROLLER,
    finalizers=(
        Finalizer(
            "ray.io/gcs-ft-redis-cleanup-finalizer",
            "KubeRay, which deletes its keys in Redis first",
            CONTROLLER,
            "KubeRay is down, or the Job that clears Redis hangs (forced after 5 minutes from v1.6.2 on)",
            "Check that Redis and KubeRay run; without the finalizer the keys in Redis stay",
            without=True,
        ),
    ),
    manager=_MANAGER,
    runs=True,
    lever=Lever.SUSPEND,
    removed_alone="its GPUs are freed and the finished root stays",
)
RAYJOB = _RayJob(
    kind="RayJob",
    plural="rayjobs",
    group="ray.io",
    versions=("v1",),
    watched_as=_WatchedRayJob,
    children=(RAYCLUSTER, JOB),
    controller=CONTROLLER,
    finalizers=(
        Finalizer(
            "ray.io/rayjob-finalizer",
            "KubeRay, which stops the Ray job first",
            CONTROLLER,
            "KubeRay is down, or cannot reach the dashboard of the Ray cluster",
            START,
            without=True,
        ),
    ),
    manager=_MANAGER,
    lever=Lever.SUSPEND,
    has_ttl=True,
)
RAYSERVICE = Kind(
    kind="RayService",
    plural="rayservices",
    group="ray.io",
    versions=("v1",),
    children=(RAYCLUSTER,),
    controller=CONTROLLER,
    runs=True,
    class_=SERVING,
)


def _groups(head: RayGroup | None, workers: Iterable[RayGroup] | None) -> Iterator[PodSpec]:
    yield from pod_specs(*(group.template for group in (head, *(workers or ())) if group is not None))


def _causes_of_ttl(spec: Spec, ending: Ending) -> Iterator[Cause]:
    waits = cleanup_words(spec, ending)
    if waits is not None:
        yield Cause(waits, "Wait, unless KubeRay is down")
    elif not spec.cluster_selector:
        yield Cause(
            "KubeRay keeps the RayCluster of a finished RayJob, GPUs included, unless shutdownAfterJobFinishes is true",
            "Set shutdownAfterJobFinishes and ttlSecondsAfterFinished; the rules of gpukeeper reclaim what is left",
        )
    yield Cause("a RayJob's ttlSecondsAfterFinished removes only its RayCluster; the RayJob itself stays", BY_RETENTION)


# What KubeRay does by itself after the end of a RayJob


def cleanup_words(spec: Spec, ending: Ending) -> str | None:
    after = _cleanup(spec, ending.outcome)
    if after is None or isinstance(after, Unknown):
        return None
    return f"KubeRay itself cleans up {in_words(after)} after the end; gpukeeper waits for that"


def _cleanup(spec: Spec, outcome: Outcome | Unknown | None) -> timedelta | Unknown | None:
    """How long after the end it acts for the last time. None: it does nothing."""
    waits: list[timedelta | Unknown] = []
    if spec.shutdown_after_job_finishes:
        shut = seconds(FIELD_TTL, spec.ttl_seconds_after_finished or 0)
        waits += [] if shut is None else [shut]
    rules = (spec.deletion_strategy or {}).get("deletionRules") or ()
    if not isinstance(rules, list | tuple):
        return Unknown("its deletionRules cannot be read")
    waits += [wait for rule in rules if (wait := _rule(rule, outcome)) is not None]
    broken = next((one for one in waits if isinstance(one, Unknown)), None)
    return broken if broken is not None else max((one for one in waits if isinstance(one, timedelta)), default=None)


def _rule(rule: Any, outcome: Outcome | Unknown | None) -> timedelta | Unknown | None:
    """None: it is for another outcome, or deletes nothing."""
    condition = rule.get("condition") if isinstance(rule, Mapping) else None
    if not isinstance(condition, Mapping):
        return Unknown("one of its deletionRules cannot be read")
    if str(rule.get("policy")) not in _DELETES:
        return None
    wanted = {str(condition.get(name) or "") for name in ("jobStatus", "jobDeploymentStatus")} - {""}
    if outcome is Outcome.SUCCEEDED and wanted and wanted <= {"FAILED", "Failed"}:
        return None
    if outcome is Outcome.FAILED and wanted and wanted <= {"SUCCEEDED", "Complete"}:
        return None
    waits = condition.get("ttlSeconds") or 0
    if not isinstance(waits, int):
        return Unknown(f"one of its deletionRules has ttlSeconds {str(waits)[:QUOTED]!r}")
    return seconds("ttlSeconds", waits)
