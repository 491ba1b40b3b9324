"""NVIDIA's nccl-tests, if installed: runs all_reduce_perf over all GPUs of this machine and parses its table.

Their average over all sizes means nothing (small ones dominate it), so each size is reported. A program that was not
found was not run, which is not a pass. params: program, gpus, first, last (sizes, as it takes them), timeout_s.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from gpukeeper.acceptance.probes.ranks import BadSetting

_TIMEOUT_S = 600.0
_TAIL = 2000  # characters of its output, if it failed


def run(device: Any, params: dict[str, Any]) -> dict[str, Any]:
    program = params.get("program")
    if not program:
        return {"not_run": "nccl-tests is not installed (all_reduce_perf not found)"}
    if not Path(program).is_file():
        return {"not_run": f"{program} not found"}
    gpus = int(params.get("gpus") or _visible())
    if gpus < 1:
        return {"not_run": "it needs a GPU"}
    command = [str(program), "-b", str(params.get("first") or "8K"), "-e", str(params.get("last") or "8G"), "-f", "2"]
    command += ["-g", str(gpus), "-c", "1"]
    with device.working():
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False,
            timeout=float(params.get("timeout_s") or _TIMEOUT_S),
        )  # fmt: skip
    answer = read(done.stdout)
    if not answer["rows"]:
        output = (done.stderr.strip() or done.stdout.strip())[-_TAIL:]
        raise RuntimeError(f"{Path(program).name} exited with code {done.returncode} and printed no table: {output}")
    return {**answer, "program": Path(program).name, "gpus": gpus, "exit": done.returncode}


def _visible() -> int:
    import torch

    return int(torch.cuda.device_count())


_VERSION = re.compile(r"^# nccl-tests version (\S+)(?: \S+)? nccl-headers=\d+ nccl-library=(\d+)", re.MULTILINE)
_BOUNDS = re.compile(r"^# Out of bounds values\s*:\s*(\d+)", re.MULTILINE)
# Size, count, type, operation, root; then time, algbw, busbw and #wrong out of place, and the same in place.
_FIGURE = r"([\d.]+(?:e[+-]?\d+)?)"
_HALF = rf"\s+{_FIGURE}\s+{_FIGURE}\s+{_FIGURE}\s+(N/A|[\d.]+(?:e[+-]?\d+)?)"
_ROW = re.compile(rf"^\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+){_HALF}{_HALF}")


def read(text: str) -> dict[str, Any]:
    """Its table, as nccl-tests 2.x print it. `wrong` is None where it did not check."""
    if not isinstance(text, str):
        raise BadSetting("nccl-tests print text.")
    rows = [_row(found) for line in text.splitlines() if (found := _ROW.match(line))]
    version, bounds = _VERSION.search(text), _BOUNDS.search(text)
    return {
        "rows": rows,
        "out_of_bounds": int(bounds[1]) if bounds else None,
        "version": version[1] if version else None,
        "nccl": int(version[2]) if version else None,
    }


def _row(found: re.Match[str]) -> dict[str, Any]:
    time_us, algbw, busbw = (float(found[n]) for n in (6, 7, 8))
    wrongs = [found[n] for n in (9, 13)]
    checked = [float(one) for one in wrongs if one != "N/A"]
    return {
        "bytes": int(found[1]),
        "dtype": found[3],
        "time_us": time_us,
        "algbw": algbw,
        "busbw": busbw,
        "busbw_in_place": float(found[12]),
        "wrong": int(sum(checked)) if checked else None,
    }
