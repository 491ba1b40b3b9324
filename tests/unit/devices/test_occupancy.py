"""What has a GPU open: any process but the driver's services, of any user and age. In a proc that the test builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpukeeper.devices import holders
from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.devices.gpus import Occupied, occupied, services_on
from gpukeeper.interfaces.cli.doctor import _never_reset
from gpukeeper.model.unknown import Unknown

NAMES = {0: "root", 4242: "ann"}


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    add(tmp_path, 1, comm="init")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "stat").write_text("cpu 1 2\nbtime 1700000000\n")
    return tmp_path


@pytest.fixture(autouse=True)
def in_the_first_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "is_walled", lambda proc: False)


def add(
    proc: Path, pid: int, *links: str, uid: int = 0, comm: str = "python", command: str = "", cgroup: str = "/"
) -> None:
    (proc / str(pid) / "fd").mkdir(parents=True)
    for number, link in enumerate(links):
        (proc / str(pid) / "fd" / str(number)).symlink_to(link)
    fields = ["S", "1", *["0"] * 17, "100", *["0"] * 20]
    (proc / str(pid) / "stat").write_text(f"{pid} ({comm}) {' '.join(fields)}\n")
    (proc / str(pid) / "status").write_text(f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (proc / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")
    (proc / str(pid) / "cmdline").write_bytes(command.replace(" ", "\0").encode())


def gpu(listed: tuple[int, ...] | Unknown = (), **more: object) -> GpuFacts:
    return GpuFacts(uuid="GPU-a", index=0, minor=0, listed=listed, **more)  # type: ignore[arg-type]


def told(proc: Path, one: GpuFacts, hidden: tuple[int, ...] = ()) -> Occupied:
    found = holders.Holders(holders.scan(str(proc)).found, hidden)
    return occupied((one,), found, lambda uid: NAMES.get(uid, str(uid)), str(proc))


@pytest.mark.parametrize("uid", [0, 4242])
def test_a_process_of_anybody_holds_it_however_young(proc: Path, uid: int) -> None:
    add(proc, 20, "/dev/nvidia0", uid=uid)
    assert told(proc, gpu((20,))) == {"GPU-a": f"pid 20 (python, {NAMES[uid]})"}
    assert told(proc, gpu()) == {"GPU-a": f"pid 20 (python, {NAMES[uid]})"}, "though the driver does not list it"


@pytest.mark.parametrize("comm", ["nvidia-persiste", "nv-hostengine", "dcgm-exporter"])
def test_services_of_the_driver_do_not(proc: Path, comm: str) -> None:
    add(proc, 20, "/dev/nvidia0", comm=comm)
    assert told(proc, gpu((20,))) == {"GPU-a": None}


def test_services_that_keep_a_gpu_open_are_named_and_it_is_not_reset(proc: Path) -> None:
    """C11.2: of one GPU; programs of people are no services, whatever their name."""
    add(proc, 20, "/dev/nvidia0", comm="dcgm-exporter", cgroup=f"/docker/{'a' * 64}")
    add(proc, 21, "/dev/nvidia1", comm="nv-hostengine")
    add(proc, 22, "/dev/nvidia0", comm="dcgm-exporter", uid=4242)
    add(proc, 23, "/dev/nvidia0", command="/usr/bin/python3 -P -m gpukeeper.devices.driver.child")
    found = holders.scan(str(proc))
    assert services_on(gpu(), found, str(proc)) == ("pid 20 (dcgm-exporter)",)
    words = _never_reset(gpu(), found, str(proc))
    assert words is not None
    assert "GPU-a is not reset (gpu.reset) while pid 20 (dcgm-exporter) has it open" in words
    assert "nvidia-smi -r -i GPU-a" in words
    assert _never_reset(gpu(), holders.Holders((), ()), str(proc)) is None


def test_a_name_makes_no_service_of_a_persons_program_nor_of_one_in_a_container(proc: Path) -> None:
    add(proc, 20, "/dev/nvidia0", comm="nvidia-smi", uid=4242)
    add(proc, 21, "/dev/nvidia0", comm="nvidia-smi", cgroup=f"/docker/{'a' * 64}")
    assert told(proc, gpu()) == {"GPU-a": "pid 20 (nvidia-smi, ann), pid 21 (nvidia-smi, root)"}


def test_our_own_programs_that_ask_the_driver_do_not_hold_it(proc: Path) -> None:
    add(proc, 20, "/dev/nvidia0", command="/usr/bin/python3 -P -m gpukeeper.devices.driver.child")
    assert told(proc, gpu()) == {"GPU-a": None}
    add(proc, 21, "/dev/nvidia0", uid=4242, command="python3 -m gpukeeper.devices.driver.child")
    assert told(proc, gpu()) == {"GPU-a": "pid 21 (python, ann)"}


def test_where_descriptors_are_hidden_the_drivers_list_names_the_holder(proc: Path) -> None:
    """Without root: status and stat of root's process can still be read."""
    add(proc, 20)
    assert told(proc, gpu((20,)), hidden=(20,)) == {"GPU-a": "pid 20 (python, root)"}


def test_where_descriptors_are_hidden_an_empty_list_of_the_driver_is_not_proof(proc: Path) -> None:
    found = told(proc, gpu(()), hidden=(20,))["GPU-a"]
    assert isinstance(found, Unknown)
    assert found.by_design, "memory at its baseline may prove it"


def test_outside_of_the_machines_pid_namespace_nothing_is_proven(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "is_walled", lambda proc: True)
    found = told(proc, gpu(()))["GPU-a"]
    assert isinstance(found, Unknown)
    assert "pid namespace" in found.why
    add(proc, 20, uid=4242)
    found = told(proc, gpu((20,)))["GPU-a"]
    assert isinstance(found, Unknown), "pid 20 of the machine is not our pid 20"
    assert not found.by_design


def test_where_neither_descriptors_nor_the_driver_tell_it_is_unknown(proc: Path) -> None:
    found = told(proc, gpu(Unknown("not supported")), hidden=(20,))["GPU-a"]
    assert isinstance(found, Unknown)
    assert "that needs root" in found.why


def test_a_listed_pid_that_cannot_be_seen_is_unknown(proc: Path) -> None:
    """It died and the driver still lists it, or it is outside of our pid namespace."""
    found = told(proc, gpu((999,)))["GPU-a"]
    assert isinstance(found, Unknown)
    assert "999" in found.why


def test_a_slice_is_held_by_whoever_opened_it_or_the_whole_gpu(proc: Path) -> None:
    (proc / "driver/nvidia-caps").mkdir(parents=True)
    (proc / "driver/nvidia-caps/mig-minors").write_text("gpu0/gi1/ci0/access 11\ngpu0/gi2/ci0/access 12\n")
    parts = tuple(SliceFacts(uuid=f"MIG-{n}", index=n, gpu_instance=n, compute_instance=0, listed=()) for n in (1, 2))
    add(proc, 20, "/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap11")
    found = told(proc, gpu(slices=parts))
    assert (found["MIG-1"], found["MIG-2"]) == ("pid 20 (python, root)", None)
    add(proc, 21, "/dev/nvidia0")
    assert told(proc, gpu(slices=parts))["MIG-2"] == "pid 21 (python, root)"


def test_a_process_name_cannot_drive_a_terminal(proc: Path) -> None:
    add(proc, 20, "/dev/nvidia0", comm="x\x1b[2J")
    assert "\x1b" not in str(told(proc, gpu()))
