"""A Job of Kubernetes itself."""

from __future__ import annotations

from collections.abc import Sequence

from gpukeeper.model.decision import Refused
from gpukeeper.platforms.kubernetes.kinds.kind import End, EvictPod, Json, Kind, Lever
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.wire import Pod, Root

UID_LABEL = "batch.kubernetes.io/controller-uid"
OF_ITS_PODS = ("controller-uid", UID_LABEL, "job-name", "batch.kubernetes.io/job-name")


class _Job(Kind, frozen=True):
    def parts_query(self, makers: Sequence[Root | Pod]) -> dict[str, str] | None:
        if not all(_labels_its_pods(one) for one in makers):
            return None
        uids = ",".join(sorted(one.metadata.uid for one in makers))
        return {"labelSelector": f"{UID_LABEL} in ({uids})"}

    def trim(self, root: Root, living: Sequence[Pod]) -> Sequence[End] | Refused:
        """The pods of a finished Job are not replaced."""
        return [EvictPod(pod) for pod in living]

    def detach(self, spec: Json, labels: dict[str, str]) -> None:
        """The cluster binds a Job to its pods by its uid, and rejects the uid of another Job."""
        if spec.get("manualSelector"):
            return
        spec.pop("selector", None)
        template = spec.get("template")
        below = ((template or {}).get("metadata") or {}).get("labels") or {}
        for name in OF_ITS_PODS:
            labels.pop(name, None)
            below.pop(name, None)


JOB = _Job(
    kind="Job",
    plural="jobs",
    group="batch",
    versions=("v1",),
    children=(POD,),
    uid_label=UID_LABEL,
    manager="kubernetes.io/job-controller",
    in_bulk=True,
    in_runs=True,
    succeeded=("Complete",),
    failed=("Failed",),
    lever=Lever.SUSPEND,
    has_ttl=True,
)


def _labels_its_pods(job: Root | Pod) -> bool:
    """By its selector. A Job created before 1.27 has an older label; with `manualSelector` it may be any."""
    selector = job.spec.selector if isinstance(job, Root) else None
    return selector is None or UID_LABEL in (selector.match_labels or {})
