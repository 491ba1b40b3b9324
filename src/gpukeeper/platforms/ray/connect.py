"""Is there a Ray node here? Looks for an address or a session folder, asks nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SESSION = "/tmp/ray/session_latest"  # noqa: S108 - Ray's own default


def find(environ: Mapping[str, str]) -> str | None:
    """Where it is, or None."""
    if address := environ.get("RAY_ADDRESS"):
        return address
    return SESSION if Path(SESSION).exists() else None
