"""Bytes that a platform has on disk: images, what workloads wrote, their logs. For metrics only: nothing is decided by
them, and no pass reads them."""

from __future__ import annotations

from datetime import datetime

import msgspec

from gpukeeper.model.unknown import Unknown


class ImageBytes(msgspec.Struct, frozen=True):
    """`own`: without layers that other images have, too."""

    name: str
    own: int | Unknown


class WorkloadBytes(msgspec.Struct, frozen=True):
    """`written`: outside of volumes. `log`: None if it has none."""

    name: str
    written: int | Unknown
    log: int | Unknown | None


class StorageBytes(msgspec.Struct, frozen=True, kw_only=True):
    """One place at one time. `layers`: of all images, each layer once. `cache`: of image builds; None: has none."""

    at: datetime
    layers: int | Unknown
    images: tuple[ImageBytes, ...] = ()
    workloads: tuple[WorkloadBytes, ...] = ()
    cache: int | None = None
