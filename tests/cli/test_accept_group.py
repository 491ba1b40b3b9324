"""`gpukeeper accept --together`: refused before anything runs if it cannot work. Groups that run: tests/real/launch.

C1.9
"""

from __future__ import annotations

import pytest

from tests.cli.fleet import Fleet

pytestmark = pytest.mark.slow

CPU = ("accept", "--together", "--device", "cpu", "--ranks", "1")
SECOND_OF_TWO = {"GPUKEEPER_GROUP_SIZE": "2", "GPUKEEPER_GROUP_INDEX": "1", "MASTER_ADDR": "gpu-0"}


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (CPU, {}, "the number of nodes is not set. Set GPUKEEPER_GROUP_SIZE on every node"),
        (CPU, {"GPUKEEPER_GROUP_SIZE": "2", "MASTER_ADDR": "gpu-0"}, "Set GPUKEEPER_GROUP_INDEX: 0 on the first node"),
        (CPU, SECOND_OF_TWO | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (CPU, SECOND_OF_TWO | {"PET_NNODES": "3"}, "contradict each other"),
        (("accept", "--together", "--device", "simulated"), SECOND_OF_TWO, "simulated nodes have no network"),
        ((*CPU, "--set", "group.probes=gemm"), SECOND_OF_TWO, 'unknown probe "gemm"'),
        ((*CPU, "--set", "group.stall_s=0"), SECOND_OF_TWO, "stall_s must be 1 or more"),
        (("accept", "--device", "simulated", "--check", "group"), {}, 'unknown check "group"'),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    fleet: Fleet, words: tuple[str, ...], environ: dict[str, str], said: str
) -> None:
    ran = fleet.run(*words, **environ)
    assert (ran.code, said in ran.err) == (2, True), ran.err
    assert ran.out == ""
    assert not (fleet.state / "reports").exists()
