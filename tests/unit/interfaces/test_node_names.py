"""`node` knows a GPU by every name that observe prints."""

from __future__ import annotations

import pytest

from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.interfaces.cli.node import _find
from gpukeeper.model.errors import UsageError

INVENTORY = (
    GpuFacts(index=0, uuid="GPU-0aaa", minor=0),
    GpuFacts(
        index=1,
        uuid="GPU-1bbb",
        minor=1,
        slices=(SliceFacts(uuid="MIG-ccc", index=2, gpu_instance=7, compute_instance=0),),
    ),
)


@pytest.mark.parametrize(
    ("words", "uuid"),
    [
        *((name, "GPU-0aaa") for name in ("gpu-0", "host/node-1/gpu-0", "GPU-0", "GPU 0", "0", "GPU-0aaa", "gpu-0a")),
        ("gpu-1", "GPU-1bbb"),
        ("gpu-1-slice-2", "MIG-ccc"),
    ],
)
def test_a_gpu_is_found_by_the_name_that_observe_prints(words: str, uuid: str) -> None:
    assert _find(words, INVENTORY, {})[0] == uuid


def test_another_index_is_refused() -> None:
    with pytest.raises(UsageError, match="gpu-7"):
        _find("gpu-7", INVENTORY, {})
