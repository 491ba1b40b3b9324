"""The long-lived process that runs probes on one GPU: a job per line of input, a record per line of output.

    {"probe": "gemm", "params": {…}} → {"done": {…}, "seconds": 1.2, "busy_s": 1.1} or {"broken": {"words": "…"}}

It first sends a greeting with facts about PyTorch and the driver, or that it is broken, and then ends.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import sys
import time
import traceback
from typing import Any, TextIO

PROBES = (
    *("gemm", "memory_bandwidth", "copies", "memory_pattern", "exact", "training", "stress"),
    *("links", "nccl_tests"),
)
UNUSABLE = 3  # exit code: nothing can run here
# After these the process cannot use the GPU again: the parent starts another one.
_FATAL = ("cuda error", "cublas_status", "cudnn_status", "hip error", "uncorrectable", "launch failure")


def main(arguments: list[str]) -> int:
    with _records() as records:
        return serve(records, arguments[0] if arguments else "cuda:0")


def serve(records: TextIO, name: str) -> int:
    try:
        from gpukeeper.acceptance.probes.device import Device

        device = Device(name)
        _threads(device)
        hello = _hello(device)
    except Exception as error:  # any error is reported, not raised
        _write(records, {"broken": {"words": words(error)}})
        return UNUSABLE
    _write(records, {"hello": hello})
    for line in sys.stdin:
        if line.strip():
            record = answer(device, line)
            _write(records, record)
            if "broken" in record and _is_fatal(record["broken"]["words"]):
                return UNUSABLE
    return 0


def answer(device: Any, line: str) -> dict[str, Any]:
    began, busy = time.perf_counter(), device.busy_s
    try:
        job = json.loads(line)
        result = run(device, str(job["probe"]), dict(job.get("params") or {}))
    except Exception as error:
        return {"broken": {"words": words(error)}, "seconds": time.perf_counter() - began}
    finally:
        _release(device)
    return {"done": result, "seconds": time.perf_counter() - began, "busy_s": device.busy_s - busy}


def run(device: Any, name: str, params: dict[str, Any]) -> dict[str, Any]:
    if name not in PROBES:
        raise ValueError(f"unknown probe {name!r}; valid values: {', '.join(PROBES)}")
    module = importlib.import_module(f"gpukeeper.acceptance.probes.{name}")
    result: dict[str, Any] = module.run(device, params)
    return result


def words(error: BaseException) -> str:
    """Where and what went wrong; its kind and first line last, since that is what is quoted."""
    where = "".join(traceback.format_tb(error.__traceback__)[-3:]).rstrip()
    first, *rest = str(error).splitlines() or [""]
    return "\n".join((where, *rest, f"{type(error).__name__}: {first}")).strip()


def strict(value: Any) -> Any:
    """JSON has no NaN and no infinity; they are written as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): strict(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(one) for one in value]
    return value


def _records() -> TextIO:
    """Our own copy of the output; what libraries print (NCCL does) goes to the errors."""
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(kept, "w", encoding="utf-8")


def _write(records: TextIO, record: dict[str, Any]) -> None:
    records.write(json.dumps(strict(record), allow_nan=False) + "\n")
    records.flush()


def _hello(device: Any) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl(torch),
        "cudnn": _dotted(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
        "python": platform.python_version(),
        "device_name": device.name,
        "device_count": torch.cuda.device_count() if device.cuda else 0,
        "memory_total": device.total_memory(),
        "memory_free": device.free_memory(),
    }
    if device.cuda:
        torch.ones(8, device=device.torch).sum().item()  # a context that cannot compute is no greeting
        properties = torch.cuda.get_device_properties(device.torch)
        facts |= {
            "capability": f"{device.capability[0]}.{device.capability[1]}",
            "uuid": str(getattr(properties, "uuid", "")) or None,
            "sms": properties.multi_processor_count,
            "l2_bytes": device.l2_bytes,
            "architectures": list(torch.cuda.get_arch_list()),
        }
    return facts


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    except Exception:  # a build without it
        return None


def _dotted(version: int | None) -> str | None:
    """cuDNN reports 91002 for 9.10.2."""
    if version is None:
        return None
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _threads(device: Any) -> None:
    """Eight of these share a machine."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(4, os.cpu_count() or 1) if device.cuda else 1)


def _release(device: Any) -> None:
    try:
        device.release()
    except Exception as error:  # the GPU is gone: the next job reports it
        sys.stderr.write(f"could not free memory: {error}\n")


def _is_fatal(text: str) -> bool:
    lowered = text.lower()
    return "out of memory" not in lowered and any(sign in lowered for sign in _FATAL)
