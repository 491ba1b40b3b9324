"""What gpukeeper makes of a node of a real cluster, as its adapter asks: from the arguments of the raylet alone."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from gpukeeper.clients.ray import DEADLINE, StateApi
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.busy import ClusterState, busy, foreign, quiet
from gpukeeper.platforms.ray.state import addresses
from gpukeeper.platforms.ray.state import answers_of as state_of
from tests.real.ray.clusters import Node, until


def api_that_reports(node: Node, deadline: timedelta = DEADLINE) -> StateApi | None:
    """The first address in the arguments of the raylet that reports its session."""
    for address in addresses(node.argv):
        api = StateApi(address, deadline=deadline)
        version = asyncio.run(api.version())
        if not isinstance(version, Unknown) and version.session == node.session:
            return api
    return None


def api_of(node: Node) -> StateApi:
    found = api_that_reports(node)
    assert found is not None, addresses(node.argv)
    return found


def answers_of(node: Node) -> ClusterState:
    return asyncio.run(state_of(api_of(node), node.session))


def ray_says(node: Node) -> str | Unknown | None:
    return busy(node.node_id, answers_of(node))


def is_idle(node: Node) -> bool:
    """By Ray and by the titles of its processes."""
    titles = node.titles()
    return ray_says(node) is None and quiet(titles) is None and foreign(titles) is None


def until_idle(*nodes: Node) -> None:
    """What ended takes Ray a moment to notice."""
    for node in nodes:
        until(
            lambda node=node: is_idle(node), "the node is idle", lambda node=node: f"{ray_says(node)} {node.titles()}"
        )
