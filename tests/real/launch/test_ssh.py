"""Runs over real ssh servers: three hosts, one of which dies; a launcher that is killed at named points."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import pytest

from gpukeeper.acceptance.fleet.collect import encode_frames
from gpukeeper.acceptance.fleet.launcher import Launcher, NodeStatus, Phase, RunSpec, Target
from gpukeeper.acceptance.launchers import story
from gpukeeper.acceptance.launchers.ssh import SshClient, SshLauncher
from gpukeeper.acceptance.launchers.story import RunArchive
from gpukeeper.blocking import SystemClock
from gpukeeper.clients.ssh import Host, Settings
from gpukeeper.interfaces.cli.accept_remote import open_launcher
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from tests.engines import has_sshd, require
from tests.real.launch.passes import Moment, Point, a_spec, kills_itself, launch, next_pass, reports
from tests.real.launch.ssh_hosts import SshHosts, ssh_hosts
from tests.real.launch.waiting import until

OPERATIONS = ("start", "listed", "output", "remove")
T = TypeVar("T")
GPUKEEPER = Path(sys.executable).with_name("gpukeeper")
SIMULATED = ("--device", "simulated", "--ranks", "2")
STUB = """#!/bin/sh
# In place of gpukeeper: prints what a node prints, then leaves a note that it has sent its report.
sleep 0.1
cat "$FRAMES/$3-$GPUKEEPER_NODE"
echo sent > "$FRAMES/sent-$3-$GPUKEEPER_NODE"
"""
SLOW = "#!/bin/sh\necho begun\n(setsid sleep 1234 &)\nsleep 1234\n"


class KilledClient(SshClient):
    def __init__(self, settings: Settings, point: Point) -> None:
        super().__init__(settings)
        self._point = point

    async def request_bytes(self, host: Host, reply: type[T], do: str, **what: object) -> tuple[T, bytes]:
        return await self._point.around(do, lambda: SshClient.request_bytes(self, host, reply, do, **what))


class Bed:
    """Hosts, programs in place of gpukeeper, and what was collected."""

    def __init__(self, hosts: SshHosts, folder: Path) -> None:
        self.hosts, self.folder, self.collected = hosts, folder, folder / "collected"
        self.collected.mkdir()
        (folder / "frames").mkdir()

    def launcher(self, program: Path, nodes: Sequence[str] = ()) -> Launcher:
        options = {**self.hosts.options, "program": str(program)}
        if nodes:
            del options["hosts"]
            options["nodes"] = ",".join(nodes)
        return open_launcher("ssh", options)

    def killed(self, program: Path, spec: RunSpec, nodes: Sequence[str], point: Point) -> None:
        """Until the requests that were under way have ended as well."""

        def work() -> None:
            client = KilledClient(Settings(config=self.hosts.options["config"]), point)
            launcher = SshLauncher(client, [Host(node, node) for node in nodes], program=str(program))
            asyncio.run(launch(launcher, spec, self.collected, nodes))

        kills_itself(work)
        until(lambda: not self.hosts.clients(), self.hosts.clients)

    def program(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def spec(self, run: str, **changes: object) -> RunSpec:
        """With the frames that the stub prints for it."""
        for node in self.hosts.names:
            lines = encode_frames(report_of(run, node), run, node)
            (self.folder / "frames" / f"{run}-{node}").write_text("\n".join(["log", *lines, ""]))
        return a_spec(run, "ssh", environment={"FRAMES": str(self.folder / "frames")}, **changes)

    def sent(self, run: str) -> list[str]:
        return [node for node in self.hosts.names if (self.folder / "frames" / f"sent-{run}-{node}").exists()]


def report_of(run: str, node: str) -> bytes:
    return (
        f'{{"run": "{run}", "node": "{node}", "padding": "{random.Random(run + node).randbytes(6000).hex()}"}}'.encode()
    )


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    require("ssh", has_sshd())
    folder = tmp_path_factory.mktemp("ssh")
    with ssh_hosts(folder, 3) as hosts:
        yield Bed(hosts, folder)


@pytest.fixture(autouse=True)
def _nothing_is_left(bed: Bed) -> Iterator[None]:
    yield
    for host in bed.hosts.hosts:
        if host.server is not None and host.server.poll() is not None:
            host.start()
    asyncio.run(remove_all(bed))
    until(lambda: not bed.hosts.left() and not bed.hosts.clients(), lambda: bed.hosts.left() + bed.hosts.clients())


async def remove_all(bed: Bed) -> None:
    launcher = bed.launcher(GPUKEEPER)
    for run in {path.name for host in bed.hosts.hosts for path in host.runs.glob("[!.]*")}:
        await launcher.remove(run)


def statuses(launcher: Launcher, run: str) -> dict[str, NodeStatus]:
    found = asyncio.run(launcher.run(run))
    assert found is not None
    return {node.node: node for node in found.nodes}


@pytest.mark.smoke
def test_one_command_accepts_three_hosts_and_leaves_nothing(bed: Bed) -> None:
    """The real program on every host; its report comes back whole, from its log."""
    spec = bed.spec("whole", arguments=SIMULATED)
    launcher = bed.launcher(GPUKEEPER)
    targets = asyncio.run(launcher.targets(spec))
    assert [(one.node, one.excluded) for one in targets] == [(name, "") for name in bed.hosts.names]
    asyncio.run(launch(launcher, spec, bed.collected))
    for node in bed.hosts.names:
        (report,) = reports(bed.collected, "whole", node)
        assert f'"{node}"'.encode() in report
    assert bed.hosts.left() == []


def test_a_host_that_dies_in_the_middle_is_gone_and_the_others_report(bed: Bed) -> None:
    gpu0, gpu1, gpu2 = bed.hosts.hosts
    launcher, spec = bed.launcher(bed.program("slow", SLOW)), bed.spec("dies")
    asyncio.run(launcher.start(spec, tuple(Target(node=name) for name in bed.hosts.names)))
    assert {one.phase for one in statuses(launcher, "dies").values()} == {Phase.RUNNING}
    gpu1.die()
    other = bed.launcher(GPUKEEPER)  # another machine
    found = statuses(other, "dies")
    assert (found["gpu1"].phase, found["gpu1"].code) == (Phase.GONE, "unreachable")
    assert f"connect to host {gpu1.address} port 22: Connection refused" in found["gpu1"].reason
    assert found["gpu0"].phase is found["gpu2"].phase is Phase.RUNNING
    assert asyncio.run(other.output(spec, "gpu0")) == b"begun\n"
    assert isinstance(asyncio.run(other.output(spec, "gpu1")), Unknown)
    removal = asyncio.run(other.remove("dies"))
    assert len(removal.removed) == 2
    assert [name for name, _ in removal.left] == ["gpu1:gpukeeper-runs/dies"]
    assert gpu0.left() == gpu2.left() == []
    gpu1.start()
    back = statuses(other, "dies")
    assert (back["gpu1"].phase, back["gpu1"].code) == (Phase.GONE, "vanished")
    assert asyncio.run(other.remove("dies")).left == ()
    assert bed.hosts.left() == []


def test_a_host_that_is_down_from_the_start_is_a_row_and_the_others_are_tested(bed: Bed, tmp_path: Path) -> None:
    """The whole story of `accept --on ssh`, with the real program."""
    gpu1 = bed.hosts.hosts[1]
    launcher, spec = bed.launcher(GPUKEEPER), bed.spec("down", arguments=SIMULATED, created=datetime.now(UTC))
    gpu1.die()

    async def told() -> story.Ended:
        setting = story.Setting(launcher, RunArchive(tmp_path, spec.run), SystemClock())
        return await story.launch(setting, spec, await launcher.targets(spec))

    ended = asyncio.run(told())
    assert [one.node for one in ended.report.fleet.nodes] == ["gpu0", "gpu2"], ended.report.missing
    [missing] = ended.report.missing
    assert (missing.node, missing.code) == ("gpu1", "excluded")
    assert "Connection refused" in missing.reason
    assert ended.report.verdict is Grade.INCONCLUSIVE
    assert ended.problems == ()
    gpu1.start()
    assert bed.hosts.left() == []


def test_the_deadline_is_kept_without_any_launcher(bed: Bed) -> None:
    program, spec = bed.program("slow", SLOW), bed.spec("late", deadline_s=2.0)

    bed.killed(program, spec, bed.hosts.names, Point("start", Moment.AFTER, 3))
    until(lambda: not any(host.processes() for host in bed.hosts.hosts), bed.hosts.left)
    found = statuses(bed.launcher(program), "late")
    assert {(one.phase, one.code) for one in found.values()} == {(Phase.ENDED, "deadline")}


def test_a_host_with_an_unknown_key_is_excluded_with_the_words_of_ssh(bed: Bed) -> None:
    known = bed.hosts.hosts[2].folder / "known_hosts"
    before = known.read_text()
    known.write_text("")
    try:
        found = {one.node: one.excluded for one in asyncio.run(bed.launcher(GPUKEEPER).targets(bed.spec("key")))}
    finally:
        known.write_text(before)
    assert "Host key verification failed" in found["gpu2"]
    assert not found["gpu0"]


def test_connections_can_be_shared_and_end_with_the_launcher(bed: Bed, tmp_path: Path) -> None:
    """A control socket has a short path."""
    options = {**bed.hosts.options, "program": str(bed.program("stub", STUB)), "multiplex": str(bed.folder)}
    asyncio.run(launch(open_launcher("ssh", options), bed.spec("shared"), bed.collected, bed.hosts.names))
    assert all(reports(bed.collected, "shared", node) for node in bed.hosts.names)
    until(lambda: not bed.hosts.clients(), bed.hosts.clients)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_launcher_killed_at_any_point_leaves_nothing_and_loses_no_report(bed: Bed, operation: str) -> None:
    """Two hosts. Every point is a kill; the next pass is another launcher."""
    program, nodes = bed.program("stub", STUB), bed.hosts.names[:2]
    for moment in Moment:
        spec = bed.spec(f"{operation}-{moment}")
        point = Point(operation, moment, len(nodes), seed=OPERATIONS.index(operation))
        bed.killed(program, spec, nodes, point)
        asyncio.run(next_pass(lambda: bed.launcher(program, nodes), bed.collected))
        sent = bed.sent(spec.run)
        for node in sent:
            assert reports(bed.collected, spec.run, node) == {report_of(spec.run, node)}, f"{node}, {point}"
        assert bed.hosts.left() == [], f"{point}"
        if (operation, moment) != ("start", Moment.BEFORE) and (operation, moment) != ("start", Moment.DURING):
            assert sent == nodes, f"{point}"


@pytest.mark.parametrize("operation", ["start", "output"])
def test_a_launcher_killed_while_the_real_program_runs(bed: Bed, operation: str) -> None:
    spec, nodes = bed.spec(f"real-{operation}", arguments=SIMULATED), bed.hosts.names[:1]
    bed.killed(GPUKEEPER, spec, nodes, Point(operation, Moment.AFTER, len(nodes)))
    asyncio.run(next_pass(lambda: bed.launcher(GPUKEEPER, nodes), bed.collected))
    (report,) = reports(bed.collected, spec.run, nodes[0])
    assert f'"{nodes[0]}"'.encode() in report
    assert bed.hosts.left() == []
