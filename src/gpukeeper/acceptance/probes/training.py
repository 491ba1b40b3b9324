"""Whether it trains, and twice alike to the last bit. A small classifier and a small transformer, from a fixed seed;
the same on every GPU, so that the hashes of equal GPUs are equal too.

The loss is measured before the first and after the last step, on the same data.
params: samples, features, classes, epochs, rate, batch, min_fall, twice, steps (of the transformer), width, seed.
inject: {"flip": true, "bit": 12, "step": half way} flips one bit of one weight in the second run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpukeeper.acceptance.probes.arithmetic import digest, precision, unsupported
from gpukeeper.acceptance.probes.device import Device

SEED = 80
HEADS, LAYERS, LENGTH, WORDS = 8, 4, 128, 1024


def run(device: Device, params: dict[str, Any]) -> dict[str, Any]:
    refuse(params)
    turns = 2 if params.get("twice", True) else 1
    inject = params.get("inject") or {}
    with device.working(), deterministic(device) as why:
        runs = [classifier(device, params, inject if turn else {}) for turn in range(turns)]
        steps = int(params.get("steps", 30))
        small = [transformer(device, params, steps, inject if turn else {}) for turn in range(turns)] if steps else []
    return {
        "runs": runs,
        "equal": _alike(runs) and _alike(small),
        "deterministic": why or True,
        "min_fall": float(params.get("min_fall", 0.30)),
        "transformer": {"runs": small, "equal": _alike(small)} if small else None,
    }


def refuse(params: dict[str, Any]) -> None:
    """Settings with which a healthy GPU could not pass."""
    epochs, fall = int(params.get("epochs", 2)), float(params.get("min_fall", 0.30))
    if epochs < 2:
        raise ValueError(f"epochs {epochs} cannot show that the loss falls; use 2 or more")
    if not 0 < fall < 1:
        raise ValueError(f"min_fall {fall} is not between 0 and 1; 0.3 requires the loss to fall by 30 %")
    if int(params.get("classes", 4)) < 2:
        raise ValueError("one class cannot be learned: its loss is zero from the start; use 2 or more")
    if float(params.get("rate", 3e-3)) <= 0:
        raise ValueError("rate 0 or less cannot learn; 0.003 is typical")
    for name in ("samples", "features", "batch"):
        if int(params.get(name, 1)) < 1:
            raise ValueError(f"{name} must be 1 or more")


def classifier(device: Device, params: dict[str, Any], inject: dict[str, Any]) -> dict[str, Any]:
    """Two layers on clouds of points, one cloud for each class; AdamW."""
    samples, features = int(params.get("samples", 4000)), int(params.get("features", 128))
    classes, batch = int(params.get("classes", 4)), int(params.get("batch", 64))
    chance = torch.Generator().manual_seed(int(params.get("seed", SEED)))  # on the CPU: the same for every GPU
    labels = torch.randint(0, classes, (samples,), generator=chance)
    centres = torch.randn(classes, features, generator=chance) / 2
    points = (centres[labels] + torch.randn(samples, features, generator=chance)).to(device.torch)
    labels = labels.to(device.torch)
    weights = _weights(device, chance, {"in": (features, 256), "in_bias": (256,), "out": (256, classes)})
    order = [
        part.to(device.torch)
        for _ in range(int(params.get("epochs", 2)))
        for part in torch.randperm(samples, generator=chance).split(batch)
    ]

    def loss(which: Any = slice(None)) -> Any:
        hidden = torch.relu(points[which] @ weights["in"] + weights["in_bias"])
        return torch.nn.functional.cross_entropy(hidden @ weights["out"], labels[which])

    return _train(weights, [partial(loss, part) for part in order], loss, params, inject)


def transformer(device: Device, params: dict[str, Any], steps: int, inject: dict[str, Any]) -> dict[str, Any]:
    """Learns a few sentences by heart. In bf16 where the GPU has it, for the units that training uses."""
    width, batch = int(params.get("width", 512)), int(params.get("sentences", 16))
    chance = torch.Generator().manual_seed(int(params.get("seed", SEED)) + 1)
    sentences = torch.randint(0, WORDS, (batch, LENGTH + 1), generator=chance).to(device.torch)
    weights = _weights(device, chance, _shapes(width))
    half = device.cuda and unsupported(device, "bf16") is None

    def loss() -> Any:
        with torch.autocast(device.torch.type, dtype=torch.bfloat16, enabled=half):
            scores = _forward(weights, sentences[:, :-1], width)
        return torch.nn.functional.cross_entropy(scores.float().reshape(-1, WORDS), sentences[:, 1:].reshape(-1))

    return _train(weights, [loss] * steps, loss, params, inject)


def _shapes(width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"words": (WORDS, width), "places": (LENGTH, width)}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.qkv": (width, 3 * width), f"{layer}.mix": (width, width)}
        shapes |= {f"{layer}.up": (width, 4 * width), f"{layer}.down": (4 * width, width)}
    return shapes


def _forward(weights: dict[str, Any], tokens: Any, width: int) -> Any:
    """Attention is written out: fused kernels need not give the same bits twice."""
    norm = torch.nn.functional.layer_norm
    x = weights["words"][tokens] + weights["places"]
    hidden = torch.full((LENGTH, LENGTH), float("-inf"), device=tokens.device).triu(1)
    for layer in range(LAYERS):
        q, k, v = (
            part.unflatten(-1, (HEADS, width // HEADS)).transpose(1, 2)
            for part in (norm(x, (width,)) @ weights[f"{layer}.qkv"]).chunk(3, -1)
        )
        attention = (q @ k.transpose(-1, -2) / (width // HEADS) ** 0.5 + hidden).softmax(-1).to(v.dtype)
        x = x + (attention @ v).transpose(1, 2).flatten(2) @ weights[f"{layer}.mix"]
        inner = torch.nn.functional.gelu(norm(x, (width,)) @ weights[f"{layer}.up"])
        x = x + inner @ weights[f"{layer}.down"]
    return norm(x, (width,)) @ weights["words"].t()


def _weights(device: Device, chance: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    made = {}
    for name, shape in shapes.items():
        spread = (shape[0] if len(shape) > 1 and name != "words" else shape[-1]) ** -0.5
        made[name] = (torch.randn(shape, generator=chance) * spread).to(device.torch).requires_grad_()
    return made


def _train(
    weights: dict[str, Any],
    steps: list[Callable[[], Any]],
    whole: Callable[[], Any],
    params: dict[str, Any],
    inject: dict[str, Any],
) -> dict[str, Any]:
    began = time.perf_counter()
    tensors = list(weights.values())
    optimizer = torch.optim.AdamW(tensors, lr=float(params.get("rate", 3e-3)))
    with torch.no_grad():
        start = whole()
    losses, norms = [], []
    for number, step in enumerate(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = step()
        loss.backward()
        norms.append(torch.stack([tensor.grad.norm() for tensor in tensors]).norm())
        optimizer.step()
        losses.append(loss.detach())
        if inject.get("flip") and number == int(inject.get("step", len(steps) // 2)):
            _flip(tensors[0], int(inject.get("bit", 12)))
    with torch.no_grad():
        end = whole()
    first, last = float(start), float(end)
    return {
        "loss_start": first,
        "loss_end": last,
        "fall": 1 - last / first,
        "loss_bits": _hex(losses),
        "norm_bits": _hex(norms),
        "hash": digest(tensors),
        "steps": len(steps),
        "seconds": time.perf_counter() - began,
    }


def _flip(tensor: Any, bit: int) -> None:
    tensor.detach().view(torch.int32).reshape(-1)[7] ^= 1 << bit


def _hex(figures: list[Any]) -> list[str]:
    """Fetched at the end, once: asking after each step would make the GPU wait."""
    words = torch.stack(figures).float().view(torch.int32).tolist() if figures else []
    return [f"{word % (1 << 32):08x}" for word in words]


def _alike(runs: list[dict[str, Any]]) -> bool:
    return all(one[key] == runs[0][key] for one in runs for key in ("hash", "loss_bits", "norm_bits"))


@contextmanager
def deterministic(device: Device) -> Iterator[str | None]:
    """PyTorch's promise of the same bits twice; yields why it cannot be had. Put back afterwards."""
    why = _no_promise(device)
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    was = cudnn.deterministic, cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(why is None)
        cudnn.deterministic, cudnn.benchmark = True, False
        with precision("fp32", whole=True):
            yield why
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        cudnn.deterministic, cudnn.benchmark = was


def _no_promise(device: Device) -> str | None:
    """PyTorch refuses to multiply at all when this is set otherwise; then we train without its guarantee, and report
    it."""
    setting = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    if not device.cuda or setting in {":4096:8", ":16:8"}:
        return None
    return f"CUBLAS_WORKSPACE_CONFIG is {setting!r}; cuBLAS is deterministic only with :4096:8 or :16:8"
