"""Is there a cluster to talk to? Looks for a service account or a kubeconfig, asks nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/token"


def find(environ: Mapping[str, str]) -> str | None:
    """Where it is, or None."""
    if environ.get("KUBERNETES_SERVICE_HOST") and Path(ACCOUNT).exists():
        return "the cluster around us"
    named = environ.get("KUBECONFIG", "")
    home = environ.get("HOME")
    places = [Path(p) for p in named.split(":") if p] or ([Path(home) / ".kube" / "config"] if home else [])
    return next((str(place) for place in places if place.is_file()), None)
