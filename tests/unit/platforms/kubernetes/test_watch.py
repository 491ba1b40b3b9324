"""What watches remember: of what exists, and no longer than it exists. When they are begun again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.model.subject import Ref
from gpukeeper.platforms.kubernetes import watch as watch_module
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.marks import TranslationSettings
from gpukeeper.platforms.kubernetes.walk import WalkSettings
from gpukeeper.platforms.kubernetes.watch import RECONNECT, SHORT, Watches
from gpukeeper.platforms.simulated.world import VirtualLoop, run_virtually
from tests.patience import PATIENCE
from tests.unit.clients.kubernetes.scripted_api import PODS, Reply, ScriptedApi, ask, pods, refused, stream
from tests.unit.platforms.kubernetes.stored_cluster import StoredCluster

EVERYTHING = WalkSettings(("*",), {}, TranslationSettings())
KNOWN = (POD.name, None)


class Served:
    """Every kind is, in its first version."""

    async def served(self, kind: Kind) -> str:
        return kind.versions[0]


def added(name: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": "lab", "uid": f"uid-{name}", "resourceVersion": "8"}
    return {"type": "ADDED", "object": {"kind": "Pod", "metadata": meta}}


def expired() -> dict[str, Any]:
    return {"type": "ERROR", "object": refused(410, "Expired", "too old")}


@pytest.mark.parametrize(
    ("again", "left"),
    [
        ([Reply(pods("a"))], {"uid-a"}),
        ([Reply(pods("a", more="t")), Reply(pods("b"))], {"uid-a", "uid-b"}),
        # A list that is not of one moment proves nothing.
        (
            [
                Reply(pods("a", more="t")),
                Reply({**refused(410, "Expired"), "metadata": {"continue": "later"}}, 410),
                Reply(pods("d")),
            ],
            {"uid-a", "uid-b", "uid-c"},
        ),
    ],
)
def test_what_was_deleted_in_a_gap_is_forgotten(again: list[Reply], left: set[str], tmp_path: Path) -> None:
    api = ScriptedApi()
    heard = stream(added("a"), added("b"), added("c"), expired())
    api.says(f"GET {PODS}", Reply(pods("a")), heard, *again, stream(open_after=True))

    async def story(cluster: Cluster) -> set[str]:
        queue: asyncio.Queue[Ref | None] = asyncio.Queue()
        watches = Watches(cluster, cast(ApiDiscovery, Served()), "lab", lambda uid: None, pauses=(0.0,))
        following = asyncio.create_task(watches._follow(POD, None, EVERYTHING, queue))
        try:
            async with asyncio.timeout(PATIENCE):
                while await queue.get() is not None:  # None: there was a gap, and the list after it is over
                    pass
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return set(watches._known[KNOWN])

    assert ask(api, story, tmp_path) == left


class WatchedCluster(StoredCluster):
    """Its watches last so long, then end: properly, or because the version is too old."""

    def __init__(self, lasts: float, *, expired: bool) -> None:
        super().__init__()
        self.lasts, self.expired = lasts, expired
        self.begun: list[float] = []  # by the clock of the loop
        self.ended: list[float] = []

    async def watch(self, path: str, version: str, type_: object) -> AsyncIterator[Any]:
        time = asyncio.get_running_loop().time
        self.begun.append(time())
        await asyncio.sleep(self.lasts)
        self.ended.append(time())
        if self.expired:
            raise ApiError(410, "Expired", "too old resource version")
        return
        yield


def pauses(cluster: WatchedCluster, minutes: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Between watches of pods, in so many minutes."""
    loop = VirtualLoop()
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=loop.time))

    async def story() -> None:
        watches = Watches(cluster.as_cluster, cast(ApiDiscovery, Served()), "lab", lambda uid: None)
        following = asyncio.create_task(watches._follow(POD, None, EVERYTHING, asyncio.Queue()))
        await asyncio.sleep(minutes * 60)
        assert not following.done(), following.exception()

    run_virtually(story(), loop)
    return [begun - ended for ended, begun in zip(cluster.ended, cluster.begun[1:], strict=False)]


@pytest.mark.parametrize("expired", [True, False], ids=["410", "closed properly"])
def test_watches_that_end_at_once_are_begun_again_after_longer_and_longer_pauses(
    expired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spin on 410 (ttlc); a balancer that closes what is idle."""
    found = pauses(WatchedCluster(SHORT - 1, expired=expired), 10, monkeypatch)
    assert found[: len(RECONNECT)] == list(RECONNECT)
    assert set(found[len(RECONNECT) :]) == {RECONNECT[-1]}


def test_a_watch_that_lasted_is_followed_by_the_next_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(pauses(WatchedCluster(SHORT, expired=False), 2, monkeypatch)) == {0}


def test_a_watch_that_lasted_until_its_version_was_too_old_is_begun_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(pauses(WatchedCluster(SHORT, expired=True), 2, monkeypatch)) == {RECONNECT[0]}
