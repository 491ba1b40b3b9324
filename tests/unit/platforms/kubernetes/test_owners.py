"""Up to the root by uid, and down by owner uid; what could not be read is never taken for absent."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import Meta
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.builtin import DEPLOYMENT, JOB
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB
from gpukeeper.platforms.kubernetes.kinds.ray import RAYJOB
from gpukeeper.platforms.kubernetes.owners import Climb, Descendants, climb, descendants
from tests.unit.platforms.kubernetes.examples import meta, pod_json
from tests.unit.platforms.kubernetes.stored_cluster import StoredCluster, forbidden, silent

Told = dict[str, Any]


def thing(kind: str, name: str, owner: Told | None = None, **parts: Any) -> Told:
    """`kind`: as people write it. uids say what they are: jobset-run-7."""
    known = BY_NAME[kind.lower()]
    version = f"{known.group}/{known.versions[0]}" if known.group else known.versions[0]
    above = {} if owner is None else {"ownerReferences": [reference(owner)]}
    metadata = meta(name=name, uid=f"{known.name}-{name}", **above, **parts)
    if kind == "Pod":
        return {**pod_json(), "apiVersion": version, "metadata": metadata}
    return {"apiVersion": version, "kind": known.kind, "metadata": metadata, "spec": {}, "status": {}}


def reference(owner: Told, **parts: Any) -> Told:
    said = owner["metadata"]
    told = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": said["name"], "uid": said["uid"]}
    return {**told, "controller": True, "blockOwnerDeletion": True, **parts}


def read(one: Told) -> Meta:
    return msgspec.json.decode(msgspec.json.encode(one["metadata"]), type=Meta)


TRAIN = thing("TrainJob", "run-7")
SET = thing("JobSet", "run-7", TRAIN)
JOB_ = thing("Job", "run-7-node-0", SET, labels={"jobset.sigs.k8s.io/jobset-name": "run-7"})
POD_ = thing("Pod", "run-7-node-0-0-x", JOB_, labels={"batch.kubernetes.io/controller-uid": "job-run-7-node-0"})
CHAIN = (TRAIN, SET, JOB_, POD_)


def climbed(cluster: StoredCluster, of: Told) -> Climb:
    return asyncio.run(climb(cluster.as_cluster, cluster.served, read(of)))


def below(cluster: StoredCluster, kind: Kind, of: Told, **how: Any) -> Descendants:
    return asyncio.run(descendants(cluster.as_cluster, cluster.served, kind, read(of), **how))


def test_a_pod_is_climbed_from_to_its_trainjob() -> None:
    cluster = StoredCluster(*CHAIN)
    found = climbed(cluster, POD_)
    assert [node.words for node in found.above] == ["job/run-7-node-0", "jobset/run-7", "trainjob/run-7"]
    assert found.root is found.above[-1]
    assert (found.gone, found.made_by, found.unknown) == (None, None, None)


def test_what_has_no_owner_is_a_root() -> None:
    assert climbed(StoredCluster(*CHAIN), TRAIN) == Climb()
    assert climbed(StoredCluster(*CHAIN), TRAIN).root is None


def test_an_owner_that_does_not_control_is_none() -> None:
    loose = thing("Pod", "beside")
    loose["metadata"]["ownerReferences"] = [reference(TRAIN, controller=False)]
    assert climbed(StoredCluster(TRAIN, loose), loose) == Climb()


def test_an_owner_of_another_uid_is_gone() -> None:
    again = {**SET, "metadata": {**SET["metadata"], "uid": "jobset-run-7-second"}}
    found = climbed(StoredCluster(TRAIN, again, JOB_, POD_), POD_)
    assert [node.words for node in found.above] == ["job/run-7-node-0"]
    assert found.gone is not None
    assert found.gone.uid == "jobset-run-7"
    assert found.owner_gone is False, "its Job is there; only that Job's owner is gone"


def test_an_owner_that_is_not_there_is_gone() -> None:
    found = climbed(StoredCluster(POD_), POD_)
    assert found.above == ()
    assert found.gone is not None
    assert found.gone.name == "run-7-node-0"
    assert found.unknown is None
    assert found.owner_gone is True


@pytest.mark.parametrize(
    "error",
    [
        forbidden("jobsets"),
        silent(),
        ApiError(404, "", "404 page not found"),  # of a proxy, or of a kind that is not installed
        ApiError(500, "InternalError", "etcdserver: request timed out"),
    ],
)
def test_an_owner_that_cannot_be_read_makes_the_root_unknown(error: Exception) -> None:
    cluster = StoredCluster(*CHAIN)
    cluster.refused["/jobsets/run-7"] = error  # type: ignore[assignment]
    found = climbed(cluster, POD_)
    assert isinstance(found.root, Unknown)
    assert "it belongs to JobSet run-7" in found.root.why
    assert found.gone is None
    assert isinstance(climbed(cluster, JOB_).owner_gone, Unknown)
    assert found.owner_gone is False


def test_an_owner_without_a_uid_proves_nothing() -> None:
    garbled = {**SET, "metadata": {"name": "run-7", "namespace": "team-a"}}
    found = climbed(StoredCluster(TRAIN, garbled, JOB_), JOB_)
    assert isinstance(found.root, Unknown)
    assert "no uid" in found.root.why


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("sparkoperator.k8s.io/v1beta2", "SparkApplication"),
        ("v1", "Node"),  # a mirror pod
        ("batch.example.com/v1", "Job"),  # the name of a kind that we know, of another group
        ("batch.example.com/v1", "CronJob"),  # no generator of ours
    ],
)
def test_an_owner_of_a_kind_that_we_do_not_know_makes_the_root_unknown(version: str, kind: str) -> None:
    owned = thing("Pod", "theirs")
    owned["metadata"]["ownerReferences"] = [
        {"apiVersion": version, "kind": kind, "name": "x", "uid": "u", "controller": True}
    ]
    found = climbed(StoredCluster(owned), owned)
    assert isinstance(found.root, Unknown)
    assert f"{kind} x ({version}), a kind that gpukeeper does not know" in found.root.why


def test_an_owner_of_a_kind_that_is_not_served_makes_the_root_unknown() -> None:
    cluster = StoredCluster(*CHAIN)

    async def served(kind: Kind) -> str | Unknown | None:
        return None if kind.name == "jobset" else kind.versions[0]

    found = asyncio.run(climb(cluster.as_cluster, served, read(JOB_)))
    assert isinstance(found.root, Unknown)

    async def silent_discovery(kind: Kind) -> str | Unknown | None:
        return Unknown("discovery did not answer")

    found = asyncio.run(climb(cluster.as_cluster, silent_discovery, read(JOB_)))
    assert isinstance(found.root, Unknown)
    assert "discovery did not answer" in found.root.why


@pytest.mark.parametrize(("version", "kind"), [("batch/v1", "CronJob"), ("ray.io/v1", "RayCronJob")])
def test_a_run_is_the_root_never_its_generator(version: str, kind: str) -> None:
    run = thing("Job" if kind == "CronJob" else "RayJob", "nightly-1")
    run["metadata"]["ownerReferences"] = [
        {"apiVersion": version, "kind": kind, "name": "nightly", "uid": "u", "controller": True}
    ]
    below_it = thing("Pod", "nightly-1-x", run)
    assert climbed(StoredCluster(run), run).root is None
    found = climbed(StoredCluster(run, below_it), below_it)
    assert [node.meta.name for node in found.above] == ["nightly-1"]
    assert found.made_by is not None
    assert found.made_by.name == "nightly"


def test_owners_in_a_circle_end() -> None:
    one, other = thing("Job", "a"), thing("JobSet", "b")
    one["metadata"]["ownerReferences"] = [reference(other)]
    other["metadata"]["ownerReferences"] = [reference(one)]
    found = climbed(StoredCluster(one, other), one)
    assert isinstance(found.root, Unknown)
    assert "cycle" in found.root.why


def test_everything_below_a_trainjob_is_found_by_uid() -> None:
    stranger = thing("Pod", "run-7-node-0-0-y", thing("Job", "run-7-node-0-of-before"), labels={"job-name": "run-7"})
    many = [thing("Pod", f"p{n}", JOB_) for n in range(5)]
    found = below(StoredCluster(*CHAIN, stranger, *many), TRAINJOB, TRAIN)
    assert [node.words for node in found.of("trainjob-run-7")] == ["jobset/run-7"]
    assert [node.words for node in found.of("jobset-run-7")] == ["job/run-7-node-0"]
    assert {pod.metadata.name for pod in found.pods()} == {"run-7-node-0-0-x", *(f"p{n}" for n in range(5))}
    assert found.complete
    assert len(list(found.every())) == 8


def test_children_of_two_kinds_bring_their_pods() -> None:
    ray = thing("RayJob", "tune")
    cluster_, submitter = thing("RayCluster", "tune-x", ray), thing("Job", "tune", ray)
    head, sender = thing("Pod", "head", cluster_), thing("Pod", "sender", submitter)
    found = below(StoredCluster(ray, cluster_, submitter, head, sender), RAYJOB, ray)
    assert {pod.metadata.name for pod in found.pods()} == {"head", "sender"}
    deployment = thing("Deployment", "web")
    copies = thing("ReplicaSet", "web-1", deployment)
    found = below(StoredCluster(deployment, copies, thing("Pod", "web-1-a", copies)), DEPLOYMENT, deployment)
    assert [pod.metadata.name for pod in found.pods()] == ["web-1-a"]


def test_another_namespace_is_not_read() -> None:
    elsewhere = {**POD_, "metadata": {**POD_["metadata"], "namespace": "team-b"}}
    assert below(StoredCluster(JOB_, elsewhere), JOB, JOB_).below == {}


@pytest.mark.parametrize("error", [forbidden("jobs"), silent()])
def test_a_list_that_is_refused_is_reported_and_never_empty(error: Exception) -> None:
    cluster = StoredCluster(*CHAIN)
    cluster.refused["/jobs"] = error  # type: ignore[assignment]
    found = below(cluster, TRAINJOB, TRAIN)
    assert not found.complete
    assert "jobs in team-a could not be listed" in found.unseen[0]


def test_a_list_that_broke_off_proves_no_absence() -> None:
    cluster = StoredCluster(JOB_, POD_, *(thing("Pod", f"p{n}", JOB_) for n in range(3)))
    cluster.inconsistent = True
    found = below(cluster, JOB, JOB_)
    assert len(list(found.pods())) == 4
    assert not found.complete


def test_a_kind_that_is_not_installed_has_no_children_and_a_silent_discovery_hides_them() -> None:
    cluster = StoredCluster(*CHAIN)

    async def without(kind: Kind) -> str | Unknown | None:
        return None if kind.name == "jobset" else kind.versions[0]

    found = asyncio.run(descendants(cluster.as_cluster, without, TRAINJOB, read(TRAIN)))
    assert found.below == {}
    assert found.complete

    async def silent_discovery(kind: Kind) -> str | Unknown | None:
        return Unknown("discovery did not answer")

    found = asyncio.run(descendants(cluster.as_cluster, silent_discovery, TRAINJOB, read(TRAIN)))
    assert not found.complete


def test_labels_narrow_what_is_requested_and_the_uid_still_decides() -> None:
    wrong = thing("Pod", "liar", labels={"batch.kubernetes.io/controller-uid": "job-run-7-node-0"})  # owned by nobody
    cluster = StoredCluster(*CHAIN, wrong)
    found = below(cluster, TRAINJOB, TRAIN, narrow=True)
    assert [pod.metadata.name for pod in found.pods()] == ["run-7-node-0-0-x"]
    assert not found.complete  # labels can be changed by anybody
    assert [path.partition("?")[2] for path in cluster.asked] == [
        "metadata.name=run-7",
        "jobset.sigs.k8s.io/jobset-name in (run-7)",
        "batch.kubernetes.io/controller-uid in (job-run-7-node-0)",
    ]


def test_where_no_label_is_known_or_it_would_not_fit_everything_is_requested() -> None:
    long = thing("JobSet", "x" * 64)
    child = thing("Job", "c", long)
    cluster = StoredCluster(long, child)
    assert [node.words for node in below(cluster, BY_NAME["jobset"], long, narrow=True).every()] == ["job/c"]
    assert all("?" not in path for path in cluster.asked if path.endswith("/jobs"))
    copies = thing("StatefulSet", "s")
    cluster = StoredCluster(copies, thing("Pod", "s-0", copies))
    assert len(list(below(cluster, BY_NAME["statefulset"], copies, narrow=True).pods())) == 1
