"""A driver for the bed's GPUs. It stands where gpukeeper expects its interpreter, for the programs that ask the driver:
they are started as `PYTHON -P -m gpukeeper.devices.<child>`, and are answered here from the file $GPUKEEPER_BED_DRIVER:

    gpus      [{index, uuid, minor, busy, memory_used_mib, …}]; pids as /proc has them unless they are told
    instead   by child: a record that is printed, or a command that runs (a driver that never answers, say)

A program that is not known here, and everything else, is run by the real interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

AT_REST_W, AT_WORK_W = 80, 700


def main(arguments: list[str]) -> None:
    module = arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else ""
    child = module.removeprefix("gpukeeper.devices.")
    instead = world()["instead"].get(child)
    if isinstance(instead, list):
        os.execvp(instead[0], instead)
    elif child == "usage_child":
        answer_each_line()
    elif child in ONCE:
        say(instead or {"state": "answered", "gpus": [ONCE[child](gpu) for gpu in world()["gpus"]]})
    else:
        os.execv(sys.executable, [sys.executable, *arguments])


def world() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ["GPUKEEPER_BED_DRIVER"]).read_text())
    return found


def say(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def inventory(gpu: dict[str, Any]) -> dict[str, Any]:
    facts = ("index", "uuid", "name", "minor", "memory_total_mib", "memory_used_mib")
    return {fact: gpu[fact] for fact in facts} | {"utilisation": gpu["busy"], "slices": []}


def condition(gpu: dict[str, Any]) -> dict[str, Any]:
    return {
        **{fact: gpu[fact] for fact in ("uuid", "minor", "pci", "memory_used_mib", "advice")},
        "listed": listed(gpu),
        "remap_pending": False,
        "remap_failed": False,
        "sliced": False,
        "reset_alone": True,
        "slices": [],
    }


ONCE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"nvml_child": inventory, "condition_child": condition}


def answer_each_line() -> None:
    before, energy = time.monotonic() - 1, {gpu["uuid"]: 1_000_000 for gpu in world()["gpus"]}
    for _question in sys.stdin:
        now = time.monotonic()
        window, before = now - before, now
        told = world()
        usual = {"state": "answered", "gpus": [usage(gpu, window, energy) for gpu in told["gpus"]]}
        say(told["instead"].get("usage_child") or usual)


def usage(gpu: dict[str, Any], window: float, energy: dict[str, int]) -> dict[str, Any]:
    """Two sources that agree, and an energy counter that shows that the GPU lives."""
    began = energy[gpu["uuid"]]
    watts = AT_REST_W + (AT_WORK_W - AT_REST_W) * gpu["busy"] / 100
    energy[gpu["uuid"]] = began + max(1, int(watts * window * 1000))
    return {
        **{fact: gpu[fact] for fact in ("index", "uuid", "memory_used_mib")},
        "sliced": False,
        "window_s": window,
        "gpm": gpu["busy"],
        "gpm_s": window,
        "utilisation": gpu["busy"],
        "utilisation_peak": gpu["busy"],
        "utilisation_covered_s": window,
        "energy_before_mj": began,
        "energy_mj": energy[gpu["uuid"]],
        "pids": listed(gpu),
        "slices": [],
    }


def listed(gpu: dict[str, Any]) -> list[int]:
    if gpu["pids"] is not None:
        return list(gpu["pids"])
    path = f"/dev/nvidia{gpu['minor']}"
    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if has_open(process, path)]


def has_open(process: Path, path: str) -> bool:
    try:
        return any(os.path.islink(fd) and os.readlink(fd) == path for fd in (process / "fd").iterdir())  # noqa: PTH114, PTH115
    except OSError:
        return False  # it ended meanwhile


if __name__ == "__main__":
    main(sys.argv[1:])
