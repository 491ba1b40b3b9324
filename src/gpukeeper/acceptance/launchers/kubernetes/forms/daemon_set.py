"""A DaemonSet, as the older kit had it. It never completes: each pod runs once, reports and waits, and the set is
removed when its nodes have reported. Its pods are alike, so there is one set for each number and kind of GPUs."""

from __future__ import annotations

from gpukeeper.acceptance.launchers.kubernetes import marks, pod
from gpukeeper.acceptance.launchers.kubernetes.api import DAEMON_SETS
from gpukeeper.acceptance.launchers.kubernetes.plan import Item, Plan, head, names
from gpukeeper.model.errors import UsageError

RESOURCE = DAEMON_SETS
SET = "gpukeeper.io/set"


def items(plan: Plan) -> list[Item]:
    if plan.spec.together:
        raise UsageError(
            "--as daemonset: its pods have no stable names, so they cannot be one run. Nothing was created. "
            "Use --as job, indexed-job or statefulset."
        )
    kinds = sorted({tuple(plan.devices(one).items()) for one in plan.nodes})
    return [_set(plan, dict(kind), number if len(kinds) > 1 else 0) for number, kind in enumerate(kinds, start=1)]


def _set(plan: Plan, devices: dict[str, int], number: int) -> Item:
    """`number`: of the set, where there are several."""
    chosen = [one for one in plan.nodes if plan.devices(one) == devices]
    template = pod.template(plan, devices=devices, nodes=names(chosen), stays=True)
    match = {marks.ACCEPTANCE: "run", marks.RUN: plan.spec.run}
    if number:
        match[SET] = template["metadata"]["labels"][SET] = str(number)
    spec = {"selector": {"matchLabels": match}, "updateStrategy": {"type": "OnDelete"}, "template": template}
    name = marks.name(plan.spec.run, str(number) if number else "")
    return Item(DAEMON_SETS, {**head(DAEMON_SETS), "metadata": plan.metadata(name), "spec": spec})
