"""A TrainJob of Kubeflow Trainer, which makes a JobSet from a runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

from gpukeeper.model.decision import Refused
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import End, Kind, Lever, SuspendItself, SuspendPart
from gpukeeper.platforms.kubernetes.kinds.ttl import FIELD_TTL, TTL, seconds
from gpukeeper.platforms.kubernetes.wire import Pod, Root, Spec


class _TrainJob(Kind, frozen=True):
    def parts_query(self, makers: Sequence[Root | Pod]) -> dict[str, str] | None:
        """Its JobSet has the same name in every release."""
        return {"fieldSelector": f"metadata.name={makers[0].metadata.name}"} if len(makers) == 1 else None

    def trim(self, root: Root, living: Sequence[Pod]) -> Sequence[End] | Refused:
        """First the TrainJob, or v2.1 resumes the JobSet at once; then the JobSet, for v2.3 does not pass on what it is
        told of a finished TrainJob. Both seen on real controllers."""
        return SuspendItself(), SuspendPart(JOBSET, root.metadata.name)

    def ttl(self, spec: Spec, in_crd: bool | Unknown) -> timedelta | Unknown | None:
        """Counts where the CRD has the field; where nobody could say, it is not left to the platform, and the TrainJob
        stays."""
        value = self.ttl_seconds(spec)
        if value is None or in_crd is False:
            return None
        return in_crd if isinstance(in_crd, Unknown) else seconds(FIELD_TTL, value)

    def ttl_words(self, spec: Spec, in_crd: bool | Unknown) -> str:
        return "this kind has no TTL" if in_crd is False else Kind.ttl_words(self, spec, in_crd)

    def misplaced(self, spec: Spec, in_crd: bool | Unknown) -> Iterator[str]:
        if self.ttl_seconds(spec) is not None and in_crd is False:
            yield (
                f"{FIELD_TTL} does nothing on a TrainJob of this cluster, whose CRD has no such field; annotate {TTL}"
            )

    def ttl_belongs(self, spec: Spec) -> str | None:
        return f"the annotation {TTL}"


TRAINJOB = _TrainJob(
    kind="TrainJob",
    plural="trainjobs",
    group="trainer.kubeflow.org",
    versions=("v1alpha1",),
    children=(JOBSET,),
    controller="trainer.kubeflow.org/trainjob-controller",
    succeeded=("Complete",),
    failed=("Failed",),
    lever=Lever.SUSPEND,
    has_ttl=True,
    ttl_in_crd=True,
)
