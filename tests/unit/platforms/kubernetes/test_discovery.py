"""Which kinds a cluster has. That one is not installed is said only where it is proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.wire import Root, Spec
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.kinds.builtin import JOB
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from tests.unit.clients.kubernetes.scripted_api import Reply, ScriptedApi, Time, ask, refused

PYTORCH, MPI = BY_NAME["pytorchjob"], BY_NAME["mpijob"]
Answer = str | Unknown | None


def group(name: str, *versions: str) -> Reply:
    return Reply({"kind": "APIGroup", "name": name, "versions": [{"version": one} for one in versions]})


def resources(place: str, *kinds: Kind) -> Reply:
    listed = [{"name": one.plural, "kind": one.kind} for one in kinds]
    listed += [{"name": f"{one.plural}/status", "kind": one.kind} for one in kinds]
    return Reply({"kind": "APIResourceList", "groupVersion": place, "resources": listed})


def groups(*names: str) -> Reply:
    return Reply({"kind": "APIGroupList", "groups": [{"name": one, "versions": []} for one in names]})


def a_cluster() -> ScriptedApi:
    api = ScriptedApi()
    api.says("GET /apis", groups("apps", "batch", "kubeflow.org"))
    api.says("GET /api/v1", resources("v1", POD))
    api.says("GET /apis/batch", group("batch", "v1"))
    api.says("GET /apis/batch/v1", resources("batch/v1", JOB))
    api.says("GET /apis/kubeflow.org", group("kubeflow.org", "v2beta1", "v1"))
    api.says("GET /apis/kubeflow.org/v1", resources("kubeflow.org/v1", PYTORCH))
    api.says("GET /apis/kubeflow.org/v2beta1", resources("kubeflow.org/v2beta1", MPI))
    return api


def answers(api: ScriptedApi, folder: Path, *kinds: Kind) -> list[Answer]:
    async def all_(cluster: Cluster) -> list[Answer]:
        discovery = ApiDiscovery(cluster)
        return [await discovery.served(one) for one in kinds]

    return ask(api, all_, folder)


def test_kinds_that_are_there_are_read_in_the_version_we_know(tmp_path: Path) -> None:
    assert answers(a_cluster(), tmp_path, POD, JOB, PYTORCH) == ["v1", "v1", "v1"]


def test_a_group_that_no_list_has_is_not_installed(tmp_path: Path) -> None:
    api = a_cluster()
    assert answers(api, tmp_path, TRAINJOB, TRAINJOB) == [None, None]
    assert [one.path for one in api.asked] == ["/apis/trainer.kubeflow.org", "/apis"]


def test_a_kind_that_its_group_lacks_is_not_installed(tmp_path: Path) -> None:
    assert answers(a_cluster(), tmp_path, BY_NAME["tfjob"]) == [None]


def test_a_kind_in_a_version_we_cannot_read_is_unknown(tmp_path: Path) -> None:
    (found,) = answers(a_cluster(), tmp_path, MPI)
    assert isinstance(found, Unknown)
    assert found.why == "the cluster serves mpijobs in v2beta1; gpukeeper supports v1"


@pytest.mark.parametrize(
    ("what", "reply"),
    [
        ("GET /apis", Reply("404 page not found", 404)),  # everything is 404: a proxy, not a cluster
        ("GET /apis", Reply(refused(403, "Forbidden"), 403)),
        ("GET /apis", Reply("garbage")),
        ("GET /apis", Reply({"kind": "APIGroupList", "groups": []})),
        ("GET /apis", Reply({"kind": "Other", "groups": [{"name": "apps"}]})),
        ("GET /apis", groups("apps", "trainer.kubeflow.org")),  # listed, and yet not there
        ("GET /apis/trainer.kubeflow.org", Reply(refused(503, "ServiceUnavailable"), 503)),
        ("GET /apis/trainer.kubeflow.org", Reply("{}")),
        ("GET /apis/trainer.kubeflow.org", group("trainer.kubeflow.org")),
        ("GET /apis/trainer.kubeflow.org", group("other", "v1alpha1")),
        ("GET /apis/trainer.kubeflow.org", group("trainer.kubeflow.org", "v1alpha1")),  # its version page is a 404
    ],
)
def test_what_proves_nothing_is_unknown_and_queried_again(what: str, reply: Reply, tmp_path: Path) -> None:
    api = a_cluster()
    api.says(what, reply)
    first, second = answers(api, tmp_path, TRAINJOB, TRAINJOB)
    assert isinstance(first, Unknown)
    assert isinstance(second, Unknown)
    assert [one.path for one in api.asked].count("/apis/trainer.kubeflow.org") >= 2


@pytest.mark.parametrize("page", ["{}", '{"kind": "APIResourceList", "groupVersion": "other/v1", "resources": []}'])
def test_a_page_of_something_else_does_not_say_that_a_kind_is_missing(page: str, tmp_path: Path) -> None:
    api = a_cluster()
    api.says("GET /apis/batch/v1", Reply(page))
    (found,) = answers(api, tmp_path, JOB)
    assert isinstance(found, Unknown)


def test_answers_are_remembered_for_ten_minutes(tmp_path: Path) -> None:
    api, time = a_cluster(), Time()

    async def over_time(cluster: Cluster) -> list[int]:
        discovery = ApiDiscovery(cluster, time.clock)
        seen = []
        for seconds in (0, 599, 1):
            time.now += seconds
            assert await discovery.served(JOB) == "v1"
            seen.append(len(api.asked))
        return seen

    assert ask(api, over_time, tmp_path) == [2, 2, 4]


def test_kinds_of_one_group_share_its_pages(tmp_path: Path) -> None:
    api = a_cluster()
    kinds: list[Any] = [one for one in BY_NAME.values() if one.group == "kubeflow.org"]
    assert len(answers(api, tmp_path, *kinds)) == 6
    assert len(api.asked) == 3


# Whether the served TrainJob has a TTL

DESCRIBED = "GET /openapi/v3/apis/trainer.kubeflow.org/v1alpha1"
NAMES_TTL, NAMES_NONE = Root(spec=Spec(ttl_seconds_after_finished=60)), Root()


def with_trainer(*fields: str) -> ScriptedApi:
    api = a_cluster()
    api.says("GET /apis/trainer.kubeflow.org", group("trainer.kubeflow.org", "v1alpha1"))
    api.says("GET /apis/trainer.kubeflow.org/v1alpha1", resources("trainer.kubeflow.org/v1alpha1", TRAINJOB))
    named = [{"group": "trainer.kubeflow.org", "version": "v1alpha1", "kind": "TrainJob"}]
    spec = {"properties": {name: {} for name in ("runtimeRef", *fields)}}
    schema = {"properties": {"spec": spec}, "x-kubernetes-group-version-kind": named}
    api.says(DESCRIBED, Reply({"components": {"schemas": {"TrainJob": schema}}}))
    return api


def ttl_fields(api: ScriptedApi, folder: Path, kind: Kind, *roots: Root, apart: float = 0) -> list[bool | Unknown]:
    time = Time()

    async def all_(cluster: Cluster) -> list[bool | Unknown]:
        discovery, found = ApiDiscovery(cluster, time.clock), []
        for one in roots:
            found.append(await discovery.ttl_field(kind, (NAMES_NONE, one)))
            time.now += apart
        return found

    return ask(api, all_, folder)


def times_read(api: ScriptedApi) -> int:
    return sum(one.path.startswith("/openapi") for one in api.asked)


def test_a_ttl_field_that_is_served_is_remembered_for_ten_minutes(tmp_path: Path) -> None:
    api = with_trainer("ttlSecondsAfterFinished")
    assert ttl_fields(api, tmp_path, TRAINJOB, NAMES_TTL, NAMES_TTL, NAMES_TTL, apart=400) == [True, True, True]
    assert times_read(api) == 2


def test_that_a_ttl_field_is_missing_is_checked_again(tmp_path: Path) -> None:
    """The server keeps no field that its CRD does not have: an object that names one says that the CRD changed."""
    api = with_trainer()
    assert ttl_fields(api, tmp_path, TRAINJOB, NAMES_TTL, NAMES_TTL) == [False, False]
    assert times_read(api) == 2


def test_where_no_trainjob_names_a_ttl_nobody_is_queried(tmp_path: Path) -> None:
    api = with_trainer("ttlSecondsAfterFinished")
    for kind, one in ((TRAINJOB, NAMES_NONE), (JOB, NAMES_TTL)):
        (found,) = ttl_fields(api, tmp_path, kind, one)
        assert isinstance(found, Unknown)
    assert api.asked == []


@pytest.mark.parametrize(
    "reply",
    [
        Reply(refused(403, "Forbidden"), 403),
        Reply("404 page not found", 404),
        Reply("garbage"),
        Reply({"components": {"schemas": []}}),
        Reply({"components": {"schemas": {"TrainJob": {"properties": {"spec": {"properties": {}}}}}}}),
    ],
)
def test_what_does_not_describe_a_trainjob_proves_nothing_about_its_ttl(reply: Reply, tmp_path: Path) -> None:
    api = with_trainer()
    api.says(DESCRIBED, reply)
    (found,) = ttl_fields(api, tmp_path, TRAINJOB, NAMES_TTL)
    assert isinstance(found, Unknown)
    assert "whether a TrainJob of this cluster has spec.ttlSecondsAfterFinished is unknown" in found.why
