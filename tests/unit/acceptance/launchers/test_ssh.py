"""The launcher for hosts, and its program on them, over a stand-in for ssh; tests/real/launch has real servers."""

from __future__ import annotations

import ast
import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec
import pytest

from gpukeeper.acceptance.fleet.collect import RunReport, exit_code
from gpukeeper.acceptance.fleet.launcher import NodeStatus, Phase, RunSpec, RunSummary, Target
from gpukeeper.acceptance.launchers import host_checks_program, host_program, story
from gpukeeper.acceptance.launchers.ssh import SshClient, SshLauncher, host_facts, unmet
from gpukeeper.acceptance.launchers.story import RunArchive, stored_runs
from gpukeeper.blocking import SystemClock
from gpukeeper.clients.ssh import Host, HostError, Settings, read_hosts
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from gpukeeper.wiring import launch_hosts
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

T = TypeVar("T")
PYTHON = os.path.realpath(sys.executable)  # without the packages of a virtual environment, as on a host
HOSTS = ("gpu1", "gpu2", "gpu3")
LOCAL_SSH = Path(__file__).with_name("local_ssh.sh")
REPORTS = "#!/bin/sh\necho report of $GPUKEEPER_NODE; printf PASS > $GPUKEEPER_TERMINATION_LOG; exit 4\n"
WAITS = "#!/bin/sh\necho waiting; sleep 600\n"


class Fleet:
    """Three hosts on this machine. `program`: what runs there in place of gpukeeper."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("down", "cut"):
            (folder / name).mkdir()
        self._script("ssh", f'#!/bin/sh\nexec sh {LOCAL_SSH} {folder} "$@"\n')

    def launcher(self, body: str = REPORTS, hosts: tuple[str, ...] = HOSTS, master: str = "") -> SshLauncher:
        program = str(self.program(body))
        return SshLauncher(self.client(), read_hosts(hosts, "test"), program=program, master=master)

    def client(self) -> SshClient:
        return SshClient(Settings(program=str(self.folder / "ssh"), python=PYTHON))

    def program(self, body: str) -> Path:
        return self._script(f"gpukeeper-{abs(hash(body))}", body)

    def down(self, host: str) -> None:
        (self.folder / "down" / host).touch()

    def up(self, host: str) -> None:
        (self.folder / "down" / host).unlink()

    def runs(self) -> list[str]:
        return sorted(str(one.relative_to(self.folder / "state")) for one in self.folder.glob("state/*/*/*/*"))

    def _script(self, name: str, body: str) -> Path:
        path = self.folder / name
        path.write_text(body)
        path.chmod(0o700)
        return path


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    for host in HOSTS:
        (tmp_path / "down" / host).unlink(missing_ok=True)
    launcher = made.launcher()
    for run in {one.split("/")[2] for one in made.runs()}:
        do(launcher.remove(run))


def free_port() -> int:
    with socket.create_server(("", 0)) as one:
        return int(one.getsockname()[1])


def do(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def spec(run: str = "r1", **changes: Any) -> RunSpec:
    return RunSpec(
        **{"run": run, "owner": "ann", "created": datetime(2026, 1, 1, tzinfo=UTC), "engine": "ssh", **changes}
    )


def started(launcher: SshLauncher, run: RunSpec) -> tuple[Target, ...]:
    targets = do(launcher.targets(run))
    do(launcher.start(run, targets))
    return targets


def until(launcher: SshLauncher, run: str, holds: Callable[[dict[str, NodeStatus]], bool]) -> dict[str, NodeStatus]:
    late = time.monotonic() + PATIENCE
    while not holds(found := nodes(do(launcher.run(run)))):
        assert time.monotonic() < late, found
        time.sleep(0.1)  # each look starts programs
    return found


def nodes(summary: RunSummary | None) -> dict[str, NodeStatus]:
    assert summary is not None
    return {one.node: one for one in summary.nodes}


def ended(found: dict[str, NodeStatus]) -> bool:
    return all(one.phase is not Phase.RUNNING for one in found.values())


def test_every_host_runs_the_program_and_its_output_comes_back(fleet: Fleet) -> None:
    launcher, run = fleet.launcher(), spec()
    assert [one.node for one in started(launcher, run) if not one.excluded] == list(HOSTS)
    found = until(launcher, "r1", ended)
    assert {(one.phase, one.exit_code, one.message) for one in found.values()} == {(Phase.ENDED, 4, "PASS")}
    for host in HOSTS:
        assert do(launcher.output(run, host)) == f"report of {host}\n".encode()


def test_another_machine_finds_the_run_and_removes_it(fleet: Fleet) -> None:
    started(fleet.launcher(), spec(arguments=("--quick",)))
    other = fleet.launcher()
    runs = do(other.runs())
    assert not isinstance(runs, Unknown)
    assert [one.spec for one in runs] == [spec(arguments=("--quick",))]
    assert len(runs[0].objects) == 3
    removal = do(other.remove("r1"))
    assert len(removal.removed) == 3
    assert not removal.left
    assert fleet.runs() == []
    assert do(other.run("r1")) is None
    assert do(other.runs()) == ()
    assert do(other.remove("r1")).removed == ()  # again is allowed


def test_starting_again_starts_only_what_is_missing(fleet: Fleet) -> None:
    launcher, run = fleet.launcher(WAITS), spec()
    fleet.down("gpu2")
    targets = tuple(Target(node=host) for host in HOSTS)
    do(launcher.start(run, targets))
    before = {one: (fleet.folder / "state" / one / "run.json").read_text() for one in fleet.runs()}
    assert len(before) == 2
    fleet.up("gpu2")
    do(launcher.start(run, targets))
    assert len(fleet.runs()) == 3
    assert all((fleet.folder / "state" / one / "run.json").read_text() == text for one, text in before.items())


def test_two_runs_can_be_started_while_one_is_running(fleet: Fleet) -> None:
    """The lock of a request is not held by what the request started."""
    launcher = fleet.launcher(WAITS, ("gpu1",))
    started(launcher, spec("r1"))
    started(launcher, spec("r2"))
    assert {one.phase for run in ("r1", "r2") for one in nodes(do(launcher.run(run))).values()} == {Phase.RUNNING}


def test_a_host_that_does_not_reply_is_gone_with_the_words_of_ssh_and_the_others_are_reported(fleet: Fleet) -> None:
    launcher, run = fleet.launcher(), spec()
    started(launcher, run)
    until(launcher, "r1", ended)
    fleet.down("gpu2")
    runs = do(launcher.runs())
    assert not isinstance(runs, Unknown)
    found = nodes(runs[0])
    assert found["gpu1"].phase is Phase.ENDED
    assert (found["gpu2"].phase, found["gpu2"].code) == (Phase.GONE, "unreachable")
    assert "ssh: connect to host gpu2 port 22: No route to host" in found["gpu2"].reason
    output = do(launcher.output(run, "gpu2"))
    assert isinstance(output, Unknown)
    assert "No route to host" in output.why
    removal = do(launcher.remove("r1"))
    assert len(removal.removed) == 2
    assert [name for name, why in removal.left if "No route" in why] == ["gpu2:gpukeeper-runs/r1"]


def test_no_run_on_the_others_is_no_answer_while_a_host_is_silent(fleet: Fleet) -> None:
    launcher = fleet.launcher()
    fleet.down("gpu3")
    assert isinstance(do(launcher.runs()), Unknown)
    with pytest.raises(PlatformError, match="No route to host"):
        do(launcher.run("r1"))
    for host in HOSTS:
        fleet.down(host)
    with pytest.raises(PlatformError, match="no host replied"):
        do(launcher.runs())
    with pytest.raises(PlatformError, match="no host replied"):
        do(launcher.start(spec(), tuple(Target(node=host) for host in HOSTS)))


def test_a_host_that_cannot_be_tested_is_excluded_with_the_reason(fleet: Fleet) -> None:
    launcher = fleet.launcher()
    fleet.down("gpu1")
    found = {one.node: one.excluded for one in do(launcher.targets(spec()))}
    assert "No route to host" in found["gpu1"]
    assert not found["gpu2"]
    Path(launcher._program).unlink()
    assert "--option program=PATH" in {one.node: one.excluded for one in do(launcher.targets(spec()))}["gpu2"]


def test_output_is_read_on_from_where_it_was_and_a_broken_connection_loses_nothing(fleet: Fleet) -> None:
    launcher, run = fleet.launcher("#!/bin/sh\necho one; sleep 600\n", ("gpu1",)), spec()
    started(launcher, run)
    late = time.monotonic() + PATIENCE
    while do(launcher.output(run, "gpu1")) != b"one\n":
        assert time.monotonic() < late
        time.sleep(0.1)
    (log,) = fleet.folder.glob("state/gpu1/*/r1/gpu1/log")
    log.write_bytes(log.read_bytes() + b"two\n")
    (fleet.folder / "cut" / "gpu1").touch()
    assert isinstance(do(launcher.output(run, "gpu1")), Unknown)
    (fleet.folder / "cut" / "gpu1").unlink()
    assert do(launcher.output(run, "gpu1")) == b"one\ntwo\n"
    assert do(fleet.launcher(hosts=("gpu1",)).output(run, "gpu1")) == b"one\ntwo\n"


def test_the_deadline_is_kept_on_the_host_and_ends_everything(fleet: Fleet) -> None:
    """Also what went into a session of its own. No launcher is needed for it."""
    body = "#!/bin/sh\n(setsid sleep 600 &)\necho $$\nexec sleep 600\n"
    launcher, run = fleet.launcher(body, ("gpu1",)), spec(deadline_s=1.0)
    started(launcher, run)
    found = until(launcher, "r1", ended)["gpu1"]
    assert (found.phase, found.code) == (Phase.ENDED, "deadline")
    assert found.reason == "it reached its deadline of 1s and was ended"
    assert holders(fleet) == []


def holders(fleet: Fleet) -> list[str]:
    """Processes that have a token of a run of this fleet."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            given = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if any(
            one.startswith(host_program.TOKEN.encode()) and str(fleet.folder).encode() in b" ".join(given)
            for one in given
        ):
            found.append(entry.name)
    return found


def test_removing_a_run_ends_its_processes_first(fleet: Fleet) -> None:
    launcher = fleet.launcher("#!/bin/sh\n(setsid sleep 600 &)\nsleep 600\n", ("gpu1",))
    started(launcher, spec())
    assert len(holders(fleet)) >= 2
    assert do(launcher.remove("r1")).left == ()
    assert holders(fleet) == []
    assert fleet.runs() == []


def test_a_run_whose_watchdog_was_killed_ends_with_it_and_has_vanished(fleet: Fleet) -> None:
    launcher = fleet.launcher("#!/bin/sh\nexec sleep 600\n", ("gpu1",))
    started(launcher, spec())
    (file,) = fleet.folder.glob("state/gpu1/*/r1/gpu1/run.json")
    recorded = host_program.read(file)
    assert recorded is not None
    os.kill(recorded["watchdog"]["pid"], 9)
    found = until(launcher, "r1", ended)["gpu1"]
    assert (found.phase, found.code) == (Phase.GONE, "vanished")
    assert holders(fleet) == []


def test_a_process_that_only_has_the_number_is_not_signalled(fleet: Fleet) -> None:
    """The record names a process that lives, with another start time."""
    launcher = fleet.launcher("#!/bin/sh\nexit 0\n", ("gpu1",))
    started(launcher, spec())
    until(launcher, "r1", ended)
    (file,) = fleet.folder.glob("state/gpu1/*/r1/gpu1/run.json")
    recorded = host_program.read(file)
    assert recorded is not None
    other = {"pid": os.getpid(), "start": 1, "boot": host_program.boot()}
    host_program.write(file, {**recorded, "watchdog": other, "process": other})
    (file.parent / "exit.json").unlink()
    assert nodes(do(launcher.run("r1")))["gpu1"].code == "vanished"
    assert do(launcher.remove("r1")).left == ()  # and this test still runs


def test_old_runs_are_removed_and_others_are_kept(fleet: Fleet) -> None:
    launcher = fleet.launcher(hosts=("gpu1",))
    started(launcher, spec("old"))
    until(launcher, "old", ended)
    started(launcher, spec("next"))  # a run cleans before it starts
    until(launcher, "next", ended)
    (file,) = fleet.folder.glob("state/gpu1/*/old/gpu1/request.json")
    asked = host_program.read(file)
    assert asked is not None
    host_program.write(file, {**asked, "deadline_s": 0, "retention_s": 0})
    started(fleet.launcher(WAITS, ("gpu1",)), spec("new"))
    assert sorted(one.rsplit("/", 2)[1] for one in fleet.runs()) == ["new", "next"]


@pytest.mark.parametrize("content", ["", "{", '{"created": 0}', "[]"])
def test_a_run_whose_request_cannot_be_read_is_kept_with_its_log(fleet: Fleet, content: str) -> None:
    launcher = fleet.launcher(hosts=("gpu1",))
    started(launcher, spec("old"))
    until(launcher, "old", ended)
    (file,) = fleet.folder.glob("state/gpu1/*/old/gpu1/request.json")
    asked = host_program.read(file)
    assert asked is not None
    file.write_text(content)
    started(launcher, spec("next"))
    assert file.read_text() == content
    assert "report of gpu1" in "".join(one.read_text() for one in file.parent.glob("*log*"))
    host_program.write(file, {**asked, "deadline_s": 0, "retention_s": 0})
    started(launcher, spec("last"))
    assert not file.exists()


def test_what_an_interrupted_request_left_is_removed(fleet: Fleet) -> None:
    launcher = fleet.launcher(hosts=("gpu1",))
    started(launcher, spec())
    until(launcher, "r1", ended)
    (folder,) = fleet.folder.glob("state/gpu1/*/r1")
    for name in (".starting-1", ".removing-1"):
        (folder / name).mkdir(mode=0o700)
        (folder / name / "spec.json").write_text("{}")
    assert list(nodes(do(launcher.run("r1")))) == ["gpu1"]
    started(launcher, spec("next"))
    assert sorted(one.name for one in folder.iterdir()) == ["gpu1"]


def test_a_directory_that_others_may_open_is_refused(fleet: Fleet) -> None:
    launcher = fleet.launcher(hosts=("gpu1",))
    do(launcher.targets(spec()))
    folder = fleet.folder / "state/gpu1/gpukeeper-runs"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(PlatformError, match="chmod 700"):
        do(launcher.start(spec(), (Target(node="gpu1"),)))


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".hidden", "x" * 300, "a\nb"])
def test_a_run_id_cannot_leave_its_directory(fleet: Fleet, name: str) -> None:
    launcher = fleet.launcher(hosts=("gpu1",))
    with pytest.raises(PlatformError, match="cannot be the name of a directory"):
        do(launcher.remove(name))


def test_hostile_text_reaches_no_shell(fleet: Fleet) -> None:
    """Arguments and variables travel as JSON; the remote command is the same for every run."""
    hostile = "$(touch owned); `touch owned`; 'x' \"y\" \\ ; exit 9\n--"
    body = '#!/bin/sh\nshift 3; printf %s "$1|$V"\n'
    launcher, run = fleet.launcher(body, ("gpu1",)), spec(arguments=(hostile,), environment={"V": hostile})
    started(launcher, run)
    until(launcher, "r1", ended)
    assert do(launcher.output(run, "gpu1")) == f"{hostile}|{hostile}".encode()
    assert not list(fleet.folder.rglob("owned"))


GROUP = "#!/bin/sh\necho $MASTER_ADDR $MASTER_PORT $GPUKEEPER_GROUP_SIZE $GPUKEEPER_GROUP_INDEX\n"


def test_together_every_node_learns_where_the_group_meets(fleet: Fleet) -> None:
    port = free_port()
    launcher, run = fleet.launcher(GROUP, master="127.0.0.1"), spec(together=True, port=port)
    fleet.down("gpu1")
    targets = started(launcher, run)
    until(launcher, "r1", ended)
    assert do(launcher.output(run, "gpu2")) == f"127.0.0.1 {port} 2 0\n".encode()
    assert do(launcher.output(run, "gpu3")) == f"127.0.0.1 {port} 2 1\n".encode()
    with socket.create_server(("", port)):
        do(launcher.start(run, targets))  # the run itself may use the port: it is not checked again


def test_together_a_host_that_does_not_find_the_first_one_is_named_and_nothing_is_started(fleet: Fleet) -> None:
    launcher, run = fleet.launcher(GROUP, master="no-such-host.invalid"), spec(together=True, port=free_port())
    with pytest.raises(PlatformError, match=r'gpu2: the name "no-such-host\.invalid" does not resolve there'):
        do(launcher.start(run, do(launcher.targets(run))))
    assert fleet.runs() == []


def test_together_a_port_that_is_taken_is_an_error_of_the_first_host(fleet: Fleet) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        launcher, run = fleet.launcher(GROUP, master="127.0.0.1"), spec(together=True, port=port)
        with pytest.raises(PlatformError, match=f"gpu1: port {port} cannot be used there: Address already in use"):
            do(launcher.start(run, do(launcher.targets(run))))


def test_checks_before_a_run_leave_nothing_on_a_host(fleet: Fleet) -> None:
    client, hosts = fleet.client(), read_hosts(HOSTS, "test")
    fleet.down("gpu3")
    program = str(fleet.program("#!/bin/sh\necho gpukeeper 1.0\n"))
    found = [do(host_facts(client, one, program)) for one in hosts]
    assert isinstance(found[2], HostError)
    for one in found[:2]:
        assert not isinstance(one, HostError)
        reply, clock_s = one
        assert (reply.version, reply.broken, reply.refused, clock_s) == ("gpukeeper 1.0", "", "", 0.0)
        assert reply.shm
        assert reply.free
    assert list((fleet.folder / "state").rglob("gpukeeper-runs")) == []


def test_another_program_at_the_port_is_not_taken_for_the_first_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def reply() -> None:
            peer, _ = other.accept()
            with peer:
                peer.sendall(b"220 mail.example ESMTP\n")

        thread = threading.Thread(target=reply)
        thread.start()
        given = {"address": "127.0.0.1", "port": port, "token": "t", "within_s": 1.0}
        found = host_checks_program.reach(given, Path("/nowhere"))
        thread.join()
    assert "another program replies" in found["problem"]


def test_hosts_that_are_too_many_for_the_time_are_not_said_to_be_unreachable() -> None:
    """The first host stops to listen while others still wait for their turn: nothing is known about these."""

    class Slow(SshClient):
        async def request(self, host: Host, reply: type[T], do: str, **what: Any) -> T:
            if what["check"] == "listen":
                return msgspec.convert(host_checks_program.listen({**what, "within_s": 0.1}, Path("/nowhere")), reply)
            await asyncio.sleep(60)
            raise AssertionError

    hosts = read_hosts(["gpu1", "gpu2", "gpu3"], "t")
    found = do(unmet(Slow(Settings()), hosts, "gpu1", 0))
    assert found == {"gpu1": "2 hosts had not connected after 0 s"}


def test_a_program_that_cannot_be_executed_is_named(fleet: Fleet) -> None:
    launcher = fleet.launcher(hosts=("gpu1",))
    targets = do(launcher.targets(spec()))
    Path(launcher._program).unlink()
    do(launcher.start(spec(), targets))
    found = until(launcher, "r1", ended)["gpu1"]
    assert (found.code, found.exit_code) == ("command", 127)
    assert "--option program=PATH" in found.reason


def test_without_python_the_reason_says_so(fleet: Fleet) -> None:
    client = SshClient(Settings(program=str(fleet.folder / "ssh"), python="python-that-is-not-there"))
    with pytest.raises(HostError, match="needs Python 3") as raised:
        do(client.request(read_hosts(["gpu1"], "t")[0], dict, "facts"))
    assert raised.value.code == "python"


def test_the_rendered_run_names_each_host_and_its_command(fleet: Fleet) -> None:
    launcher = fleet.launcher()
    fleet.down("gpu3")
    run = spec(arguments=("--expect", "8 GPUs"))
    shown = launcher.render(run, do(launcher.targets(run)))
    assert f"GPUKEEPER_NODE=gpu1 {launcher._program} accept --report-to-log r1 --expect '8 GPUs'" in shown
    assert "BatchMode=yes" in shown
    assert "# gpu3 is left out: gpu3 cannot be reached" in shown


def test_options_are_checked(tmp_path: Path) -> None:
    for options, words in (
        ({"host": "x"}, 'has no option "host". Did you mean hosts?'),
        ({"hosts": str(tmp_path / "none")}, "cannot be read"),
        ({"connect": "soon"}, 'option connect="soon" is not a duration'),
        ({"python": "python3; rm x"}, "is not the name or path of an interpreter"),
        ({"nodes": "-x"}, "is not a host"),
    ):
        with pytest.raises(UsageError) as raised:
            launch_hosts.ssh(options)
        assert words in str(raised.value)
    listed = tmp_path / "hosts"
    listed.write_text("gpu1\nann@gpu2:2222 # second\n")
    launcher = launch_hosts.ssh({"hosts": str(listed), "user": "bob", "identity": "id", "config": "c"})
    shown = launcher.render(spec(nodes=("gpu1",)), (Target(node="gpu1"),))
    assert "-F c -i id" in shown
    with pytest.raises(UsageError, match="no host is named"):
        launch_hosts.ssh({}).render(spec(), ())
    with pytest.raises(UsageError, match="hosts have no labels"):
        launcher.render(spec(selector="rack=1"), ())


@pytest.mark.parametrize("program", [host_program, host_checks_program])
def test_the_program_is_sent_as_it_is_and_needs_only_an_old_python(program: ModuleType) -> None:
    source = Path(str(program.__file__)).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def launched(fleet: Fleet, launcher: SshLauncher, run: RunSpec) -> story.Ended:
    """The whole story, as `accept --on ssh` tells it."""

    async def told() -> story.Ended:
        setting = story.Setting(launcher, RunArchive(fleet.folder / "reports", run.run), SystemClock())
        setting.sleep = lambda seconds: asyncio.sleep(min(seconds, 0.2))
        return await story.launch(setting, run, await launcher.targets(run))

    return do(told())


@pytest.mark.parametrize("together", [False, True])
def test_a_host_that_cannot_be_reached_is_a_row_and_the_others_run(fleet: Fleet, together: bool) -> None:
    fleet.down("gpu2")
    run = spec(created=datetime.now(UTC), together=together, port=free_port())
    done = launched(fleet, fleet.launcher(master="127.0.0.1"), run)
    assert done.problems == ()
    assert done.removal is not None
    assert [one.partition(":")[0] for one in done.removal.removed] == ["gpu1", "gpu3"], "these were started"
    missing = {one.node: (one.code, one.exit_code) for one in done.report.missing}
    assert missing == {"gpu1": ("no-report", 4), "gpu2": ("excluded", None), "gpu3": ("no-report", 4)}
    assert "No route to host" in next(one.reason for one in done.report.missing if one.node == "gpu2")
    assert done.report.verdict is Grade.INCONCLUSIVE
    assert fleet.runs() == []


@pytest.mark.parametrize("together", [False, True])
def test_if_no_host_can_be_reached_the_run_ends_with_a_report(fleet: Fleet, together: bool) -> None:
    """Such as names that do not resolve."""
    for host in HOSTS:
        fleet.down(host)
    done = launched(fleet, fleet.launcher(), spec(created=datetime.now(UTC), together=together))
    assert {one.code for one in done.report.missing} == {"excluded"}
    assert (done.report.verdict, exit_code(done.report), done.problems) == (Grade.INCONCLUSIVE, 5, ())
    [(_, stored)] = stored_runs(fleet.folder / "reports")
    assert isinstance(stored, RunReport), "it does not go on"


def test_a_host_that_is_lost_before_the_start_leaves_no_run_behind(fleet: Fleet) -> None:
    launcher, run = fleet.launcher(), spec(created=datetime.now(UTC))

    async def told() -> None:
        setting = story.Setting(launcher, RunArchive(fleet.folder / "reports", run.run), SystemClock())
        targets = await launcher.targets(run)
        fleet.down("gpu2")
        await story.launch(setting, run, targets)

    with pytest.raises(PlatformError, match="nothing is known of run r1"):
        do(told())
    assert stored_runs(fleet.folder / "reports") == []
    assert fleet.runs() == []
