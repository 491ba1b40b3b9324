"""Every kind that gpukeeper knows, as a list.

A kind that a cluster does not have is absent. A kind that is not in the list is not gpukeeper's: what it owns stays.
"""

from __future__ import annotations

from gpukeeper.platforms.kubernetes.kinds.builtin import DAEMONSET, DEPLOYMENT, JOB, REPLICASET, STATEFULSET
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB, V1_KINDS
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.kinds.ray import RAYCLUSTER, RAYJOB, RAYSERVICE

# Children before the kinds that make them, so that one walk over the lists can add up what each root has.
KINDS = (
    POD,
    REPLICASET,
    JOB,
    JOBSET,
    TRAINJOB,
    *V1_KINDS,
    RAYCLUSTER,
    RAYJOB,
    RAYSERVICE,
    DEPLOYMENT,
    STATEFULSET,
    DAEMONSET,
)
BY_NAME = {kind.name: kind for kind in KINDS}
_BY_OWNER = {(kind.group, kind.kind): kind for kind in KINDS}
# By group and kind. They make runs; the run is the root, never they.
GENERATORS = frozenset({("batch", "CronJob"), ("ray.io", "RayCronJob")})


def makes_runs(api_version: str, kind: str) -> bool:
    """An owner that makes runs: what it made is a root."""
    return (api_version.rpartition("/")[0], kind) in GENERATORS


def known_owner(api_version: str, kind: str) -> Kind | None:
    """The kind of an owner, by group and name: two groups may use one name."""
    return _BY_OWNER.get((api_version.rpartition("/")[0], kind))
