"""Deterministic training: the loss falls, twice alike to the bit; one changed bit of one weight shows."""

from __future__ import annotations

import pytest

from tests.real.torch import installation

SMALL = {"steps": 4, "width": 32, "sentences": 2}


def test_the_old_kits_classifier_learns_twice_alike(worker: installation.Worker) -> None:
    """C1.4: 4000 samples × 128, 4 classes, AdamW 3e-3, 2 epochs, loss down by 30 % or more."""
    result = worker.run("training", **SMALL)
    first, second = result["runs"]
    assert first["fall"] >= 0.30
    assert first["fall"] == pytest.approx(1 - first["loss_end"] / first["loss_start"])
    assert first["steps"] == len(first["loss_bits"]) == 2 * 63
    assert (first["hash"], first["loss_bits"]) == (second["hash"], second["loss_bits"])
    assert (result["equal"], result["deterministic"]) == (True, True)
    assert [run["steps"] for run in result["transformer"]["runs"]] == [4, 4]


def test_the_transformer_learns_too(worker: installation.Worker) -> None:
    result = worker.run("training", samples=64, steps=12, width=32, sentences=2)
    assert result["transformer"]["equal"] is True
    assert result["transformer"]["runs"][0]["fall"] > 0


@pytest.mark.parametrize("bit", [0, 12, 31])
def test_one_flipped_bit_of_one_weight_makes_the_runs_differ(worker: installation.Worker, bit: int) -> None:
    result = worker.run("training", samples=512, inject={"flip": True, "bit": bit}, **SMALL)
    assert result["equal"] is False
    assert result["runs"][0]["hash"] != result["runs"][1]["hash"]
    assert result["transformer"]["equal"] is False


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"epochs": 1}, "epochs 1 cannot show that the loss falls"),
        ({"min_fall": 1.5}, "min_fall 1.5 is not between 0 and 1"),
        ({"classes": 1}, "one class cannot be learned"),
        ({"rate": 0}, "cannot learn"),
        ({"samples": 0}, "samples must be 1 or more"),
    ],
)
def test_settings_that_can_never_pass_are_refused(
    worker: installation.Worker, params: dict[str, float], words: str
) -> None:
    """C1.4: epochs 1 could never pass. Refused before anything is computed."""
    last = worker.ask("training", **params)["broken"]["words"].splitlines()[-1]
    assert last.startswith("ValueError: ")
    assert words in last


def test_settings_of_pytorch_are_put_back() -> None:
    """A probe after training runs as if there had been none."""
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("main", sys.argv[1]); main = importlib.util.module_from_spec(spec)
spec.loader.exec_module(main); main._be_alone()
import torch
from gpukeeper.acceptance.probes import exact, gemm, training
from gpukeeper.acceptance.probes.device import Device
torch.set_num_threads(1)
def settings():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark, matmul.fp32_precision,
            matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction)
before, device = settings(), Device("cpu")
training.run(device, {"samples": 64, "steps": 1, "width": 16, "sentences": 1})
exact.run(device, {"n": 32, "rounds": 1}); gemm.run(device, {"n": 32, "seconds": 0.01, "dtypes": ["fp32"]})
try: exact.run(device, {"n": 32, "rounds": "many"})
except ValueError: pass
print(settings() == before)
"""
    import subprocess

    command = (installation.python(), "-W", "error", "-c", code, str(installation.MAIN))
    ended = subprocess.run(command, capture_output=True, text=True, env=installation.environment(), check=False)
    assert ended.stdout.strip() == "True", ended.stderr
