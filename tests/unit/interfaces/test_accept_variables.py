"""Variables of older kits and of launchers are understood, said, or refused; never guessed. C1.9, C3.4"""

from __future__ import annotations

import pytest

from gpukeeper.interfaces.cli.accept_settings import LONGER, EnvironmentSettings, read_variables
from gpukeeper.model.errors import UsageError


def test_nothing_set_asks_for_nothing() -> None:
    assert read_variables({"PATH": "/bin", "POD_NAMESPACE": "lab", "QUICK": "", "EPOCHS": ""}) == EnvironmentSettings()


@pytest.mark.parametrize(
    ("environ", "environment"),
    [
        ({"QUICK": "1"}, EnvironmentSettings(notes=["QUICK=1 is the default"])),
        ({"QUICK": "0"}, EnvironmentSettings(within=LONGER, notes=["QUICK=0 means --within 5m"])),
        ({"VERBOSE": "yes"}, EnvironmentSettings(verbose=True, notes=["VERBOSE=1 means --verbose"])),
        ({"VERBOSE": "0"}, EnvironmentSettings()),
        ({"REPORT_DIR": "/r"}, EnvironmentSettings(report_dir="/r", notes=["REPORT_DIR means --report-dir /r"])),
        ({"GPUS_PER_NODE": "8"}, EnvironmentSettings(expect=8, notes=["GPUS_PER_NODE=8 means --expect 8"])),
        (
            {"GPUKEEPER_EXPECT": "4", "GPUS_PER_NODE": "8"},
            EnvironmentSettings(expect=4, notes=["GPUKEEPER_EXPECT=4 means --expect 4"]),
        ),
        ({"GPUKEEPER_PYTHON": "/p"}, EnvironmentSettings(python="/p")),
    ],
)
def test_each_of_the_older_kits_variables_is_a_flag(environ: dict[str, str], environment: EnvironmentSettings) -> None:
    assert read_variables(environ) == environment


def test_epochs_and_steps_are_settings_of_checks() -> None:
    environment = read_variables({"EPOCHS": "3", "TRAIN_SMOKE": "1", "STEPS": "10"})
    assert environment.settings == ["training.epochs=3", "ddp.epochs=3", "throughput.steps=10"]
    assert environment.within == LONGER
    assert len(environment.notes) == 3
    alone = read_variables({"STEPS": "10"})
    assert alone.settings == []
    assert alone.notes == ["STEPS=10 is ignored without TRAIN_SMOKE=1"]


def test_one_epoch_is_refused() -> None:
    """C1.4: the older kit's default compared a loss with itself."""
    with pytest.raises(UsageError, match=r"EPOCHS=1 compares a loss with itself.*2 or more"):
        read_variables({"EPOCHS": "1"})


@pytest.mark.parametrize(
    "environ", [{"QUICK": "maybe"}, {"EPOCHS": "two"}, {"GPUS_PER_NODE": "0"}, {"PET_NNODES": "x"}, {"BACKEND": "mpi"}]
)
def test_what_cannot_be_read_is_refused_by_name(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(environ))):
        read_variables(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"},
        {"PET_NNODES": "2", "PET_MASTER_ADDR": "node-0"},
        {"PET_NNODES": "1:4"},
        {"WORLD_SIZE": "2", "K8S_MASTER_ADDR": "node-0"},
        {"GPUKEEPER_GROUP_SIZE": "2", "GPUKEEPER_GROUP_INDEX": "0", "MASTER_ADDR": "node-0"},
        {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0"},
        {"RANK": "1", "MASTER_ADDR": "node-0"},
        {"PET_NODE_RANK": "1"},
        {"MASTER_ADDR": "node-0.train"},
        {"PET_RDZV_ENDPOINT": "[fd00::7]:29500"},
        {"MASTER_ADDR": "fd00::7"},
    ],
)
def test_one_node_of_several_is_never_tested_alone_without_a_word_that_says_so(environ: dict[str, str]) -> None:
    """Whoever set them: a manifest, torchrun, an operator."""
    with pytest.raises(UsageError, match="those of one node of several") as refused:
        read_variables(environ)
    for name, value in environ.items():
        assert f"{name}={value}" in str(refused.value)
    assert "add --together on every node" in str(refused.value)
    read_variables({**environ, "GPUKEEPER_GROUP_SIZE": "1"})
    read_variables(environ, together=True)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1:29500", "[::1]:29500", "::1"])
def test_an_address_of_this_machine_alone_is_no_group(address: str) -> None:
    read_variables({"MASTER_ADDR": address, "MASTER_PORT": "29500"})


def test_ranks_that_are_all_here_are_started_by_us() -> None:
    with pytest.raises(UsageError, match="start it once, without the launcher"):
        read_variables({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"})


def test_a_job_of_one_rank_changes_nothing_and_is_reported() -> None:
    environment = read_variables({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "BACKEND": "nccl"})
    assert (
        environment.notes[0] == "RANK, WORLD_SIZE, MASTER_ADDR: a job with one node; gpukeeper starts the ranks itself"
    )
    assert "GPUs use nccl" in environment.notes[1]
