"""Every way to ask for a GPU, as the engine shows it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.translate import GpuRequest, devices_of, requested_gpus
from tests.unit.platforms.docker.examples import CUT, SECOND, WHOLE, container, docker

GPU = [["gpu"]]
MACHINE = (WHOLE, SECOND, CUT)


def request(**parts: Any) -> dict[str, Any]:
    return {"DeviceRequests": [{"Driver": "", "Count": 0, "DeviceIDs": None, "Capabilities": GPU, **parts}]}


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("nogpu", ("all",)),
        ("gpus2", ("0", "1")),
        ("created", ("0", "1")),
        ("mig", ("MIG-11111111-2222-3333-4444-555555555555",)),
        ("running", ()),
        ("exited1", ()),
        ("envgpu", ()),  # without the nvidia runtime the variable does nothing
        ("nodes", ()),  # /dev/null under a GPU's name
    ],
)
def test_recorded_requests(name: str, names: tuple[str, ...]) -> None:
    assert requested_gpus(docker(name)).names == names


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (request(Count=-1), ("GPU-a", "GPU-b", "MIG-1", "MIG-2")),
        (request(Count=2), ("GPU-a", "GPU-b")),
        (request(DeviceIDs=["1"]), ("GPU-b",)),
        (request(DeviceIDs=["0", "2:1"]), ("GPU-a", "MIG-2")),
        (request(DeviceIDs=["2.7"]), ("MIG-1",)),
        (request(DeviceIDs=["GPU-b"]), ("GPU-b",)),
        (request(DeviceIDs=["nvidia.com/gpu=0"]), ("GPU-a",)),
        (
            request(Driver="cdi", DeviceIDs=["nvidia.com/gpu=all"], Capabilities=None),
            ("GPU-a", "GPU-b", "MIG-1", "MIG-2"),
        ),
        (request(Driver="cdi", DeviceIDs=["vendor.com/nic=0"], Capabilities=None), ()),
        (request(Driver="nvidia", Count=1, Capabilities=None), ("GPU-a",)),
        (request(Count=-1, Capabilities=[["tpu"]]), ()),
        ({"Devices": [{"PathOnHost": "/dev/nvidia3"}]}, ("GPU-b",)),
        ({"Devices": [{"PathOnHost": "/dev/nvidia2"}]}, ("MIG-1", "MIG-2")),
        ({"Devices": [{"PathOnHost": "/dev/nvidiactl"}, {"PathOnHost": "/dev/nvidia-uvm"}]}, ()),
        ({"Devices": [{"PathOnHost": "nvidia.com/gpu=1"}]}, ("GPU-b",)),
        ({**request(DeviceIDs=["0"]), "Devices": [{"PathOnHost": "/dev/nvidia3"}]}, ("GPU-a", "GPU-b")),
        ({"Privileged": True}, ()),  # it may use all and asks for none: what it holds decides
    ],
)
def test_a_request_is_resolved_to_what_it_means_on_this_machine(
    host: dict[str, Any], expected: tuple[str, ...]
) -> None:
    one = container(host=host)
    assert devices_of(one, requested_gpus(one), (), MACHINE) == expected


@pytest.mark.parametrize(
    ("env", "runtime", "default", "names"),
    [
        (["NVIDIA_VISIBLE_DEVICES=0"], "nvidia", "", ("0",)),
        (["NVIDIA_VISIBLE_DEVICES=0"], "", "nvidia", ("0",)),
        (["NVIDIA_VISIBLE_DEVICES=0"], "runc", "nvidia", ()),
        (["NVIDIA_VISIBLE_DEVICES=0,1"], "nvidia", "", ("0", "1")),
        (["NVIDIA_VISIBLE_DEVICES=all"], "nvidia-container-runtime", "", ("all",)),
        (["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=1"], "nvidia", "", ("1",)),
        (["NVIDIA_VISIBLE_DEVICES=void"], "nvidia", "", ()),
        (["NVIDIA_VISIBLE_DEVICES=none"], "nvidia", "", ()),
        (["NVIDIA_VISIBLE_DEVICES="], "nvidia", "", ()),
        (["NVIDIA_VISIBLE_DEVICES=0,void"], "nvidia", "", ()),
        (["PATH=/bin"], "nvidia", "", ()),
        (["CUDA_VERSION=9.0"], "nvidia", "", ("all",)),  # an old CUDA image, which says nothing and gets everything
        (["CUDA_VERSION=12.4", "NVIDIA_REQUIRE_CUDA=cuda>=12.4"], "nvidia", "", ()),
        (["CUDA_VERSION=9.0"], "runc", "", ()),
    ],
)
def test_the_environment_asks_only_under_the_nvidia_runtime(
    env: list[str], runtime: str, default: str, names: tuple[str, ...]
) -> None:
    assert requested_gpus(container(host={"Runtime": runtime}, config={"Env": env}), default).names == names


def test_a_request_outranks_the_environment() -> None:
    host = {**request(DeviceIDs=["1"]), "Runtime": "nvidia"}
    assert requested_gpus(container(host=host, config={"Env": ["NVIDIA_VISIBLE_DEVICES=all"]})).names == ("1",)


def test_what_it_holds_counts_beside_what_it_requested() -> None:
    one = container(host=request(DeviceIDs=["0"]))
    assert devices_of(one, requested_gpus(one), ("GPU-b",), MACHINE) == ("GPU-a", "GPU-b")
    assert devices_of(one, GpuRequest(), ("GPU-b",), MACHINE) == ("GPU-b",)


@pytest.mark.parametrize("inventory", [Unknown("the driver does not answer"), ()])
def test_who_asks_for_gpus_that_nobody_can_name_has_unknown_devices(inventory: Any) -> None:
    one = container(host=request(Count=-1))
    assert isinstance(devices_of(one, requested_gpus(one), (), inventory), Unknown)


@pytest.mark.parametrize(
    "host",
    [
        request(DeviceIDs=["7"]),
        request(DeviceIDs=["MIG-none"]),
        request(DeviceIDs=["0", "nonsense"]),
        request(Count=99),
        request(DeviceIDs=["9" * 5000]),
        {"Devices": [{"PathOnHost": "/dev/nvidia9"}]},
    ],
)
def test_a_gpu_that_is_not_there_is_unknown_and_not_nothing(host: dict[str, Any]) -> None:
    one = container(host=host)
    assert isinstance(devices_of(one, requested_gpus(one), (), MACHINE), Unknown)


def test_a_count_beyond_every_machine_does_not_fill_the_memory() -> None:
    """Such a container can be created by anybody; its start fails, and it stays."""
    one = container(host=request(Count=2**62))
    assert len(requested_gpus(one).names) < 10_000
    assert isinstance(devices_of(one, requested_gpus(one), (), MACHINE), Unknown)


def test_a_device_path_with_endless_digits_breaks_nothing() -> None:
    assert not requested_gpus(container(host={"Devices": [{"PathOnHost": "/dev/nvidia" + "9" * 5000}]}))


@given(
    st.lists(st.text(max_size=20), max_size=4),
    st.integers(min_value=-(2**63), max_value=2**63 - 1),
    st.lists(st.text(max_size=20), max_size=3),
    st.lists(st.text(max_size=30), max_size=3),
)
def test_no_request_breaks_the_read(ids: list[str], count: int, paths: list[str], env: list[str]) -> None:
    host = {
        **request(DeviceIDs=ids, Count=count),
        "Devices": [{"PathOnHost": f"/dev/nvidia{path}"} for path in paths],
        "Runtime": "nvidia",
    }
    one = container(host=host, config={"Env": [f"NVIDIA_VISIBLE_DEVICES={value}" for value in env]})
    found = devices_of(one, requested_gpus(one), (), MACHINE)
    assert isinstance(found, tuple | Unknown)
