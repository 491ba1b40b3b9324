"""Nodes for tests: processes as plain values, and real folders with real programs in them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpukeeper.model.decision import Action, Decision, Step
from gpukeeper.model.policy import PlaceScope, Policy, Temporary
from gpukeeper.model.subject import Subject
from gpukeeper.platforms.ray.adapter import RayPlatform
from gpukeeper.platforms.ray.nodes import Process, Raylet, raylet_of, read
from gpukeeper.platforms.ray.settings import RaySettings
from gpukeeper.platforms.ray.survey import NodesAccess
from tests.own_processes import everything_seen
from tests.patience import PATIENCE

SESSION = "session_2026-01-01_00-00-00_000000_7"
NOW = datetime(2026, 11, 15, tzinfo=UTC)


class Ahead:
    """Nobody can set the time of a change back, so the clock is ahead."""

    def __init__(self, ahead: timedelta = timedelta(days=1)) -> None:
        self.ahead = ahead

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


def process(pid: int = 100, *argv: str, **facts: Any) -> Process:
    known = {
        "starttime": 1,
        "parent": 1,
        "uid": 1000,
        "ticks": 0,
        "comm": "python",
        "mounts": "mnt:[1]",
        "pids": "pid:[1]",
        "inside": pid,
        "container": None,
    }
    return Process(pid=pid, argv=argv, **(known | facts))


def raylet(pid: int, root: str, *more: str, **facts: Any) -> Process:
    session = f"{root}/{SESSION}"
    flags = (f"--session_dir={session}", f"--temp_dir={root}", "--node_id=abc", f"--session-name={SESSION}", *more)
    return process(pid, "/venv/ray/core/src/ray/raylet/raylet", *flags, **({"comm": "raylet"} | facts))


def as_raylet(one: Process) -> Raylet:
    found = raylet_of(one)
    assert found is not None
    return found


def platform(
    scratch: Path,
    *,
    here: Callable[[], tuple[Process, ...]] = tuple,
    ahead: timedelta = timedelta(days=1),
    settings: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    **how: Any,
) -> RayPlatform:
    """This machine as a node, for the sake of a Ray root below `scratch`; with no processes but these."""
    (scratch / "ray").mkdir(parents=True, exist_ok=True)
    nodes = RaySettings(
        **{"roots": (str(scratch),), "cpu": 1e9, "window": timedelta(milliseconds=1)} | (settings or {})
    )
    temporary = tuple(Temporary(root=root, names=nodes.names, above=0, platform="ray") for root in nodes.roots)
    made = Policy(
        **{"scope": {"ray": PlaceScope()}, "platforms": {"ray": nodes}, "temporary": temporary} | (policy or {})
    )
    read = {name: how.pop(name) for name in NodesAccess.__struct_fields__ if name in how}
    access = NodesAccess(**{"scan": everything_seen, "everyone": here} | read)
    return RayPlatform("here", made, Ahead(ahead), access=access, **{"environ": {}} | how)


def session(scratch: Path, name: str = SESSION) -> Path:
    """As a crash leaves it, with what Ray makes in it."""
    folder = scratch / "ray" / name
    for inner in ("logs/old", "logs/events", "sockets", "runtime_resources"):
        (folder / inner).mkdir(parents=True)
    (folder / "logs/raylet.out").write_text("the last words\n")
    return folder


def tree(scratch: Path, name: str) -> Path:
    (scratch / name).mkdir(parents=True)
    (scratch / name / "data").write_bytes(b"x" * 50_000)
    return scratch / name


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def observed(ray: RayPlatform, below: Path) -> list[Subject]:
    """Of this test; the machine may have sessions of its own."""
    found = [one async for page in ray.observe(PlaceScope()) for one in page.subjects]
    return [one for one in found if one.ref.kind == "node" or one.ref.name.startswith(str(below))]


def one_of(ray: RayPlatform, below: Path, name: str) -> Subject:
    return next(one for one in run(observed(ray, below)) if Path(one.ref.name).name == name)


def step(subject: Subject) -> Step:
    return Step("1.1", Decision(seen=subject.seen, action=Action.REMOVE, rule="leftover_tree", reason="because"))


@contextmanager
def child(program: str, *arguments: object, before: tuple[str, ...] = ()) -> Iterator[int]:
    """A real program that says `ready`; the pid of it."""
    command = [*before, sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            assert made.stdout.readline() == "ready\n"
            yield made.pid
        finally:
            made.kill()


def until(read: Callable[[], Any], deadline: float = PATIENCE) -> Any:
    late = time.monotonic() + deadline
    while not (found := read()):
        assert time.monotonic() < late
        time.sleep(0.01)
    return found


def real(*pids: int) -> Callable[[], tuple[Process, ...]]:
    """Just these of this machine, read anew each time."""
    return lambda: tuple(one for pid in pids if (one := read(pid)) is not None)
