"""Image, pull secrets, shared memory, namespace, quota, limits and rights."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.fleet.preflight.facts import (
    LimitFacts,
    NamespaceFacts,
    QuotaFacts,
    RightFacts,
    SecretFacts,
    gibibytes,
    quantity,
    whole,
)
from gpukeeper.acceptance.fleet.preflight.kubernetes import FORMS, needed, spelled
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.preflight.clusters import IMAGE, REQUEST, asking, judged, node, the


def test_only_a_trial_proves_a_pull() -> None:
    one = the("image", judged(nodes=(node("gpu-1"), node("gpu-2", images=()))))
    assert one.verdict is Grade.INCONCLUSIVE
    assert one.fix == (f"gpukeeper accept preflight --on kubernetes --trial --image {IMAGE}",)
    assert the("image", judged(asking(image=""))).verdict is Grade.INCONCLUSIVE


def test_a_tag_that_moves_is_a_warning() -> None:
    assert the("image", judged(asking(image="lab/accept")), Grade.WARN)
    assert the("image", judged(asking(image="lab/accept:latest")), Grade.WARN)
    fixed = judged(asking(image="host:5000/accept@sha256:0123"))
    assert the("image", fixed).verdict is Grade.INCONCLUSIVE


def test_an_image_is_found_under_each_of_its_spellings() -> None:
    assert "docker.io/library/accept:latest" in spelled("accept")
    assert "docker.io/lab/accept:1" in spelled("lab/accept:1")
    assert spelled("host:5000/accept:1") == {"host:5000/accept:1"}


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("kubernetes.io/dockerconfigjson", Grade.PASS),
        ("Opaque", Grade.FAIL),
        (None, Grade.FAIL),
        (Unknown("secrets is forbidden"), Grade.INCONCLUSIVE),
    ],
)
def test_a_pull_secret_must_exist_and_have_the_right_type(kind: str | Unknown | None, verdict: Grade) -> None:
    one = the("pull-secret", judged(secrets=(SecretFacts(name="regcred", kind=kind),)))
    assert one.verdict is verdict
    if verdict is Grade.FAIL:
        assert "--docker-server=registry.example.org" in one.fix[-1]


def test_shared_memory_must_fit_into_the_node() -> None:
    assert the("shm", judged()).message == "shared memory of 16 GiB fits into the memory of the GPU nodes"
    small = node("gpu-1", allocatable={"nvidia.com/gpu": "8", "memory": "24Gi"})
    assert "gpu-1 (24 GiB)" in the("shm", judged(nodes=(small,))).message
    assert the("shm", judged(asking(shm="much"))).verdict is Grade.FAIL


def test_a_namespace_that_is_not_there_or_being_deleted() -> None:
    one = the("namespace", judged(namespace=NamespaceFacts(exists=False)))
    assert one.fix == ("kubectl create namespace lab",)
    assert "being deleted" in the("namespace", judged(namespace=NamespaceFacts(exists=True, ending=True))).message


@pytest.mark.parametrize("level", ["baseline", "restricted"])
def test_pod_security_that_forbids_locked_memory(level: str) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level}
    one = the("admission", judged(namespace=NamespaceFacts(exists=True, labels=labels)))
    assert one.verdict is Grade.FAIL
    assert one.fix == ("kubectl label namespace lab pod-security.kubernetes.io/enforce=privileged --overwrite",)


def test_a_quota_that_is_too_small_comes_with_the_patch() -> None:
    small = QuotaFacts(name="team", hard={"requests.nvidia.com/gpu": "8"}, used={"requests.nvidia.com/gpu": "2"})
    one = the("quota", judged(quotas=(small,)))
    assert one.verdict is Grade.FAIL
    assert one.message == "ResourceQuota team: requests.nvidia.com/gpu is limited to 8, 2 in use; the run needs 16"
    assert one.fix == (
        "kubectl -n lab patch resourcequota team --type merge "
        """-p '{"spec":{"hard":{"requests.nvidia.com/gpu":"18"}}}'""",
    )
    assert the("quota", judged(asking(gpus_per_node=3), quotas=(small,))).verdict is Grade.PASS


def test_a_quota_for_objects_and_for_memory() -> None:
    jobs = QuotaFacts(name="few", hard={"count/jobs.batch": "1"})
    assert "the run needs 2" in the("quota", judged(quotas=(jobs,))).message
    memory = QuotaFacts(name="mem", hard={"limits.memory": "1Ti"})
    assert the("quota", judged(quotas=(memory,))).verdict is Grade.WARN


def test_limits_that_the_pods_of_the_run_exceed() -> None:
    few = LimitFacts(name="few", kind="Container", most={"nvidia.com/gpu": "4"})
    assert "at most 4 GPUs" in the("limit-range", judged(limits=(few,))).message
    default = LimitFacts(name="mem", kind="Container", default={"memory": "512Mi"})
    one = the("limit-range", judged(limits=(default,)))
    assert "a default limit of 0.5 GiB" in one.message
    assert one.verdict is Grade.FAIL


def test_a_missing_right_comes_with_the_role() -> None:
    rights = tuple(RightFacts(right=one, allowed=one.resource != "pods/log") for one in needed(REQUEST))
    one = the("rights", judged(rights=rights))
    assert one.message == "may not get pods/log in namespace lab; needed to collect reports"
    assert one.fix[0] == "kubectl -n lab create role gpukeeper-get-pods-log --verb=get --resource=pods/log"


def test_a_missing_right_of_the_cluster() -> None:
    rights = tuple(RightFacts(right=one, allowed=one.resource != "nodes") for one in needed(REQUEST))
    assert the("rights", judged(rights=rights)).fix[0].startswith("kubectl create clusterrole")


def test_rights_that_could_not_be_asked_for() -> None:
    rights = tuple(RightFacts(right=one, allowed=Unknown("refused")) for one in needed(REQUEST))
    assert the("rights", judged(rights=rights)).verdict is Grade.INCONCLUSIVE


@pytest.mark.parametrize("form", FORMS)
def test_each_form_needs_its_own_kind(form: str) -> None:
    found = {(one.verb, one.resource) for one in needed(asking(form=form))}
    assert ("create", FORMS[form]) in found
    assert (("create", "services") in found) is (form in ("indexed-job", "statefulset"))
    assert ("create", "services") in {(one.verb, one.resource) for one in needed(asking(form=form, together=True))}


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("1k", 1000), ("500m", 0.5), ("16Gi", 16 * 1024**3), ("1.5M", 1_500_000), ("", None), ("lots", None)],
)
def test_quantities(text: str, value: float | None) -> None:
    found = quantity(text)
    assert found is None if value is None else float(found or 0) == value
    assert whole(text) == int(value or 0)


def test_gibibytes() -> None:
    found = quantity("24Gi")
    assert found is not None
    assert gibibytes(found) == "24 GiB"
