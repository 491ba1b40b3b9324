"""The rules for a cluster, in the order of the output, and what each needs to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from gpukeeper.acceptance.fleet.preflight import image, namespace, network, nodes, software, taints
from gpukeeper.acceptance.fleet.preflight.cluster import ClusterFacts, ClusterRequest
from gpukeeper.acceptance.fleet.preflight.finding import Finding, in_order, unchecked
from gpukeeper.model.unknown import Unknown

Check: TypeAlias = Callable[[ClusterFacts, ClusterRequest], Iterable[Finding]]


class Rule(msgspec.Struct, frozen=True):
    """`code` is reported as "could not check" if something of `needs` is not known."""

    code: str
    check: Check
    needs: tuple[str, ...] = ("nodes",)


RULES = (
    Rule("gpu-nodes", nodes.announced),
    Rule("node-not-ready", nodes.present),
    Rule("taints", taints.taints),
    Rule("gpus-unhealthy", nodes.health),
    Rule("gpus-in-use", nodes.occupied, ("nodes", "workloads")),
    Rule("gpus-differ", nodes.sameness),
    Rule("gpu-labels", nodes.labelled),
    Rule("device-plugin", software.device_plugin, ("nodes", "plugins")),
    Rule("drivers", software.drivers),
    Rule("rdma", network.rdma),
    Rule("nccl", network.nccl, ("nodes", "workloads")),
    Rule("image", image.image),
    Rule("pull-secret", image.pull_secrets, ()),
    Rule("shm", image.shm),
    Rule("namespace", namespace.namespace, ("namespace",)),
    Rule("quota", namespace.quota, ("nodes", "quotas")),
    Rule("limit-range", namespace.limit_range, ("nodes", "limits")),
    Rule("rights", namespace.rights, ()),
)
# What reads each part of the facts.
READ_BY = {
    "nodes": "list nodes",
    "workloads": "list pods --all-namespaces",
    "plugins": "list daemonsets.apps --all-namespaces",
    "namespace": "get namespaces",
    "quotas": "list resourcequotas",
    "limits": "list limitranges",
}


def judge(facts: ClusterFacts, request: ClusterRequest) -> tuple[Finding, ...]:
    """In the order of the output: by group, then by rule."""
    found = [finding for rule in RULES for finding in _applied(rule, facts, request)]
    return in_order(found)


def _applied(rule: Rule, facts: ClusterFacts, request: ClusterRequest) -> Iterable[Finding]:
    for need in rule.needs:
        value = getattr(facts, need)
        if isinstance(value, Unknown):
            return [unchecked(rule.code, value, (), [f"kubectl auth can-i {READ_BY[need]}", namespace.ROLE])]
    return rule.check(facts, request)
