"""A Job of Kubernetes itself."""

from __future__ import annotations

from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Lever
from gpukeeper.platforms.kubernetes.kinds.pod import POD

JOB = Kind(
    kind="Job",
    plural="jobs",
    group="batch",
    versions=("v1",),
    succeeded=("Complete",),
    failed=("Failed",),
    lever=Lever.SUSPEND,
    children=(POD,),
    controller="kubernetes.io/job-controller",
)
