"""Deployment, StatefulSet, DaemonSet, ReplicaSet: they run until they are stopped."""

from __future__ import annotations

from gpukeeper.platforms.kubernetes.kinds.kind import INFRASTRUCTURE, Kind, Lever, Matters
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.wire import Root


class _StatefulSet(Kind, frozen=True):
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


REPLICASET = Kind(
    kind="ReplicaSet",
    plural="replicasets",
    group="apps",
    versions=("v1",),
    children=(POD,),
    runs=True,
    matters=Matters.NEVER,
    watched=False,
)
DEPLOYMENT = Kind(
    kind="Deployment",
    plural="deployments",
    group="apps",
    versions=("v1",),
    children=(REPLICASET,),
    runs=True,
    matters=Matters.WITH_GPU,
    watched=False,
    in_runs=True,
    lever=Lever.SCALE,
    counts_annotations=True,
)
STATEFULSET = _StatefulSet(
    kind="StatefulSet",
    plural="statefulsets",
    group="apps",
    versions=("v1",),
    children=(POD,),
    runs=True,
    matters=Matters.WITH_GPU,
    watched=False,
    in_runs=True,
    lever=Lever.SCALE,
)
DAEMONSET = Kind(
    kind="DaemonSet",
    plural="daemonsets",
    group="apps",
    versions=("v1",),
    children=(POD,),
    runs=True,
    matters=Matters.NEVER,
    watched=False,
    in_runs=True,
    class_=INFRASTRUCTURE,
)
