"""Absence is proven by a whole list of one moment that covers the namespace, and by nothing less."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gpukeeper.model.subject import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.walk import FEW_REFS, absent
from tests.unit.platforms.kubernetes.stored_cluster import StoredCluster, forbidden, silent

MANY = 3 * FEW_REFS


def job(number: int, namespace: str = "lab", uid: str = "") -> dict[str, Any]:
    meta = {"name": f"run-{number}", "namespace": namespace, "uid": uid or f"uid-{number}"}
    return {"kind": "Job", "metadata": meta}


def ref(number: int, namespace: str = "lab", kind: str = "job") -> Ref:
    return Ref("kubernetes", "c", kind, f"run-{number}", f"uid-{number}", namespace)


def gone(cluster: StoredCluster, refs: Sequence[Ref], *, everywhere: bool = False) -> list[str]:
    found = asyncio.run(absent(cluster.as_cluster, cluster.served, refs, everywhere=everywhere))
    return sorted(one.name for one in found)


def test_many_are_compared_with_one_list() -> None:
    cluster = StoredCluster(job(0), job(1), page=100)
    assert len(gone(cluster, [ref(n) for n in range(400)])) == 398
    assert len(cluster.asked) == 1


def test_few_are_requested_one_by_one() -> None:
    cluster = StoredCluster(job(0), page=100)
    assert gone(cluster, [ref(0), ref(1)]) == ["run-1"]
    assert len(cluster.asked) == 2


@pytest.mark.parametrize("number", [1, MANY])
def test_another_object_of_the_same_name_is_another_object(number: int) -> None:
    cluster = StoredCluster(*(job(n, uid=f"new-{n}") for n in range(number)), page=100)
    assert len(gone(cluster, [ref(n) for n in range(number)])) == number


@pytest.mark.parametrize("number", [1, MANY])
@pytest.mark.parametrize("problem", [forbidden(), silent()])
def test_a_list_that_fails_proves_nothing(number: int, problem: Exception) -> None:
    cluster = StoredCluster(page=100)
    cluster.refused = {"jobs": problem, "run-0": problem}  # type: ignore[dict-item]
    assert gone(cluster, [ref(n) for n in range(number)]) == []


def test_a_kind_that_fails_says_nothing_about_itself_and_leaves_others_alone() -> None:
    cluster = StoredCluster(page=100)
    cluster.refused = {"pods": forbidden()}
    refs = [*(ref(n) for n in range(MANY)), *(ref(n, kind="pod") for n in range(MANY))]
    assert len(gone(cluster, refs)) == MANY


def test_a_list_that_broke_off_and_went_on_later_proves_nothing() -> None:
    cluster = StoredCluster(*(job(n) for n in range(100, 110)), page=2)
    cluster.inconsistent = True
    assert gone(cluster, [ref(n) for n in range(MANY)]) == []


def test_an_item_without_a_uid_spoils_the_proof() -> None:
    nameless: Mapping[str, Any] = {"kind": "Job", "metadata": {"name": "odd", "namespace": "lab"}}
    assert gone(StoredCluster(nameless, page=100), [ref(n) for n in range(MANY)]) == []


def test_each_namespace_is_listed_by_itself_where_only_some_may_be_listed() -> None:
    cluster = StoredCluster(job(0, "lab"), job(1, "other"), page=100)
    cluster.refused = {"/apis/batch/v1/jobs": forbidden()}
    refs = [*(ref(n, "lab") for n in range(0, 2 * MANY, 2)), *(ref(n, "other") for n in range(1, 2 * MANY, 2))]
    assert len(gone(cluster, refs)) == 2 * MANY - 2
    assert sorted(cluster.asked) == [f"/apis/batch/v1/namespaces/{one}/jobs?{_ACCEPT}" for one in ("lab", "other")]


def test_one_list_of_the_cluster_is_enough_where_it_may_be_listed() -> None:
    cluster = StoredCluster(job(0, "lab"), page=100)
    refs = [ref(n, f"space-{n}") for n in range(100, 100 + MANY)]
    assert len(gone(cluster, refs, everywhere=True)) == MANY
    assert len(cluster.asked) == 1


def test_a_kind_that_may_be_served_proves_nothing() -> None:
    cluster = StoredCluster(page=100)

    async def unclear(kind: Kind) -> str | Unknown | None:
        return Unknown("discovery failed")

    refs = [ref(n) for n in range(MANY)]
    assert asyncio.run(absent(cluster.as_cluster, unclear, refs, everywhere=False)) == []


_ACCEPT = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"  # metadata only
