"""Checks before an acceptance run, on each engine. What one engine needs is imported when it is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

import msgspec

from gpukeeper.acceptance.fleet.preflight.cluster import ClusterFacts, ClusterRequest, targets
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


class PreflightOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was typed, the same for every engine. `names` empty and no selector: all nodes."""

    names: tuple[str, ...] = ()
    selector: str = ""
    image: str = ""
    namespace: str = ""
    context: str = ""
    pull_secrets: tuple[str, ...] = ()
    gpus_per_node: int | None = None
    shm: str = "16Gi"
    rdma: str = ""
    form: str = "job"
    together: bool = False
    trial: bool = False
    trial_on: tuple[str, ...] = ()  # names, or all
    trial_s: float = 300.0
    run: str = ""  # of the trial
    owner: str = ""


async def kubernetes(options: PreflightOptions, environ: Mapping[str, str] = os.environ) -> tuple[Finding, ...]:
    try:
        api = cluster_api({"context": options.context}, environ)
    except UsageError as problem:
        return (unchecked("cluster", str(problem), (), ["kubectl config get-contexts"]),)
    try:
        reached = await _reached(api)
        if reached.verdict is not Grade.PASS:
            return (reached,)
        request = cluster_request(options, api.namespace)
        facts = await gather(api, request)
        tried = await _trial(api, options, request, facts)
        found = [one for one in judge(facts, request) if not is_proven(one, tried)]
        return in_order((reached, _client(environ), *found, *tried))
    finally:
        await api.close()


def cluster_request(options: PreflightOptions, namespace: str) -> ClusterRequest:
    return ClusterRequest(
        namespace=options.namespace or namespace,
        image=options.image,
        pull_secrets=options.pull_secrets,
        nodes=options.names,
        selector=options.selector,
        gpus_per_node=options.gpus_per_node,
        shm=options.shm,
        rdma=options.rdma,
        form=options.form,
        together=options.together,
    )


def is_proven(one: Finding, tried: tuple[Finding, ...]) -> bool:
    """What could not be checked, and a trial proved: on every node that the finding is about, and nowhere else."""
    if one.verdict is not Grade.INCONCLUSIVE or one.code != "drivers":
        return False
    seen = {
        name for trial in tried if trial.code == "trial-gpu" and trial.verdict is Grade.PASS for name in trial.about
    }
    return bool(one.about) and seen.issuperset(one.about)


async def _trial(
    api: Api, options: PreflightOptions, request: ClusterRequest, facts: ClusterFacts
) -> tuple[Finding, ...]:
    """Empty: none was wanted."""
    if not (options.trial or options.trial_on):
        return ()
    if not request.image:
        raise UsageError("--trial needs the image of the run: --image REGISTRY/NAME:TAG")
    nodes = options.trial_on
    if nodes == ("all",):
        nodes = () if isinstance(facts.nodes, Unknown) else tuple(one.name for one in targets(facts, request))
    asked = TrialRequest(run=options.run, owner=options.owner, cluster=request, nodes=nodes, deadline_s=options.trial_s)
    before = await leftovers(api, request.namespace, options.owner)
    done = await tried(api, asked)
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
