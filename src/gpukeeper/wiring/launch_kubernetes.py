"""The launcher of acceptance runs on a Kubernetes cluster, with its connection."""

from __future__ import annotations

from collections.abc import Mapping

from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher
from gpukeeper.wiring.cluster_api import cluster_api


def launcher(options: Mapping[str, str]) -> KubernetesLauncher:
    return KubernetesLauncher(cluster_api(options), options)
