"""`gpukeeper node list --on ENGINE`: the GPU nodes of a cluster with the marks that gpukeeper set."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpukeeper.acceptance.fleet.quarantine import NodeState, state_of
from gpukeeper.config.load import load_policy
from gpukeeper.interfaces.cli.marking import refuse_engine
from gpukeeper.interfaces.terminal import show as shown
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.wiring import node_marks
from gpukeeper.wiring.clock import SystemClock


def list_nodes(engine: str, context: str, policy: Path | None, *, json: bool) -> None:
    refuse_engine(engine)
    place, found = asyncio.run(node_marks.read_nodes({"context": context}, load_policy(policy).policy.marks))
    now = SystemClock().now()
    nodes = tuple(state_of(one, now) for one in sorted(found, key=lambda one: one.node) if one.gpu)
    if json:
        shown.as_json("cluster-nodes", {"place": place, "nodes": nodes})
        return
    shown.table([_row(one) for one in nodes], head=("state", "node", "acceptance", "run", "reason"))
    over = [one.node for one in nodes if one.expired]
    if over:
        print_message(f"The time of {len(over)} quarantines is over: gpukeeper node return --expired --on {engine}")
    if not nodes:
        print_message("The cluster has no GPU nodes.")


def _row(one: NodeState) -> tuple[str, ...]:
    state = "quarantined" if one.quarantined else "out" if one.out else "in service"
    return (state, one.node, one.acceptance or "-", one.run or "-", one.quarantine or one.out or "-")
