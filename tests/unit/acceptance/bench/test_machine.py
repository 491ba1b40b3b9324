"""What is said of a machine, from folders that look like one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpukeeper.acceptance.bench import machine
from gpukeeper.devices import holders
from gpukeeper.model.gpu import Gpu
from gpukeeper.model.unknown import Unknown


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    """Two GPUs of ours, one of a virtual machine, a virtual function, a switch, a sound device, a network card."""
    for address, vendor, class_, driver in (
        ("0000:1b:00.0", "0x10de", "0x030200", "nvidia"),
        ("0000:2b:00.0", "0x10de", "0x030200", None),
        ("0000:3b:00.0", "0x10de", "0x030200", "vfio-pci"),
        ("0000:1b:00.4", "0x10de", "0x030200", "nvidia"),
        ("0000:05:00.0", "0x10de", "0x068000", "nvidia-nvswitch"),
        ("0000:1b:00.1", "0x10de", "0x040300", "snd_hda_intel"),
        ("0000:41:00.0", "0x15b3", "0x020700", "mlx5_core"),
    ):
        folder = tmp_path / "pci" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(class_ + "\n")
        if driver:
            (folder / "driver").symlink_to(f"../../drivers/{driver}")
    (tmp_path / "pci/0000:1b:00.4/physfn").touch()
    (tmp_path / "pci/0000:1b:00.0/numa_node").write_text("1\n")
    (tmp_path / "pci/0000:2b:00.0/numa_node").write_text("-1\n")
    (tmp_path / "dev").mkdir()
    return tmp_path


def counted(bus: Path, known: tuple[int, ...] = (0, 1), **variables: str) -> int | Unknown:
    return machine.on_bus(known, variables, inside=False, pci=str(bus / "pci"), dev=str(bus / "dev"))


def test_the_bus_shows_gpus_that_no_driver_took_and_none_of_another_users(bus: Path) -> None:
    assert counted(bus) == 2
    assert counted(bus, known=(0,)) == 2  # one is missing, and that is to be seen


@pytest.mark.parametrize("shown", ["0", ""])
@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SLURM_JOB_ID"])
def test_no_gpu_is_called_missing_where_a_user_may_have_narrowed_the_view(name: str, shown: str, bus: Path) -> None:
    found = counted(bus, **{name: shown})
    assert isinstance(found, Unknown)
    assert found.by_design


def test_all_narrows_nothing(bus: Path) -> None:
    assert counted(bus, NVIDIA_VISIBLE_DEVICES="all") == 2


def test_inside_a_workload_the_bus_says_nothing(bus: Path) -> None:
    found = machine.on_bus((0,), {}, inside=True, pci=str(bus / "pci"))
    assert isinstance(found, Unknown)
    assert found.by_design


def test_a_gpu_that_we_may_not_open_is_not_missing(bus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device cgroup: the node is there, and opening it is refused even to root."""
    (bus / "dev/nvidia0").touch()
    (bus / "dev/nvidia1").touch()
    (bus / "dev/nvidiactl").touch()
    assert counted(bus, known=(0,)) == 2
    really_open = os.open

    def denied(path: object, *rest: int) -> int:
        if str(path).endswith("nvidia1"):
            raise PermissionError(1, "Operation not permitted")
        return really_open(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", denied)
    found = counted(bus, known=(0,))
    assert isinstance(found, Unknown)
    assert found.by_design


def test_a_bus_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert isinstance(counted(tmp_path), Unknown)


def test_the_numa_node_is_found_by_the_drivers_way_of_writing_addresses(bus: Path) -> None:
    pci = str(bus / "pci")
    assert machine.numa_of("00000000:1B:00.0", pci) == 1
    assert machine.numa_of("00000000:2B:00.0", pci) is None
    assert isinstance(machine.numa_of("00000000:9B:00.0", pci), Unknown)


GPUS = (
    *(Gpu(uuid=f"GPU-{n}a", index=n) for n in range(3)),
    *(Gpu(uuid=f"MIG-{n}", index=3, part_of="GPU-3a", profile="1g.18gb") for n in range(2)),
)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (None, "GPU-0a GPU-1a GPU-2a MIG-0 MIG-1"),
        ("2,0", "GPU-0a GPU-2a"),
        ("GPU-1", "GPU-1a"),
        ("MIG-1", "MIG-1"),
        ("3", "MIG-0 MIG-1"),
        ("0,nonsense,1", "GPU-0a"),
        ("0,-1,1", "GPU-0a"),
        ("", ""),
        ("NoDevFiles", ""),
    ],
)
def test_gpus_that_a_scheduler_gave_to_others_are_left_alone(shown: str | None, expected: str) -> None:
    variables = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert " ".join(gpu.uuid for gpu in machine.visible(GPUS, variables)) == expected


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine as it is without any workload around us."""
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").touch()
    number = (tmp_path / "proc/self/ns/pid").stat().st_ino
    monkeypatch.setattr(holders, "FIRST_PID_NAMESPACE", number)
    (tmp_path / "proc/self/cgroup").write_text("0::/user.slice/session-1.scope\n")
    (tmp_path / "proc/self/mountinfo").write_text("27 1 254:0 / / rw - ext4 /dev/vda rw\n")
    return tmp_path


def inside(where: Path, **variables: str) -> bool:
    return machine.is_inside(variables, str(where / "proc"), str(where))


def test_a_bare_machine_is_none(bare: Path) -> None:
    assert inside(bare) is False


def test_each_sign_of_a_workload_is_enough(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inside(bare, KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert inside(bare, container="podman")
    (bare / ".dockerenv").touch()
    assert inside(bare)
    (bare / ".dockerenv").unlink()
    (bare / "proc/self/mountinfo").write_text("27 1 0:5 / / rw - overlay overlay rw,lowerdir=/x\n")
    assert inside(bare)
    (bare / "proc/self/mountinfo").write_text("27 1 254:0 / / rw - ext4 /dev/vda rw\n")
    (bare / "proc/self/cgroup").write_text(f"0::/system.slice/docker-{'a' * 64}.scope\n")
    assert inside(bare)
    (bare / "proc/self/cgroup").write_text("0::/\n")
    assert not inside(bare)
    monkeypatch.setattr(holders, "FIRST_PID_NAMESPACE", 1)
    assert inside(bare)


def test_the_fabric_manager_is_seen_by_its_name_and_missed_only_on_the_bare_machine(bare: Path) -> None:
    proc = str(bare / "proc")
    assert machine._fabric_manager(False, proc) is False
    assert isinstance(machine._fabric_manager(True, proc), Unknown)
    (bare / "proc/77").mkdir()
    (bare / "proc/77/comm").write_text("nv-fabricmanage\n")
    assert machine._fabric_manager(True, proc) is True


def test_variables_of_nccl_are_told_without_secrets() -> None:
    variables = {"NCCL_IB_HCA": "mlx5", "NCCL_AUTH_TOKEN": "hush", "FI_PROVIDER": "efa", "HOME": "/"}
    assert machine.nccl_env(variables) == "FI_PROVIDER=efa NCCL_AUTH_TOKEN=(set) NCCL_IB_HCA=mlx5"


def test_variables_that_are_no_text_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that cannot be written is lost with all that was measured."""
    odd = os.fsdecode(b"mlx\xff")
    monkeypatch.setenv("NODE_NAME", odd)
    found = machine.environment({"NCCL_IB_HCA": odd, "CUDA_VISIBLE_DEVICES": odd})
    assert (found["nccl_env"], found["visible_devices"]) == ("NCCL_IB_HCA=mlx\ufffd", "mlx\ufffd")
    assert machine.node_name() == "mlx\ufffd"


def test_nccl_tests_are_found_on_the_path_or_not_at_all(tmp_path: Path) -> None:
    """C1.6: a program that is missing was not run."""
    assert machine.nccl_tests(str(tmp_path)) is None
    (tmp_path / "all_reduce_perf").write_text("#!/bin/sh\n")
    (tmp_path / "all_reduce_perf").chmod(0o755)
    assert machine.nccl_tests(str(tmp_path)) == str(tmp_path / "all_reduce_perf")


def test_the_environment_of_this_machine_has_every_fact() -> None:
    found = machine.environment()
    assert isinstance(found["cpus"], int)
    assert isinstance(found["memory_mib"], int)
    assert found["kernel"] == os.uname().release
    assert {"os", "hostname", "containerized", "shm_bytes", "memlock", "nccl_env", "taint", "nccl_tests"} <= set(found)
