"""Is there a Docker engine here? Looks at the socket, asks nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SOCKET = "/var/run/docker.sock"


def find(environ: Mapping[str, str]) -> str | None:
    """Where it is, or None."""
    address = environ.get("DOCKER_HOST") or f"unix://{SOCKET}"
    if not address.startswith("unix://"):
        return address
    return address if Path(address.removeprefix("unix://")).is_socket() else None
