"""Who has a GPU open, read from a proc folder that the test builds."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpukeeper.devices.holders import (
    KERNEL_THREAD,
    Stat,
    boot_id,
    boot_time,
    look_up,
    mig_minors,
    parse_container,
    parse_containers,
    parse_mig_minors,
    parse_stat,
    parse_uid,
    pids,
    scan,
    shows_everyone,
    started,
)
from tests.own_processes import own_proc

ID = "0123456789abcdef" * 4


def add(
    proc: Path,
    pid: int,
    *links: str,
    comm: str = "python",
    state: str = "S",
    flags: int = 0,
    cgroup: str = "0::/user.slice\n",
) -> None:
    home = proc / str(pid)
    (home / "fd").mkdir(parents=True)
    for number, link in enumerate(links):
        (home / "fd" / str(number)).symlink_to(link)
    fields = [state, "1", "1", "1", "0", "-1", str(flags), *["0"] * 12, "4200", "0"]
    (home / "stat").write_text(f"{pid} ({comm}) {' '.join(fields)}\n")
    (home / "status").write_text(f"Name:\t{comm}\nUid:\t1001\t0\t0\t0\n")
    (home / "cgroup").write_text(cgroup)


def test_a_holder_is_found_by_its_descriptors(tmp_path: Path) -> None:
    add(tmp_path, 1, "/dev/null", comm="init")
    add(tmp_path, 20, "/dev/nvidiactl", "/dev/nvidia1", "/dev/nvidia0", "/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap7")
    (holder,) = scan(str(tmp_path)).found
    assert (holder.pid, holder.starttime, holder.uid, holder.comm) == (20, 4200, 1001, "python")
    assert (holder.minors, holder.capabilities, holder.container) == ((0, 1), (7,), None)


def test_who_only_has_the_control_device_open_holds_no_gpu(tmp_path: Path) -> None:
    add(tmp_path, 20, "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset", "/tmp/nvidia0", "/dev/nvidia0x")
    assert scan(str(tmp_path)).found == ()


def test_a_stopped_holder_still_holds_and_a_zombie_holds_nothing(tmp_path: Path) -> None:
    add(tmp_path, 20, "/dev/nvidia0", state="T")
    add(tmp_path, 21, "/dev/nvidia0", state="Z")
    add(tmp_path, 22, flags=KERNEL_THREAD)
    (holder,) = scan(str(tmp_path)).found
    assert (holder.pid, holder.stopped) == (20, True)


def test_a_holder_in_a_container_names_it(tmp_path: Path) -> None:
    add(tmp_path, 20, "/dev/nvidia0", cgroup=f"0::/system.slice/docker-{ID}.scope\n")
    assert scan(str(tmp_path)).found[0].container == ID


def test_who_ended_between_list_and_look_is_nobody(tmp_path: Path) -> None:
    assert look_up(4711, str(tmp_path)) is None


def test_who_may_not_be_read_is_hidden_and_never_left_out(tmp_path: Path) -> None:
    """As root nothing is refused in a plain folder, so the real proc is read by nobody."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody who may not read others")
    reading, writing = os.pipe()
    with own_proc() as proc:
        child = os.fork()
        if child == 0:
            os.setgid(65534)
            os.setuid(65534)
            os.write(writing, b"hidden" if os.getppid() in scan(proc).hidden else b"seen")
            os._exit(0)
        os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        assert answer.read() == b"hidden"


def test_this_process_can_be_looked_up_on_the_real_proc() -> None:
    me = look_up(os.getpid())
    assert me is not None
    assert me.uid == os.getuid()
    began = started(me.starttime, boot_time())
    assert timedelta() < datetime.now(UTC) - began < timedelta(days=1)
    assert os.getpid() in pids()
    assert len(boot_id()) == 36


def test_a_name_may_hold_brackets_and_blanks() -> None:
    text = "7 (a) (b c) R 1 1 1 0 -1 4194304 " + "0 " * 12 + "99 0"
    assert parse_stat(text) == Stat(comm="a) (b c", state="R", flags=4194304, starttime=99)


def test_the_real_uid_counts() -> None:
    assert parse_uid("Name:\tx\nUid:\t1000\t0\t0\t0\n") == 1000


@pytest.mark.parametrize(
    "cgroup",
    [
        f"12:pids:/docker/{ID}\n0::/docker/{ID}\n",
        f"0::/system.slice/docker-{ID}.scope\n",
        f"0::/kubepods/burstable/pod1234/{ID}\n",
        f"0::/kubepods.slice/kubepods-pod12_34.slice/cri-containerd-{ID}.scope\n",
        f"0::/kubepods-pod12_34.slice:cri-containerd:{ID}\n",
        f"0::/user.slice/user-1000.slice/user@1000.service/libpod-{ID}.scope\n",
        f"0::/docker/{ID}/docker/{'f' * 64}\n",
        f"0::/../../docker/{ID}\n",
    ],
)
def test_the_outermost_container_is_read_from_every_layout(cgroup: str) -> None:
    assert parse_container(cgroup) == ID


@pytest.mark.parametrize("cgroup", ["0::/\n", "0::/user.slice/session-3.scope\n", f"0::/x/{ID}0\n"])
def test_no_container_where_none_is_named(cgroup: str) -> None:
    assert parse_container(cgroup) is None


def test_every_container_is_read_outermost_first_and_each_once() -> None:
    inner = "f" * 64
    assert parse_containers(f"3:cpu:/docker/{ID}/docker/{inner}\n0::/docker/{ID}/docker/{inner}\n") == (ID, inner)
    assert parse_containers(f"0::/kubepods.slice/cri-containerd-{ID}.scope/docker/{inner}\n") == (ID, inner)
    assert parse_containers("0::/user.slice\n") == ()


def test_capabilities_are_mapped_to_slices(tmp_path: Path) -> None:
    text = "config 1\nmonitor 2\ngpu0/gi7/access 66\ngpu0/gi7/ci0/access 67\ngpu3/gi1/ci2/access 412\n"
    assert parse_mig_minors(text) == {67: (0, 7, 0), 412: (3, 1, 2)}
    assert mig_minors(str(tmp_path)) == {}
    (tmp_path / "driver/nvidia-caps").mkdir(parents=True)
    (tmp_path / "driver/nvidia-caps/mig-minors").write_text(text)
    assert mig_minors(str(tmp_path)) == parse_mig_minors(text)


def test_a_proc_without_its_first_process_hides_people(tmp_path: Path) -> None:
    assert not shows_everyone(str(tmp_path))
    add(tmp_path, 1)
    assert shows_everyone(str(tmp_path))


@pytest.mark.parametrize("comm", ["a\x0bUid:", "a\x0cUid:\t0", "a\x1cUid: x", "a\x85Uid:\t0", "Uid:\t0"])
def test_a_name_that_looks_like_a_line_changes_no_uid(comm: str) -> None:
    """Anybody gives a process of theirs any name; only a newline is escaped by the kernel."""
    assert parse_uid(f"Name:\t{comm}\nUmask:\t0022\nUid:\t1001\t0\t0\t0\n") == 1001


def test_one_process_that_cannot_be_understood_hides_no_other(tmp_path: Path) -> None:
    add(tmp_path, 20, "/dev/nvidia0")
    add(tmp_path, 21, "/dev/nvidia0")
    (tmp_path / "21/status").write_text("Name:\tpython\n")
    found = scan(str(tmp_path))
    assert ([one.pid for one in found.found], found.hidden) == ([20], (21,))


def test_a_file_whose_path_is_too_long_to_be_told_hides_nobody(tmp_path: Path) -> None:
    """The kernel refuses to name it. Anybody can open one, and it is no device."""
    here, folders = os.open(tmp_path, os.O_RDONLY), []
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=here)
        folders.append(here)
        here = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
    try:
        with pytest.raises(OSError, match="too long"):
            Path(f"/proc/self/fd/{here}").readlink()
        with own_proc() as proc:
            assert os.getpid() not in scan(proc).hidden
        assert look_up(os.getpid()) is not None
    finally:
        os.close(here)
        for folder in reversed(folders):
            os.rmdir("d" * 200, dir_fd=folder)
            os.close(folder)
