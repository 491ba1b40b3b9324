"""Which pod has which GPU: cgroups as every runtime writes them, the kubelet's record, and what must not be guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gpukeeper.devices.busy import GpuUse
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.node_use import (
    GONE,
    Assigned,
    PodGpu,
    PodName,
    assigned,
    pod_names,
    pod_uid,
    pods_of_gpus,
)

UID, OTHER = "1ee48fe1-0c6b-4b52-9a57-3a0d8d1f2c11", "7dce7935-81aa-4d5e-8a6f-2b1b8e9c0d22"
UNDERSCORED, STATIC, ID = UID.replace("-", "_"), "5d9f1a0b" * 4, "ab" * 32
NAMES = {UID: PodName("lab", "train-0", UID), OTHER: PodName("lab", "eval-0", OTHER)}


@pytest.mark.parametrize(
    ("cgroup", "uid"),
    [
        (f"0::/kubepods/burstable/pod{UID}/{ID}", UID),
        (f"0::/kubepods/pod{UID}/{ID}", UID),  # guaranteed
        (f"12:memory:/kubepods/besteffort/pod{UID}/{ID}\n11:pids:/kubepods/besteffort/pod{UID}/{ID}\n0::/", UID),
        (f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice/crio-{ID}.scope", UID),
        (f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope", UID),
        (f"1:name=systemd:/system.slice/containerd.service/kubepods-pod{UNDERSCORED}.slice:cri-containerd:{ID}", UID),
        (f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDERSCORED}.slice/cri-{ID}.scope", UID),
        # from a cgroup namespace of our own
        (f"0::/../../pod{UID}/{ID}", UID),
        (f"0::/../../../kubepods-besteffort.slice/kubepods-besteffort-pod{UNDERSCORED}.slice/crio-{ID}.scope", UID),
        (f"0::/kubepods/burstable/pod{STATIC}/{ID}", STATIC),
        # what runs inside may add any name: the outermost counts
        (f"0::/kubepods/pod{UID}/{ID}/kubepods/pod{OTHER}/{ID}", UID),
        (f"0::/kubepods/pod{UID}/{ID}/docker/{ID}", UID),
    ],
)
def test_the_pod_of_a_process(cgroup: str, uid: str) -> None:
    assert pod_uid(cgroup + "\n") == uid


@pytest.mark.parametrize(
    "cgroup",
    [
        "",
        "garbage",
        "0::/",
        "0::/init.scope",
        f"12:memory:/docker/{ID}\n0::/system.slice/docker-{ID}.scope",
        f"0::/machine.slice/libpod-{ID}.scope",
        f"0::/machine.slice/machine-libpod_pod_{ID}.slice/libpod-{ID}.scope",  # a pod of Podman
        f"0::/user.slice/user-1000.slice/user@1000.service/kubepods/pod{UID}/{ID}",
        f"0::/kubepods/burstable/pod{UID[:-1]}/{ID}",
        f"0::/kubepods/burstable/pod{UID}x/{ID}",
        f"0::/kubepods/burstable/pod{UID.upper()}/{ID}",
    ],
)
def test_a_process_in_no_pod(cgroup: str) -> None:
    assert pod_uid(cgroup) is None


def test_cgroups_that_contradict_each_other_are_unknown() -> None:
    assert isinstance(pod_uid(f"2:cpu:/kubepods/pod{UID}/{ID}\n1:pids:/kubepods/pod{OTHER}/{ID}\n"), Unknown)


def test_names_come_from_log_directories_and_a_doubtful_one_is_none() -> None:
    found = pod_names([f"lab_train-0_{UID}", f"kube-system_etcd.node_{STATIC}", "lost+found", UID, f"a_b_c_{OTHER}"])
    assert found == {UID: NAMES[UID], STATIC: PodName("kube-system", "etcd.node", STATIC)}
    assert pod_names([f"lab_train-0_{UID}", f"lab_train-1_{UID}"]) == {}


def record(*entries: Mapping[str, Any]) -> bytes:
    """As the kubelet writes it (pkg/kubelet/cm/devicemanager/checkpoint)."""
    whole = [{"ContainerName": "main", "AllocResp": "Cg==", **one} for one in entries]
    data = {"PodDeviceEntries": whole or None, "RegisteredDevices": {"nvidia.com/gpu": ["GPU-1"]}}
    return json.dumps({"Data": data, "Checksum": 1234567890}).encode()


def given(devices: object, uid: str = UID, resource: str = "nvidia.com/gpu") -> dict[str, Any]:
    return {"PodUID": uid, "ResourceName": resource, "DeviceIDs": devices}


def test_the_record_of_the_kubelet() -> None:
    text = record(
        given({"-1": ["GPU-1"], "0": ["GPU-2"]}),
        given({"0": ["MIG-7"]}, OTHER, "nvidia.com/mig-1g.10gb"),
        given({"0": ["GPU-3::1"]}, OTHER, "nvidia.com/gpu.shared"),
        given({"0": ["hca-0"]}, OTHER, "rdma/hca"),
    )
    assert set(assigned(text)) == {  # type: ignore[arg-type]
        Assigned("GPU-1", UID),
        Assigned("GPU-2", UID),
        Assigned("MIG-7", OTHER),
        Assigned("GPU-3", OTHER, "1"),
    }
    assert assigned(record()) == ()
    assert assigned(record(given(["GPU-1"]))) == (Assigned("GPU-1", UID),)  # an older form


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"Data":{}}', b"\xff\xfe", record(given({"0": "GPU-1"}))])
def test_a_record_of_another_form_is_unknown_and_not_empty(text: bytes) -> None:
    assert isinstance(assigned(text), Unknown)


def use(uuid: str, pids: tuple[int, ...] | Unknown = (), parent: str | None = None) -> GpuUse:
    return GpuUse(uuid=uuid, slice=parent is not None, busy=0.0, memory_used_mib=0, pids=pids, parent=parent)


def test_assigned_and_used_are_added_and_named_once() -> None:
    uses = {"GPU-1": use("GPU-1", (10,)), "GPU-2": use("GPU-2", (10, 11)), "MIG-7": use("MIG-7", (11,), "GPU-3")}
    given_ = [Assigned("GPU-1", UID, "0")]
    found = pods_of_gpus(uses, given_, NAMES, {10: UID, 11: OTHER})
    assert set(found.found) == {
        PodGpu("GPU-1", NAMES[UID], "0"),  # its process adds no second share
        PodGpu("GPU-2", NAMES[UID]),  # more than it was given: the operator counts two, and keeps
        PodGpu("GPU-2", NAMES[OTHER]),
        PodGpu("MIG-7", NAMES[OTHER]),
    }
    assert (found.processes["mapped"], found.nameless) == (4, 0)


def test_what_cannot_be_mapped_is_counted_and_names_no_pod() -> None:
    uid_of = {1: None, 2: GONE, 3: Unknown("its cgroup could not be read"), 4: STATIC}
    uses = {"GPU-1": use("GPU-1", (1, 2, 3, 4, 5)), "GPU-2": use("GPU-2", Unknown("refused"))}
    strange = [Assigned("0", UID), Assigned("nvidia0/gi1", UID), Assigned("GPU-1", STATIC)]
    found = pods_of_gpus(uses, strange, NAMES, uid_of)
    assert found.found == ()
    assert found.processes == {"mapped": 0, "no_pod": 1, "unnamed": 1, "gone": 2, "unreadable": 1}
    assert found.nameless == 2
