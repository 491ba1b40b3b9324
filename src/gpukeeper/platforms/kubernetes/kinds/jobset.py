"""A JobSet: several Jobs as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpukeeper.clients.kubernetes.wire import Pod, PodSpec, Root, Spec
from gpukeeper.model.decision import Refused
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.builtin import JOB
from gpukeeper.platforms.kubernetes.kinds.kind import (
    FIELD_TTL,
    QUOTED,
    TTL_NAME,
    Controller,
    End,
    Kind,
    Lever,
    Propagation,
    SuspendPart,
    pod_specs,
)

CONTROLLER = Controller(
    "JobSet's controller",
    ("jobset-controller-manager", "jobset-controller"),
    "6d4f6a47.jobset.x-k8s.io",
    ("jobset-system", "kubeflow-system"),
    "jobset",
)


class _JobSet(Kind, frozen=True):
    def templates(self, spec: Spec) -> Iterator[PodSpec]:
        for job in spec.replicated_jobs or ():
            if job.template is not None and job.template.spec is not None:
                yield from pod_specs(job.template.spec.template)

    def misplaced(self, spec: Spec, in_crd: bool | Unknown) -> Iterator[str]:
        for job in spec.replicated_jobs or ():
            inner = None if job.template is None else job.template.spec
            if inner is not None and inner.ttl_seconds_after_finished is not None:
                yield (
                    f"{TTL_NAME} is set in the template of replicated job {job.name[:QUOTED]}, where it"
                    f" removes single Jobs of the JobSet; set {FIELD_TTL} of the JobSet instead"
                )

    def trim(self, root: Root, living: Sequence[Pod]) -> Sequence[End] | Refused:
        """The Jobs of a JobSet that is over, which early releases left running."""
        owners = (pod.metadata.owner for pod in living)
        names = {owner.name for owner in owners if owner is not None and owner.kind == JOB.kind}
        if not names:
            return Refused("its running pods do not belong to a Job, so only its removal ends them")
        return [SuspendPart(JOB, name) for name in sorted(names)]


JOBSET = _JobSet(
    kind="JobSet",
    plural="jobsets",
    group="jobset.x-k8s.io",
    versions=("v1alpha2",),
    children=(JOB,),
    part_label="jobset.sigs.k8s.io/jobset-name",
    controller=CONTROLLER,
    manager="jobset.sigs.k8s.io/jobset-controller",
    succeeded=("Completed",),
    failed=("Failed",),
    lever=Lever.SUSPEND,
    propagation=Propagation.FOREGROUND,
    has_ttl=True,
)
