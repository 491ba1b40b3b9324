"""The machine as a platform: real folders and children, a proc folder that the test builds for GPUs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from gpukeeper.blocking import in_thread
from gpukeeper.devices.driver.client import inventory
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.devices.holders import user_name
from gpukeeper.disk import mounts
from gpukeeper.disk.measure import MeasureLimits
from gpukeeper.engine.ports import Platform
from gpukeeper.model.decision import (
    Action,
    Decision,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
)
from gpukeeper.model.policy import PlaceScope, Policy, Temporary
from gpukeeper.model.subject import Gone, Ref, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host.adapter import HostPlatform
from gpukeeper.platforms.host.connect import Timeouts, hostname
from tests.own_processes import scan_own
from tests.patience import PATIENT
from tests.unit.platforms.host.machine import Machine, read_with

T = TypeVar("T")
BOOT = datetime(2026, 1, 1, tzinfo=UTC)
NOW = BOOT + timedelta(hours=1)
EVERYWHERE = PlaceScope()
GPU = GpuFacts(uuid="GPU-a", index=0, minor=0)
TICKS = os.sysconf("SC_CLK_TCK")


class Noon:
    def now(self) -> datetime:
        return NOW


def wait(work: Awaitable[T]) -> T:
    async def main() -> T:
        return await work

    return asyncio.run(main())


async def pages_of(platform: Platform, scope: PlaceScope = EVERYWHERE) -> list[Snapshot]:
    return [page async for page in platform.observe(scope)]


def subjects(platform: Platform) -> dict[str, Subject]:
    """All but disks, by name."""
    found = [subject for page in wait(pages_of(platform)) for subject in page.subjects]
    return {subject.ref.name: subject for subject in found if subject.shape is not Shape.NODE}


def unseen(platform: Platform) -> dict[str, str]:
    return {one.what: one.why for page in wait(pages_of(platform)) for one in page.unseen}


def no_gpus(deadline: timedelta) -> tuple[GpuFacts, ...]:
    return ()


def one_gpu(deadline: timedelta) -> tuple[GpuFacts, ...]:
    return (GPU,)


def stuck_driver(deadline: timedelta) -> Unknown:
    return Unknown("the NVIDIA driver did not answer within 10s")


def host(root: Path, *names: str, **given: object) -> HostPlatform:
    policy = Policy(temporary=(Temporary(root=str(root), names=names or ("pip-*",)),))
    return HostPlatform("node-1", policy, Noon(), **read_with(**{"scan": scan_own} | given))


def tree(root: Path, name: str = "pip-a", content: str = "x") -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "file").write_text(content)
    return root / name


# Trees


def test_each_entry_that_the_policy_names_is_a_tree(tmp_path: Path) -> None:
    for name in ("pip-a", "pip-b", "other"):
        tree(tmp_path, name)
    (tmp_path / "pip-file").write_text("x")
    found = subjects(host(tmp_path))
    assert sorted(found) == [f"{tmp_path}/{name}" for name in ("pip-a", "pip-b", "pip-file")]
    one = found[f"{tmp_path}/pip-a"]
    status = (tmp_path / "pip-a").stat()
    assert one.ref.uid == f"{status.st_dev}:{status.st_ino}"
    assert (one.shape, one.owner, one.labels["root"]) == (Shape.TREE, user_name(os.getuid()), str(tmp_path))
    assert isinstance(one.size, int)
    assert one.together == sum(other.size for other in found.values() if isinstance(other.size, int))


def test_a_tree_that_changes_is_another_incarnation_of_the_same_thing(tmp_path: Path) -> None:
    path = tree(tmp_path)
    platform = host(tmp_path)
    (before,) = subjects(platform).values()
    (path / "file").chmod(0o600)
    after = wait(platform.read(before.ref))
    assert isinstance(after, Subject)
    assert after.ref == before.ref
    assert after.seen.incarnation != before.seen.incarnation


def test_an_entry_that_two_roots_name_is_listed_once(tmp_path: Path) -> None:
    tree(tmp_path / "real")
    (tmp_path / "short").symlink_to(tmp_path / "real")
    roots = tuple(Temporary(root=str(tmp_path / name), names=("pip-*", "*")) for name in ("short", "real"))
    platform = HostPlatform("node-1", Policy(temporary=roots), Noon(), **read_with(scan=scan_own))
    assert list(subjects(platform)) == [f"{tmp_path}/short/pip-a"]


def test_a_root_that_is_not_there_has_no_trees_and_one_that_is_no_directory_is_unseen(tmp_path: Path) -> None:
    assert subjects(host(tmp_path / "nothing")) == unseen(host(tmp_path / "nothing")) == {}
    (tmp_path / "file").touch()
    assert "could not be read" in unseen(host(tmp_path / "file"))[str(tmp_path / "file")]


def test_hostile_names_become_valid_text(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/pip-\n\xff")  # noqa: PTH102 - a name that is not text
    platform = host(tmp_path)
    (found,) = subjects(platform).values()
    assert found.ref.name == f"{tmp_path}/pip-\\x0a\\xff"
    assert b"pip-" in msgspec.json.encode(found)
    again = wait(platform.read(found.ref))
    assert isinstance(again, Subject)
    assert again.seen == found.seen


def test_a_tree_that_a_child_sits_in_is_in_use(tmp_path: Path) -> None:
    path = tree(tmp_path)
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, cwd=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        (busy,) = subjects(host(tmp_path)).values()
        child.stdin.close()
    assert busy.in_use is True
    assert busy.labels["held_by"] == f"pid {child.pid}"
    (free,) = subjects(host(tmp_path)).values()
    assert free.in_use is False or isinstance(free.in_use, Unknown)


def test_a_tree_beyond_patience_or_limits_is_listed_with_an_unknown_size(tmp_path: Path) -> None:
    tree(tmp_path)
    for given in ({"timeouts": Timeouts(trees=timedelta(seconds=-1))}, {"limits": MeasureLimits(entries=1)}):
        (found,) = subjects(host(tmp_path, **given)).values()
        assert isinstance(found.size, Unknown)
        assert isinstance(found.in_use, Unknown)


def test_an_unreadable_proc_makes_use_unknown(tmp_path: Path) -> None:
    tree(tmp_path)
    (found,) = subjects(host(tmp_path, proc=str(tmp_path / "nothing"))).values()
    assert isinstance(found.in_use, Unknown)
    assert isinstance(found.size, int)


def test_pages_hold_at_most_500(tmp_path: Path) -> None:
    for number in range(501):
        (tmp_path / f"pip-{number}").touch()
    pages = wait(pages_of(host(tmp_path)))
    assert [len(page.subjects) for page in pages] == [0, 1, 500, 1], "no GPU, one disk, trees"


def test_a_place_outside_the_scope_is_not_read(tmp_path: Path) -> None:
    tree(tmp_path)
    assert wait(pages_of(host(tmp_path), PlaceScope(places=("node-2*",)))) == []


# Looking at one tree


def test_a_tree_is_read_by_identity_whatever_its_name_is_now(tmp_path: Path) -> None:
    path = tree(tmp_path)
    platform = host(tmp_path)
    (before,) = subjects(platform).values()
    again = wait(platform.read(before.ref))
    assert isinstance(again, Subject)
    assert (again.seen, again.size, again.last_used) == (before.seen, before.size, before.last_used)
    path.rename(tmp_path / "pip-b")
    renamed = wait(platform.read(before.ref))
    assert isinstance(renamed, Subject)
    assert renamed.ref.name == f"{tmp_path}/pip-b"
    (tmp_path / "pip-b").rename(tmp_path / "mine")
    assert isinstance(wait(platform.read(before.ref)), Unknown)


def test_a_tree_is_gone_only_when_its_filesystem_was_read(tmp_path: Path) -> None:
    path = tree(tmp_path)
    platform = host(tmp_path)
    (before,) = subjects(platform).values()
    path.rename(tmp_path.parent / f"{tmp_path.name}-moved")
    tree(tmp_path)  # the same name, another thing
    assert wait(platform.read(before.ref)) == Gone(before.ref, NOW)
    elsewhere = msgspec.structs.replace(before.ref, uid="1:" + before.ref.uid.split(":")[1])
    assert isinstance(wait(platform.read(elsewhere)), Unknown)
    assert wait(host(tmp_path / "removed/root").read(before.ref)) == Gone(before.ref, NOW)
    assert isinstance(wait(platform.read(msgspec.structs.replace(before.ref, uid="garbled"))), Unknown)


def test_the_sum_of_a_root_is_unknown_before_it_was_observed(tmp_path: Path) -> None:
    tree(tmp_path)
    (seen,) = subjects(host(tmp_path)).values()
    fresh = wait(host(tmp_path).read(seen.ref))
    assert isinstance(fresh, Subject)
    assert isinstance(fresh.together, Unknown)


# GPUs and who holds them


def add(proc: Path, pid: int, *links: str, age: float = 3600, uid: int = 4242, state: str = "S") -> None:
    (proc / str(pid) / "fd").mkdir(parents=True)
    for number, link in enumerate(links):
        (proc / str(pid) / "fd" / str(number)).symlink_to(link)
    ticks = int(((NOW - BOOT).total_seconds() - age) * TICKS)
    fields = [state, *["1"] * 5, "0", *["0"] * 12, str(ticks), "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} (python) {' '.join(fields)}\n")
    (proc / str(pid) / "status").write_text(f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (proc / str(pid) / "cgroup").write_text("0::/\n")
    (proc / "stat").write_text(f"cpu 1 2\nbtime {int(BOOT.timestamp())}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    add(tmp_path / "proc", 1)
    return tmp_path / "proc"


def gpu_host(proc: Path, **given: object) -> HostPlatform:
    return HostPlatform("node-1", Policy(), Noon(), **read_with(**{"proc": str(proc), "inventory": one_gpu} | given))


def test_a_gpu_and_the_process_that_holds_it_are_shown(proc: Path) -> None:
    add(proc, 20, "/dev/nvidia0", age=120)
    add(proc, 21, "/dev/nvidia0", age=30)
    add(proc, 22, "/dev/nvidia0", uid=0)
    found = subjects(gpu_host(proc))
    assert list(found) == ["gpu-0", "python-20"]
    holder = found["python-20"]
    assert (holder.ref.kind, holder.devices, holder.owner) == ("process", ("GPU-a",), "uid 4242")
    assert holder.started == NOW - timedelta(seconds=120)
    assert unseen(gpu_host(proc)) == {}


def test_a_gpu_that_root_or_a_process_just_begun_has_open_reports_it(proc: Path) -> None:
    """They are not shown as work, and the GPU is not free all the same."""
    add(proc, 21, "/dev/nvidia0", age=1)
    add(proc, 22, "/dev/nvidia0", uid=0)
    found = subjects(gpu_host(proc))
    assert set(found) == {"gpu-0"}
    assert found["gpu-0"].busy == "pid 21 (python, uid 4242), pid 22 (python, root)"


def test_a_gpu_whose_holders_could_not_be_listed_may_be_held(tmp_path: Path) -> None:
    assert isinstance(subjects(gpu_host(tmp_path / "nothing"))["gpu-0"].busy, Unknown)


def test_a_driver_that_does_not_answer_is_unseen_and_its_holders_have_unknown_gpus(proc: Path) -> None:
    add(proc, 20, "/dev/nvidia0")
    platform = gpu_host(proc, inventory=stuck_driver)
    assert "did not answer" in unseen(platform)["GPUs"]
    assert isinstance(subjects(platform)["python-20"].devices, Unknown)


def test_without_a_driver_there_is_nothing_and_nothing_unseen(tmp_path: Path) -> None:
    platform = HostPlatform("node-1", Policy(), Noon(), **read_with(proc=str(tmp_path / "nothing")))
    assert wait(pages_of(platform)) == [Snapshot("host", "node-1", NOW, ())]


def test_holders_that_cannot_be_listed_are_unseen(tmp_path: Path) -> None:
    assert "could not be read" in unseen(gpu_host(tmp_path / "nothing"))["processes that hold GPUs"]


def test_a_proc_that_hides_people_is_unseen(proc: Path) -> None:
    (proc / "1/stat").unlink()
    assert "hidepid" in unseen(gpu_host(proc))["processes that hold GPUs"]


def test_a_process_is_gone_when_its_pid_has_another_start(proc: Path) -> None:
    add(proc, 20, "/dev/nvidia0")
    platform = gpu_host(proc)
    seen = subjects(platform)["python-20"]
    assert wait(platform.read(seen.ref)) == seen
    reused = msgspec.structs.replace(seen.ref, uid="20@999999999")
    assert wait(platform.read(reused)) == Gone(reused, NOW)
    never = msgspec.structs.replace(seen.ref, uid="4711@1")
    assert wait(platform.read(never)) == Gone(never, NOW)
    assert isinstance(wait(platform.read(msgspec.structs.replace(seen.ref, uid="x"))), Unknown)
    (proc / "1/stat").unlink()
    assert isinstance(wait(platform.read(never)), Unknown)


def test_a_process_that_let_go_of_its_gpu_is_still_there(proc: Path) -> None:
    add(proc, 20, "/dev/nvidia0")
    platform = gpu_host(proc)
    seen = subjects(platform)["python-20"]
    (proc / "20/fd/0").unlink()
    fresh = wait(platform.read(seen.ref))
    assert isinstance(fresh, Subject)
    assert fresh.devices == ()


def test_a_gpu_is_gone_only_when_the_driver_lists_all_others(proc: Path) -> None:
    platform = gpu_host(proc)
    ref = subjects(platform)["gpu-0"].ref
    assert isinstance(wait(platform.read(ref)), Subject)
    other = msgspec.structs.replace(ref, uid="GPU-z")
    assert wait(platform.read(other)) == Gone(other, NOW)

    def one_lost(deadline: timedelta) -> tuple[GpuFacts, ...]:
        return (GPU, GpuFacts(uuid=Unknown("GPU is lost"), index=1))

    assert isinstance(wait(gpu_host(proc, inventory=one_lost).read(other)), Unknown)
    assert isinstance(wait(gpu_host(proc, inventory=stuck_driver).read(ref)), Unknown)


# The rest of the port


def test_of_all_verbs_only_the_removal_of_trees_is_offered(proc: Path, tmp_path: Path) -> None:
    platform: Platform = gpu_host(proc)
    assert platform.guards == {Action.REMOVE: Guard.ATOMIC}
    assert (platform.name, platform.place) == ("host", "node-1")
    gpu = subjects(platform)["gpu-0"]
    step = Step("s", Decision(seen=gpu.seen, action=Action.REMOVE, rule="temporary_tree", reason="large"))
    for answer in (wait(platform.act(step, gpu)), wait(platform.restore(gpu.ref, None))):
        assert isinstance(answer, Refused)
    tree(tmp_path)
    (seen,) = subjects(host(tmp_path)).values()
    stop = Step("s", Decision(seen=seen.seen, action=Action.STOP, rule="temporary_tree", reason="large"))
    assert isinstance(wait(host(tmp_path).act(stop, seen)), Refused)
    assert (tmp_path / "pip-a/file").exists()


def test_a_tree_has_nothing_to_capture_and_the_rest_is_not_captured(proc: Path, tmp_path: Path) -> None:
    tree(tmp_path)
    platform = host(tmp_path)
    (seen,) = subjects(platform).values()
    assert isinstance(wait(platform.capture(seen, ("logs",))), NothingToCapture)
    gpu = subjects(gpu_host(proc))["gpu-0"]
    assert isinstance(wait(platform.capture(gpu, ("logs",))), Unknown)


def test_it_gives_no_hints_and_where_it_cannot_watch_reports_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpukeeper.disk.access_times.FileWatcher.start", lambda _: "Operation not permitted")

    async def hints() -> list[Ref | None]:
        return [hint async for hint in host(tmp_path).wake()]

    assert wait(hints()) == []


def test_a_foreign_kind_is_unknown(tmp_path: Path) -> None:
    assert isinstance(wait(host(tmp_path).read(Ref("host", "node-1", "pod", "x", "1"))), Unknown)


def test_work_that_hangs_is_left_behind_at_its_deadline() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError):
        wait(in_thread(release.wait, timedelta(milliseconds=5)))
    release.set()  # the loop is closed by now; the thread must end without a word


def test_what_the_work_raises_reaches_who_waits() -> None:
    with pytest.raises(ZeroDivisionError):
        wait(in_thread(lambda: 1 // 0, PATIENT))
    assert wait(in_thread(lambda: 7, PATIENT)) == 7


def test_a_hanging_inventory_is_unseen(proc: Path) -> None:
    def hang(deadline: timedelta) -> tuple[GpuFacts, ...] | Unknown:
        return inventory(deadline, [sys.executable, "-c", "import time; time.sleep(600)"])

    platform = gpu_host(proc, inventory=hang, timeouts=Timeouts(gpus=timedelta(milliseconds=20)))
    assert "did not answer" in unseen(platform)["GPUs"]


def test_the_place_is_this_machine() -> None:
    assert hostname() == socket.gethostname()
    assert user_name(0) == "root"
    assert user_name(3_999_999_999) == "uid 3999999999"


@pytest.mark.parametrize("work", ["actor Trainer is alive", Unknown("its dashboard does not answer"), None])
def test_a_temporary_tree_is_beside_whatever_a_cluster_runs_on_this_machine(
    tmp_path: Path, work: str | Unknown | None
) -> None:
    tree(tmp_path)

    async def busy(root: str) -> str | Unknown | None:
        assert root == str(tmp_path)
        return work

    platform = host(tmp_path, busy=busy)
    (listed,) = subjects(platform).values()
    looked = wait(platform.read(listed.ref))
    assert isinstance(looked, Subject)
    assert (listed.busy, looked.busy) == (work, work)


# Filesystems that outlast their device number


def test_a_tree_has_a_uid_that_outlasts_its_device_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    inode, device = machine.tree().stat().st_ino, tmp_path.stat().st_dev
    monkeypatch.setattr(mounts, "lasting_ids", lambda: {device: "fsid-a"})
    seen = machine.observe()["tmp-a"]
    assert (seen.ref.uid, seen.lasting) == (f"{device}:{inode}", f"fsid-a:{inode}")
    assert machine.read(seen).lasting == seen.lasting


def test_without_a_list_of_filesystems_no_tree_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether somebody holds it is not known then."""
    machine = Machine(tmp_path)
    machine.tree()
    seen = machine.observe()["tmp-a"]

    def fail() -> dict[int, str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(mounts, "lasting_ids", fail)
    words = "the filesystems could not be identified: Permission denied"
    assert (machine.observe(), unseen(machine.platform)) == ({}, {"trees of node-1": words})
    assert machine.read(seen) == Unknown(words)
