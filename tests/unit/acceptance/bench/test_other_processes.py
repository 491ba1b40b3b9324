"""Who else computes on a GPU, by a /proc made of files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpukeeper.acceptance.bench import workbench
from gpukeeper.acceptance.bench.workbench import OtherProcesses, scan_processes
from gpukeeper.devices import holders
from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.devices.holders import Holder
from gpukeeper.model.unknown import Unknown
from tests.own_processes import own_proc

GPU = GpuFacts(index=0, uuid="GPU-0", minor=0)
UVM = "/dev/nvidia-uvm"


def holder(pid: int, minor: int = 0, **values: object) -> Holder:
    given = {"starttime": 1, "uid": 1000, "comm": "python", "stopped": False, "minors": (minor,), **values}
    return Holder(pid=pid, **given)  # type: ignore[arg-type]


def neighbours(*computing: Holder, proc: str = "/nowhere", **values: object) -> OtherProcesses:
    return OtherProcesses(computing, frozenset({10, 11}), {}, proc=proc, **values)  # type: ignore[arg-type]


def test_others_are_named_and_our_own_are_not() -> None:
    assert neighbours(holder(10), holder(99), holder(98, minor=1)).on(GPU, "GPU-0", (), 4) == (99,)


def test_nobody_is_an_answer_where_everybody_can_be_seen() -> None:
    assert neighbours(holder(10)).on(GPU, "GPU-0", (), 60_000) == ()


def test_whom_only_the_driver_lists_counts_while_it_lives(tmp_path: Path) -> None:
    add(tmp_path, 77)
    found = neighbours(proc=str(tmp_path)).on(GPU, "GPU-0", (77, 78, 10), 4)
    assert found == (77,)  # 78 is dead, 10 is ours


def test_without_the_rights_to_look_the_drivers_list_counts_and_its_silence_is_reported() -> None:
    found = neighbours(blind="3 processes of other users could not be inspected: run as root").on(GPU, "GPU-0", (), 4)
    assert isinstance(found, Unknown)
    assert found.by_design
    assert "run as root; the driver lists no other process" in found.why
    neither = neighbours(blind="3 hidden").on(GPU, "GPU-0", Unknown("no permission"), 4)
    assert isinstance(neither, Unknown)
    assert not neither.by_design


def test_behind_a_wall_pids_of_the_driver_mean_nothing(tmp_path: Path) -> None:
    """In a pid namespace the driver may list our own worker by a number that somebody else has in here."""
    add(tmp_path, 4242)
    found = neighbours(walled=True, proc=str(tmp_path)).on(GPU, "GPU-0", (4242,), 4)
    assert isinstance(found, Unknown)
    assert found.by_design


def test_memory_that_a_user_behind_the_wall_uses_leaves_it_open() -> None:
    found = neighbours(walled=True).on(GPU, "GPU-0", (), 40_000)
    assert isinstance(found, Unknown)
    assert not found.by_design
    assert "40000 MiB" in found.why


@pytest.mark.parametrize(
    ("now", "before_us", "theirs"),
    [
        (1_500, 600, None),  # our own worker rests
        (1_500, None, None),
        (3_500, 3_000, 3_000),  # somebody was there before us
        (100_000, 600, 100_000 - workbench.OURS_MIB),  # somebody came; a worker that rests never keeps that much
        (Unknown("no"), Unknown("no"), None),
    ],
)
def test_our_own_worker_does_not_hide_who_else_is_behind_the_wall(
    now: int | Unknown, before_us: int | Unknown | None, theirs: int | None
) -> None:
    found = neighbours(holder(10), walled=True).on(GPU, "GPU-0", (), now, before_us)
    assert isinstance(found, Unknown)
    assert found.by_design is (theirs is None)
    assert theirs is None or f"{theirs} MiB" in found.why


def test_a_neighbour_on_another_slice_is_not_on_ours() -> None:
    parts = tuple(SliceFacts(uuid=f"MIG-{n}", index=n, gpu_instance=n, compute_instance=0) for n in (1, 2))
    cut = GpuFacts(index=0, uuid="GPU-0", minor=0, sliced=True, slices=parts)
    found = OtherProcesses((holder(99, capabilities=(30,)),), frozenset(), {30: (0, 1, 0)})
    assert found.on(cut, "MIG-1", (), 4) == (99,)
    assert found.on(cut, "MIG-2", (), 4) == ()


def test_who_only_watches_does_not_count(tmp_path: Path) -> None:
    """Monitors keep the GPU open for ever; a machine with one could never be accepted."""
    add(tmp_path, 1, comm="init")
    add(tmp_path, 20, "/dev/nvidia0", UVM, comm="python")
    add(tmp_path, 21, "/dev/nvidia0", "/dev/nvidiactl", comm="python")
    add(tmp_path, 22, "/dev/nvidia0", UVM, comm="nv-hostengine", uid=0)
    add(tmp_path, 23, "/dev/nvidia0", UVM, comm="nv-hostengine", uid=1000)
    (tmp_path / "self/ns").mkdir(parents=True)
    found = scan_processes(str(tmp_path))
    assert [one.pid for one in found.computing] == [20, 23]


def test_this_process_and_its_children_are_ours() -> None:
    with own_proc() as proc, subprocess.Popen(["sleep", "600"]) as child:
        ours = scan_processes(proc).ours
        child.kill()
    assert {os.getpid(), child.pid} <= ours


@pytest.mark.parametrize("there", [True, False])
def test_a_pid_namespace_of_our_own_is_noticed(there: bool, tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    if there:
        (tmp_path / "self/ns/pid").touch()  # its number is not that of the first namespace
    assert holders.is_walled(str(tmp_path)) is there


def add(proc: Path, pid: int, *links: str, comm: str = "python", uid: int = 1000) -> None:
    home = proc / str(pid)
    (home / "fd").mkdir(parents=True)
    for number, link in enumerate(links):
        (home / "fd" / str(number)).symlink_to(link)
    (home / "stat").write_text(f"{pid} ({comm}) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0")
    (home / "status").write_text(f"Name:\t{comm}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (home / "cgroup").write_text("0::/\n")


def test_a_process_is_described_by_owner_and_command(tmp_path: Path) -> None:
    add(tmp_path, 4242)
    folder = tmp_path / "4242"
    folder.joinpath("status").write_text("Name:\tpython\nUid:\t0\t0\t0\t0\n")
    folder.joinpath("cmdline").write_bytes(b"python\0train\x1b[31m.py\0" + b"x" * 500)
    said = workbench.describe_process(4242, str(tmp_path))
    assert said.startswith("pid 4242 (root: python train?[31m.py xxx")
    assert said.endswith("…)")
    assert workbench.describe_process(1, str(tmp_path)) == "pid 1"
    folder.joinpath("status").write_text("Uid:\t4000111\t0\t0\t0\n")
    folder.joinpath("cmdline").write_bytes(b"")
    assert workbench.describe_process(4242, str(tmp_path)) == "pid 4242 (uid 4000111: command unknown)"


@pytest.mark.parametrize(("busy", "hint"), [(95.0, True), (3.0, False), (None, False), (Unknown("slices"), False)])
@pytest.mark.parametrize("hidden", [{"walled": True}, {"blind": "3 hidden"}])
def test_use_before_we_began_is_a_hint_where_others_cannot_be_seen(
    hidden: dict[str, object], busy: float | Unknown | None, hint: bool
) -> None:
    found = neighbours(**hidden).on(GPU, "GPU-0", (), 4, 4, busy)
    assert isinstance(found, Unknown)
    assert found.by_design is not hint
    assert ("95 % busy before the run started" in found.why) is hint


def test_use_before_we_began_means_nothing_where_everybody_can_be_seen() -> None:
    """A program that ended just before, or a driver that was just opened."""
    assert neighbours().on(GPU, "GPU-0", (), 4, 4, 95.0) == ()


def test_one_of_ours_that_lost_its_parent_is_still_ours(tmp_path: Path) -> None:
    add(tmp_path, 77, "/dev/nvidia0", UVM)
    (found,) = scan_processes(str(tmp_path), known=()).computing
    assert scan_processes(str(tmp_path)).others(GPU, "GPU-0") == {77}
    assert scan_processes(str(tmp_path), known={(77, found.starttime)}).others(GPU, "GPU-0") == set()
    assert scan_processes(str(tmp_path), known={(77, found.starttime + 1)}).others(GPU, "GPU-0") == {77}, (
        "its pid was reused"
    )
