"""Who a rank is, from the variables of torchrun or of somebody else's launcher (C1.9)."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.probes.ranks import GROUP_TIMEOUT_S, BadSetting, RankInfo, read_place

ELASTIC = {"TORCHELASTIC_RUN_ID": "none"}


def test_without_any_variable_it_is_alone() -> None:
    assert read_place({}, "cuda") == RankInfo(0, 1, 0, "127.0.0.1", 29500, "nccl")
    assert read_place({}, "cpu").backend == "gloo"


def test_torchruns_own_variables_count() -> None:
    told = ELASTIC | {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "node-1",
        "MASTER_PORT": "41000",
    }
    assert read_place(told, "cuda") == RankInfo(3, 8, 3, "node-1", 41000, "nccl")


def test_under_torchrun_what_the_launcher_was_told_does_not_count() -> None:
    """It describes the outer work; torchrun of one machine inside it has its own numbers."""
    told = ELASTIC | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "40001"}
    outer = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "K8S_MASTER_ADDR": "far-away", "PET_MASTER_PORT": "1"}
    assert read_place(told | outer, "cpu") == RankInfo(0, 2, 0, "localhost", 40001, "gloo")


def test_the_port_is_29500_unless_said() -> None:
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-1"}
    assert read_place(told, "cuda").port == 29500
    assert read_place(told | {"MASTER_PORT": "29501"}, "cuda").port == 29501


def test_a_launchers_nodes_make_ranks() -> None:
    told = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2", "LOCAL_RANK": "5"}
    place = read_place(told | {"PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456"}, "cuda")
    assert place == RankInfo(21, 32, 5, "job-master-0", 23456, "nccl")


def test_an_elastic_range_of_nodes_is_no_number_of_ranks() -> None:
    told = {"PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "auto", "RANK": "0", "WORLD_SIZE": "1"}
    assert read_place(told, "cpu").world == 1


def test_a_meeting_point_of_the_launcher_is_used_when_no_other_is_set() -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "PET_RDZV_ENDPOINT": "trainer-node-0-0.trainer:29400"}
    place = read_place(told, "cuda")
    assert (place.address, place.port) == ("trainer-node-0-0.trainer", 29400)


def test_short_and_long_names_of_one_service_are_no_contradiction() -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "master", "POD_NAMESPACE": "lab"}
    assert read_place(told | {"K8S_MASTER_ADDR": "master.lab.svc.cluster.local"}, "cuda").address == "master"


def test_a_cpu_run_may_be_told_gloo_and_a_gpu_run_may_use_it() -> None:
    assert read_place({"BACKEND": "gloo"}, "cuda").backend == "gloo"
    assert read_place({"BACKEND": "GLOO"}, "cpu").backend == "gloo"


@pytest.mark.parametrize(
    ("told", "kind", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "cpu", "RANK=2 with WORLD_SIZE=2: ranks are 0 to 1"),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "cpu", "WORLD_SIZE=4 without RANK"),
        ({"RANK": "3"}, "cpu", "RANK=3 without WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, "cpu", "must be 1 or more"),
        ({"RANK": "x", "WORLD_SIZE": "1"}, "cpu", "RANK='x' is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "cpu", "without MASTER_ADDR"),
        ({"MASTER_PORT": "99999"}, "cpu", "the maximum is 65535"),
        ({"MASTER_PORT": "0"}, "cpu", "MASTER_PORT='0' is not a number of 1 or more"),
        ({"BACKEND": "mpi"}, "cuda", "BACKEND=mpi is unknown"),
        ({"BACKEND": "nccl"}, "cpu", "BACKEND=nccl needs GPUs"),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "8", "RANK": "0"}, "cuda", "gives 16"),
        ({"MASTER_ADDR": "a", "K8S_MASTER_ADDR": "b"}, "cuda", "MASTER_ADDR=a and K8S_MASTER_ADDR=b name different"),
        ({}, "tpu", "'tpu' is not a valid device"),
    ],
)
def test_contradictions_are_sentences(told: dict[str, str], kind: str, words: str) -> None:
    with pytest.raises(BadSetting) as error:
        read_place(told, kind)
    assert words in str(error.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(BadSetting) as error:
        read_place({"RANK": "9", "WORLD_SIZE": "2", "BACKEND": "mpi"}, "cuda")
    said = str(error.value)
    assert ("ranks are 0 to 1" in said, "without MASTER_ADDR" in said, "BACKEND=mpi" in said) == (True, True, True)


def test_a_group_waits_for_ten_minutes_unless_said() -> None:
    """C1.4: a constant of "five minutes" held 600 s."""
    assert GROUP_TIMEOUT_S == 600
