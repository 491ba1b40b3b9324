"""Collect and merge the reports of 512 nodes: seconds, memory, requests, beside unpacking and writing the same reports.

The peer does what any collector must: it reads every log once, unpacks and parses every report, and writes it to disk.
Ours also verifies each part, judges every report again, compares all GPUs, and writes the pages of every node.
"""

from __future__ import annotations

import asyncio
import base64
import json
import resource
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.report import Figure, print_figure, print_table, timed
from benchmarks.size import sized
from gpukeeper.acceptance.fleet.collect import encode_frames
from gpukeeper.acceptance.fleet.launcher import NodeStatus, Phase, Removal, RunSpec, RunSummary, Target
from gpukeeper.acceptance.launchers import story
from gpukeeper.acceptance.launchers.story import RunArchive
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports.formats import report_json
from gpukeeper.blocking import SystemClock
from gpukeeper.model.unknown import Unknown
from gpukeeper.wiring.launch_simulated import SimulatedNodes

NODES, RUN = sized(512, tiny=4), "bench-collect"
PART = 4  # word of a line: its number and how many there are


class Ended512:
    """An engine whose nodes have all ended; counts what it is asked."""

    engine = "simulated"

    def __init__(self, spec: RunSpec, logs: dict[str, bytes]) -> None:
        self._logs = logs
        statuses = tuple(NodeStatus(node=node, phase=Phase.ENDED, exit_code=0) for node in logs)
        self.summary = RunSummary(spec=spec, nodes=statuses)
        self.requests = 0

    async def targets(self, spec: RunSpec) -> tuple[Target, ...]:
        return tuple(Target(node=node) for node in self._logs)

    def render(self, spec: RunSpec, targets: Sequence[Target]) -> str:
        return ""

    async def start(self, spec: RunSpec, targets: Sequence[Target]) -> None: ...

    async def runs(self) -> tuple[RunSummary, ...]:
        self.requests += 1
        return (self.summary,)

    async def run(self, run: str) -> RunSummary:
        self.requests += 1
        return self.summary

    async def output(self, spec: RunSpec, node: str) -> bytes:
        self.requests += 1
        return self._logs[node]

    async def remove(self, run: str) -> Removal:
        return Removal()

    async def close(self) -> None: ...


def run() -> None:
    spec = RunSpec(run=RUN, owner="bench", created=datetime.now(UTC), engine="simulated")
    logs = {report.node: _log(report) for report in _reports(spec)}
    before = _resident()
    engine = Ended512(spec, logs)
    with tempfile.TemporaryDirectory() as at:
        plain = timed(lambda: _plain(logs, Path(at)))[0]
    with tempfile.TemporaryDirectory() as at:
        setting = story.Setting(engine, RunArchive(Path(at), RUN), SystemClock())
        ours, ended = timed(lambda: asyncio.run(story.rescue(setting, engine.summary)))
    if len(ended.report.fleet.nodes) != NODES or ended.report.missing:
        raise SystemExit("not every report was collected")
    size = sum(map(len, logs.values())) / NODES / 1024
    rows = [
        ("unpack, parse, write", f"{plain:.2f}", f"{plain / NODES * 1000:.1f}", "", ""),
        ("collect, verify, judge, merge, write", f"{ours:.2f}", f"{ours / NODES * 1000:.1f}", str(engine.requests), ""),
    ]
    print_table((f"{NODES} nodes, 8 GPUs each, logs of {size:.0f} KiB", "s", "ms per node", "requests", ""), rows)
    print(f"memory: {_resident() - before} MiB more than the logs themselves (largest resident size)\n")
    print_figure(Figure("accept-collect", round(ours, 2), "s", round(ours / plain, 2), "unpack, parse and write once"))


def _reports(spec: RunSpec) -> Iterator[Report]:
    """One simulated run, with the names of other nodes and GPUs."""
    first = SimulatedNodes()(spec, "node-000", {})
    text = report_json(first).decode()
    gpus = () if isinstance(first.machine.gpus, Unknown) else first.machine.gpus
    for number in range(NODES):
        mine = text.replace("node-000", f"node-{number:03}")
        for gpu in gpus:
            mine = mine.replace(gpu.uuid, f"{gpu.uuid}-{number}").replace(str(gpu.serial), f"{gpu.serial}{number:03}")
        yield msgspec.json.decode(mine, type=Report)


def _log(report: Report) -> bytes:
    return "".join(f"{line}\n" for line in encode_frames(report_json(report), RUN, report.node)).encode()


def _plain(logs: dict[str, bytes], at: Path) -> None:
    for node, log in logs.items():
        parts: dict[int, bytes] = {}
        for line in log.splitlines():
            words = line.split()
            parts.setdefault(int(words[PART].split(b"/")[0]), words[-1])
        text = zlib.decompress(base64.b64decode(b"".join(parts[number] for number in sorted(parts))))
        json.loads(text)
        (at / node).write_bytes(text)


def _resident() -> int:
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib // (1024 * 1024 if sys.platform == "darwin" else 1024)
