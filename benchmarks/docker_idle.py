"""What `serve` costs while nothing happens: CPU and memory on a host with 100 running containers that hold GPUs.

The engine is a private one; the driver is pretended, so what its programs cost is shown apart. The peer is the engine's
own CPU time in the same minutes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from benchmarks.needs import need
from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from tests.engines import has_docker
from tests.real.docker import programs
from tests.real.docker.private_engine import DockerEngine, docker_engine

CONTAINERS, SETTLE, SECONDS = sized((100, 40, 120), tiny=(2, 3, 3))
CPU, MEMORY = 0.5, 80.0  # targets: percent of a core; MiB
POLICY = "preset: shared-host\nmode: enforce\nscope: {host: {}, docker: {}}\n"


class Used(msgspec.Struct, frozen=True):
    """CPU seconds until now: of a process, of its living children, and of those it has waited for."""

    own: float
    living: float
    waited: float


def run() -> None:
    need("docker", has_docker())
    with docker_engine() as engine:
        for number in range(CONTAINERS):
            engine.run(f"runs-{number}", gpus=[number % 4], cmd=programs.shell(engine.gpus[number % 4].path), user="0")
        serving = engine.popen("serve", policy=POLICY)
        engine.until((engine.folder / "state" / "ledger.db").exists, "it serves", 60)
        time.sleep(SETTLE)
        assert serving.poll() is None, serving.communicate()
        _report(engine, serving.pid)
        assert serving.poll() is None, serving.communicate()


def _report(engine: DockerEngine, pid: int) -> None:
    begun, before, earlier = time.monotonic(), used(pid), used(engine.engine_pid)
    time.sleep(SECONDS)
    took, after, later = time.monotonic() - begun, used(pid), used(engine.engine_pid)
    own = (after.own - before.own) / took * 100
    open_, asked = ((end - begin) / took * 100 for begin, end in _children(before, after))
    peer = (later.own - earlier.own) / took * 100
    memory, theirs = resident(pid), sum(resident(one) for one in children_of(pid))
    rows = [
        ("serve", f"{own:.2f}", f"{memory:.0f}", ""),
        ("its program that reads the (pretended) driver", f"{open_:.2f}", f"{theirs:.0f}", ""),
        ("programs it started and that ended", f"{asked:.2f}", "", ""),
        ("together", f"{own + open_ + asked:.2f}", f"{memory + theirs:.0f}", ""),
        ("dockerd", f"{peer:.2f}", f"{resident(engine.engine_pid):.0f}", ""),
    ]
    print_table((f"{CONTAINERS} running containers with GPUs", "% of a core", "MiB", ""), rows)
    print(
        f"over {took:.0f} s with the default tick; CPU of serve: target below {CPU:g} %, {met(own, CPU, least=False)}"
    )
    print(f"memory of serve: target below {MEMORY:g} MiB, {met(memory, MEMORY, least=False)}\n")
    ratio = round(own / peer, 2) if peer else 0.0  # it may be idle for seconds
    print_figure(Figure("docker-idle", round(own, 2), "% of a core", ratio, "dockerd itself"))


def _children(before: Used, after: Used) -> tuple[tuple[float, float], ...]:
    return (before.living, after.living), (before.waited, after.waited)


def used(pid: int) -> Used:
    own, waited = _times(pid)
    return Used(own, sum(_times(one)[0] for one in children_of(pid)), waited)


def children_of(pid: int) -> list[int]:
    listed = [Path(f"/proc/{pid}/task/{task}/children") for task in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    return [int(one) for path in listed if path.exists() for one in path.read_text().split()]


def resident(pid: int) -> float:
    """MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _times(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, waited_user, waited_system = (int(one) / os.sysconf("SC_CLK_TCK") for one in fields[11:15])
    return user + system, waited_user + waited_system
