"""A machine for tests: a folder with trees, a platform that looks at it, a clock that the test moves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.model.decision import Action, Decision, Step
from gpukeeper.model.policy import PlaceScope, Policy, Reports, Temporary
from gpukeeper.model.subject import Shape, Subject
from gpukeeper.platforms.host.adapter import HostAccess, HostPlatform
from tests.own_processes import everything_seen

T = TypeVar("T")
COARSE_CLOCK = 5  # CLOCK_REALTIME_COARSE, with which files are stamped
# Told by its input: what a process names in its command line would stay for that alone.
HOLDS = "import sys; file = open(sys.stdin.readline()[:-1]); print(flush=True); sys.stdin.read()"


class Ahead:
    """The time of day, as far ahead as the test likes: files made a moment ago are then old."""

    def __init__(self) -> None:
        self.by = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.by


def no_gpus(deadline: timedelta) -> tuple[GpuFacts, ...]:
    return ()


def read_with(**given: Any) -> dict[str, Any]:
    """How the machine is read, apart from what else an adapter is given."""
    how = {name: given.pop(name) for name in HostAccess.__struct_fields__ if name in given}
    return {"access": HostAccess(**{"inventory": no_gpus} | how), **given}


class Machine:
    def __init__(self, root: Path, *names: str, reports: Reports | None = None, **given: Any) -> None:
        self.root, self.clock = root, Ahead()
        temporary = [Temporary(root=str(root), names=names or ("tmp*",), above=0)] if reports is None else []
        policy = Policy(temporary=tuple(temporary), reports=reports or Reports())
        self.platform = HostPlatform("node-1", policy, self.clock, **read_with(**{"scan": everything_seen} | given))

    def tree(self, name: str = "tmp-a", files: int = 3) -> Path:
        (self.root / name / "below").mkdir(parents=True)
        for number in range(files):
            (self.root / name / "below" / f"f{number}").write_bytes(b"x" * 5000)
        return self.root / name

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(work)

    def observe(self) -> dict[str, Subject]:
        """Trees and reports, by their last name."""
        return {Path(one.ref.name).name: one for one in self.all() if one.shape is Shape.TREE}

    def all(self) -> list[Subject]:
        async def read() -> list[Subject]:
            return [one async for page in self.platform.observe(PlaceScope()) for one in page.subjects]

        return self.run(read())

    def read(self, subject: Subject) -> Any:
        return self.run(self.platform.read(subject.ref))

    def remove(self, subject: Subject) -> Any:
        """As of that look; times have the grain of the kernel's tick, so what comes after it is waited for."""
        decision = Decision(seen=subject.seen, action=Action.REMOVE, rule="temporary_tree", reason="old")
        return self.run(self.platform.act(Step("1.1", decision), subject))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())


def a_tick() -> None:
    """Until the clock with which files are stamped has moved on."""
    now = time.clock_gettime_ns(COARSE_CLOCK)
    while time.clock_gettime_ns(COARSE_CLOCK) <= now:
        pass


@contextmanager
def held_open(path: Path) -> Iterator[int]:
    """By another process; its pid."""
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdin.write(os.fsencode(path) + b"\n")
        child.stdin.flush()
        child.stdout.readline()
        yield child.pid
        child.stdin.close()
