"""Which node of how many this one is, from the variables of every launcher."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.group.members import read_membership
from gpukeeper.model.errors import UsageError

MASTER = {"MASTER_ADDR": "gpu-0"}


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        ({"GPUKEEPER_GROUP_SIZE": "3", "GPUKEEPER_GROUP_INDEX": "1"}, "x"),
        ({"PET_NNODES": "3", "PET_NODE_RANK": "1"}, "x"),
        ({"WORLD_SIZE": "3", "RANK": "1"}, "x"),
        ({"GPUKEEPER_GROUP_SIZE": "3", "JOB_COMPLETION_INDEX": "1"}, "x"),
        ({"GPUKEEPER_GROUP_SIZE": "3"}, "accept-1"),
        ({"PET_NNODES": "3"}, "accept-1.accept.default.svc"),
        ({"PET_NNODES": "3", "PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "24", "RANK": "8"}, "x"),
    ],
)
def test_every_launcher_defines_the_same_member(environ: dict[str, str], host: str) -> None:
    """C1.9."""
    found = read_membership({**MASTER, **environ}, host)
    assert (found.index, found.size, found.address, found.port) == (1, 3, "gpu-0", 29500)
    assert found.notes


def test_address_and_port_of_other_launchers() -> None:
    base = {"GPUKEEPER_GROUP_SIZE": "2", "GPUKEEPER_GROUP_INDEX": "0"}
    found = read_membership({**base, "PET_RDZV_ENDPOINT": "head:29400"}, "x")
    assert (found.address, found.port) == ("head", 29400)
    same = {"MASTER_ADDR": "svc", "K8S_MASTER_ADDR": "svc.lab.svc.cluster.local", "POD_NAMESPACE": "lab"}
    assert read_membership({**base, **same, "MASTER_PORT": "1234"}, "x").port == 1234


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "the number of nodes is not set"),
        ({"GPUKEEPER_GROUP_SIZE": "3"}, "the index of this node is not set"),
        ({"GPUKEEPER_GROUP_SIZE": "3", "PET_NNODES": "4", "GPUKEEPER_GROUP_INDEX": "0"}, "contradict each other"),
        ({"GPUKEEPER_GROUP_SIZE": "3", "RANK": "1", "PET_NODE_RANK": "2"}, "contradict each other"),
        ({"GPUKEEPER_GROUP_SIZE": "3", "GPUKEEPER_GROUP_INDEX": "3"}, "index 3 of 3 nodes"),
        ({"GPUKEEPER_GROUP_SIZE": "1", "GPUKEEPER_GROUP_INDEX": "0"}, "a group has 2 to 4096"),
        ({"GPUKEEPER_GROUP_SIZE": "x", "GPUKEEPER_GROUP_INDEX": "0"}, "is not a number"),
        ({"GPUKEEPER_GROUP_SIZE": "2", "GPUKEEPER_GROUP_INDEX": "0", "K8S_MASTER_ADDR": "b"}, "different machines"),
    ],
)
def test_contradictions_are_errors(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_membership({**MASTER, **environ}, "host")


def test_without_an_address_nothing_is_guessed() -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR is not set"):
        read_membership({"GPUKEEPER_GROUP_SIZE": "2", "GPUKEEPER_GROUP_INDEX": "0"}, "x")
