"""The kinds of Kubernetes itself besides pods: Job, and Deployment, StatefulSet, DaemonSet and ReplicaSet, which run
until they are stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpukeeper.clients.kubernetes.wire import Pod, Root
from gpukeeper.model.decision import Refused
from gpukeeper.platforms.kubernetes.kinds.kind import INFRASTRUCTURE, End, EvictPod, Json, Kind, Lever, Matters
from gpukeeper.platforms.kubernetes.kinds.pod import POD

UID_LABEL = "batch.kubernetes.io/controller-uid"
OF_ITS_PODS = ("controller-uid", UID_LABEL, "job-name", "batch.kubernetes.io/job-name")


class _Job(Kind, frozen=True):
    def parts_query(self, makers: Sequence[Root | Pod]) -> dict[str, str] | None:
        if not all(_labels_its_pods(one) for one in makers):
            return None
        uids = ",".join(sorted(one.metadata.uid for one in makers))
        return {"labelSelector": f"{UID_LABEL} in ({uids})"}

    def trim(self, root: Root, living: Sequence[Pod]) -> Sequence[End] | Refused:
        """The pods of a finished Job are not replaced."""
        return [EvictPod(pod) for pod in living]

    def detach(self, spec: Json, labels: dict[str, str]) -> None:
        """The cluster binds a Job to its pods by its uid, and rejects the uid of another Job."""
        if spec.get("manualSelector"):
            return
        spec.pop("selector", None)
        template = spec.get("template")
        below = ((template or {}).get("metadata") or {}).get("labels") or {}
        for name in OF_ITS_PODS:
            labels.pop(name, None)
            below.pop(name, None)


JOB = _Job(
    kind="Job",
    plural="jobs",
    group="batch",
    versions=("v1",),
    children=(POD,),
    uid_label=UID_LABEL,
    manager="kubernetes.io/job-controller",
    in_bulk=True,
    in_runs=True,
    succeeded=("Complete",),
    failed=("Failed",),
    lever=Lever.SUSPEND,
    has_ttl=True,
)


def _labels_its_pods(job: Root | Pod) -> bool:
    """By its selector. A Job created before 1.27 has an older label; with `manualSelector` it may be any."""
    selector = job.spec.selector if isinstance(job, Root) else None
    return selector is None or UID_LABEL in (selector.match_labels or {})


class _Apps(Kind, frozen=True, kw_only=True):
    group: str = "apps"
    versions: tuple[str, ...] = ("v1",)
    runs: bool = True
    watched: bool = False


class _StatefulSet(_Apps, frozen=True):
    """gpukeeper never deletes volumes, but the cluster may do it when the set is deleted or scaled."""

    def why_not_stopped(self, root: Root) -> str | None:
        retention = root.spec.persistent_volume_claim_retention_policy
        if retention is None or retention.when_scaled != "Delete":
            return None
        return (
            "it would lose its volumes: its persistentVolumeClaimRetentionPolicy.whenScaled is Delete; set it to Retain"
        )

    def why_not_removed(self, root: Root) -> str | None:
        retention = root.spec.persistent_volume_claim_retention_policy
        if retention is None or retention.when_deleted != "Delete":
            return None
        return (
            "its volumes would be deleted with it: its persistentVolumeClaimRetentionPolicy.whenDeleted is Delete; set"
            " it to Retain, or remove it yourself"
        )


REPLICASET = _Apps(
    kind="ReplicaSet",
    plural="replicasets",
    children=(POD,),
    matters=Matters.NEVER,
)
DEPLOYMENT = _Apps(
    kind="Deployment",
    plural="deployments",
    children=(REPLICASET,),
    matters=Matters.WITH_GPU,
    in_runs=True,
    lever=Lever.SCALE,
    counts_annotations=True,
)
STATEFULSET = _StatefulSet(
    kind="StatefulSet",
    plural="statefulsets",
    children=(POD,),
    matters=Matters.WITH_GPU,
    in_runs=True,
    lever=Lever.SCALE,
)
DAEMONSET = _Apps(
    kind="DaemonSet",
    plural="daemonsets",
    children=(POD,),
    matters=Matters.NEVER,
    in_runs=True,
    class_=INFRASTRUCTURE,
)
