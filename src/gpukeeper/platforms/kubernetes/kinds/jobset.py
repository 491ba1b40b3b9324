"""A JobSet: several Jobs as one."""

from __future__ import annotations

from gpukeeper.platforms.kubernetes.kinds.job import JOB
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Lever, Propagation

JOBSET = Kind(
    kind="JobSet",
    plural="jobsets",
    group="jobset.x-k8s.io",
    versions=("v1alpha2",),
    succeeded=("Completed",),
    failed=("Failed",),
    lever=Lever.SUSPEND,
    propagation=Propagation.FOREGROUND,
    children=(JOB,),
    controller="jobset.sigs.k8s.io/jobset-controller",
)
