"""What watches remember: of what exists, and no longer than it exists."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from gpukeeper.model.identity import Ref
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.translate import TranslationSettings
from gpukeeper.platforms.kubernetes.walk import WalkSettings
from gpukeeper.platforms.kubernetes.watch import Watches
from tests.patience import PATIENCE
from tests.unit.platforms.kubernetes.scripted_api import PODS, Reply, ScriptedApi, ask, pods, refused, stream

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
