"""Leases of a real API server: what it stores of ours, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

from gpukeeper.blocking import SystemClock
from gpukeeper.clients.kubernetes.connect import Cluster as Client
from gpukeeper.platforms.kubernetes.lease import Leadership
from tests.real.kube.api import Api
from tests.real.kube.control_plane import Cluster

SECOND = timedelta(seconds=1)


def told(
    cluster: Cluster,
    namespace: str,
    story: Callable[[Callable[[str], Leadership]], Awaitable[None]],
    second: timedelta = 10 * SECOND,
) -> None:
    """A story about candidates, each with a connection of its own. `second`: where their times have to pass, short."""
    environ = {"KUBECONFIG": str(cluster.kubeconfig())}

    async def tell() -> None:
        async with AsyncExitStack() as stack:
            clients = [Client.from_environment(environ) for _ in range(2)]
            for client in clients:
                await stack.enter_async_context(client.opened())

            def candidate(name: str) -> Leadership:
                return Leadership(
                    clients[name == "two"],
                    namespace,
                    "leader",
                    name,
                    SystemClock(),
                    duration=3 * second,
                    renew_deadline=2 * second,
                    retry=second / 4,
                )

            await story(candidate)

    asyncio.run(tell())


@pytest.mark.smoke
def test_a_lease_is_made_renewed_handed_over_and_taken(cluster: Cluster, api: Api, namespace: str) -> None:
    def spec() -> dict[str, object]:
        found = api.get("leases", namespace, "leader")
        assert found is not None
        return dict(found["spec"])

    async def story(candidate: Callable[[str], Leadership]) -> None:
        one, two = candidate("one"), candidate("two")
        stop, end = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group, asyncio.timeout(30):
            first = group.create_task(one.campaign(stop))
            await one.won.wait()
            begun = await asyncio.to_thread(spec)
            assert (begun["holderIdentity"], begun["leaseTransitions"]) == ("one", 0)
            group.create_task(two.campaign(end))
            is_renewed = lambda: spec()["renewTime"] != begun["renewTime"]  # noqa: E731
            await asyncio.to_thread(cluster.until, is_renewed, "it is renewed", 20)
            renewed = await asyncio.to_thread(spec)
            assert (one.why_not(), two.won.is_set()) == (None, False)
            assert renewed["acquireTime"] == begun["acquireTime"]
            stop.set()
            await first
            await asyncio.wait_for(two.won.wait(), 2)
            assert "two holds it" not in str(one.why_not())
            assert (await asyncio.to_thread(spec))["leaseTransitions"] == 1
            end.set()

    told(cluster, namespace, story, SECOND)
    assert not spec()["holderIdentity"]


def test_only_one_of_two_writes_at_the_same_version_holds_it(cluster: Cluster, api: Api, namespace: str) -> None:
    async def story(candidate: Callable[[str], Leadership]) -> None:
        for round_ in range(20):
            one, two = candidate("one"), candidate("two")
            await asyncio.gather(one.attempt(), two.attempt())
            assert [one.why_not() is None, two.why_not() is None].count(True) == 1, round_
            api.delete("leases", namespace, "leader")

    told(cluster, namespace, story)


def test_a_namespace_that_is_not_there_is_reported(cluster: Cluster) -> None:
    async def story(candidate: Callable[[str], Leadership]) -> None:
        one = candidate("one")
        await one.attempt()
        assert 'namespaces "nowhere-at-all" not found' in str(one.why_not())

    told(cluster, "nowhere-at-all", story)
