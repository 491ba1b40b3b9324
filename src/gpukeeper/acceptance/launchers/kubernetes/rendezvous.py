"""How the nodes of one run find each other: the headless Service, and the variables that name the first of them. Pure.

The number of nodes is written down, never counted by DNS: while pods start, each of them would count another number.
"""

from __future__ import annotations

from typing import Any

from gpukeeper.acceptance.launchers.kubernetes import marks
from gpukeeper.acceptance.launchers.kubernetes.api import SERVICES
from gpukeeper.acceptance.launchers.kubernetes.plan import Item, Plan, head


def service(plan: Plan) -> Item:
    """Addresses of pods that are not ready are published, too: they become ready after they have met."""
    manifest = {
        **head(SERVICES),
        "metadata": plan.metadata(plan.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {marks.ACCEPTANCE: "run", marks.RUN: plan.spec.run},
            "ports": [{"name": "rendezvous", "port": plan.spec.port}],
        },
    }
    return Item(SERVICES, manifest, owned=True)


def variables(plan: Plan, first: str, index: dict[str, Any] | None) -> list[dict[str, Any]]:
    """`first`: the host name of the node with index 0. `index`: None where the controller sets its own variable."""
    found: list[dict[str, Any]] = [
        {"name": "MASTER_ADDR", "value": first},
        {"name": "MASTER_PORT", "value": str(plan.spec.port)},
        {"name": "GPUKEEPER_GROUP_SIZE", "value": str(len(plan.nodes))},
    ]
    return found + ([{"name": "GPUKEEPER_GROUP_INDEX", **index}] if index else [])


def from_field(path: str) -> dict[str, Any]:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}
