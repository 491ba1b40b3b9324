"""Deployment, StatefulSet, DaemonSet, ReplicaSet: they run until somebody ends them."""

from __future__ import annotations

from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Lever
from gpukeeper.platforms.kubernetes.kinds.pod import POD

REPLICASET = Kind(kind="ReplicaSet", plural="replicasets", group="apps", versions=("v1",), children=(POD,), runs=True)
DEPLOYMENT = Kind(
    kind="Deployment",
    plural="deployments",
    group="apps",
    versions=("v1",),
    lever=Lever.SCALE,
    children=(REPLICASET,),
    runs=True,
)
STATEFULSET = Kind(
    kind="StatefulSet",
    plural="statefulsets",
    group="apps",
    versions=("v1",),
    lever=Lever.SCALE,
    children=(POD,),
    runs=True,
)
DAEMONSET = Kind(kind="DaemonSet", plural="daemonsets", group="apps", versions=("v1",), children=(POD,), runs=True)
