"""Lists instead of questions: what they give, and when they are not believed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpukeeper.model.subject import Ref
from gpukeeper.platforms.kubernetes import objects
from gpukeeper.platforms.kubernetes.kinds.builtin import UID_LABEL
from gpukeeper.platforms.kubernetes.objects import FEW, Bulk
from tests.unit.platforms.kubernetes.stored_cluster import StoredCluster, forbidden

MANY = 2 * FEW


def job(number: int) -> dict[str, Any]:
    uid = f"uid-{number}"
    meta = {"name": f"run-{number}", "namespace": "lab", "uid": uid, "resourceVersion": "7"}
    return {"kind": "Job", "metadata": meta, "spec": {"selector": {"matchLabels": {UID_LABEL: uid}}}}


def pod(number: int) -> dict[str, Any]:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": f"run-{number}", "uid": f"uid-{number}"}
    labels = {UID_LABEL: f"uid-{number}"}
    meta = {"name": f"run-{number}-x", "namespace": "lab", "uid": f"pod-{number}", "labels": labels}
    return {"kind": "Pod", "metadata": {**meta, "ownerReferences": [{**owner, "controller": True}]}}


def event(about: str) -> dict[str, Any]:
    meta = {"name": f"e-{about}", "namespace": "lab"}
    return {"kind": "Event", "metadata": meta, "reason": "Completed", "involvedObject": {"uid": about}}


class Lab(StoredCluster):
    """Understands a label selector that asks only whether a label is there."""

    def pages(self, path: str, type_: Any, *, limit: int = 500, **query: Any) -> Any:
        query.pop("labelSelector", None)
        return super().pages(path, type_, limit=limit, **query)


def refs(number: int = MANY) -> list[Ref]:
    return [Ref("kubernetes", "c", "job", f"run-{n}", f"uid-{n}", "lab") for n in range(number)]


def a_lab(*more: dict[str, Any], page: int = 100) -> Lab:
    return Lab(*(job(n) for n in range(MANY)), pod(0), event("uid-0"), event("pod-0"), *more, page=page)


def read(lab: Lab, number: int = MANY, *, events: bool = True) -> Bulk:
    made = Bulk(lab.as_cluster, lab.served)
    asyncio.run(made.read(refs(number), events=events))
    return made


def test_three_lists_give_what_many_removals_need() -> None:
    lab = a_lab()
    found = read(lab)
    assert len(lab.asked) == 3
    one = found.get("uid-0")
    assert one is not None
    assert one.source.metadata.resource_version == "7"
    assert (one.description["apiVersion"], one.description["kind"]) == ("batch/v1", "Job"), "a list leaves them out"
    assert [pod.metadata.uid for pod in one.below.pods()] == ["pod-0"]
    described = one.pod("pod-0")
    assert described is not None
    assert described["kind"] == "Pod"
    assert one.events is not None
    assert {uid: len(some) for uid, some in one.events.items()} == {"uid-0": 1, "pod-0": 1}
    other = found.get("uid-1")
    assert other is not None
    assert (other.events, other.pods) == ({"uid-1": []}, [])


def test_few_are_not_listed() -> None:
    lab = a_lab()
    assert read(lab, FEW).get("uid-0") is None
    assert lab.asked == []


@pytest.mark.parametrize("refused", ["jobs", "pods"])
def test_what_cannot_be_listed_is_requested_one_by_one(refused: str) -> None:
    lab = a_lab()
    lab.refused = {refused: forbidden()}
    assert read(lab).get("uid-0") is None


def test_events_that_may_not_be_listed_are_requested_one_by_one() -> None:
    lab = a_lab()
    lab.refused = {"events": forbidden()}
    one = read(lab).get("uid-0")
    assert one is not None
    assert one.events is None


def test_a_list_of_two_moments_is_not_accepted() -> None:
    lab = a_lab(page=2)
    lab.inconsistent = True
    assert read(lab).get("uid-0") is None


def test_a_list_with_more_pages_than_objects_that_are_wanted_is_not_read() -> None:
    lab = a_lab(*(job(n) for n in range(MANY, 5 * MANY)), page=2)
    assert read(lab).get("uid-0") is None


def test_a_job_that_does_not_label_its_pods_is_requested_by_itself() -> None:
    lab = a_lab()
    lab.objects[0] = {**job(0), "spec": {"selector": {"matchLabels": {"app": "own"}}}}
    found = read(lab)
    assert found.get("uid-0") is None
    assert found.get("uid-1") is not None


def test_what_was_read_is_accepted_for_a_minute_and_until_it_is_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(a_lab())
    found.forget("uid-0")
    assert found.get("uid-0") is None
    assert found.get("uid-1") is not None
    monkeypatch.setattr(objects, "CACHE_SECONDS", 0.0)
    assert found.get("uid-1") is None


def test_what_is_left_of_a_batch_is_listed_again_when_its_lists_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute every Job was read by itself, which made the rest of a large pass three times as slow."""
    lab, now = a_lab(), 100.0
    monkeypatch.setattr(objects.time, "monotonic", lambda: now)
    found = read(lab)
    found.forget("uid-0")  # it was acted on
    now += objects.CACHE_SECONDS - 1
    assert asyncio.run(found.current("uid-1")) is not None
    assert len(lab.asked) == 3, "not before"
    now += 1
    lab.objects[1] = {**job(1), "metadata": {**job(1)["metadata"], "resourceVersion": "8"}}
    del lab.objects[2]
    again = asyncio.run(_several(found, "uid-1", "uid-2", "uid-3"))
    assert len(lab.asked) == 6, "once for all of them"
    assert again[0] is not None
    assert again[0].source.metadata.resource_version == "8"
    assert again[1] is None, "it is gone"
    assert again[2] is not None
    assert asyncio.run(found.current("uid-0")) is None
    now += objects.CACHE_SECONDS
    found.forget(*(f"uid-{n}" for n in range(MANY - FEW)))
    assert asyncio.run(found.current(f"uid-{MANY - 1}")) is None, "few are not listed"
    assert len(lab.asked) == 6


async def _several(found: Bulk, *uids: str) -> list[objects.ListedObject | None]:
    return list(await asyncio.gather(*map(found.current, uids)))
