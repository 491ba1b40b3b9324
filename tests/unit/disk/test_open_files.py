"""Which trees are in use: real children that hold a file open, mapped, or sit inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.disk import process_files
from gpukeeper.disk.kernel import KERNEL
from gpukeeper.disk.measure import TreeMeasurement, measure, open_directory
from gpukeeper.disk.mounts import MountEntry
from gpukeeper.disk.open_files import (
    DirectoryUse,
    OpenFiles,
    below,
    is_in_use,
    parse_backing_files,
    scan,
    user_of,
    users_of_trash,
)
from gpukeeper.disk.process_files import FIRST_PID_NAMESPACE, parse_maps
from gpukeeper.model.unknown import Unknown
from tests.own_processes import everything_seen, own_proc, scan_own

HOLD_OPEN = "import sys; f = open(sys.argv[1] + '/tree/file'); print(flush=True); sys.stdin.read()"
HOLD_MAPPED = """
import mmap, sys
with open(sys.argv[1] + '/tree/file', 'rb') as f: m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
print(flush=True); sys.stdin.read()
"""
SIT_INSIDE = "import os, sys; os.chdir(sys.argv[1] + '/tree/sub'); print(flush=True); sys.stdin.read()"
HOLD_DELETED = """
import os, sys
f = open(sys.argv[1] + '/tree/gone', 'w'); os.unlink(f.name); print(flush=True); sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/file").write_text("content")
    (tmp_path / "tree-2").mkdir()
    return tmp_path


@contextmanager
def child(program: str, root: Path, *before: str) -> Iterator[int]:
    """Runs while the block does; it has said so when the block begins."""
    command = [*before, sys.executable, "-c", program, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == b"\n"
        yield running.pid
        running.stdin.close()


def look(root: Path, name: str) -> tuple[TreeMeasurement, DirectoryUse]:
    used = below(str(root), everything_seen())
    with open_directory(str(root)) as parent:
        found = measure(name, parent, used.open_files.files)
    assert found is not None
    return found, used


@pytest.mark.parametrize("program", [HOLD_OPEN, HOLD_MAPPED, SIT_INSIDE, HOLD_DELETED])
def test_a_tree_that_a_process_uses_is_in_use(root: Path, program: str) -> None:
    with child(program, root) as pid:
        found, used = look(root, "tree")
        assert is_in_use("tree", found, used) is True
        assert user_of("tree", found, used) == pid
        assert is_in_use("tree-2", *look(root, "tree-2")) is False
    assert is_in_use("tree", *look(root, "tree")) is False


@pytest.mark.parametrize("program", [HOLD_OPEN, HOLD_MAPPED])
def test_a_process_that_knows_the_file_by_another_name_is_found_by_identity(root: Path, program: str) -> None:
    """As in a container, where the same file has another path: here the folder was renamed by a hard link."""
    (root / "elsewhere/tree").mkdir(parents=True)
    os.link(root / "tree/file", root / "elsewhere/tree/file")
    with child(program, root / "elsewhere") as pid:
        found, used = look(root, "tree")
        assert "tree" not in used.users
        assert found.held_by == pid
        assert is_in_use("tree", found, used) is True


BY_A_THREAD = """
import ctypes, os, sys, threading
def work():
    assert ctypes.CDLL(None).unshare(0x600) == 0  # CLONE_FS | CLONE_FILES
    {act}
    print(flush=True); sys.stdin.read()
threading.Thread(target=work).start()
"""
OPEN, SIT = "f = open(sys.argv[1] + '/tree/file')", "os.chdir(sys.argv[1] + '/tree/sub')"


@pytest.mark.parametrize("compared", [True, False], ids=["compared by the kernel", "all read"])
@pytest.mark.parametrize("act", [OPEN, SIT])
def test_what_one_thread_alone_has_open_is_in_use(
    root: Path, act: str, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compared:  # as where a filter forbids to ask
        monkeypatch.setattr("gpukeeper.disk.kernel.is_same", lambda *_: None)
    with child(BY_A_THREAD.format(act=act), root) as pid:
        found, used = look(root, "tree")
        assert user_of("tree", found, used) == pid


DEEP = """
import os, sys
os.chdir(sys.argv[1] + '/tree')
for _ in range(20): os.mkdir('x' * 250); os.chdir('x' * 250)
print(flush=True); sys.stdin.read()
"""


def test_who_sits_too_deep_for_a_path_is_found_by_identity_and_hides_nothing(root: Path) -> None:
    """Otherwise anybody could keep every tree of the machine for ever."""
    with child(DEEP, root) as pid:
        assert f"of pid {pid} " not in str(scan_own().hidden)
        found, used = look(root, "tree")
        assert found.held_by == pid
        assert is_in_use("tree", found, used) is True


MOUNT_OVERLAY = """
import os, subprocess, sys
os.chdir(sys.argv[1])
point = sys.argv[1] + "/away/merged"
subprocess.run(["mount", "-i", "-t", "overlay", "-o", OPTIONS, "none", point], check=True)
os.chdir("/"); print(flush=True); sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting needs root and unshare")
@pytest.mark.parametrize("layer", ["upper", "lower:1", "relative"])
def test_a_tree_that_holds_a_layer_of_a_mounted_overlay_is_in_use(root: Path, layer: str) -> None:
    """Nothing is open, nothing in the tree is mounted; `relative`: to a folder above the point, as some engines do."""
    at = {name: root / ("tree" if name == layer else "away") / name for name in ("upper", "lower:1", "work")}
    if layer in {"upper", "relative"}:
        at["upper"], at["work"] = root / "tree/upper", root / "tree/work"  # the kernel wants these two on one mount
    for path in (*at.values(), root / "away/merged"):
        path.mkdir(parents=True)
    names = {name: path.relative_to(root) if layer == "relative" else path for name, path in at.items()}
    lower = str(names["lower:1"]).replace(":", "\\:")
    options = f"lowerdir={lower},upperdir={names['upper']},workdir={names['work']}"
    with child(MOUNT_OVERLAY.replace("OPTIONS", repr(options)), root, "unshare", "--mount"):
        assert is_in_use("tree", *look(root, "tree")) is True
        assert is_in_use("tree-2", *look(root, "tree-2")) is False
    assert is_in_use("tree", *look(root, "tree")) is False


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting needs root and unshare")
def test_a_tree_that_a_container_has_mounted_is_in_use_although_nothing_is_open(root: Path) -> None:
    program = """
import subprocess, sys
subprocess.run(["mount", "--bind", sys.argv[1] + "/tree", sys.argv[1] + "/tree-2"], check=True)
print(flush=True); sys.stdin.read()
"""
    with child(program, root, "unshare", "--mount"):
        found, used = look(root, "tree")
        assert user_of("tree", found, used) is None
        assert is_in_use("tree", found, used) is True


def test_a_mount_of_the_directory_above_says_nothing_about_the_tree() -> None:
    mounts = (MountEntry("8:1", "/", "/"),)
    seen = OpenFiles({}, {}, mounts, frozenset({("8:1", "/tmp"), ("8:1", "/tmp/tree-2"), ("8:2", "/tmp/tree")}), None)
    assert is_in_use("tree", PLAIN, below("/tmp", seen)) is False
    assert is_in_use("tree-2", PLAIN, below("/tmp", seen)) is True


@pytest.mark.parametrize(
    ("used", "user"),
    [
        ({}, None),
        ({"points": frozenset({"/run/c/rootfs/tmp/.trash-1/tree/inside"})}, KERNEL),  # only that namespace has it
        ({"points": frozenset({"/tmp/.trash-1"})}, KERNEL),
        ({"mounted": frozenset({("8:1", "/scratch/.trash-1/tree")})}, KERNEL),
        ({"own_mounts": (MountEntry("8:1", "/", "/tmp/.trash-1/tree"),)}, KERNEL),
        ({"paths": {"/elsewhere/.trash-1/tree/file": 7}}, 7),
        ({"points": frozenset({"/tmp/.trash-12/x"}), "paths": {"/tmp/.trash-12/x": 7, "/tmp/.trash-1": 8}}, None),
    ],
    ids=["nothing", "other namespace", "the trash itself", "source", "own mount", "open", "another trash"],
)
def test_what_uses_a_tree_in_the_trash_is_found_by_the_name_of_the_trash(
    used: dict[str, Any], user: int | None
) -> None:
    assert users_of_trash(".trash-1", msgspec.structs.replace(NOBODY, **used)) == user


def test_a_trash_without_users_is_unknown_while_a_process_could_not_be_read() -> None:
    hidden = msgspec.structs.replace(NOBODY, hidden="one process could not be read")
    assert users_of_trash(".trash-1", hidden) == Unknown("one process could not be read")


PLAIN = TreeMeasurement(device=1, inode=2, uid=0, size=0, entries=1, newest=Unknown(""), ctime_ns=0, problems=())
NOBODY = OpenFiles({}, {}, (), frozenset(), None)


def test_not_in_use_is_unknown_while_a_user_could_not_be_read() -> None:
    hidden = msgspec.structs.replace(NOBODY, hidden="the open files of 3 processes could not be read")
    assert is_in_use("tree", PLAIN, below("/tmp", hidden)) == Unknown("the open files of 3 processes could not be read")
    busy = msgspec.structs.replace(hidden, paths={"/tmp/tree/x": 9})
    assert is_in_use("tree", PLAIN, below("/tmp", busy)) is True


def test_not_in_use_is_unknown_of_a_tree_that_was_not_walked_whole_or_holds_what_a_removal_refuses() -> None:
    for given in ({"problems": ("closed could not be read",)}, {"sockets": 1}, {"fifos": 1}, {"devices": 1}):
        found = msgspec.structs.replace(PLAIN, **given)
        assert isinstance(is_in_use("tree", found, below("/tmp", NOBODY)), Unknown)
    assert is_in_use("tree", PLAIN, below("/tmp", NOBODY)) is False


def test_the_root_itself_being_open_says_nothing_about_its_trees() -> None:
    used = below("/tmp", msgspec.structs.replace(NOBODY, paths={"/tmp": 1, "/tmpfile": 2, "/": 3, "/tmp/a/b": 4}))
    assert used.users == {"a": 4}


def made_proc(proc: Path, namespace: str = FIRST_PID_NAMESPACE, first: bool = True) -> str:
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").symlink_to(namespace)
    (proc / "self/mountinfo").write_text("")
    if first:
        (proc / "1").mkdir()
        (proc / "1/stat").write_text("1 (init) S 0 1 1 0 -1 2097152 " + "0 " * 20)
    return str(proc)


def test_a_scan_that_sees_everybody_hides_nothing(tmp_path: Path) -> None:
    assert scan(made_proc(tmp_path), system=str(tmp_path)).hidden is None


def test_a_scan_inside_a_container_is_never_complete(tmp_path: Path) -> None:
    hidden = scan(made_proc(tmp_path, "pid:[4026532000]"), system=str(tmp_path)).hidden
    assert hidden is not None
    assert "container" in hidden


def test_a_proc_that_hides_other_people_is_never_complete(tmp_path: Path) -> None:
    hidden = scan(made_proc(tmp_path, first=False), system=str(tmp_path)).hidden
    assert hidden is not None
    assert "hidepid" in hidden


@pytest.mark.parametrize(
    ("comm", "uids", "vouched"),
    [
        ("sealed", "0 0 0 0", True),
        ("other", "0 0 0 0", False),
        ("sealed", "1000 1000 1000 1000", False),
        ("sealed", "1000 0 0 0", False),
    ],
    ids=["root's and named", "root's and not named", "named and somebody's", "named and started by somebody"],
)
def test_a_program_that_nobody_may_look_into_hides_everything_unless_a_user_vouches_for_it(
    tmp_path: Path, comm: str, uids: str, vouched: bool
) -> None:
    """Its folder is root's whoever runs it, as that of all who may not be looked into."""
    sealed = Path(made_proc(tmp_path), "7")
    sealed.mkdir()
    (sealed / "stat").write_text(f"7 ({comm}) S 1 7 7 0 -1 0 0")
    (sealed / "comm").write_text(f"{comm}\n")
    (sealed / "status").write_text("Name:\tx\nUid:\t{}\nGid:\t0\t0\t0\t0\n".format(uids.replace(" ", "\t")))
    (sealed / "fd").write_text("no folder, so that listing it fails")
    (sealed / "ns").mkdir()
    (sealed / "ns/mnt").symlink_to("mnt:[1]")
    for name in ("mountinfo", "maps"):
        (sealed / name).touch()
    hidden = scan(str(tmp_path), system=str(tmp_path), unreadable=["sealed"]).hidden
    assert (hidden is None) is vouched
    assert vouched or "disk.unreadable" in str(hidden)


def test_files_that_the_kernel_itself_uses_are_in_use(tmp_path: Path) -> None:
    proc, system = made_proc(tmp_path / "proc"), tmp_path / "sys"
    (tmp_path / "proc/swaps").write_text("Filename Type Size Used Priority\n/tmp/swap/file file 1 0 -2\n")
    (system / "block/loop0/loop").mkdir(parents=True)
    (system / "block/loop0/loop/backing_file").write_text("/tmp/image/disk.img\n")
    used = below("/tmp", scan(proc, str(system)))
    assert set(used.users) == {"swap", "image"}
    assert is_in_use("image", PLAIN, used) is True


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody who may not read others")
def test_who_may_not_read_others_reports_it() -> None:
    program = """
import os, sys
from gpukeeper.disk.open_files import scan
os.setgid(65534); os.setuid(65534)
print(scan(sys.argv[1]).hidden)
"""
    with own_proc() as proc:
        printed = subprocess.check_output([sys.executable, "-c", program, proc], text=True)
    assert "could not be read" in printed or "container" in printed


def test_mapped_files_are_read_with_device_and_inode() -> None:
    maps = (
        b"7f00-7f01 r--p 00000000 fe:0a 4711                       /tmp/tree/lib with blank.so (deleted)\n"
        b"7f01-7f02 rw-p 00000000 00:00 0                          [heap]\n"
        b"7f02-7f03 rw-s 00000000 00:01 1025                       /dev/zero (deleted)\n"
    )
    assert list(parse_maps(maps)) == [
        ((os.makedev(0xFE, 0x0A), 4711), "/tmp/tree/lib with blank.so"),
        ((os.makedev(0, 1), 1025), "/dev/zero"),
    ]


def test_swap_partitions_are_devices_and_stay_what_they_are() -> None:
    assert list(parse_backing_files(b"Filename\n/dev/sda2 partition 1 0 -2\n")) == ["/dev/sda2"]


def relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lists: list[tuple[int, bytes]]) -> str | None:
    """Of a scan that is given these lists of processes, one after the other, then the last: who uses /tree."""
    proc, given = tmp_path / "proc", list(lists)
    (proc / "self").mkdir(parents=True)

    def processes(_: str) -> list[tuple[int, bytes]]:
        now = given.pop(0) if len(given) > 1 else given[0]
        holders.append(now[-1])
        return now

    def add(scan: process_files.ProcessScan, pid: int) -> None:
        if holders[-1] == (pid, b"holder"):
            scan.paths["/tree"] = pid

    holders: list[tuple[int, bytes]] = []
    monkeypatch.setattr(process_files, "_processes", processes)
    monkeypatch.setattr(process_files.ProcessScan, "add", add)
    scan = process_files.ProcessScan(str(proc), frozenset())
    scan.add_all()
    return f"pid {scan.paths['/tree']}" if "/tree" in scan.paths else None


def test_a_child_whose_number_was_passed_when_numbers_begin_anew_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent, 32767, ended before the list came to it."""
    without = [(400, b"1")]
    assert relay(tmp_path, monkeypatch, without, without, [(300, b"holder"), (400, b"1")][::-1]) == "pid 300"


def test_a_process_with_the_number_of_one_that_was_read_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert relay(tmp_path, monkeypatch, [(400, b"1")], [(400, b"holder")]) == "pid 400"


def test_a_process_that_ended_before_its_start_was_read_is_not_taken_for_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = [(400, process_files.ENDED)]
    assert relay(tmp_path, monkeypatch, ended, ended, [(400, b"holder")]) == "pid 400"


def numbered(proc: Path, start: int, last: int, pid_max: int = 4_194_304) -> Path:
    """A /proc with process 400, and the last number that was assigned."""
    for folder in ("400", "sys/kernel"):
        (proc / folder).mkdir(parents=True, exist_ok=True)
    (proc / "400/stat").write_text(f"400 (x) S {' '.join(['0'] * 18)} {start} 0\n")
    (proc / "sys/kernel/pid_max").write_text(f"{pid_max}\n")
    (proc / "loadavg").write_text(f"0.00 0.00 0.00 1/200 {last}\n")
    return proc


def unseen_after(proc: Path, last: int, *, pid_max: int = 4_194_304, usable: bool = True) -> list[tuple[int, bytes]]:
    """Process 400 was read; then another one has its number, and this is the last number."""
    numbers = process_files._Numbers(str(numbered(proc, 10, 500, pid_max)), usable=usable)
    assert numbers.unseen(set()) == [(400, b"10")]
    numbered(proc, 20, last, pid_max)
    return numbers.unseen({(400, b"10")})


def test_while_numbers_only_rise_no_process_is_inspected_again(tmp_path: Path) -> None:
    assert unseen_after(tmp_path, 501) == []


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"last": 420}, id="they began anew"),
        pytest.param({"last": 501, "pid_max": 1}, id="there are so few that they may have"),
        pytest.param({"last": 501, "usable": False}, id="the last one is of another namespace"),
        pytest.param({"last": 0}, id="the last one is not reported"),
    ],
)
def test_a_number_that_may_be_used_again_is_inspected_again(tmp_path: Path, how: dict[str, Any]) -> None:
    assert unseen_after(tmp_path, **how) == [(400, b"20")]


def test_once_numbers_began_anew_they_are_never_trusted_again(tmp_path: Path) -> None:
    numbers = process_files._Numbers(str(numbered(tmp_path, 10, 500)), usable=True)
    numbered(tmp_path, 20, 420)
    numbers.sample()
    numbered(tmp_path, 20, 600)
    assert numbers.unseen({(400, b"10")}) == [(400, b"20")]
