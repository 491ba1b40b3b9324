"""Which TTL fields a cluster serves, asked of real CRDs: one that a later release of Kubeflow Trainer plans, and one
that was applied where its kind has none, which the API server drops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from gpukeeper.model.decision import Action, Verdict
from tests.real.kube import objects
from tests.real.kube.api import Api, Object
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.harness import Harness
from tests.real.kube.runs import SUCCEEDS, V1_REPLICAS, annotated, passes, reclaimed, v1_job
from tests.real.kube.test_diagnose import Asked, one_of

pytestmark = pytest.mark.usefixtures("kwok_node")
RUN, TTL = "run", "ttlSecondsAfterFinished"
CRD, DESCRIBED = "trainjobs.trainer.kubeflow.org", "/openapi/v3/apis/trainer.kubeflow.org/v1alpha1"
IN_SPEC = f"/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/{TTL}"


def serves_ttl(api: Api) -> bool:
    """As the API server describes it; a moment after its CRD was changed."""
    schemas = api.must("GET", DESCRIBED)["components"]["schemas"].values()
    (schema,) = [
        one
        for one in schemas
        if any(named["kind"] == "TrainJob" for named in one.get("x-kubernetes-group-version-kind", ()))
    ]
    return TTL in schema["properties"]["spec"]["properties"]


@pytest.fixture
def with_ttl(trainer_v23: ControlPlane) -> Iterator[ControlPlane]:
    """Trainer v2.3.0 with a CRD that has the field which a later release plans; its controller does not know it."""
    api = trainer_v23.api
    field = {"type": "integer", "format": "int32"}
    api.patch("customresourcedefinitions", None, CRD, [{"op": "add", "path": IN_SPEC, "value": field}], kind="json")
    try:
        trainer_v23.until(lambda: serves_ttl(api), "the field is served")
        yield trainer_v23
    finally:
        api.patch("customresourcedefinitions", None, CRD, [{"op": "remove", "path": IN_SPEC}], kind="json")
        trainer_v23.until(lambda: not serves_ttl(api), "the field is served no more")


def applied(made: Object) -> Object:
    """As `kubectl apply` sends it."""
    whole = annotated(made, {})
    return annotated(whole, {"kubectl.kubernetes.io/last-applied-configuration": json.dumps(whole) + "\n"})


def complete(plane: ControlPlane, namespace: str, made: Object) -> Object:
    plane.api.create(objects.training_runtime("torch", annotations=SUCCEEDS), namespace)
    plane.api.create(made, namespace)
    ended: Object = plane.api.wait_condition("trainjobs", namespace, RUN, "Complete")
    return ended


def test_whether_a_trainjob_has_a_ttl_is_read_from_its_crd(trainer_v23: ControlPlane, namespace: str) -> None:
    """C5.2. Whoever may only read TrainJobs may ask, too."""
    made = applied(objects.train_job(RUN, "torch", **{TTL: 60}))
    one = complete(trainer_v23, namespace, made)
    assert TTL not in one["spec"], "the API server dropped it"
    rules = [{"apiGroups": ["trainer.kubeflow.org"], "resources": ["trainjobs"], "verbs": ["get"]}]
    for user in ("admin", trainer_v23.new_user(rules, namespace=namespace)):
        found = Asked(trainer_v23, user).about(one, datetime.now(UTC))
        one_of(found, f"a TrainJob has no TTL in this cluster (its CRD has no spec.{TTL}): only gpukeeper")
        assert "this kind has no TTL" in found.tree[0]
        assert "use the annotation gpukeeper.io/ttl" in one_of(found, f"spec.{TTL}: 60 was applied").words


def test_a_ttl_that_the_crd_of_a_trainjob_has_is_left_to_the_platform(with_ttl: ControlPlane, namespace: str) -> None:
    """C5.2. Two hours, past the policy's hour; then a minute for its controller, which here does not keep it."""
    complete(with_ttl, namespace, objects.train_job(RUN, "torch"))

    def named() -> Any:
        one = with_ttl.api.patch("trainjobs", namespace, RUN, {"spec": {TTL: 7200}})
        return one if one["spec"].get(TTL) == 7200 else None

    one = with_ttl.until(named, "the API server keeps the field")
    found = Asked(with_ttl).about(one, datetime.now(UTC))
    assert "TTL 2h" in found.tree[0]
    one_of(found, "its TTL of 2h expires in")

    harness = Harness(with_ttl.keeper_kubeconfig(), namespace)
    harness.later(minutes=61)
    decision = harness.decisions()[f"trainjob/{RUN}"]
    assert (decision.rule, decision.verdict) == ("own_ttl", Verdict.WAIT)
    assert "then the platform removes it" in decision.reason
    assert passes(harness) == []
    harness.later(minutes=61)
    lines = passes(harness)
    assert reclaimed(lines) == {f"trainjob/{RUN}": Action.REMOVE}
    assert "the platform has not removed it" in lines[0].reason
    with_ttl.api.wait_gone("trainjobs", namespace, RUN)


def test_a_ttl_that_was_applied_under_spec_of_a_v1_job_is_reported(
    training_operator: ControlPlane, api: Api, namespace: str
) -> None:
    """C5.2"""
    made = {}
    for kind in V1_REPLICAS:
        one = v1_job(kind, kind.lower(), annotations=SUCCEEDS, gpus=0)
        one["spec"][TTL] = 600
        made[kind] = api.create(applied(one), namespace)
        assert TTL not in made[kind]["spec"], "the API server dropped it"
    found = Harness(training_operator.keeper_kubeconfig(), namespace).subjects()
    for kind in V1_REPLICAS:
        (words,) = [one for one in found[f"{kind.lower()}/{kind.lower()}"].findings if TTL in one]
        assert words.startswith(f"spec.{TTL}: 600 was applied, but the {kind} has no such field")
        assert words.endswith(f"use spec.runPolicy.{TTL}")
        assert found[f"{kind.lower()}/{kind.lower()}"].marks.ttl is None

    ended = api.wait_condition("pytorchjobs", namespace, "pytorchjob", "Succeeded")
    cause = one_of(Asked(training_operator).about(ended, datetime.now(UTC)), f"spec.{TTL}: 600 was applied")
    assert cause.words.endswith(f"use spec.runPolicy.{TTL}")
    api.patch("pytorchjobs", namespace, "pytorchjob", {"spec": {"runPolicy": {TTL: 7200}}})
    corrected = Harness(training_operator.keeper_kubeconfig(), namespace).subjects()["pytorchjob/pytorchjob"]
    assert not [one for one in corrected.findings if TTL in one], "it was written where it counts"
