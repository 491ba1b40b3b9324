"""Which GPUs a pod requests. Pure.

The scheduler gives a pod what it requests, whole numbers only, so a scheduled pod holds exactly that. The API does not
show which device of the node it got; of a claim (dynamic resource allocation) not even how many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

import msgspec

from gpukeeper.platforms.kubernetes.wire import Container, PodSpec

WHOLE = frozenset({"nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe"})
SLICES = frozenset({"nvidia.com/gpu.shared"})
SLICE_PREFIX = "nvidia.com/mig-"
MOST_GPUS = 256  # of one pod; a manifest may contain any number, and no node has more
_QUANTITY = re.compile(r"(\d{1,18})([kMGT]?)")  # the API itself writes 1000 as 1k
_SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class PodGpuRequest(msgspec.Struct, frozen=True):
    whole: int = 0
    slices: int = 0
    unclear: str | None = None  # why that may not be all
    written: int = 0  # what is requested, if that is more than is counted

    def __bool__(self) -> bool:
        """It requests a GPU, or may do so."""
        return self.whole > 0 or self.slices > 0 or self.unclear is not None


def requested(spec: PodSpec) -> PodGpuRequest:
    """What the scheduler counts: containers together, or the largest step of the start if that needs more."""
    unclear = _claims(spec)
    together, largest = {"whole": 0, "slices": 0}, {"whole": 0, "slices": 0}
    beside = {"whole": 0, "slices": 0}  # init containers that stay, as far as they are started
    for container in spec.init_containers or ():
        wants, odd = _requested(container)
        unclear = unclear or odd
        for part, count in wants.items():
            if container.restart_policy == "Always":
                beside[part] += count
                largest[part] = max(largest[part], beside[part])
            else:
                largest[part] = max(largest[part], beside[part] + count)
    for container in spec.containers:
        wants, odd = _requested(container)
        unclear = unclear or odd
        for part, count in wants.items():
            together[part] += count
    counts = {part: max(together[part] + beside[part], largest[part]) for part in together}
    written = sum(counts.values())
    if written <= MOST_GPUS:
        return PodGpuRequest(counts["whole"], counts["slices"], unclear)
    unclear = f"it requests {written} GPUs, more than any node has; counted as {MOST_GPUS}"
    counts = {part: min(count, MOST_GPUS) for part, count in counts.items()}
    return PodGpuRequest(counts["whole"], counts["slices"], unclear, written)


def any_requested(specs: Iterable[PodSpec]) -> bool:
    """One of these requests a GPU, or something that may be one."""
    return any(requested(one) for one in specs)


def image_of(specs: Iterable[PodSpec]) -> str | None:
    """Of the first container that requests a GPU, else of the first one."""
    containers = [container for spec in specs for container in spec.containers]
    if len(containers) == 1:  # most; its requests need not be read
        return containers[0].image or None
    with_gpu = [one for one in containers if any(_requested(one)[0].values())]
    return next((one.image for one in (*with_gpu, *containers) if one.image), None)


def _claims(spec: PodSpec) -> str | None:
    if not spec.resource_claims:
        return None
    names = ", ".join(one.name[:60] for one in spec.resource_claims[:4])
    return f"it has a resource claim ({names}), which may be a GPU"


def _requested(container: Container) -> tuple[dict[str, int], str | None]:
    """A request that is not written is as large as the limit; for GPUs both are always the same."""
    wants = {"whole": 0, "slices": 0}
    resources = container.resources
    if resources is None:
        return wants, None
    unclear = None
    for name, quantity in {**(resources.limits or {}), **(resources.requests or {})}.items():
        part = "whole" if name in WHOLE else "slices" if name in SLICES or name.startswith(SLICE_PREFIX) else None
        if part is None:
            continue
        count = _count(quantity)
        if count is None:
            unclear = f"it requests {str(quantity)[:40]!r} of {name[:60]}, which is not a number of GPUs"
        else:
            wants[part] += count
    return wants, unclear


def _count(quantity: str | float) -> int | None:
    if not isinstance(quantity, str):
        return int(quantity) if quantity >= 0 and quantity == int(quantity) else None
    found = _QUANTITY.fullmatch(quantity)
    return int(Decimal(found[1]) * _SCALES[found[2]]) if found is not None else None
