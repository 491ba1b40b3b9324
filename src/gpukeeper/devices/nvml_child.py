"""The program that asks the NVIDIA driver, and prints one JSON record. Run it: python -m gpukeeper.devices.nvml_child

It is a program of its own because a call into a sick driver may never return; whoever starts it can give it up.
It knows nothing of gpukeeper. A fact that the driver would not give is {"why": …} in the place of its value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

MIB = 1024 * 1024
NO_SLICE_UTILISATION = {"why": "the driver has no utilisation of a GPU that is cut into slices", "by_design": True}


def main() -> None:
    sys.stdout.write(json.dumps(record()) + "\n")


def record() -> dict[str, Any]:
    return every_gpu(gpu)


def every_gpu(tell: Callable[[Any, int], dict[str, Any]]) -> dict[str, Any]:
    """`state`: answered, no driver (library or kernel module is missing), failed."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return {"state": "no driver" if error.value in missing else "failed", "why": words(error)}
    try:
        count = pynvml.nvmlDeviceGetCount()
        return {"state": "answered", "gpus": [tell(pynvml, index) for index in range(count)]}
    except pynvml.NVMLError as error:
        return {"state": "failed", "why": words(error)}
    finally:
        pynvml.nvmlShutdown()


def gpu(nvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = text(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError as error:
        return {"index": index, "uuid": {"why": words(error)}}
    sliced = is_sliced(nvml, handle)
    return {
        "index": index,
        "uuid": uuid,
        "name": fact(nvml, lambda: text(nvml.nvmlDeviceGetName(handle))),
        "minor": fact(nvml, lambda: int(nvml.nvmlDeviceGetMinorNumber(handle))),
        "utilisation": NO_SLICE_UTILISATION
        if sliced is True
        else fact(nvml, lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        "slices": slices(nvml, handle) if sliced is True else (sliced if isinstance(sliced, dict) else []),
        "listed": listed(nvml, handle),
        **memory(nvml, handle),
    }


def is_sliced(nvml: Any, handle: Any) -> bool | dict[str, Any]:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as error:
        # Most models cannot be cut at all and say "not supported"; that is an answer.
        return False if error.value == nvml.NVML_ERROR_NOT_SUPPORTED else {"why": words(error)}
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def slices(nvml: Any, handle: Any) -> list[dict[str, Any]] | dict[str, Any]:
    try:
        return [slice_of(nvml, part, index) for index, part in each_slice(nvml, handle)]
    except nvml.NVMLError as error:
        return {"why": words(error)}


def each_slice(nvml: Any, handle: Any) -> Iterator[tuple[int, Any]]:
    """Index and handle of every slice of a GPU that is cut."""
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NOT_FOUND:  # an index without a slice is not an error
                raise
        else:
            yield index, part


def slice_of(nvml: Any, part: Any, index: int) -> dict[str, Any]:
    return {
        "uuid": text(nvml.nvmlDeviceGetUUID(part)),
        "index": index,
        "name": fact(nvml, lambda: text(nvml.nvmlDeviceGetName(part))),
        "gpu_instance": fact(nvml, lambda: int(nvml.nvmlDeviceGetGpuInstanceId(part))),
        "compute_instance": fact(nvml, lambda: int(nvml.nvmlDeviceGetComputeInstanceId(part))),
        "listed": listed(nvml, part),
        **memory(nvml, part),
    }


def memory(nvml: Any, handle: Any) -> dict[str, Any]:
    """The second version of the call: the first counts what the driver reserves for itself as used."""
    try:
        answer = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        try:
            answer = nvml.nvmlDeviceGetMemoryInfo(handle)  # drivers before 510 have only the first
        except nvml.NVMLError as error:
            return {"memory_total_mib": {"why": words(error)}, "memory_used_mib": {"why": words(error)}}
    return {"memory_total_mib": answer.total // MIB, "memory_used_mib": answer.used // MIB}


def fact(nvml: Any, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except nvml.NVMLError as error:
        return {"why": words(error)}


def listed(nvml: Any, handle: Any) -> list[int] | dict[str, Any]:
    """Every pid the driver names, for computing, for graphics and through MPS."""
    pids: set[int] = set()
    for ask in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
        nvml.nvmlDeviceGetMPSComputeRunningProcesses,
    ):
        found = fact_or_absent(nvml, lambda: [int(one.pid) for one in ask(handle)])  # noqa: B023 (called here)
        if isinstance(found, dict):
            if found.get("by_design"):
                continue  # a model without graphics, a slice without MPS
            return found
        pids.update(found)
    return sorted(pids)


def fact_or_absent(nvml: Any, ask: Callable[[], Any]) -> Any:
    """As `fact`; what the model or the driver does not have is unknown by design."""
    try:
        return ask()
    except nvml.NVMLError as error:
        return {"why": words(error), "by_design": error.value in absent(nvml)}


def absent(nvml: Any) -> tuple[int, ...]:
    return (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def text(answer: str | bytes) -> str:
    """Older bindings answer with bytes."""
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer


def words(error: Exception) -> str:
    return f"the NVIDIA driver answered: {error}"


if __name__ == "__main__":
    main()
