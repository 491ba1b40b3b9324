"""The kinds gpukeeper knows: where each is served, what it is made of, when it is over, how it is stopped and removed.

A kind that a cluster does not have is absent. A kind that is not in this table is somebody else's: what it owns stays.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Lever(StrEnum):
    """How work of a kind is stopped so that it can be brought back."""

    NONE = "none"
    SUSPEND = "suspend"  # spec.suspend
    RUN_POLICY = "run policy"  # spec.runPolicy.suspend
    SCALE = "scale"  # the scale subresource, to 0


class Propagation(StrEnum):
    """Always named: a bare DELETE of a Job leaves its pods behind. In the foreground the root vanishes last, and each
    waits for the garbage collector, which asks twenty times a second by default: not for Jobs, of which there are
    thousands, and whose pods have ended."""

    FOREGROUND = "Foreground"
    BACKGROUND = "Background"


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    kind: str  # as the API writes it
    plural: str
    group: str = ""  # empty: the core group
    versions: tuple[str, ...]  # that we can read, the best first
    succeeded: tuple[str, ...] = ()  # conditions that say it is over, when their status is True
    failed: tuple[str, ...] = ()
    lever: Lever = Lever.NONE
    propagation: Propagation = Propagation.BACKGROUND
    children: tuple[str, ...] = ()  # names (lower case) of the kinds it makes
    controller: str = ""  # its own controller's name in `managedBy`; any other value there: hands off
    runs: bool = False  # never over by itself: a service, a set

    @property
    def name(self) -> str:
        """How people write it, and `Ref.kind`."""
        return self.kind.lower()

    def path(self, version: str, namespace: str | None = None, name: str = "", sub: str = "") -> str:
        """Its place in the API. None: in every namespace."""
        root = f"/apis/{self.group}/{version}" if self.group else f"/api/{version}"
        where = "" if namespace is None else f"/namespaces/{namespace}"
        return root + where + f"/{self.plural}" + (f"/{name}" if name else "") + (f"/{sub}" if sub else "")


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
        children=("pod",),
        controller="kubeflow.org/training-operator",
    )


POD = Kind(kind="Pod", plural="pods", versions=("v1",))
JOB = Kind(
    kind="Job",
    plural="jobs",
    group="batch",
    versions=("v1",),
    succeeded=("Complete",),
    failed=("Failed",),
    lever=Lever.SUSPEND,
    children=("pod",),
    controller="kubernetes.io/job-controller",
)
JOBSET = Kind(
    kind="JobSet",
    plural="jobsets",
    group="jobset.x-k8s.io",
    versions=("v1alpha2",),
    succeeded=("Completed",),
    failed=("Failed",),
    lever=Lever.SUSPEND,
    propagation=Propagation.FOREGROUND,
    children=("job",),
    controller="jobset.sigs.k8s.io/jobset-controller",
)
TRAINJOB = Kind(
    kind="TrainJob",
    plural="trainjobs",
    group="trainer.kubeflow.org",
    versions=("v1alpha1",),
    succeeded=("Complete",),
    failed=("Failed",),
    lever=Lever.SUSPEND,
    children=("jobset",),
    controller="trainer.kubeflow.org/trainjob-controller",
)
V1_KINDS = (
    _v1("PyTorchJob", "pytorchjobs"),
    _v1("TFJob", "tfjobs"),
    _v1("MPIJob", "mpijobs"),
    _v1("XGBoostJob", "xgboostjobs"),
    _v1("PaddleJob", "paddlejobs"),
    _v1("JAXJob", "jaxjobs"),
)
RAYJOB = Kind(
    kind="RayJob",
    plural="rayjobs",
    group="ray.io",
    versions=("v1",),
    lever=Lever.SUSPEND,
    children=("raycluster", "job"),
    controller="ray.io/kuberay-operator",
)
RAYCLUSTER = Kind(
    kind="RayCluster",
    plural="rayclusters",
    group="ray.io",
    versions=("v1",),
    lever=Lever.SUSPEND,
    children=("pod",),
    controller="ray.io/kuberay-operator",
    runs=True,
)
RAYSERVICE = Kind(
    kind="RayService", plural="rayservices", group="ray.io", versions=("v1",), children=("raycluster",), runs=True
)
REPLICASET = Kind(kind="ReplicaSet", plural="replicasets", group="apps", versions=("v1",), children=("pod",), runs=True)
DEPLOYMENT = Kind(
    kind="Deployment",
    plural="deployments",
    group="apps",
    versions=("v1",),
    lever=Lever.SCALE,
    children=("replicaset",),
    runs=True,
)
STATEFULSET = Kind(
    kind="StatefulSet",
    plural="statefulsets",
    group="apps",
    versions=("v1",),
    lever=Lever.SCALE,
    children=("pod",),
    runs=True,
)
DAEMONSET = Kind(kind="DaemonSet", plural="daemonsets", group="apps", versions=("v1",), children=("pod",), runs=True)

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
# By group and kind. They make runs; the run is the root, never they.
GENERATORS = frozenset({("batch", "CronJob"), ("ray.io", "RayCronJob")})


def makes_runs(api_version: str, kind: str) -> bool:
    """An owner that makes runs: what it made is a root."""
    return (api_version.rpartition("/")[0], kind) in GENERATORS


def known_owner(api_version: str, kind: str) -> Kind | None:
    """The kind of an owner, by group and name: two groups may use one name."""
    group = api_version.rpartition("/")[0]
    found = BY_NAME.get(kind.lower())
    return found if found is not None and found.group == group and found.kind == kind else None
