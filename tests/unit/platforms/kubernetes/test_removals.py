"""Removals in progress: what keeps one open, and deletions that a watch reported."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gpukeeper.clients.kubernetes.exchange import ClusterUnavailable
from gpukeeper.clients.kubernetes.wire import Pod
from gpukeeper.model.subject import Gone, Ref, Seen, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import watch
from gpukeeper.platforms.kubernetes.watch import FOLLOWED_MAX, PendingRemovals
from tests.unit.platforms.kubernetes.examples import NOW
from tests.unit.platforms.kubernetes.stored_cluster import StoredCluster, forbidden, silent

JOB = Ref("kubernetes", "lab", "job", "run-7", "uid-7", "team")
SUBJECT = Subject(seen=Seen(JOB, "1", "7", NOW), state=State.RUNNING, created=NOW)


class StillClock:
    def now(self) -> Any:
        return NOW


def told(name: str, uid: str, phase: str = "Running") -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "uid": uid},
        "status": {"phase": phase},
    }


def pod(name: str, uid: str) -> Pod:
    return msgspec.json.decode(msgspec.json.encode(told(name, uid)), type=Pod)


def followed(*now: dict[str, Any], living: tuple[str, ...] = ("a",)) -> tuple[StoredCluster, PendingRemovals]:
    """A job that was removed with these living pods; `now`: the pods that are there now."""
    cluster = StoredCluster(*now)
    made = PendingRemovals(cluster.as_cluster, StillClock())
    made.remember(SUBJECT, [pod(name, f"uid-{name}") for name in living])
    return cluster, made


def after(made: PendingRemovals) -> Any:
    return asyncio.run(made.after(JOB))


def test_a_removal_is_open_until_its_pods_are_gone() -> None:
    cluster, made = followed(told("a", "uid-a"), told("b", "uid-b"), living=("a", "b"))
    assert after(made).state is State.REMOVING
    del cluster.objects[0]
    assert after(made).state is State.REMOVING
    assert made.follows(JOB.uid)
    cluster.asked.clear()
    del cluster.objects[0]
    assert after(made) == Gone(JOB, NOW)
    assert len(cluster.asked) == 1, "what was gone is not requested again"
    assert not made.follows(JOB.uid)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_is_over_keeps_no_removal_open(phase: str) -> None:
    assert isinstance(after(followed(told("a", "uid-a", phase))[1]), Gone)


def test_another_pod_of_the_same_name_keeps_no_removal_open() -> None:
    """As of a StatefulSet: its next pod has the name of the last one."""
    _, made = followed(told("a", "uid-of-the-next"))
    assert after(made) == Gone(JOB, NOW)
    assert not made.follows(JOB.uid)


@pytest.mark.parametrize("living", [("a",), ("a", "b"), ("b", "a")])
def test_a_pod_that_cannot_be_read_leaves_it_unknown_and_followed(living: tuple[str, ...]) -> None:
    cluster, made = followed(told("a", "uid-a"), living=living)
    cluster.refused = {"pods/a": silent()}
    with pytest.raises(ClusterUnavailable):
        after(made)
    cluster.refused = {"pods/a": forbidden()}
    assert isinstance(after(made), Unknown)
    cluster.refused = {}
    cluster.objects[0] = told("a", "")
    assert isinstance(after(made), Unknown)
    assert made.follows(JOB.uid)


def test_the_namespace_of_the_root_is_that_of_its_pods() -> None:
    cluster, made = followed(told("a", "uid-a"))
    after(made)
    assert cluster.asked == ["/api/v1/namespaces/team/pods/a"]


def test_what_was_removed_without_living_pods_is_gone_at_once() -> None:
    cluster, made = followed(living=())
    assert (after(made), cluster.asked) == (Gone(JOB, NOW), [])


def test_what_is_followed_is_bounded_and_the_oldest_is_forgotten() -> None:
    _, made = followed(told("a", "uid-a"))
    for number in range(FOLLOWED_MAX):
        ref = msgspec.structs.replace(JOB, uid=f"other-{number}")
        other = msgspec.structs.replace(SUBJECT, seen=Seen(ref, "1", "7", NOW))
        made.remember(other, [pod("b", "uid-b")])
    assert not made.follows(JOB.uid)
    assert made.follows("other-0")


def test_reports_of_deletions_are_bounded_and_the_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "REPORTED_MAX", 3)
    _, made = followed()
    for uid in ("1", "2", "3", "1", "4"):
        made.report_deleted(uid)
    assert [uid for uid in "1234" if made.reported_gone(uid)] == ["1", "3", "4"]


def test_a_deletion_that_is_reported_while_it_is_awaited_is_known() -> None:
    _, made = followed()
    made.batched = {JOB.uid}

    async def story() -> bool:
        made.remember(SUBJECT, [])
        waiting = asyncio.create_task(made.deletion_reported(JOB))
        await asyncio.sleep(0)
        made.report_deleted("another")
        assert not waiting.done()
        made.report_deleted(JOB.uid)
        return await waiting

    assert asyncio.run(story())
