"""The part of the policy that only this platform reads. Filled by config."""

from __future__ import annotations

from collections.abc import Mapping

from gpukeeper.model.policy import Policy, Value


class KubernetesSettings(Value, frozen=True, kw_only=True):
    """How clusters are read. `requests` and `burst` apply to one cluster, for all callers."""

    context: str | None = None  # None: the current one
    requests: float = 20.0  # per second
    burst: int = 30
    page: int = 500
    environments: Mapping[str, str] = {}  # pattern of namespaces: environment; their label wins
    gitops: bool = False  # what a GitOps tool put there is acted on, too; it returns
    prometheus: str | None = None  # address of a Prometheus with DCGM metrics
    prometheus_labels: Mapping[str, str] = {}  # that every series of this cluster has
    exporters: tuple[str, ...] = ()  # addresses of DCGM exporters, without a Prometheus


DEFAULT = KubernetesSettings()


def settings_of(policy: Policy) -> KubernetesSettings:
    found = policy.platforms.get("kubernetes", DEFAULT)
    assert isinstance(found, KubernetesSettings)
    return found
