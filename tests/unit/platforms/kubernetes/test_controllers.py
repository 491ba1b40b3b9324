"""Is a controller alive? By Deployment and Lease, gone only by two checks; its release and its log."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.diagnose import Controllers
from gpukeeper.platforms.kubernetes.finalizers import Alive, ControllerState, Down, clashes_in, version_of
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.jobset import CONTROLLER as JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import BUILT_IN, Controller
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINER, TRAINING_OPERATOR, recreates_jobsets
from gpukeeper.platforms.kubernetes.kinds.ray import CONTROLLER as KUBERAY
from tests.unit.platforms.kubernetes.examples import NOW, meta, pod_json
from tests.unit.platforms.kubernetes.stored_cluster import StoredCluster, forbidden, silent

IMAGE = "ghcr.io/kubeflow/trainer/trainer-controller-manager:v2.3.0"
Told = dict[str, Any]


def deployment(
    name: str = "kubeflow-trainer-controller-manager",
    *,
    wanted: int = 1,
    ready: int = 1,
    image: str = IMAGE,
    kind: str = "Deployment",
    **metadata: Any,
) -> Told:
    labels = {"app.kubernetes.io/name": "trainer"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "manager", "image": image}]}}
    return {
        "kind": kind,
        "metadata": meta(name=name, namespace="kubeflow-system", uid=f"uid-{name}", **metadata),
        "spec": {"replicas": wanted, "selector": {"matchLabels": labels}, "template": template},
        "status": {"replicas": wanted, **({"readyReplicas": ready} if ready else {})},
    }


def lease(
    renewed: datetime | str | None,
    name: str = "trainer.kubeflow.org",
    *,
    version: str = "1",
    seconds: int = 15,
    holder: str = "trainer-7d9_1",
    namespace: str = "kubeflow-system",
) -> Told:
    at = f"{renewed:%Y-%m-%dT%H:%M:%S.%fZ}" if isinstance(renewed, datetime) else renewed
    spec = {"holderIdentity": holder, "leaseDurationSeconds": seconds, "renewTime": at}
    said = meta(name=name, namespace=namespace, uid=f"uid-{name}", resourceVersion=version)
    return {"kind": "Lease", "metadata": said, "spec": spec}


class Checks:
    """One `Controllers`, queried at chosen times."""

    def __init__(self, cluster: StoredCluster, controller: Controller = TRAINER) -> None:
        self.cluster, self.controller = cluster, controller
        self.passed = 0.0
        self.controllers = Controllers(cluster.as_cluster, lambda: self.passed)

    def state(self, after: float = 0) -> ControllerState:
        self.passed += after
        now = NOW + timedelta(seconds=self.passed)
        return asyncio.run(self.controllers.state(self.controller, now))


OLD = NOW - timedelta(days=3)


def test_ready_replicas_and_a_renewed_lease_are_alive() -> None:
    checks = Checks(StoredCluster(deployment(), lease(NOW - timedelta(seconds=3))))
    said = checks.state()
    assert isinstance(said, Alive)
    assert said.version == "v2.3.0"
    assert "kubeflow-system/kubeflow-trainer-controller-manager: 1 of 1 ready" in said.words
    assert "renewed 3s ago by trainer-7d9_1" in said.words


def test_ready_without_a_lease_is_alive() -> None:
    assert isinstance(Checks(StoredCluster(deployment())).state(), Alive)


def test_scaled_to_0_with_an_old_lease_is_gone_at_the_second_read() -> None:
    checks = Checks(StoredCluster(deployment(wanted=0, ready=0), lease(OLD)))
    assert isinstance(checks.state(), Unknown)
    assert isinstance(checks.state(after=10), Unknown), "not a whole duration of the Lease has passed"
    said = checks.state(after=10)
    assert isinstance(said, Down)
    assert "scaled to 0" in said.words
    assert said.version == "v2.3.0"


def test_absent_with_an_old_lease_is_gone_at_the_second_read() -> None:
    checks = Checks(StoredCluster(lease(OLD)))
    first = checks.state()
    assert isinstance(first, Unknown)
    assert "a later check" in first.why
    said = checks.state(after=20)
    assert isinstance(said, Down)
    assert "no Deployment kubeflow-trainer-controller-manager in any namespace" in said.words


def test_one_that_left_no_trace_may_run_outside_of_the_cluster() -> None:
    """As the add-ons of managed clusters do. However long nothing of it is seen, that proves nothing."""
    checks = Checks(StoredCluster())
    checks.state()
    said = checks.state(after=3600)
    assert isinstance(said, Unknown)
    assert "outside" in said.why


def test_a_lease_that_we_saw_change_is_alive_whatever_its_times_say() -> None:
    """The controller's clock is three days slow."""
    cluster = StoredCluster(lease(OLD, version="1"))
    checks = Checks(cluster)
    assert isinstance(checks.state(), Unknown)
    cluster.objects[0] = lease(OLD + timedelta(seconds=20), version="2")
    assert isinstance(checks.state(after=20), Alive)
    cluster.objects[0] = lease(OLD + timedelta(seconds=40), version="3")
    assert isinstance(checks.state(after=20), Alive)


def test_a_lease_that_never_changes_while_we_look_is_stale_whatever_its_times_say() -> None:
    """The clock of whoever held it last was an hour fast."""
    checks = Checks(StoredCluster(lease(NOW + timedelta(hours=1))))
    assert isinstance(checks.state(), Unknown)
    assert isinstance(checks.state(after=100), Unknown), "less than ten durations"
    assert isinstance(checks.state(after=60), Down)


def test_a_lease_whose_time_cannot_be_read_is_judged_by_our_own_reads_only() -> None:
    checks = Checks(StoredCluster(lease("yesterday")))
    assert isinstance(checks.state(), Unknown)
    assert isinstance(checks.state(after=100), Unknown)
    assert isinstance(checks.state(after=60), Down)


def test_a_lease_that_expired_a_minute_ago_is_not_gone_yet() -> None:
    checks = Checks(StoredCluster(lease(NOW - timedelta(seconds=60))))
    assert isinstance(checks.state(), Unknown)
    assert isinstance(checks.state(after=20), Unknown)


def test_a_return_between_two_reads_starts_the_count_again() -> None:
    cluster = StoredCluster(deployment(wanted=0, ready=0), lease(OLD))
    checks = Checks(cluster)
    checks.state()
    cluster.objects[0] = deployment(wanted=1, ready=0)
    assert isinstance(checks.state(after=20), Unknown)
    cluster.objects[0] = deployment(wanted=0, ready=0)
    assert isinstance(checks.state(after=20), Unknown)
    assert isinstance(checks.state(after=20), Down)


def test_wanted_and_not_ready_is_never_gone() -> None:
    checks = Checks(StoredCluster(deployment(ready=0), lease(OLD)))
    checks.state()
    said = checks.state(after=3600)
    assert isinstance(said, Unknown)
    assert "check its pods" in said.why


def test_ready_with_a_lease_that_is_not_renewed_hangs() -> None:
    checks = Checks(StoredCluster(deployment(), lease(OLD)))
    checks.state()
    said = checks.state(after=3600)
    assert isinstance(said, Unknown)
    assert "may hang" in said.why


def test_scaled_to_0_and_still_ending_is_not_gone() -> None:
    ending = deployment(wanted=0, ready=0)
    ending["status"]["replicas"] = 1
    checks = Checks(StoredCluster(ending))
    checks.state()
    assert isinstance(checks.state(after=3600), Alive)


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_something_with_its_image_under_another_name_may_be_it(kind: str) -> None:
    checks = Checks(StoredCluster(deployment("our-trainer", kind=kind)))
    checks.state()
    said = checks.state(after=3600)
    assert isinstance(said, Unknown)
    assert "kubeflow-system/our-trainer may be Kubeflow Trainer under another name" in said.why


@pytest.mark.parametrize("path", ["/apis/apps/v1/deployments", "/apis/apps/v1/statefulsets", "/v1/leases"])
@pytest.mark.parametrize("error", [forbidden(), silent()])
def test_what_may_not_be_listed_is_never_gone(path: str, error: Exception) -> None:
    cluster = StoredCluster()
    cluster.refused[path] = error  # type: ignore[assignment]
    checks = Checks(cluster)
    checks.state()
    said = checks.state(after=3600)
    assert isinstance(said, Unknown)
    assert "could not be listed" in said.why


def test_where_all_namespaces_are_refused_the_usual_ones_are_queried() -> None:
    cluster = StoredCluster(deployment(), lease(NOW))
    cluster.refused = {"/apis/apps/v1/deployments": forbidden(), "/v1/leases": forbidden()}
    said = Checks(cluster).state()
    assert isinstance(said, Alive)
    assert said.version == "v2.3.0"
    cluster.objects = [deployment(wanted=0, ready=0), lease(OLD)]
    checks = Checks(cluster)
    checks.state()
    assert isinstance(checks.state(after=3600), Unknown), "there may be another one elsewhere"


def test_the_control_plane_is_known_by_its_lease_alone() -> None:
    held = lease(NOW, "kube-controller-manager", namespace="kube-system")
    cluster = StoredCluster(held)
    assert isinstance(Checks(cluster, BUILT_IN).state(), Alive)
    cluster.objects = [lease(OLD, "kube-controller-manager", namespace="kube-system")]
    checks = Checks(cluster, BUILT_IN)
    assert isinstance(checks.state(), Unknown)
    assert isinstance(checks.state(after=20), Down)
    cluster.objects = []
    checks = Checks(cluster, BUILT_IN)
    checks.state()
    assert isinstance(checks.state(after=3600), Unknown), "it need not have one"


def test_an_answer_serves_everybody_for_a_moment() -> None:
    cluster = StoredCluster(deployment())
    checks = Checks(cluster)
    checks.state()
    asked = len(cluster.asked)
    checks.state(after=1)
    assert len(cluster.asked) == asked
    checks.state(after=5)
    assert len(cluster.asked) > asked


@pytest.mark.parametrize(
    ("image", "version"),
    [
        (IMAGE, "v2.3.0"),
        ("localhost:5000/kubeflow/trainer:2.1", "2.1"),
        ("registry.k8s.io/jobset/jobset:v0.10.1@sha256:abc", "v0.10.1"),
        ("quay.io/kuberay/operator:v1.5.0-rc.1", "v1.5.0-rc.1"),
        ("registry:5000/kuberay/operator", None),
        ("quay.io/kuberay/operator:nightly", None),
        ("", None),
    ],
)
def test_the_release_is_in_the_images_tag(image: str, version: str | None) -> None:
    assert version_of(image) == version


def test_without_a_tag_the_charts_label_tells() -> None:
    told = deployment(
        "kuberay-operator", image="quay.io/kuberay/operator@sha256:1", labels={"app.kubernetes.io/version": "1.4.2"}
    )
    report = asyncio.run(Controllers(StoredCluster(told).as_cluster).report(KUBERAY, NOW))
    assert report.version == "1.4.2"
    assert report.image == "quay.io/kuberay/operator@sha256:1"


@pytest.mark.parametrize(
    ("version", "when"),
    [
        ("v2.0.0", None),
        ("v2.1.0", "always"),
        ("2.1", "always"),
        ("v2.2.0", "if it failed"),
        ("v2.3.0", "if it failed"),
        ("v2.4.0", None),
        ("v2.10.0", None),
        ("v3.1.0", None),
    ],
)
def test_which_releases_make_a_jobset_again(version: str, when: str | None) -> None:
    assert recreates_jobsets(version) == when


@pytest.mark.parametrize("version", [None, "", "latest"])
def test_a_release_that_is_unknown_may_make_a_jobset_again(version: str | None) -> None:
    assert isinstance(recreates_jobsets(version), Unknown)


def test_every_kind_has_a_controller() -> None:
    assert BY_NAME["trainjob"].controller is TRAINER
    assert BY_NAME["jobset"].controller is JOBSET
    assert BY_NAME["tfjob"].controller is TRAINING_OPERATOR
    assert BY_NAME["rayservice"].controller is KUBERAY
    assert BY_NAME["pod"].controller is BY_NAME["job"].controller is BUILT_IN


CONFLICT = (
    '{"level":"error","msg":"Reconciler error","TrainJob":{"name":"run-7"},'
    '"error":"the object has been modified; please apply your changes to the latest version"}'
)


def test_log_lines_about_a_conflict_over_these_names() -> None:
    lines = [
        CONFLICT,
        CONFLICT.replace("run-7", "run-77"),  # another one
        CONFLICT.replace("run-7", "my-run-7"),
        "run-7 reconciled",  # no conflict
        "409 on jobset run-7",
        "took 4090 ms for run-7",
    ]
    assert clashes_in(lines, ["run-7"]) == (CONFLICT, "409 on jobset run-7")
    assert clashes_in(lines, []) == ()
    assert len(clashes_in([f"409 run-7 {n}" for n in range(9)], ["run-7"])) == 5


def with_log() -> StoredCluster:
    one = pod_json(name="trainer-7d9", namespace="kubeflow-system", labels={"app.kubernetes.io/name": "trainer"})
    cluster = StoredCluster(deployment(), one)
    cluster.logs["trainer-7d9"] = f"starting\n{CONFLICT}\n"
    return cluster


def clashes(cluster: StoredCluster) -> tuple[str, ...] | Unknown:
    async def read() -> tuple[str, ...] | Unknown:
        controllers = Controllers(cluster.as_cluster)
        return await controllers.clashes(await controllers.report(TRAINER, NOW), ["run-7"])

    return asyncio.run(read())


def test_the_log_of_its_pods_is_read() -> None:
    assert clashes(with_log()) == (CONFLICT,)


@pytest.mark.parametrize("path", ["/log", "/pods"])
def test_a_log_that_may_not_be_read_is_reported(path: str) -> None:
    cluster = with_log()
    cluster.refused[path] = forbidden("pods/log")
    said = clashes(cluster)
    assert isinstance(said, Unknown)
    assert "pods/log" in said.why
    assert isinstance(clashes(StoredCluster()), Unknown), "no Deployment, no log"
