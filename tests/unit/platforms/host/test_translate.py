"""From facts to subjects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.devices.holders import Holder
from gpukeeper.disk.mounts import Usage
from gpukeeper.disk.trash import is_named
from gpukeeper.disk.tree import PlaceAndTime
from gpukeeper.model.subject import Disk, Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host.translate import (
    devices_of,
    disk_subject,
    gpu_subjects,
    is_bare,
    process_subject,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
AT = PlaceAndTime("host", "node-1", NOW)
PARTS = tuple(
    SliceFacts(uuid=f"MIG-{number}", index=number, gpu_instance=number, compute_instance=0) for number in (1, 2)
)
GPUS = (
    GpuFacts(uuid="GPU-a", index=0, minor=1, name="NVIDIA H200", memory_total_mib=143771, utilisation=3.0),
    GpuFacts(uuid="GPU-b", index=1, minor=0, slices=PARTS),
)
HOLDER = Holder(pid=7, starttime=99, uid=1000, comm="python", stopped=False, minors=(1,))


def holder(**given: object) -> Holder:
    return Holder(**({name: getattr(HOLDER, name) for name in HOLDER.__struct_fields__} | given))  # type: ignore[arg-type]


def test_each_gpu_and_each_slice_is_a_device() -> None:
    subjects, unseen = gpu_subjects(GPUS, AT)
    assert [subject.ref.path for subject in subjects] == [
        "host/node-1/gpu-0",
        "host/node-1/gpu-1",
        "host/node-1/gpu-1-slice-1",
        "host/node-1/gpu-1-slice-2",
    ]
    assert {subject.shape for subject in subjects} == {Shape.DEVICE}
    assert [subject.ref.uid for subject in subjects] == ["GPU-a", "GPU-b", "MIG-1", "MIG-2"]
    assert subjects[2].root == subjects[1].ref.path
    assert subjects[0].labels["model"] == "NVIDIA H200"
    assert subjects[0].labels["memory_used_mib"].startswith("unknown: ")
    assert unseen == ()


def test_a_gpu_or_slices_that_do_not_answer_are_unseen() -> None:
    lost = GpuFacts(uuid=Unknown("GPU is lost"), index=3)
    cut = GpuFacts(uuid="GPU-c", index=4, slices=Unknown("no answer"))
    subjects, unseen = gpu_subjects((lost, cut), AT)
    assert [subject.ref.uid for subject in subjects] == ["GPU-c"]
    assert [(one.what, one.why) for one in unseen] == [("GPU 3", "GPU is lost"), ("slices of GPU 4", "no answer")]


def test_devices_are_named_by_minor_and_not_by_index() -> None:
    assert devices_of(HOLDER, GPUS, {}) == ("GPU-a",)
    assert devices_of(holder(minors=(0, 1)), GPUS, {}) == ("GPU-b", "GPU-a")


def test_who_opened_a_slice_holds_the_slice_and_not_the_whole_gpu() -> None:
    minors = {67: (0, 2, 0), 70: (1, 2, 0)}
    assert devices_of(holder(minors=(0,), capabilities=(1, 67)), GPUS, minors) == ("MIG-2",)


def test_devices_that_cannot_be_named_are_unknown_and_never_none() -> None:
    assert isinstance(devices_of(HOLDER, Unknown("no answer"), {}), Unknown)
    assert isinstance(devices_of(holder(minors=(1, 9)), GPUS, {}), Unknown)
    assert devices_of(holder(minors=()), Unknown("no answer"), {}) == ()


@pytest.mark.parametrize(
    ("given", "age", "shown"),
    [
        ({}, 61, True),
        ({}, 60, False),
        ({"uid": 999}, 3600, False),
        ({"container": "f" * 64}, 3600, False),
        ({"container": Unknown("not readable")}, 3600, True),
    ],
)
def test_only_peoples_settled_processes_outside_containers_are_shown(
    given: dict[str, object], age: int, shown: bool
) -> None:
    assert is_bare(holder(**given), NOW - timedelta(seconds=age), NOW) is shown


def test_a_process_is_a_workload_with_pid_and_start_as_its_uid() -> None:
    subject = process_subject(holder(stopped=True, comm="py\x1bthon"), ("GPU-a",), "ann", NOW, "boot", AT)
    assert (subject.shape, subject.class_, subject.owner, subject.devices) == (
        Shape.WORKLOAD,
        "bare",
        "ann",
        ("GPU-a",),
    )
    assert (subject.ref.kind, subject.ref.uid, subject.ref.name) == ("process", "7@99", "py\\x1bthon-7")
    assert subject.state is State.PAUSED
    assert subject.seen.incarnation == "boot:99"


@pytest.mark.parametrize(
    ("name", "patterns", "named"),
    [
        ("pip-abc", ("pip-*",), True),
        ("xpip-abc", ("pip-*",), False),
        ("TMPabc", ("tmp*",), False),
        (".hidden", ("*",), False),
        (".hidden", (".h*",), True),
        ("systemd-private-1", ("*",), False),
        ("ray", ("ray*",), False),
        ("ray_tmp_1", ("ray*",), True),
        (".X11-unix", (".X*",), False),
    ],
)
def test_names_match_as_in_a_shell_and_well_known_ones_never(name: str, patterns: tuple[str, ...], named: bool) -> None:
    assert is_named(name, patterns) is named


def test_a_disk_is_shown_as_df_tells_it() -> None:
    usage = Usage(device=8, mount_point="/tmp", size=1000, taken=450, free=450, inodes=10, inodes_free=9)
    disk = disk_subject(usage, Unknown("not everybody could be looked at"), ("a finding",), AT)
    assert (disk.shape, disk.ref.kind, disk.ref.name, disk.ref.uid) == (Shape.NODE, "disk", "/tmp", "8")
    assert (disk.size, disk.disk, disk.findings) == (450, Disk("/tmp", 0.5, 0.1), ("a finding",))
    assert disk.labels == {"disk_size": "1000", "disk_free": "450", "inodes": "10", "inodes_free": "9"}
