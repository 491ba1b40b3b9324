"""What the dashboard costs: `serve` without it, and with it, beside each other; and passes that note facts for it.

`serve` runs over an empty fleet of files until it is ready, with the option and without, in turn: CPU until then, and
the memory that its processes have for themselves (PSS). The modules that only the dashboard, the database or messages
need must not be loaded without them. Passes over 10,000 workloads are made with facts noted for metrics, for the
dashboard, and without.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.report import Figure, met, print_figure, print_table
from benchmarks.size import sized
from benchmarks.web_fleet import LARGE, POLICY, LargeFleet, make_keeper, measure_before, policy, whole_pass
from gpukeeper.lifecycle.settings import Rulebook

RUNS, PASSES, SETTLE = sized((2, 5, 6.0), tiny=(1, 1, 1.0))
MEMORY, PASS = 60.0, 1.1  # limits: MiB more with the dashboard; CPU of a pass that notes facts, of one that does not
FOREIGN = ("starlette", "uvicorn", "jinja2", "psycopg", "apprise", "anyio", "h11")
MODES = ("off", "metrics", "dashboard")


class Served(msgspec.Struct, frozen=True):
    """`cpu`: seconds until it was ready. `memory`: MiB of it and its children. `foreign`: modules of FOREIGN."""

    cpu: float
    memory: float
    foreign: tuple[str, ...]


def run() -> None:
    plain, web = [], []
    for _ in range(RUNS):  # in turn: both meet the same neighbours
        plain.append(_serve())
        web.append(_serve("--web", "0"))
    memory = {name: min(one.memory for one in found) for name, found in (("plain", plain), ("web", web))}
    rows = [
        (name, f"{min(one.cpu for one in found):.2f}", f"{min(one.memory for one in found):.1f}", found[0].foreign)
        for name, found in (("serve", plain), ("serve --web", web))
    ]
    print_table(
        ("program", "CPU s until ready", "MiB", "modules"),
        [(name, cpu, size, ", ".join(foreign) or "none of them") for name, cpu, size, foreign in rows],
    )
    more = memory["web"] - memory["plain"]
    print(f"memory with --web: {more:.1f} MiB more; limit {MEMORY:g}, {met(more, MEMORY, least=False)}")
    print(f"without --web none of {', '.join(FOREIGN)}: {'not met' if plain[0].foreign else 'met'}\n")
    passes = asyncio.run(_passes())
    ratios = {mode: passes[mode] / passes["off"] for mode in MODES}
    print_table(
        ("pass over 10,000 workloads, facts noted for", "CPU s", "of one without"),
        [(mode, f"{passes[mode]:.3f}", f"{ratios[mode]:.2f}") for mode in MODES],
    )
    worst = max(ratios.values())
    print(f"limit {PASS:g}, {met(worst, PASS, least=False)}; load average {os.getloadavg()[0]:.1f}\n")
    print_figure(
        Figure("web-cost", round(more, 1), "MiB", round(memory["web"] / memory["plain"], 2), "serve without --web")
    )


def _serve(*options: str) -> Served:
    with tempfile.TemporaryDirectory(prefix="gpukeeper-bench-") as name:
        folder = Path(name)
        (folder / "fleet").mkdir()
        (folder / "policy.yaml").write_text(POLICY)
        environ = {
            **os.environ,
            "GPUKEEPER_FLEET": f"folder:{folder / 'fleet'}",
            "GPUKEEPER_STATE": str(folder / "state"),
            "GPUKEEPER_SOCKET": str(folder / "socket"),
        }
        command = [
            sys.executable,
            "-X",
            "importtime",
            "-m",
            "gpukeeper",
            "serve",
            "--policy",
            str(folder / "policy.yaml"),
        ]
        with (folder / "imports").open("w") as imports:
            process = subprocess.Popen([*command, *options], env=environ, stdout=subprocess.DEVNULL, stderr=imports)
            try:
                while not (folder / "socket").exists():
                    assert process.poll() is None, (folder / "imports").read_text()[-2000:]
                    time.sleep(0.02)
                cpu = _cpu(process.pid)
                time.sleep(SETTLE)
                memory = sum(map(_memory, [process.pid, *_children(process.pid)]))
            finally:
                process.kill()
                process.wait()
        loaded = re.findall(r"\| +([\w.]+)$", (folder / "imports").read_text(), re.MULTILINE)
        return Served(cpu, memory, tuple(one for one in FOREIGN if one in loaded))


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(one) for task in tasks for one in (task / "children").read_text().split()]


def _memory(pid: int) -> float:
    """PSS: what several processes share is divided among them. MiB."""
    found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


async def _passes() -> dict[str, float]:
    """CPU seconds of the fastest pass of each mode."""
    fleet, book = LargeFleet(*LARGE), Rulebook(policy())
    keepers = {mode: make_keeper(fleet) for mode in MODES}
    for mode, keeper in keepers.items():
        keeper.live.enabled, keeper.live.gpus_only = mode != "off", mode == "metrics"
        await measure_before(keeper, fleet)
        await whole_pass(keeper, book)
    spent: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(PASSES):
        for mode, keeper in keepers.items():
            begun = time.process_time()
            await whole_pass(keeper, book)
            spent[mode].append(time.process_time() - begun)
    return {mode: min(found) for mode, found in spent.items()}
