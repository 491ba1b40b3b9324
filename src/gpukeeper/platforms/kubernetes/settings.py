"""The part of the policy that only this platform reads. Filled by config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from gpukeeper.model import setting as s
from gpukeeper.model.policy import Policy, Value


class KubernetesSettings(Value, frozen=True, kw_only=True):
    """How clusters are read. `requests` and `burst` apply to one cluster, for all callers."""

    context: Annotated[str | None, "Context of the kubeconfig. Default: the current one."] = None
    requests: Annotated[s.Rate, "Maximum requests per second to one cluster, in total."] = 20.0
    burst: Annotated[s.Count, "Number of requests in a burst."] = 30
    page: Annotated[s.Count, "Objects per page of a list; memory usage grows with it."] = 500
    environments: Annotated[
        Mapping[str, str], "Environment by namespace pattern. The label gpukeeper.io/environment takes precedence."
    ] = {}
    gitops: Annotated[bool, "Also act on objects that a GitOps tool manages. The tool recreates them."] = False
    prometheus: Annotated[s.Address, "URL of a Prometheus with DCGM metrics: http://prometheus:9090."] = None
    prometheus_labels: Annotated[
        Mapping[str, str], "Labels of this cluster's series, if the Prometheus has several clusters."
    ] = {}
    exporters: Annotated[tuple[str, ...], "URLs of DCGM exporters, if there is no Prometheus."] = ()


DEFAULT = KubernetesSettings()


def settings_of(policy: Policy) -> KubernetesSettings:
    found = policy.platforms.get("kubernetes", DEFAULT)
    assert isinstance(found, KubernetesSettings)
    return found
