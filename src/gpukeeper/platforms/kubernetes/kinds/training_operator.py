"""The kinds of the training operator, Kubeflow's first: PyTorchJob and its relatives."""

from __future__ import annotations

from collections.abc import Iterator

from gpukeeper.model.decision import Refused
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.controller import Controller
from gpukeeper.platforms.kubernetes.kinds.kind import Json, Kind, Lever, pod_specs
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.kinds.ttl import FIELD_TTL, RUN_POLICY_TTL
from gpukeeper.platforms.kubernetes.wire import PodSpec, Spec

CONTROLLER = Controller(
    "the training operator",
    ("training-operator",),
    "1ca428e5.training-operator.kubeflow.org",
    ("kubeflow", "kubeflow-system"),
    "training-operator",
)
CLEAN_RUNNING, CLEAN_ALL = "Running", "All"


class _V1(Kind, frozen=True, kw_only=True):
    replicas: str  # the field of Spec that has its replicas
    second_clean_pod_policy: bool = False  # spec.cleanPodPolicy counts, too

    def templates(self, spec: Spec) -> Iterator[PodSpec]:
        yield from pod_specs(*(one.template for one in (getattr(spec, self.replicas) or {}).values()))

    def clean_pods(self, spec: Spec, *, everything: bool) -> Json | Refused | None:
        """Its operator then removes them, and never the root (facts §5)."""
        now = spec.run_policy.clean_pod_policy if spec.run_policy else None
        policy = CLEAN_ALL if everything else CLEAN_RUNNING
        if now in (policy, CLEAN_ALL):
            return Refused(
                f"its cleanPodPolicy is already {now}, but its operator did not apply it; check that it runs"
            )
        return {"runPolicy": {"cleanPodPolicy": policy}}

    def misplaced(self, spec: Spec, in_crd: bool | Unknown) -> Iterator[str]:
        if spec.ttl_seconds_after_finished is not None:
            yield f"{FIELD_TTL} has no effect on a {self.kind}; use {RUN_POLICY_TTL}"
        if spec.clean_pod_policy is not None and not self.second_clean_pod_policy:
            yield f"spec.cleanPodPolicy has no effect on a {self.kind}; use spec.runPolicy.cleanPodPolicy"

    def ttl_belongs(self, spec: Spec) -> str | None:
        return RUN_POLICY_TTL if self.ttl_seconds(spec) is None else None


def _v1(kind: str, plural: str, replicas: str, *, second_clean_pod_policy: bool = False) -> Kind:
    return _V1(
        kind=kind,
        plural=plural,
        group="kubeflow.org",
        versions=("v1",),
        children=(POD,),
        part_label="training.kubeflow.org/job-name",
        controller=CONTROLLER,
        manager="kubeflow.org/training-operator",
        succeeded=("Succeeded",),
        failed=("Failed",),
        lever=Lever.SUSPEND,
        in_run_policy=True,
        has_ttl=True,
        replicas=replicas,
        second_clean_pod_policy=second_clean_pod_policy,
    )


V1_KINDS = (
    _v1("PyTorchJob", "pytorchjobs", "pytorch_replica_specs"),
    _v1("TFJob", "tfjobs", "tf_replica_specs"),
    _v1("MPIJob", "mpijobs", "mpi_replica_specs", second_clean_pod_policy=True),
    _v1("XGBoostJob", "xgboostjobs", "xgb_replica_specs"),
    _v1("PaddleJob", "paddlejobs", "paddle_replica_specs"),
    _v1("JAXJob", "jaxjobs", "jax_replica_specs"),
)
