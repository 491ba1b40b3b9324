"""Checks before an acceptance run, on each engine. What one engine needs is imported when it is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from msgspec.structs import replace

from gpukeeper.acceptance.fleet.preflight.cluster import ClusterFacts, targets
from gpukeeper.acceptance.fleet.preflight.finding import Finding, in_order, passed, unchecked, warning
from gpukeeper.acceptance.fleet.preflight.kubernetes import judge
from gpukeeper.acceptance.fleet.preflight.trial import drivers as trial_drivers
from gpukeeper.acceptance.fleet.preflight.trial import judge_trial, network_advice
from gpukeeper.acceptance.launchers.kubernetes.api import Api
from gpukeeper.acceptance.launchers.preflight.kubernetes import gather
from gpukeeper.acceptance.launchers.preflight.trial import TrialRequest, leftovers, tried
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.grade import Grade
from gpukeeper.model.unknown import Unknown
from gpukeeper.wiring.cluster_api import cluster_api


async def kubernetes(
    wanted: TrialRequest, context: str, environ: Mapping[str, str] = os.environ, *, trial: bool
) -> tuple[Finding, ...]:
    """No namespace: that of the context. `trial`: start one; else only the cluster is checked."""
    try:
        api = cluster_api({"context": context}, environ)
    except UsageError as problem:
        return (unchecked("cluster", str(problem), (), ["kubectl config get-contexts"]),)
    try:
        reached = await _reached(api)
        if reached.verdict is not Grade.PASS:
            return (reached,)
        request = replace(wanted.cluster, namespace=wanted.cluster.namespace or api.namespace)
        facts = await gather(api, request)
        tried = await _trial(api, replace(wanted, cluster=request), facts) if trial else ()
        found = [one for one in judge(facts, request) if not is_proven(one, tried)]
        return in_order((reached, _client(environ), *found, *tried))
    finally:
        await api.close()


def is_proven(one: Finding, tried: tuple[Finding, ...]) -> bool:
    """What could not be checked, and a trial proved: on every node that the finding is about, and nowhere else."""
    if one.verdict is not Grade.INCONCLUSIVE or one.code != "drivers":
        return False
    seen = {
        name for trial in tried if trial.code == "trial-gpu" and trial.verdict is Grade.PASS for name in trial.about
    }
    return bool(one.about) and seen.issuperset(one.about)


async def _trial(api: Api, wanted: TrialRequest, facts: ClusterFacts) -> tuple[Finding, ...]:
    if not wanted.cluster.image:
        raise UsageError("--trial needs the image of the run: --image REGISTRY/NAME:TAG")
    if wanted.nodes == ("all",):
        known = () if isinstance(facts.nodes, Unknown) else targets(facts, wanted.cluster)
        wanted = replace(wanted, nodes=tuple(one.name for one in known))
    before = await leftovers(api, wanted.cluster.namespace, wanted.owner)
    done = await tried(api, wanted)
    found = [finding for one in done for finding in judge_trial(one)]
    return (*before, *found, *trial_drivers(done), *network_advice(done))


async def _reached(api: Api) -> Finding:
    try:
        return passed("cluster", f"{api.place} is reachable: {await api.version()}")
    except PlatformError as problem:
        return unchecked("cluster", str(problem), (), ["kubectl cluster-info"])


def _client(environ: Mapping[str, str]) -> Finding:
    found = shutil.which("kubectl", path=environ.get("PATH"))
    if found is None:
        words = "kubectl is not in PATH. gpukeeper does not need it; the commands below do"
        return warning("client", words, (), ["https://kubernetes.io/docs/tasks/tools/"])
    return passed("client", f"kubectl is at {found}")
