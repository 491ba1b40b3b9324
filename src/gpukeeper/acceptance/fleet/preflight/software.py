"""The device plugin, in whichever namespace it is, and the driver versions of the nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gpukeeper.acceptance.fleet.preflight.cluster import DRIVER, ClusterFacts, ClusterRequest, PluginFacts, targets
from gpukeeper.acceptance.fleet.preflight.finding import Finding, counted, failed, named, passed, unchecked, warning
from gpukeeper.acceptance.fleet.preflight.nodes import INSTALL
from gpukeeper.model.unknown import Unknown

SEARCH = "kubectl get daemonsets,pods -A | grep -i device-plugin"


def device_plugin(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    assert not isinstance(facts.plugins, Unknown)
    if not facts.plugins:
        if targets(facts, request):
            words = (
                "GPUs are announced, but no NVIDIA device plugin was found in any namespace; another program does it"
            )
            yield warning("device-plugin", words, (), [SEARCH])
        else:
            yield failed("device-plugin", "no NVIDIA device plugin in any namespace", (), [SEARCH, INSTALL])
        return
    for plugin in facts.plugins:
        yield _state(plugin)


def _state(plugin: PluginFacts) -> Finding:
    where = f"{plugin.kind} {plugin.namespace}/{plugin.name}"
    show = f"kubectl -n {plugin.namespace} describe {plugin.kind.lower()} {plugin.name}"
    if plugin.wanted == 0:
        words = f"{where} runs on no node: its nodeSelector or affinity matches none"
        return failed("device-plugin", words, [where], [show])
    if plugin.ready < plugin.wanted:
        words = f"{where} is ready on {plugin.ready} of {counted(plugin.wanted, 'node')}"
        log = f"kubectl -n {plugin.namespace} logs {plugin.kind.lower()}/{plugin.name} --tail=50"
        return failed("device-plugin", words, [where], [show, log])
    return passed("device-plugin", f"{where} is ready on {counted(plugin.wanted, 'node')}", [where])


def drivers(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    chosen = targets(facts, request)
    by_version: dict[str, list[str]] = defaultdict(list)
    for node in chosen:
        by_version[node.driver].append(node.name)
    unlabelled = by_version.pop("", [])
    if len(by_version) > 1:
        words = "; ".join(f"{version} on {named(nodes)}" for version, nodes in sorted(by_version.items()))
        show = [
            f"kubectl get nodes -L {DRIVER}",
            "kubectl get clusterpolicies.nvidia.com -o jsonpath='{.items[*].spec.driver.version}'",
        ]
        yield warning("drivers", f"driver versions differ: {words}", [node.name for node in chosen], show)
    if unlabelled:
        words = f"{named(unlabelled)}: no label has the driver version; gpu-feature-discovery does not run there"
        trial = "gpukeeper accept preflight --on kubernetes --trial-on all --image IMAGE"
        yield unchecked("drivers", words, unlabelled, [INSTALL, trial])
    elif len(by_version) == 1:
        version = next(iter(by_version))
        yield passed("drivers", f"driver {version} on {counted(len(chosen), 'node')}")
