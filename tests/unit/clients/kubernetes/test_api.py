"""What the Api sends for objects by kind and name, and what it makes of the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpukeeper.clients.kubernetes.api import JOBS, NODES, PODS, Api
from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import Node, PartialObject
from gpukeeper.model.errors import PlatformError
from tests.unit.clients.kubernetes.scripted_api import Reply, ScriptedApi, ask, pods, refused

PLACE = "/apis/batch/v1/namespaces/lab/jobs"
JOB = {"metadata": {"name": "a", "uid": "u1"}}


def test_an_object_is_created_strictly_and_without_effect_where_that_is_wanted(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(f"POST {PLACE}", Reply(JOB))

    async def story(cluster: Cluster) -> PartialObject:
        await Api(cluster).create(JOBS, JOB, PartialObject, namespace="lab", dry_run=True)
        return await Api(cluster).create(JOBS, JOB, PartialObject, namespace="lab")

    assert ask(api, story, tmp_path).metadata.uid == "u1"
    strict = {"fieldManager": "gpukeeper", "fieldValidation": "Strict"}
    assert [one.query for one in api.asked] == [{**strict, "dryRun": "All"}, strict]
    assert api.asked[1].body == JOB


def test_only_the_object_that_was_read_is_deleted(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(f"DELETE {PLACE}/a", Reply({"kind": "Status"}))

    async def story(cluster: Cluster) -> None:
        assert await Api(cluster).delete(JOBS, "a", "u1", namespace="lab")
        assert await Api(cluster).delete(JOBS, "a", "u1", namespace="lab", version="7", grace=1)

    ask(api, story, tmp_path)
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    assert [one.body for one in api.asked] == [
        {**options, "preconditions": {"uid": "u1"}},
        {**options, "preconditions": {"uid": "u1", "resourceVersion": "7"}, "gracePeriodSeconds": 1},
    ]


@pytest.mark.parametrize("missing", ["uid", "resourceVersion"])
def test_without_what_was_read_nothing_is_written(tmp_path: Path, missing: str) -> None:
    """An empty resourceVersion in a patch is no condition at all for the server."""
    api = ScriptedApi()
    read = {"uid": "u1", "resourceVersion": "7", missing: ""}

    async def story(cluster: Cluster) -> None:
        with pytest.raises(PlatformError, match=f"about Node a has no {missing}.*nothing was changed"):
            await Api(cluster).patch(NODES, "a", {"metadata": {**read, "labels": {"a": "b"}}}, Node)
        with pytest.raises(PlatformError, match="about Job a has no uid"):
            await Api(cluster).delete(JOBS, "a", "", namespace="lab")

    ask(api, story, tmp_path)
    assert api.asked == []


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (refused(404, "NotFound", details={"name": "a"}), False),
        (refused(409, "Conflict", "Precondition failed: UID in precondition: u1, UID in object meta: u2"), False),
        (refused(409, "Conflict", "the ResourceVersion in the precondition (7) does not match"), None),
        (refused(403, "Forbidden"), None),
    ],
)
def test_what_is_gone_or_another_one_is_no_error(answer: dict[str, Any], told: bool | None, tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(f"DELETE {PLACE}/a", Reply(answer, status=answer["code"]))

    async def story(cluster: Cluster) -> bool:
        return await Api(cluster).delete(JOBS, "a", "u1", namespace="lab", version="7")

    if told is None:
        with pytest.raises(ApiError):
            ask(api, story, tmp_path)
    else:
        assert ask(api, story, tmp_path) is told


def test_a_missing_object_is_none_and_a_missing_kind_an_error(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says(f"GET {PLACE}/a", Reply(refused(404, "NotFound", details={"name": "a"}), status=404))

    async def story(cluster: Cluster) -> None:
        assert await Api(cluster).get(JOBS, "a", PartialObject, namespace="lab") is None
        with pytest.raises(ApiError):
            await Api(cluster).get(NODES, "a", Node)

    ask(api, story, tmp_path)


def test_a_list_is_read_to_its_end_with_its_selectors(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /api/v1/pods", Reply(pods("a", more="next")), Reply(pods("b")))

    async def story(cluster: Cluster) -> list[str]:
        found = await Api(cluster).list(PODS, PartialObject, labels="run=1", fields="spec.nodeName=n1")
        assert found.complete
        assert not found.problems
        return [one.metadata.name for one in found.items]

    assert ask(api, story, tmp_path) == ["a", "b"]
    chosen = {"labelSelector": "run=1", "fieldSelector": "spec.nodeName=n1", "limit": "500"}
    assert [one.query for one in api.asked] == [chosen, {**chosen, "continue": "next"}]


def test_a_patch_names_its_type_and_part(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("PATCH /api/v1/nodes/n1/status", Reply({"metadata": {"name": "n1"}}))
    api.says("PATCH /api/v1/nodes/n1", Reply("no JSON"))

    async def story(cluster: Cluster) -> None:
        await Api(cluster).patch(NODES, "n1", {"status": {}}, Node, how="strategic", subresource="status")
        with pytest.raises(PlatformError, match="answer about /api/v1/nodes/n1 cannot be read"):
            await Api(cluster).patch(NODES, "n1", {"metadata": {}}, Node)

    ask(api, story, tmp_path)
    types = [one.header("Content-Type") for one in api.asked]
    assert types == ["application/strategic-merge-patch+json", "application/merge-patch+json"]


def test_a_log_is_read_from_a_time_on_up_to_its_limit(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /api/v1/namespaces/lab/pods/a/log", Reply("12345678"))

    async def story(cluster: Cluster) -> bytes:
        wanted = {"container": "main", "previous": True, "since": "2026-01-05T10:00:00Z", "timestamps": True}
        return await Api(cluster).log("a", namespace="lab", limit=4, **wanted)  # type: ignore[arg-type]

    assert ask(api, story, tmp_path) == b"1234"
    (one,) = api.asked
    since = {"sinceTime": "2026-01-05T10:00:00Z", "timestamps": "true", "limitBytes": "4"}
    assert one.query == {"container": "main", "previous": "true", **since}


def test_the_connection_opens_at_the_first_request_and_requests_are_counted(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /version", Reply({"gitVersion": "v1.36.3"}))

    async def story(cluster: Cluster) -> str:
        one = Api(cluster)
        assert one.requests == 0
        version = await one.version()
        assert one.requests == 1
        await one.close()
        await one.close()
        return version

    assert ask(api, story, tmp_path) == "Kubernetes v1.36.3"
