"""A workload's counters, from a proc and cgroup folder that the test builds in every layout, and from the real ones."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.devices import counters as reading_of
from gpukeeper.devices.counters import (
    Counters,
    own_path,
    parse_groups,
    parse_io_stat,
    parse_net_dev,
    parse_throttle,
    processes_of,
    rates,
    read_counters,
)
from gpukeeper.model.series import Signal
from gpukeeper.model.unknown import Unknown

ID, OUTER = "0123456789abcdef" * 4, "f" * 64
NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 5000000      10    0    0    0     0          0         0  5000000 10 0 0 0 0 0 0
  eth0:    1000      10    0    0    0     0          0         0      234 10 0 0 0 0 0 0
  eth1:       1       1    0    0    0     0          0         0        2 1 0 0 0 0 0 0
"""
THROTTLE = "8:0 Read 4096\n8:0 Write 8192\n8:0 Sync 0\n8:0 Async 12288\n8:0 Total 12288\nTotal 12288\n"


class Machine:
    """A proc folder and a cgroup folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        self.cgroup.mkdir()
        self.process(1, "0::/init.scope\n", net="net:[1]")

    def process(self, pid: int, cgroup: str, net: str = "net:[2]", starttime: int = 42, state: str = "S") -> Path:
        home = self.proc / str(pid)
        for name in ("fd", "ns", "net"):
            (home / name).mkdir(parents=True, exist_ok=True)
        fields = [state, "1", "1", "1", "0", "-1", "0", *["0"] * 12, str(starttime), "0"]
        (home / "stat").write_text(f"{pid} (python) {' '.join(fields)}\n")
        (home / "cgroup").write_text(cgroup)
        (home / "ns/net").symlink_to(net)
        (home / "net/dev").write_text(NET_DEV)
        return home

    def group(self, path: str, **files: str) -> None:
        folder = self.cgroup / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    def read(self, pid: int = 20, **options: Any) -> Counters:
        counters = read_counters(pid, str(self.proc), str(self.cgroup), **options)
        assert counters is not None
        return counters

    def processes(self, pid: int = 20) -> tuple[int, ...] | Unknown:
        return processes_of(pid, str(self.proc), str(self.cgroup))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def v1(machine: Machine, path: str, cpu: str = "cpuacct", procs: str = "20\n21\n") -> None:
    machine.group(f"{cpu}/{path}", cpuacct__usage="7000000000\n", cgroup__procs=procs)
    machine.group(f"blkio/{path}", blkio__throttle__io_service_bytes_recursive=THROTTLE)


def v2(machine: Machine, path: str, controllers: str = "cpuset cpu io memory pids\n") -> None:
    machine.group(
        path,
        cpu__stat="usage_usec 7000000\nuser_usec 1\nsystem_usec 2\n",
        io__stat="8:0 rbytes=4096 wbytes=8192 rios=1 wios=1 dbytes=7 dios=0\n259:0 \n",
        cgroup__controllers=controllers,
        cgroup__procs="20\n21\n",
    )


LAYOUTS = {
    "v1 cgroupfs": (v1, f"docker/{ID}", "4:blkio:/{0}\n3:cpuacct:/{0}\n2:cpu:/{0}\n1:name=systemd:/{0}\n"),
    "v1 systemd": (v1, f"system.slice/docker-{ID}.scope", "4:blkio:/{0}\n3:cpu,cpuacct:/{0}\n"),
    "v1 joined": (
        lambda machine, path: v1(machine, path, "cpu,cpuacct"),
        f"docker/{ID}",
        "4:blkio:/{0}\n3:cpu,cpuacct:/{0}\n",
    ),
    "hybrid": (v1, f"docker/{ID}", "4:blkio:/{0}\n3:cpuacct:/{0}\n0::/{0}\n"),
    "v2 cgroupfs": (v2, f"docker/{ID}", "0::/{0}\n"),
    "v2 systemd": (v2, f"system.slice/docker-{ID}.scope", "0::/{0}\n"),
    "v2 own parent": (v2, f"lab.slice/lab-ann.slice/docker-{ID}.scope", "0::/{0}\n"),
    "v2 with an init of its own": (v2, f"system.slice/docker-{ID}.scope", "0::/{0}/init.scope\n"),
    "v2 podman": (v2, f"machine.slice/libpod-{ID}.scope", "0::/{0}/container\n"),
    "v2 engine inside another": (v2, f"docker/{OUTER}/docker/{ID}", "0::/{0}\n"),
    "v2 not by id": (v2, "user.slice/user-1000.slice/session-3.scope", "0::/{0}\n"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counters_are_found_in_every_layout(machine: Machine, layout: str) -> None:
    build, path, cgroup = LAYOUTS[layout]
    build(machine, path)
    machine.process(20, cgroup.format(path))
    counters = machine.read()
    assert (counters.cpu_ns, counters.disk_bytes, counters.network_bytes) == (7_000_000_000, 12288, 1237)
    assert counters.starttime == 42
    assert machine.processes() == (20, 21)


def test_v2_below_a_hybrid_host_has_no_disk_by_design(machine: Machine) -> None:
    v2(machine, f"unified/docker/{ID}", controllers="\n")
    machine.process(20, f"0::/docker/{ID}\n")
    counters = machine.read()
    assert counters.cpu_ns == 7_000_000_000
    assert isinstance(counters.disk_bytes, Unknown)
    assert counters.disk_bytes.by_design


def test_an_older_kernel_has_only_the_groups_own_disk_counter(machine: Machine) -> None:
    machine.group(f"blkio/docker/{ID}", blkio__throttle__io_service_bytes=THROTTLE)
    machine.process(20, f"4:blkio:/docker/{ID}\n")
    assert machine.read().disk_bytes == 12288


def test_groups_below_belong_to_it(machine: Machine) -> None:
    v2(machine, f"docker/{ID}")
    machine.group(f"docker/{ID}/init.scope", cgroup__procs="30\n")
    machine.group(f"docker/{ID}/docker/{OUTER}", cgroup__procs="31\n")
    machine.process(20, f"0::/docker/{ID}\n")
    assert machine.processes() == (20, 21, 30, 31)


@pytest.mark.parametrize("cgroup", ["0::/\n", "4:blkio:/\n3:cpuacct:/\n0::/\n", "0::/../../docker/x\n"])
def test_who_has_no_group_of_his_own_is_not_charged_with_the_whole_machine(machine: Machine, cgroup: str) -> None:
    machine.group("", cpu__stat="usage_usec 9\n", cgroup__procs="1\n20\n", io__stat="", cgroup__controllers="io")
    machine.process(20, cgroup)
    counters = machine.read()
    for fact in (counters.cpu_ns, counters.disk_bytes, counters.typed, machine.processes()):
        assert isinstance(fact, Unknown)
        assert not fact.by_design


def test_a_failed_read_is_unknown_and_not_by_design(machine: Machine) -> None:
    home = machine.process(20, f"0::/docker/{ID}\n")
    (home / "net/dev").unlink()
    counters = machine.read()  # its group is not there either
    for fact in (counters.cpu_ns, counters.disk_bytes, counters.network_bytes, counters.typed):
        assert isinstance(fact, Unknown)
        assert not fact.by_design


@pytest.mark.parametrize("text", ["", "many\n"])
def test_a_counter_that_is_no_number_is_unknown(machine: Machine, text: str) -> None:
    v1(machine, f"docker/{ID}")
    machine.group(f"cpuacct/docker/{ID}", cpuacct__usage=text)
    machine.process(20, f"3:cpuacct:/docker/{ID}\n")
    assert isinstance(machine.read().cpu_ns, Unknown)


def test_the_hosts_network_is_nobodys_by_design(machine: Machine) -> None:
    v2(machine, f"docker/{ID}")
    machine.process(20, f"0::/docker/{ID}\n", net="net:[1]")
    for network in (machine.read().network_bytes, machine.read(host_network=True).network_bytes):
        assert isinstance(network, Unknown)
        assert network.by_design


@pytest.mark.parametrize("state", ["Z", "X"])
def test_who_is_not_there_or_has_ended_is_none(machine: Machine, state: str) -> None:
    machine.process(20, "0::/x\n", state=state)
    assert read_counters(20, str(machine.proc), str(machine.cgroup)) is None
    assert read_counters(4711, str(machine.proc), str(machine.cgroup)) is None


def test_a_pid_that_is_reused_while_it_is_read_is_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    v2(machine, f"docker/{ID}")
    machine.process(20, f"0::/docker/{ID}\n")
    stat = machine.proc / "20/stat"

    def ends_and_another_starts(*_where: Path) -> int:
        stat.write_text(stat.read_text().replace(" 42 ", " 43 "))
        return 0

    monkeypatch.setattr(reading_of, "_disk", ends_and_another_starts)
    assert read_counters(20, str(machine.proc), str(machine.cgroup)) is None


def test_a_process_outside_our_pid_namespace_makes_the_list_unknown(machine: Machine) -> None:
    v2(machine, f"docker/{ID}")
    machine.group(f"docker/{ID}", cgroup__procs="20\n0\n")
    machine.process(20, f"0::/docker/{ID}\n")
    assert isinstance(machine.processes(), Unknown)


# Terminals: real ones, since only the kernel makes them.


def test_what_was_typed_is_the_newest_input_of_any_process(machine: Machine) -> None:
    v2(machine, f"docker/{ID}")
    first, second = os.openpty(), os.openpty()
    try:
        os.utime(first[1], (1_700_000_000, 1_800_000_000))
        os.utime(second[1], (1_700_000_100, 1_800_000_000))
        (machine.process(20, f"0::/docker/{ID}\n") / "fd/0").symlink_to(os.ttyname(first[1]))
        (machine.process(21, f"0::/docker/{ID}\n") / "fd/2").symlink_to(os.ttyname(second[1]))
        assert machine.read().typed == datetime.fromtimestamp(1_700_000_100, UTC)
    finally:
        for fd in (*first, *second):
            os.close(fd)


def test_without_a_terminal_nobody_types_by_design(machine: Machine, tmp_path: Path) -> None:
    v2(machine, f"docker/{ID}")
    home = machine.process(20, f"0::/docker/{ID}\n")
    for number, target in enumerate(("/dev/null", "/dev/zero", str(tmp_path / "gone"))):
        (home / "fd" / str(number)).symlink_to(target)
    typed = machine.read().typed
    assert isinstance(typed, Unknown)
    assert typed.by_design


def test_a_file_of_a_terminals_kind_that_is_no_terminals_name_is_not_read(machine: Machine, tmp_path: Path) -> None:
    """Output often goes to a file on a network disk, and to look at one on a dead disk never ends."""
    v2(machine, f"docker/{ID}")
    screen, device = os.openpty()
    try:
        (tmp_path / "log").symlink_to(os.ttyname(device))
        (machine.process(20, f"0::/docker/{ID}\n") / "fd/1").symlink_to(tmp_path / "log")
        typed = machine.read().typed
    finally:
        os.close(screen)
        os.close(device)
    assert isinstance(typed, Unknown)
    assert typed.by_design


def test_a_terminal_that_may_not_be_read_is_unknown(tmp_path: Path) -> None:
    """As root nothing is refused, so somebody else reads, shut into the folder that the test built."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody who may not read others")
    world = tmp_path / "world"
    world.mkdir(mode=0o755)
    machine = Machine(world)
    v2(machine, f"docker/{ID}")
    (machine.process(20, f"0::/docker/{ID}\n") / "fd").chmod(0o700)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.chroot(world)
        os.chdir("/")
        os.setgid(65534)
        os.setuid(65534)
        counters = read_counters(20, "/proc", "/cgroup")
        os.write(writing, repr(counters and (counters.cpu_ns, counters.typed)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read().decode()
    assert said == "(7000000000, Unknown(why='what was typed could not be read: Permission denied', by_design=False))"


def test_this_process_can_be_read_on_the_real_proc() -> None:
    counters = read_counters(os.getpid())
    assert counters is not None
    again = read_counters(os.getpid())
    assert again is not None
    assert counters.starttime == again.starttime
    if not isinstance(counters.cpu_ns, Unknown) and not isinstance(again.cpu_ns, Unknown):
        assert 0 < counters.cpu_ns <= again.cpu_ns


# Reading.


def test_the_kernels_tables_are_read() -> None:
    assert parse_net_dev(NET_DEV) == 1237
    assert parse_throttle(THROTTLE) == 12288
    assert parse_throttle("") == 0
    assert parse_io_stat("8:0 rbytes=1 wbytes=2 rios=9\n8:16 rbytes=3 wbytes=4\n") == 10
    assert parse_io_stat("") == 0
    assert parse_groups("3:cpu,cpuacct:/a:b\n0::/c\n") == {"cpu": "/a:b", "cpuacct": "/a:b", "": "/c"}


def test_the_group_of_a_workload_is_cut_after_its_own_id() -> None:
    assert own_path(f"/docker/{OUTER}/docker/{ID}/init.scope/x") == f"docker/{OUTER}/docker/{ID}"
    assert own_path("/user.slice/x.scope") == "user.slice/x.scope"
    assert own_path(f"/docker/{ID}0") == f"docker/{ID}0"
    assert own_path("/") is None
    assert own_path("/../x") is None


# Rates.

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)


def counted(**facts: Any) -> Counters:
    zero = {"starttime": 42, "cpu_ns": 0, "disk_bytes": 0, "network_bytes": 0, "typed": NOON}
    return Counters(**(zero | facts))


def test_rates_are_in_the_units_of_the_series() -> None:
    after = counted(cpu_ns=15_000_000_000, disk_bytes=3000, network_bytes=600, typed=NOON + timedelta(seconds=8))
    assert rates(counted(), after, 30.0) == {
        Signal.CPU: 50.0,
        Signal.DISK: 100.0,
        Signal.NETWORK: 20.0,
        Signal.TERMINAL: 1.0,
    }


def test_a_counter_that_goes_backwards_is_unknown() -> None:
    found = rates(counted(cpu_ns=5, disk_bytes=5, network_bytes=5), counted(), 30.0)
    assert all(isinstance(found[signal], Unknown) for signal in (Signal.CPU, Signal.DISK, Signal.NETWORK))


@pytest.mark.parametrize(
    ("before", "after", "seconds"),
    [(None, counted(), 30.0), (counted(starttime=41), counted(), 30.0), (counted(), counted(), 0.0)],
)
def test_without_an_earlier_value_of_the_same_start_nothing_is_known(
    before: Any, after: Counters, seconds: float
) -> None:
    found = rates(before, after, seconds)
    assert len(found) == 4
    for value in found.values():
        assert isinstance(value, Unknown)
        assert not value.by_design


@pytest.mark.parametrize("before", [None, counted()])
def test_what_it_cannot_have_stays_by_design(before: Any) -> None:
    never = Unknown("shares the host's network", by_design=True)
    assert rates(before, counted(network_bytes=never), 30.0)[Signal.NETWORK] == never


def test_typing_is_input_newer_than_before() -> None:
    none = Unknown("it has no terminal", by_design=True)

    def typing(before: Any, after: Any) -> Any:
        return rates(counted(typed=before), counted(typed=after), 30.0)[Signal.TERMINAL]

    assert typing(NOON, NOON) == 0.0
    assert typing(NOON, NOON - timedelta(hours=1)) == 0.0  # the newest terminal was closed
    assert typing(none, NOON) == 1.0  # the first was opened
    assert typing(NOON, none) == 0.0  # the last was closed: nobody types, and that goes on being measured
    assert typing(none, none) == 0.0
    assert isinstance(typing(Unknown("unreadable"), NOON), Unknown)


counts = st.integers(0, 2**63) | st.just(Unknown("unreadable")) | st.just(Unknown("never", by_design=True))


@given(counts, counts, st.floats(0.001, 3600))
def test_a_rate_is_known_only_from_two_counts_that_grew(before: Any, after: Any, seconds: float) -> None:
    found = rates(counted(disk_bytes=before), counted(disk_bytes=after), seconds)[Signal.DISK]
    if isinstance(found, Unknown):
        assert isinstance(before, Unknown) or isinstance(after, Unknown) or after < before
    else:
        assert found >= 0
        assert found * seconds == pytest.approx(after - before)


# One process on the bare host.


def test_the_cpu_time_of_a_process_counts_its_children_too() -> None:
    """Fields 14 to 17 of the line; the name in brackets may hold blanks and brackets."""
    fields = " ".join(str(number) for number in range(4, 53))
    ticks = os.sysconf("SC_CLK_TCK")
    assert reading_of.parse_cpu_time(f"42 (a) b) S {fields}") == (14 + 15 + 16 + 17) * 10**9 // ticks


def test_the_io_of_a_process_is_what_reached_a_disk() -> None:
    assert reading_of.parse_io("rchar: 900\nwchar: 900\nread_bytes: 4096\nwrite_bytes: 512\n") == 4608


def test_a_living_process_is_read_and_an_ended_one_is_not() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        found = reading_of.read_process(child.pid)
        assert found is not None
        assert found.network_bytes == reading_of.HOST_NETWORK
        assert isinstance(found.cpu_ns, int)
    finally:
        child.kill()
        child.wait()
    assert reading_of.read_process(child.pid) is None
