"""The kinds of the training operator, Kubeflow's first: PyTorchJob and its relatives."""

from __future__ import annotations

from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Lever
from gpukeeper.platforms.kubernetes.kinds.pod import POD


def _v1(kind: str, plural: str) -> Kind:
    """The kinds of the training operator are alike."""
    return Kind(
        kind=kind,
        plural=plural,
        group="kubeflow.org",
        versions=("v1",),
        succeeded=("Succeeded",),
        failed=("Failed",),
        lever=Lever.RUN_POLICY,
        children=(POD,),
        controller="kubeflow.org/training-operator",
    )


V1_KINDS = (
    _v1("PyTorchJob", "pytorchjobs"),
    _v1("TFJob", "tfjobs"),
    _v1("MPIJob", "mpijobs"),
    _v1("XGBoostJob", "xgboostjobs"),
    _v1("PaddleJob", "paddlejobs"),
    _v1("JAXJob", "jaxjobs"),
)
