"""How a GPU is: a proc folder, a child that prints recorded values, and a kernel log, all made by the test."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.devices.gpus import examine, find_gpu, logged_xids, parse_parent, parse_xids, reset, reset_unheld
from gpukeeper.model.decision import Accepted, Refused
from gpukeeper.model.gpu import Advice, Condition, GpuHolder, Xid
from gpukeeper.model.unknown import Unknown
from tests.patience import PATIENT
from tests.unit.devices.driver.programs import answering
from tests.unit.devices.test_holders import add

MINUTE = timedelta(minutes=1)
BOOT = datetime(2026, 3, 1, 8, 0, tzinfo=UTC)
SINCE = BOOT + timedelta(hours=1)
ID = "0123456789abcdef" * 4
UUID = "GPU-11111111-2222-3333-4444-555555555555"
# As an H200 answered: a parent with 8 GiB was killed, and its forked child keeps them.
H200 = {
    "index": 0,
    "uuid": UUID,
    "minor": 0,
    "pci": "00000000:1B:00.0",
    "memory_used_mib": 9455,
    "listed": [4711],
    "advice": "none",
    "remap_pending": False,
    "remap_failed": False,
    "sliced": False,
    "reset_alone": True,
    "slices": [],
}
SLICED = H200 | {
    "index": 1,
    "uuid": "GPU-2",
    "minor": 1,
    "sliced": True,
    "slices": [
        {"uuid": "MIG-a", "index": 0, "gpu_instance": 1, "compute_instance": 0, "memory_used_mib": 12, "listed": []},
        {"uuid": "MIG-b", "index": 1, "gpu_instance": 2, "compute_instance": 0, "memory_used_mib": 800, "listed": [77]},
    ],
}


def child(*gpus: dict[str, Any], **record: Any) -> list[str]:
    return answering({"condition": {"state": "answered", "gpus": gpus} | record})


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    add(folder, 1, comm="init")
    (folder / "stat").write_text(f"cpu 0\nbtime {int(BOOT.timestamp())}\n")
    (tmp_path / "kmsg").write_text("")
    return folder


def read(proc: Path, uuid: str = UUID, gpus: tuple[dict[str, Any], ...] = (H200, SLICED)) -> Condition:
    found = examine(uuid, SINCE, PATIENT, child=child(*gpus), proc=str(proc), log=str(proc.parent / "kmsg"))
    assert isinstance(found, Condition), found
    return found


def test_the_forked_child_is_found_by_the_scan_and_the_dead_parent_is_only_listed(proc: Path) -> None:
    add(proc, 4712, "/dev/nvidia0", "/dev/nvidiactl", cgroup=f"0::/docker/{ID}\n", state="D")
    found = read(proc)
    assert found.holders == (GpuHolder(pid=4712, starttime=4200, uid=1001, comm="python", state="D", workload_id=ID),)
    assert (found.listed, found.memory_used_mib, found.advice) == ((4711,), 9455, Advice.NONE)
    assert (found.unread, found.sliced, found.reset_alone, found.xids) == (0, False, True, ())


def test_who_has_another_gpu_open_does_not_hold_this_one(proc: Path) -> None:
    add(proc, 4712, "/dev/nvidia1")
    assert read(proc).holders == ()
    assert [one.pid for one in read(proc, "GPU-2").holders] == [4712]


def test_our_own_children_are_ours(proc: Path) -> None:
    add(proc, 4712, "/dev/nvidia0")
    stat = proc / "4712" / "stat"
    stat.write_text(stat.read_text().replace(") S 1 ", f") S {os.getpid()} "))
    assert [one.ours for one in read(proc).holders] == [True]


def test_a_slice_is_held_by_who_opened_its_capability(proc: Path) -> None:
    caps = proc / "driver" / "nvidia-caps"
    caps.mkdir(parents=True)
    (caps / "mig-minors").write_text("gpu1/gi1/ci0/access 13\ngpu1/gi2/ci0/access 22\n")
    add(proc, 50, "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap13")
    add(proc, 51, "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap22")
    add(proc, 52, "/dev/nvidia1")  # which slice it uses is not known: all of them, to be careful
    a, b = read(proc, "MIG-a"), read(proc, "MIG-b")
    assert [one.pid for one in a.holders] == [50, 52]
    assert [one.pid for one in b.holders] == [51, 52]
    assert (b.memory_used_mib, b.listed, b.sliced) == (800, (77,), True)


def test_a_gpu_without_a_known_device_file_is_held_by_whoever_holds_any(proc: Path) -> None:
    add(proc, 50, "/dev/nvidia3")
    assert [one.pid for one in read(proc, gpus=(H200 | {"minor": {"why": "not told"}},)).holders] == [50]


def test_processes_that_could_not_be_read_are_counted(proc: Path) -> None:
    (proc / "1" / "stat").unlink()  # as with hidepid
    assert read(proc).unread == 1


def test_the_name_of_a_process_cannot_fake_its_parent() -> None:
    assert parse_parent("7 (a) S 99 (b) R 12 0 0") == ("R", 12)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (child(H200, state="failed", why="Driver/library version mismatch"), "version mismatch"),
        ([sys.executable, "-c", "print('hello')"], "invalid reply"),
        ([sys.executable, "-c", "import time; time.sleep(600)"], "did not answer within"),
        (child(SLICED, {"index": 2, "uuid": {"why": "GPU is lost"}}), "GPU is lost"),
        (child(), f"reports no {UUID}"),
    ],
)
def test_what_the_driver_does_not_tell_is_unknown(proc: Path, command: list[str], why: str) -> None:
    deadline = timedelta(seconds=1) if "sleep" in command[-1] else PATIENT
    found = examine(UUID, SINCE, deadline, child=command, proc=str(proc), log="/nowhere")
    assert isinstance(found, Unknown)
    assert why in found.why


def test_facts_that_a_model_does_not_have_are_unknown_by_design(proc: Path) -> None:
    absent = {"why": "the NVIDIA driver returned an error: Not Supported", "by_design": True}
    found = read(proc, gpus=(H200 | {"advice": absent, "remap_pending": absent},))
    assert found.advice == Unknown(str(absent["why"]), by_design=True)
    assert found.remap_pending == found.advice


def test_a_gpu_that_fell_off_the_bus_is_not_another_one() -> None:
    assert isinstance(find_gpu((), "GPU-1"), Unknown)


def test_a_slice_whose_instance_is_unknown_is_unknown() -> None:
    part = SliceFacts(uuid="MIG-1", index=0, gpu_instance=Unknown("no permission"), compute_instance=0)
    gpu = GpuFacts(index=0, uuid="GPU-1", minor=0, sliced=True, slices=(part,))
    assert find_gpu((gpu,), "MIG-1") == Unknown("no permission")


def test_the_real_child_is_read() -> None:
    found = examine(UUID, SINCE)
    assert isinstance(found, Unknown)
    assert "driver" in found.why
    assert "invalid reply" not in found.why


# The kernel's log

RECORDS = [
    "6,1,1000000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65\n",
    "3,2,3500000000,-;NVRM: Xid (PCI:0000:1b:00): 13, Graphics Exception\n",  # before the end
    "3,3,3700000000,-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n",
    "3,4,3800000000,-;NVRM: Xid (PCI:0000:4c:00): 31, another GPU\n",
    "6,5,3900000000,-;NVRM: Xid (PCI:garbled): 31\n",
]


def test_xids_of_this_gpu_since_the_end_are_read() -> None:
    found = parse_xids(RECORDS, "00000000:1B:00.0", timedelta(hours=1))
    assert found == (Xid(79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),)


def test_a_record_without_a_time_counts() -> None:
    assert parse_xids(["NVRM: Xid (PCI:0000:1b:00): 79, x"], "00000000:1B:00.0", MINUTE) == (Xid(79, "x"),)


def test_a_log_that_may_not_be_read_is_unknown_by_design(tmp_path: Path) -> None:
    found = logged_xids("00000000:1B:00.0", SINCE, BOOT, str(tmp_path / "none"))
    assert isinstance(found, Unknown)
    assert found.by_design


def test_a_log_is_read_from_its_file(tmp_path: Path) -> None:
    """A device gives one record a read; a file gives all at once, so here is one."""
    (tmp_path / "kmsg").write_text(RECORDS[2])
    found = logged_xids("00000000:1B:00.0", SINCE, BOOT, str(tmp_path / "kmsg"))
    assert isinstance(found, tuple)
    assert [xid.number for xid in found] == [79]


# Resetting, with a program that is not nvidia-smi


def fake(tmp_path: Path, ends: str = "") -> list[str]:
    told = tmp_path / "told"
    return [sys.executable, "-c", f"import sys; open({str(told)!r}, 'a').write(repr(sys.argv[1:])); {ends}"]


def test_a_reset_names_one_gpu(tmp_path: Path) -> None:
    assert asyncio.run(reset(UUID, program=fake(tmp_path))) == Accepted()
    assert (tmp_path / "told").read_text() == repr(["-r", "-i", UUID])


@pytest.mark.parametrize("uuid", ["", "0", "all", "MIG-11111111-2222-3333-4444-555555555555", UUID + ",1", "-r"])
def test_nothing_but_the_uuid_of_a_whole_gpu_is_ever_passed_on(tmp_path: Path, uuid: str) -> None:
    assert isinstance(asyncio.run(reset(uuid, program=fake(tmp_path))), Refused)
    assert not (tmp_path / "told").exists()


def test_a_refused_reset_gives_the_reason(tmp_path: Path) -> None:
    answer = asyncio.run(reset(UUID, program=fake(tmp_path, "print('in use'); raise SystemExit(4)")))
    assert answer == Refused("nvidia-smi refused (exit 4, not permitted): in use")


def test_a_reset_that_never_ends_is_given_up(tmp_path: Path) -> None:
    answer = asyncio.run(reset(UUID, timedelta(seconds=1), fake(tmp_path, "import time; time.sleep(600)")))
    assert isinstance(answer, Unknown)


def test_a_missing_nvidia_smi_is_a_sentence(tmp_path: Path) -> None:
    assert isinstance(asyncio.run(reset(UUID, program=[str(tmp_path / "none")])), Refused)


FREE = Condition(uuid=UUID, at=SINCE, sliced=False)
HOLDER = GpuHolder(pid=9, starttime=1, uid=0, comm="python", ours=True)


@pytest.mark.parametrize(
    ("found", "done"),
    [
        (FREE, True),
        (Condition(uuid=UUID, at=SINCE, sliced=False, holders=(HOLDER,)), False),
        (Condition(uuid=UUID, at=SINCE, sliced=False, unread=1), False),
        (Condition(uuid=UUID, at=SINCE, sliced=True), False),
        (Condition(uuid=UUID, at=SINCE, sliced=Unknown("?")), False),
        (Unknown("silent"), False),
    ],
)
def test_a_gpu_that_a_user_opened_at_the_last_moment_is_not_reset(
    tmp_path: Path, found: Condition | Unknown, done: bool
) -> None:
    async def read(uuid: str, since: datetime) -> Condition | Unknown:
        return found

    answer = asyncio.run(reset_unheld(UUID, read, fake(tmp_path)))
    assert isinstance(answer, Accepted if done else Refused)
    assert (tmp_path / "told").exists() is done


def test_what_a_user_wrote_into_the_kernels_log_is_no_error_of_a_gpu() -> None:
    """Root in a privileged workload may write there; the kernel gives that the mark of a user."""
    forged = "12,9,3900000000,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."
    assert parse_xids([forged], "00000000:1B:00.0", MINUTE) == ()
    assert parse_xids([forged.replace("12,", "4,", 1)], "00000000:1B:00.0", MINUTE) != ()
