"""What the NVIDIA driver reports about a GPU: one type for inventory, condition, usage and health. Values only.

Every request fills the identity, the memory, the processes and the slices; each request adds the facts of its subject
(see `child`), and the others stay NOT_QUERIED. A fact that the driver refused is Unknown with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from gpukeeper.model.condition import NOT_QUERIED, Advice
from gpukeeper.model.gpu import Fact
from gpukeeper.model.unknown import Unknown

Listed: TypeAlias = tuple[int, ...] | Unknown  # pids that the driver lists; dead ones among them

NO_SLICE_UTILISATION = Unknown("the driver reports no utilisation of a GPU that is split into slices", by_design=True)


class ActivityFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How busy a GPU or slice was since the previous request. Percentages are means."""

    window_s: float = 0.0
    gpm: float | Unknown = NOT_QUERIED
    gpm_s: float = 0.0  # seconds that `gpm` is the mean of
    utilisation: float | Unknown = NOT_QUERIED
    utilisation_peak: float = 0.0
    utilisation_covered_s: float = 0.0
    energy_before_mj: int | Unknown = NOT_QUERIED  # when the window began


NOT_MEASURED = ActivityFacts()


class SliceFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a GPU (MIG) with memory and cores of its own."""

    uuid: str
    index: int
    name: str | Unknown = NOT_QUERIED
    gpu_instance: int | Unknown = NOT_QUERIED
    compute_instance: int | Unknown = NOT_QUERIED
    memory_total_mib: int | Unknown = NOT_QUERIED
    memory_used_mib: int | Unknown = NOT_QUERIED
    listed: Listed = NOT_QUERIED
    sms: int | Unknown = NOT_QUERIED
    activity: ActivityFacts = NOT_MEASURED


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU without a known uuid is present and does not answer (it fell off the bus, for example)."""

    index: int
    uuid: str | Unknown
    name: str | Unknown = NOT_QUERIED
    minor: int | Unknown = NOT_QUERIED  # of /dev/nvidia<minor>; not always the index
    pci: str | Unknown = NOT_QUERIED
    memory_total_mib: int | Unknown = NOT_QUERIED
    memory_used_mib: int | Unknown = NOT_QUERIED
    listed: Listed = NOT_QUERIED
    sliced: bool | Unknown = NOT_QUERIED
    slices: tuple[SliceFacts, ...] | Unknown = ()
    utilisation: float | Unknown = NOT_QUERIED  # inventory: percent of the last second or less; for display only
    advice: Advice | Unknown = NOT_QUERIED  # condition, health
    remap_pending: bool | Unknown = NOT_QUERIED  # condition, health
    remap_failed: bool | Unknown = NOT_QUERIED  # condition, health
    reset_alone: bool | Unknown = NOT_QUERIED  # condition
    energy_mj: int | Unknown = NOT_QUERIED  # usage, health: since the driver was loaded
    activity: ActivityFacts = NOT_MEASURED  # usage
    serial: str | Unknown = NOT_QUERIED  # identity
    facts: Mapping[str, Fact] = {}  # identity: what does not change
    counters: Mapping[str, int | Unknown | None] = {}  # health: they only rise
    states: Mapping[str, Fact] = {}  # health: as of now
