"""A pod."""

from __future__ import annotations

from gpukeeper.platforms.kubernetes.kinds.kind import Kind

POD = Kind(kind="Pod", plural="pods", versions=("v1",))
