"""Deployment, StatefulSet, DaemonSet, ReplicaSet: they run until they are stopped."""

from __future__ import annotations

from gpukeeper.platforms.kubernetes.kinds.kind import INFRASTRUCTURE, Kind, Lever, Matters
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.wire import Root


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
