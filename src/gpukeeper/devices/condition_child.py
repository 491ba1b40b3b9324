"""The program that asks the NVIDIA driver how its GPUs are, and prints one JSON record.

Run it: python -m gpukeeper.devices.condition_child. A program of its own for the same reason as nvml_child, whose
manners it shares: a fact that the driver would not give is {"why": …} in the place of its value.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gpukeeper.devices.nvml_child import (
    absent,
    each_slice,
    every_gpu,
    fact,
    fact_or_absent,
    is_sliced,
    listed,
    memory,
    text,
    words,
)

# In the order of the driver's numbers.
ADVICE = (
    *("none", "reset", "reboot", "drain P2P", "drain and reset", "recover the IMEX domain", "bus reset"),
    "system reboot",
)
OTHER = "something this version does not know"
RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; older bindings do not name it


def main() -> None:
    sys.stdout.write(json.dumps(record()) + "\n")


def record() -> dict[str, Any]:
    return every_gpu(gpu)


def gpu(nvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = text(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError as error:
        return {"uuid": {"why": words(error)}}
    sliced = is_sliced(nvml, handle)
    remapped = fact_or_absent(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    known = isinstance(remapped, tuple)
    return {
        "uuid": uuid,
        "minor": fact(nvml, lambda: int(nvml.nvmlDeviceGetMinorNumber(handle))),
        "pci": fact(nvml, lambda: text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        "memory_used_mib": memory(nvml, handle)["memory_used_mib"],
        "listed": listed(nvml, handle),
        "advice": fact_or_absent(nvml, lambda: advice(nvml, handle)),
        "remap_pending": bool(remapped[2]) if known else remapped,
        "remap_failed": bool(remapped[3]) if known else remapped,
        "sliced": sliced,
        "reset_alone": fact(nvml, lambda: resets_alone(nvml, handle)),
        "slices": slices(nvml, handle) if sliced is True else [],
    }


def slices(nvml: Any, handle: Any) -> list[dict[str, Any]] | dict[str, Any]:
    try:
        return [slice_of(nvml, part) for _, part in each_slice(nvml, handle)]
    except nvml.NVMLError as error:
        return {"why": words(error)}


def slice_of(nvml: Any, part: Any) -> dict[str, Any]:
    return {
        "uuid": text(nvml.nvmlDeviceGetUUID(part)),
        "gpu_instance": int(nvml.nvmlDeviceGetGpuInstanceId(part)),
        "compute_instance": int(nvml.nvmlDeviceGetComputeInstanceId(part)),
        "memory_used_mib": memory(nvml, part)["memory_used_mib"],
        "listed": listed(nvml, part),
    }


def advice(nvml: Any, handle: Any) -> str:
    value = nvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_ACTION])[0]
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(value.nvmlReturn)
    number = int(value.value.uiVal)
    return ADVICE[number] if number < len(ADVICE) else OTHER


def resets_alone(nvml: Any, handle: Any) -> bool:
    """GPUs before Ampere that are linked are reset together or not at all."""
    if nvml.nvmlDeviceGetArchitecture(handle) >= nvml.NVML_DEVICE_ARCH_AMPERE:
        return True
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                return False
        except nvml.NVMLError as error:
            if error.value not in absent(nvml):
                raise
            return True  # no links, or no more of them
    return True


if __name__ == "__main__":
    main()
