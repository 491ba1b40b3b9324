"""A StatefulSet over all nodes. All pods start at once: they wait for each other. It never completes by itself."""

from __future__ import annotations

from gpukeeper.acceptance.launchers.kubernetes import marks, pod, rendezvous
from gpukeeper.acceptance.launchers.kubernetes.api import STATEFUL_SETS
from gpukeeper.acceptance.launchers.kubernetes.plan import Item, Plan, head, names

RESOURCE = STATEFUL_SETS
INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"


def items(plan: Plan) -> list[Item]:
    group = rendezvous.variables(plan, f"{plan.name}-0.{plan.name}", rendezvous.from_field(INDEX))
    spec = {
        "serviceName": plan.name,
        "replicas": len(plan.nodes),
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": {marks.ACCEPTANCE: "run", marks.RUN: plan.spec.run}},
        "template": pod.template(
            plan, devices=plan.same_devices(), nodes=names(plan.nodes), group=group, stays=True, apart=True
        ),
    }
    made = {**head(STATEFUL_SETS), "metadata": plan.metadata(plan.name), "spec": spec}
    return [Item(STATEFUL_SETS, made), rendezvous.service(plan)]
