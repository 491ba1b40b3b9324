"""What an engine reports of itself: each planted problem is found."""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.acceptance.fleet.preflight.engines import EngineFacts, judge_engine
from gpukeeper.acceptance.fleet.preflight.facts import Finding
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.preflight.clusters import the

GOOD = {
    "address": "unix:///var/run/docker.sock",
    "version": "28.3.0",
    "runtimes": ("io.containerd.runc.v2", "nvidia"),
    "memory": 512 * 1024**3,
    "image": True,
    "gpus": 8,
}


def judged(name: str = "accept:1", shm: str = "16Gi", **changes: Any) -> tuple[Finding, ...]:
    return judge_engine(EngineFacts(**{**GOOD, **changes}), name, shm)


def test_a_good_engine_passes() -> None:
    assert {one.verdict for one in judged()} == {Grade.PASS}


def test_without_the_nvidia_runtime_and_without_cdi_it_fails() -> None:
    one = the("engine-runtime", judged(runtimes=("runc",)))
    assert one.verdict is Grade.FAIL
    assert one.fix[0] == "sudo nvidia-ctk runtime configure --runtime=docker"
    assert the("engine-runtime", judged(runtimes=(), devices=("nvidia.com/gpu=all",))).verdict is Grade.PASS


@pytest.mark.parametrize(
    ("code", "changes", "verdict"),
    [
        ("engine-image", {"image": False}, Grade.FAIL),
        ("engine-image", {"image": Unknown("500")}, Grade.INCONCLUSIVE),
        ("engine-gpus", {"gpus": 0}, Grade.FAIL),
        ("engine-gpus", {"gpus": Unknown("no answer")}, Grade.INCONCLUSIVE),
        ("engine-shm", {"memory": 24 * 1024**3}, Grade.WARN),
        ("engine-shm", {"memory": 0}, Grade.INCONCLUSIVE),
        ("engine-shm", {"shm": "much"}, Grade.INCONCLUSIVE),
        ("engine-memlock", {"rootless": True}, Grade.WARN),
    ],
)
def test_planted_problems(code: str, changes: dict[str, Any], verdict: Grade) -> None:
    one = the(code, judged(**changes))
    assert one.verdict is verdict
    assert one.fix


def test_without_an_image_it_could_not_be_checked() -> None:
    assert the("engine-image", judged(name="")).verdict is Grade.INCONCLUSIVE
