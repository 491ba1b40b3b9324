"""The cluster in memory keeps the promises that the launcher relies on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpukeeper.clients.kubernetes.api import JOBS, PODS, Api
from gpukeeper.clients.kubernetes.exchange import ApiError
from tests.unit.clients.kubernetes.memory_api import MemoryApi

Json = dict[str, Any]


def test_only_the_object_with_the_uid_is_deleted_and_what_it_owns_goes_with_it() -> None:
    memory = MemoryApi()
    api: Api = memory
    job = asyncio.run(api.create(JOBS, {"metadata": {"name": "a", "labels": {"run": "1"}}}, Json, namespace="x"))
    owner = {"uid": job["metadata"]["uid"]}
    memory.add(PODS, {"metadata": {"name": "a-1", "ownerReferences": [owner]}}, "x")
    assert asyncio.run(api.delete(JOBS, "a", "another", namespace="x")) is False
    assert len(memory.objects) == 2
    assert asyncio.run(api.delete(JOBS, "a", owner["uid"], namespace="x")) is True
    assert not memory.objects


def test_a_name_exists_once_and_lists_select_by_labels() -> None:
    api = MemoryApi()
    manifest = {"metadata": {"name": "a", "labels": {"run": "1"}}}
    asyncio.run(api.create(JOBS, manifest, Json, namespace="x"))
    with pytest.raises(ApiError) as refused:
        asyncio.run(api.create(JOBS, manifest, Json, namespace="x"))
    assert refused.value.reason == "AlreadyExists"
    assert len(asyncio.run(api.list(JOBS, Json, labels="run=1")).items) == 1
    assert not asyncio.run(api.list(JOBS, Json, labels="run=2")).items
    assert not asyncio.run(api.list(JOBS, Json, namespace="y")).items
