"""Training speed over real ranks: counted once, warm-up left out, real data read, missing data said."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
from pathlib import Path

import pytest

from tests.real.torch import installation, together

TINY = {"model": "resnet18", "image": 32, "batch": 2, "classes": 10, "warmup": 1, "steps": 3}
DOCUMENTED = {
    *("model", "world_size", "batch_size_per_gpu", "global_batch_size", "total_time_seconds"),
    *("average_step_time_seconds", "throughput_samples_per_second", "total_samples", "device", "backend"),
    *("nccl_overhead_ms", "gpu_utilization_pct", "avg_step_time_ms"),
}


def test_the_speed_of_all_ranks_is_counted_once(tmp_path: Path) -> None:
    """C2.3, C4.5: it was multiplied by the number of ranks twice. Every documented field is there."""
    left = together.torchrun(tmp_path, 2, "throughput", **TINY)
    first, second = left.done(0), left.done(1)
    assert set(first) >= DOCUMENTED
    assert first["throughput_samples_per_second"] == second["throughput_samples_per_second"]
    assert first["total_samples"] == 2 * 2 * 3
    assert first["throughput_samples_per_second"] == pytest.approx(first["total_samples"] / first["total_time_seconds"])
    assert first["global_batch_size"] == 4
    assert first["average_step_time_seconds"] * 1e3 == pytest.approx(first["avg_step_time_ms"])
    assert first["alone_samples_per_second"] == second["alone_samples_per_second"] > 0
    assert len(first["step_ms"]) == 3  # C1.5: warm-up is not among them
    assert first["gpu_utilization_pct"] is None  # not measured, not invented
    assert first["parameters"] == 11_689_512 - 990 * 513


def test_models_have_as_many_parameters_as_everybodys() -> None:
    """C1.5: 25.6 and 11.7 million; a transformer of 12 layers, 1024 wide, 4096 in the middle."""
    code = (
        "import runpy, sys, json; m = runpy.run_path(sys.argv[1]); m['_be_alone']();"
        "from gpukeeper.acceptance.probes import models;"
        "print(json.dumps({n: models.parameters(models.build(n, 1000)) for n in models.NAMES}))"
    )
    done = subprocess.run(
        [installation.python(), "-c", code, str(installation.MAIN)],
        capture_output=True,
        text=True,
        env=installation.environment(),
        check=True,
    )
    layer = 4 * (1024 * 1024 + 1024) + (1024 * 4096 + 4096) + (4096 * 1024 + 1024) + 4 * 1024
    ends = 1000 * 1024 + 512 * 1024 + 1024 * 1000 + 1000
    assert json.loads(done.stdout) == {
        "resnet50": 25_557_032,
        "resnet18": 11_689_512,
        "transformer": 12 * layer + ends,
    }


@pytest.mark.parametrize("model", ["resnet50", "resnet18"])
def test_grey_images_of_28_pixels_train_both_resnets(tmp_path: Path, model: str) -> None:
    """C1.5: fashion_mnist always crashed."""
    _fashion(tmp_path / "data", 8)
    left = together.torchrun(
        tmp_path, 1, "throughput", model=model, data="fashion_mnist", data_dir=str(tmp_path / "data"), batch=2,
        warmup=1, steps=2,
    )  # fmt: skip
    result = left.done(0)
    assert (result["data"], result["data_missing"], result["world_size"]) == ("fashion_mnist", None, 1)
    assert result["throughput_samples_per_second"] > 0
    assert (result["nccl_overhead_ms"], result["alone_samples_per_second"]) == (0.0, None)


def test_missing_data_is_reported_and_never_made_up(tmp_path: Path) -> None:
    """C1.5: it silently became synthetic."""
    left = together.torchrun(tmp_path, 1, "throughput", **TINY, data="cifar10", data_dir=str(tmp_path / "nothing"))
    last = left.broken(0).splitlines()[-1]
    assert last.startswith("DataMissing: The data set cifar10 is not in ")
    assert "cifar-10-batches-py/data_batch_1" in last


def test_a_transformer_trains_on_tokens(tmp_path: Path) -> None:
    left = together.torchrun(
        tmp_path, 1, "throughput", model="transformer", sequence=16, batch=1, warmup=1, steps=2, classes=10
    )
    assert left.done(0)["loss"] > 0


def test_a_broken_weight_shows_as_a_loss_that_is_no_number(tmp_path: Path) -> None:
    left = together.torchrun(tmp_path, 1, "throughput", **TINY, inject={"nan": True})
    assert left.done(0)["loss"] == "nan"


def _fashion(folder: Path, count: int) -> None:
    folder.mkdir()
    pixels = bytes(i % 251 for i in range(count * 784))
    images = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28) + pixels
    labels = struct.pack(">HBBI", 0, 8, 1, count) + bytes(i % 10 for i in range(count))
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    (folder / "train-labels-idx1-ubyte").write_bytes(labels)
