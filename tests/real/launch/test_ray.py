"""Runs on a real Ray cluster over two machines, each with a network, processes and mounts of its own. This machine is a
third one, which reaches the dashboard of the head."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from gpukeeper.acceptance.fleet.collect import encode_frames
from gpukeeper.acceptance.fleet.launcher import Launcher, NodeStatus, Phase, RunSpec
from gpukeeper.acceptance.fleet.preflight.facts import Finding
from gpukeeper.acceptance.launchers.ray import RayLauncher, RaySettings
from gpukeeper.clients.ray import RayJob, RayJobsApi
from gpukeeper.interfaces.cli.accept_remote import open_launcher
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.gpu import Grade
from gpukeeper.wiring.preflight import ray
from tests.engines import has_ray, require
from tests.real.launch.passes import OVER, Moment, Point, a_spec, kills_itself, launch, next_pass, reports
from tests.real.launch.waiting import until
from tests.real.ray.clusters import NEWEST
from tests.real.ray.machines import HEAD, WORKER, Machines, network_of, two_machines

GPUKEEPER = Path(sys.executable).with_name("gpukeeper")
NODES = [HEAD, WORKER]
SIMULATED = ("--device", "simulated", "--ranks", "2")
# Between this machine and the head; another test run beside this one has others.
OURS, THEIRS = (f"198.19.{os.getpid() % 250}.{one}" for one in (1, 2))
STUB = """#!/bin/sh
# In place of gpukeeper: prints what a node prints, then leaves a note that it has sent its report.
sleep 1
cat "$FRAMES/$3-$GPUKEEPER_NODE"
echo "group $GPUKEEPER_GROUP_INDEX of $GPUKEEPER_GROUP_SIZE at $MASTER_ADDR:$MASTER_PORT"
echo sent > "$FRAMES/sent-$3-$GPUKEEPER_NODE"
"""
SLOW = "#!/bin/sh\necho begun\n(setsid sleep 1234 &)\nsleep 1234\n"
POINTS = [
    ("killed", "submit", Moment.BEFORE),
    ("killed", "submit", Moment.AFTER),
    ("during", "submit", Moment.DURING),
    *(("killed", "log", moment) for moment in Moment),
    ("killed", "delete", Moment.BEFORE),
    ("killed", "delete", Moment.AFTER),
    ("during", "delete", Moment.DURING),
]


class KilledApi(RayJobsApi):
    def __init__(self, address: str, point: Point) -> None:
        super().__init__(address)
        self._point = point

    async def submit(self, name: str, entrypoint: str, metadata: Mapping[str, str]) -> None:
        await self._point.around("submit", lambda: RayJobsApi.submit(self, name, entrypoint, metadata))

    async def log(self, name: str) -> str | None:
        return await self._point.around("log", lambda: RayJobsApi.log(self, name))

    async def delete(self, name: str) -> None:
        await self._point.around("delete", lambda: RayJobsApi.delete(self, name))


class Bed:
    """The cluster, programs in place of gpukeeper, and what was collected."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines, self.folder, self.collected = machines, folder, folder / "collected"
        self.address, self.python = f"http://{THEIRS}:8265", str(machines.cluster.python)
        self.networks = {Path(f"/proc/{pid}/ns/net").readlink() for pid in (machines.head, machines.worker)}
        for one in (self.collected, folder / "frames"):
            one.mkdir()

    def options(self, program: Path) -> dict[str, str]:
        return {"address": self.address, "python": self.python, "program": str(program), "wait": "60s"}

    def launcher(self, program: Path, **options: str) -> Launcher:
        return open_launcher("ray", {**self.options(program), **options})

    def killed(self, program: Path, spec: RunSpec, point: Point) -> None:
        def work() -> None:
            settings = RaySettings(python=self.python, program=str(program), token=lambda: os.urandom(8).hex())
            asyncio.run(launch(RayLauncher(KilledApi(self.address, point), settings), spec, self.collected))

        kills_itself(work)

    def program(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def spec(self, run: str, **changes: object) -> RunSpec:
        """With the frames that the stub prints for it."""
        for node in NODES:
            lines = encode_frames(report_of(run, node), run, node)
            (self.folder / "frames" / f"{run}-{node}").write_text("\n".join(["log", *lines, ""]))
        return a_spec(run, "ray", environment={"FRAMES": str(self.folder / "frames")}, **changes)

    def sent(self, run: str) -> list[str]:
        return [node for node in NODES if (self.folder / "frames" / f"sent-{run}-{node}").exists()]

    def left(self) -> list[str]:
        """Directories of runs, processes of the programs, and jobs of Ray. Other tests of this machine run programs,
        too: only those in the networks of these machines count."""
        found = [str(one) for one in self.machines.cluster.root.glob("**/gpukeeper-runs/*/*")]
        for pid in (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            with suppress(OSError):
                is_run = b"GPUKEEPER_RUN_TOKEN" in Path(f"/proc/{pid}/environ").read_bytes()
                if is_run and Path(f"/proc/{pid}/ns/net").readlink() in self.networks:
                    found.append(f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
        return found + [f"job {one.name} {one.status}" for one in asyncio.run(self.jobs())]

    def silent(self) -> str:
        """Why the cluster is not ready: the dashboard starts after its head, and learns of nodes later."""
        try:
            nodes = asyncio.run(RayJobsApi(self.address).nodes())
        except PlatformError as error:
            return str(error)
        return "" if [one.gpus for one in nodes] == [2.0, 2.0] else str(nodes)

    async def jobs(self) -> tuple[RayJob, ...]:
        return tuple(one for one in await RayJobsApi(self.address).jobs() if one.name.startswith("gpukeeper-"))


def report_of(run: str, node: str) -> bytes:
    return (
        f'{{"run": "{run}", "node": "{node}", "padding": "{random.Random(run + node).randbytes(6000).hex()}"}}'.encode()
    )


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    require("ray", has_ray(NEWEST))
    with two_machines(NEWEST, "--dashboard-host=0.0.0.0", gpus=2) as machines:
        link = f"gkl{os.getpid()}"
        head = network_of(HEAD)
        for words in (
            f"link add {link} type veth peer name outside netns {head}",
            f"address add {OURS}/30 dev {link}",
            f"link set {link} up",
            f"-n {head} address add {THEIRS}/30 dev outside",
            f"-n {head} link set outside up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        try:
            made = Bed(machines, tmp_path_factory.mktemp("ray"))
            until(lambda: made.silent() == "", made.silent)
            yield made
        finally:
            subprocess.run(["ip", "link", "delete", link], check=True)


def checked(bed: Bed) -> dict[str, Finding]:
    return {one.code: one for one in asyncio.run(ray((), "", {"address": bed.address}, 2, {}))}


def statuses(launcher: Launcher, run: str) -> dict[str, NodeStatus]:
    found = asyncio.run(launcher.run(run))
    assert found is not None
    return {node.node: node for node in found.nodes}


@pytest.mark.smoke
def test_one_command_accepts_two_machines_and_leaves_nothing(bed: Bed) -> None:
    """The real program on every node; its report comes back whole, from the log of the job."""
    spec = bed.spec("whole", arguments=SIMULATED)
    launcher = bed.launcher(GPUKEEPER)
    targets = asyncio.run(launcher.targets(spec))
    assert [(one.node, one.gpus, one.excluded) for one in targets] == [(node, 2, "") for node in NODES]
    asyncio.run(launch(launcher, spec, bed.collected))
    for node in NODES:
        (report,) = reports(bed.collected, "whole", node)
        assert f'"{node}"'.encode() in report
    assert bed.left() == []


def test_a_launcher_killed_at_any_point_leaves_nothing_and_loses_no_report(bed: Bed) -> None:
    """Nine points in the lives of two runs: each launcher continues where the last one died. The nodes of a run are
    reserved together, in a placement group."""
    program, names = bed.program("stub", STUB), ("killed", "during")
    for number, (run, operation, moment) in enumerate(POINTS):
        if operation == "delete":
            asyncio.run(ends(bed.launcher(program), run))
        bed.killed(program, bed.spec(run, together=True), Point(operation, moment, 1, seed=number))
    asyncio.run(next_pass(lambda: bed.launcher(program), bed.collected))
    for run in names:
        assert bed.sent(run) == NODES
        for index, node in enumerate(NODES):
            assert reports(bed.collected, run, node) == {report_of(run, node)}
            logs = [path.read_text() for path in bed.collected.glob(f"{run}-{node}-*")]
            assert all(f"group {index} of 2 at {HEAD}:29500" in log for log in logs)
    assert bed.left() == []


async def ends(launcher: Launcher, run: str) -> None:
    """Until every node has ended: then a launcher deletes the job at once."""
    while True:
        summary = await launcher.run(run)
        if summary is None or all(node.phase in OVER for node in summary.nodes):
            return
        await asyncio.sleep(0.3)


def test_a_machine_that_dies_in_the_middle_is_gone_and_what_waits_for_gpus_says_so(bed: Bed) -> None:
    """The last test: the second machine does not come back. A run that waits behind another one names the resource; a
    run that is removed while it runs leaves no process."""
    slow = bed.program("slow", SLOW)
    launcher, spec = bed.launcher(slow), bed.spec("dies")
    asyncio.run(launcher.start(spec, asyncio.run(launcher.targets(spec))))
    until(lambda: {one.phase for one in statuses(launcher, "dies").values()} == {Phase.RUNNING}, bed.left)
    taken = checked(bed)
    assert (taken["ray-cluster"].verdict, taken["ray-jobs"].verdict) == (Grade.PASS, Grade.PASS)
    assert taken["ray-free"].about == (HEAD, WORKER)
    assert f"2 of 2 on {HEAD}, 2 of 2 on {WORKER}" in taken["ray-free"].message
    second = bed.spec("waits", nodes=(HEAD,))
    asyncio.run(launcher.start(second, asyncio.run(launcher.targets(second))))
    bed.machines.end_worker()
    until(lambda: statuses(launcher, "dies")[WORKER].phase is Phase.GONE, lambda: statuses(launcher, "dies"))
    gone = statuses(launcher, "dies")
    assert (gone[WORKER].code, gone[HEAD].phase) == ("node-gone", Phase.RUNNING)
    assert "its Ray node died" in gone[WORKER].reason
    # It is read once a second from when it runs on: on a crowded machine the program may not have written yet.
    until(lambda: asyncio.run(launcher.output(spec, HEAD)) == b"begun\n", lambda: statuses(launcher, "dies"))
    until(lambda: statuses(launcher, "waits")[HEAD].code == "resources", lambda: statuses(launcher, "waits"))
    assert "0 of 2 GPUs of its node are free, 2 are needed" in statuses(launcher, "waits")[HEAD].reason
    for run in ("waits", "dies"):
        removal = asyncio.run(bed.launcher(slow).remove(run))  # another machine
        assert (removal.removed, removal.left) == ((f"job/gpukeeper-{run}",), ())
    # The directory on the dead machine cannot be reached. The first run there after its retention removes it.
    until(lambda: all(one.endswith(f"gpukeeper-runs/dies/{WORKER}") for one in bed.left()), bed.left, 120)
    after = checked(bed)
    assert after["ray-free"].verdict is Grade.PASS
    assert after["ray-dead"].about == (WORKER,)
    (dead,) = asyncio.run(launcher.targets(bed.spec("x", nodes=(WORKER,))))
    assert "its Ray node is dead" in dead.excluded
