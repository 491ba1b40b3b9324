"""A driver for the GPUs of an engine.

It stands where gpukeeper expects its interpreter. The program that asks the driver is
started as `PYTHON -P -m gpukeeper.devices.driver.child`, and is answered here from the file driver.json in $HOME, which
is one of the few variables that this program gets:

    gpus      [{index, uuid, minor, busy, memory_used_mib, …}]; pids as /proc has them unless they are given
    instead   by question: a record that is printed, or a command that runs (a driver that never answers, say)

A question that is not known here ends it; every other program is run by the real interpreter.
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
CHILD = "gpukeeper.devices.driver.child"


def main(arguments: list[str]) -> None:
    if CHILD not in arguments:
        os.execv(sys.executable, [sys.executable, *arguments])
    meter = Meter()
    ask: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "inventory": inventory,
        "condition": condition,
        "usage": meter.usage,
    }
    for line in sys.stdin:
        question = json.loads(line)
        meter.tick(question["about"])
        more, instead = ask[question["about"]], world()["instead"].get(question["about"])
        if isinstance(instead, list):
            os.execvp(instead[0], instead)
        usual = {"state": "answered", "gpus": [more(gpu) for gpu in world()["gpus"]]}
        sys.stdout.write(json.dumps({"id": question["id"], **(instead or usual)}) + "\n")
        sys.stdout.flush()


def world() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ["HOME"], "driver.json").read_text())
    return found


def facts(gpu: dict[str, Any]) -> dict[str, Any]:
    known = ("index", "uuid", "name", "minor", "pci", "memory_total_mib", "memory_used_mib")
    return {fact: gpu[fact] for fact in known} | {"sliced": False, "slices": []}


def inventory(gpu: dict[str, Any]) -> dict[str, Any]:
    return facts(gpu) | {"utilisation": gpu["busy"]}


def condition(gpu: dict[str, Any]) -> dict[str, Any]:
    found = {"advice": gpu["advice"], "remap_pending": False, "remap_failed": False, "reset_alone": True}
    return facts(gpu) | {"listed": listed(gpu)} | found


class Meter:
    """Two sources that agree, and an energy counter that shows that the GPU lives."""

    def __init__(self) -> None:
        self._before, self._window = time.monotonic() - 1, 1.0
        self._energy: dict[str, int] = {}

    def tick(self, about: str) -> None:
        if about == "usage":
            now = time.monotonic()
            self._window, self._before = now - self._before, now

    def usage(self, gpu: dict[str, Any]) -> dict[str, Any]:
        began = self._energy.get(gpu["uuid"], 1_000_000)
        watts = AT_REST_W + (AT_WORK_W - AT_REST_W) * gpu["busy"] / 100
        self._energy[gpu["uuid"]] = began + max(1, int(watts * self._window * 1000))
        activity = {
            "window_s": self._window,
            "gpm": gpu["busy"],
            "gpm_s": self._window,
            "utilisation": gpu["busy"],
            "utilisation_peak": gpu["busy"],
            "utilisation_covered_s": self._window,
            "energy_before_mj": began,
        }
        return facts(gpu) | {
            "listed": listed(gpu),
            "energy_mj": self._energy[gpu["uuid"]],
            "activity": activity,
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
