"""A TrainJob of Kubeflow Trainer, which makes a JobSet from a runtime."""

from __future__ import annotations

from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Lever

TRAINJOB = Kind(
    kind="TrainJob",
    plural="trainjobs",
    group="trainer.kubeflow.org",
    versions=("v1alpha1",),
    succeeded=("Complete",),
    failed=("Failed",),
    lever=Lever.SUSPEND,
    children=(JOBSET,),
    controller="trainer.kubeflow.org/trainjob-controller",
)
