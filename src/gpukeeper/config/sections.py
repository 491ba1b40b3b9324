"""The policy file, where it differs from the policy: what covers which platform, and settings that stand elsewhere."""

from __future__ import annotations

from typing import Annotated

from gpukeeper.model import policy as model
from gpukeeper.model import setting as s
from gpukeeper.model.policy import Value
from gpukeeper.platforms.kubernetes.settings import KubernetesSettings
from gpukeeper.platforms.ray.settings import RaySettings

PLATFORMS = ("host", "docker", "kubernetes", "ray")
_P = model.Policy()


class Places(Value, frozen=True, kw_only=True):
    places: Annotated[tuple[str, ...], "Hosts or clusters, by name. Shell patterns."] = ("*",)


class KubernetesPlaces(Value, frozen=True, kw_only=True):
    """All namespaces are covered only if the file requests it."""

    namespaces: Annotated[tuple[str, ...], 'Namespaces: [research, "team-*"], or ["*"] for all.']
    places: Annotated[tuple[str, ...], "Clusters, by name. Shell patterns."] = ("*",)


class Scope(Value, frozen=True, kw_only=True):
    host: Annotated[Places | None, "This machine itself: temporary trees, processes that hold GPUs. {} covers it."] = (
        None
    )
    docker: Annotated[Places | None, "Docker hosts. {} covers this host."] = None
    kubernetes: Annotated[KubernetesPlaces | None, "Kubernetes clusters and their namespaces."] = None
    ray: Annotated[Places | None, "Ray clusters. {} covers all that are found."] = None
    simulated: Annotated[Places | None, "The simulated fleet of `gpukeeper demo`."] = None


class Kubernetes(KubernetesSettings, frozen=True, kw_only=True):
    release: Annotated[
        tuple[str, ...],
        "Finalizers that may be removed from an object whose deletion is proven to be stuck.",
        s.InFile(after="gitops"),
    ] = _P.release


class Holds(Value, frozen=True, kw_only=True):
    total: Annotated[s.Span, "Maximum total of a user's holds on one workload or one GPU ..."] = _P.hold_total
    within: Annotated[s.Span, "... within this time."] = _P.hold_within
    keep_alive: Annotated[str, "Path of a file inside a workload that requests a hold."] = _P.keep_alive


class Ttl(Value, frozen=True, kw_only=True):
    own: Annotated[bool, "Use a workload's own TTL, shorter or longer, up to `retention.max`."] = _P.own_ttl
    foreign: Annotated[tuple[str, ...], "TTL annotations of other tools to use as well, such as janitor/ttl."] = (
        _P.foreign_ttl
    )


class Acceptance(Value, frozen=True, kw_only=True):
    marks: Annotated[model.MarkSettings, "Marks on nodes of a cluster: `accept mark`, `node quarantine`."] = _P.marks


class PolicyFile(model.Settings, frozen=True, kw_only=True):
    """A whole policy file after merging."""

    scope: Annotated[Scope, "What the policy covers. Other platforms are never changed.", s.InFile(after="mode")] = (
        Scope()
    )
    ttl: Annotated[Ttl, "TTLs that workloads set for themselves.", s.InFile(after="at_finish")] = Ttl()
    exemptions: Annotated[
        tuple[model.Exemption, ...],
        "Suspends rules for an owner, a workload or a class.",
        s.InFile(after="match"),
    ] = ()
    exemptions_from: Annotated[
        str | None, "File with further exemptions, written by other tools.", s.InFile(after="exemptions")
    ] = None
    ray: Annotated[
        RaySettings,
        "Ray nodes on this machine, and which of their temporary files may be deleted.",
        s.InFile(after="reports"),
    ] = RaySettings()
    holds: Annotated[Holds, "Limits of holds.", s.InFile(after="loops")] = Holds()
    kubernetes: Annotated[Kubernetes, "Access to Kubernetes clusters.", s.InFile(after="gpu")] = Kubernetes()
    acceptance: Annotated[
        Acceptance, "What acceptance runs and quarantines may change on nodes.", s.InFile(after="kubernetes")
    ] = Acceptance()
