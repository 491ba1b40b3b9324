"""The kinds of KubeRay: RayCluster, RayJob, RayService."""

from __future__ import annotations

from gpukeeper.platforms.kubernetes.kinds.job import JOB
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Lever
from gpukeeper.platforms.kubernetes.kinds.pod import POD

RAYCLUSTER = Kind(
    kind="RayCluster",
    plural="rayclusters",
    group="ray.io",
    versions=("v1",),
    lever=Lever.SUSPEND,
    children=(POD,),
    controller="ray.io/kuberay-operator",
    runs=True,
)
RAYJOB = Kind(
    kind="RayJob",
    plural="rayjobs",
    group="ray.io",
    versions=("v1",),
    lever=Lever.SUSPEND,
    children=(RAYCLUSTER, JOB),
    controller="ray.io/kuberay-operator",
)
RAYSERVICE = Kind(
    kind="RayService", plural="rayservices", group="ray.io", versions=("v1",), children=(RAYCLUSTER,), runs=True
)
