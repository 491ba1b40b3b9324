"""Data-parallel training over all ranks: does the loss fall, and do all ranks hold equal parameters after every step?

The gradients are averaged by a collective, so parameters that differ in one bit anywhere show that a rank computed or
received something else than the others. Ranks are named by the majority; of two that differ, it is unknown which.

params: epochs, batch (of each rank), samples (of each rank), features, classes, rate, min_fall.
inject: {"wrong_rank": n} flips one bit of one parameter there in the middle, {"slow_rank": n, "slow_s": s} delays that
rank in every step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpukeeper.acceptance.probes.ranks import BadSetting, RankGroup, begin, delay

_SEED = 41
_APART = 0.2  # how far classes lie from each other: to be learned, not to be seen at a glance


def run(device: Any, group: RankGroup, params: dict[str, Any]) -> dict[str, Any]:
    wanted = settings(params)
    began = time.perf_counter()
    with device.working():
        answer = _train(device, group, wanted, params.get("inject") or {})
    return {**answer, "seconds": time.perf_counter() - began}


def settings(params: dict[str, Any]) -> dict[str, Any]:
    """The requested parameters with defaults; refused if they could never pass, or always would."""
    wanted = {"epochs": 2, "batch": 256, "samples": 4000, "features": 128, "classes": 4, "rate": 3e-3, "min_fall": 0.20}
    wanted |= {name: params[name] for name in wanted if params.get(name) is not None}
    if wanted["epochs"] < 2:
        raise BadSetting(f"epochs={wanted['epochs']}: at least 2 are needed to show that the loss falls.")
    if not 0 < wanted["min_fall"] < 1:
        raise BadSetting(f"min_fall={wanted['min_fall']}: not between 0 and 1, such as 0.2.")
    if wanted["batch"] > wanted["samples"]:
        raise BadSetting(f"batch={wanted['batch']} with {wanted['samples']} samples per rank gives no step.")
    if wanted["classes"] < 2 or wanted["features"] < 1:
        raise BadSetting("At least 2 classes and 1 feature are needed.")
    return wanted


def _train(device: Any, group: RankGroup, wanted: dict[str, Any], inject: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from gpukeeper.acceptance.probes.arithmetic import digest

    inputs, labels = _samples(device, group, wanted)
    inner = _network(wanted).to(device.torch)
    model = DistributedDataParallel(inner, device_ids=[device.torch.index] if device.cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=wanted["rate"])
    loss_of = nn.CrossEntropyLoss()
    batch, each = wanted["batch"], wanted["samples"] // wanted["batch"]
    steps = wanted["epochs"] * each
    loss_start = _mean_loss(inner, loss_of, inputs, labels)
    digests, local_ms = [], []
    for step in range(steps):
        part = slice(step % each * batch, step % each * batch + batch)
        optimizer.zero_grad(set_to_none=True)
        began = time.perf_counter()
        loss = loss_of(model(inputs[part]), labels[part])  # this rank's own work; the others are met in `backward`
        delay(inject, group.rank)
        device.synchronize()
        local_ms.append(1e3 * (time.perf_counter() - began))
        begin(group, f"training step {step}")
        loss.backward()
        optimizer.step()
        if inject.get("wrong_rank") == group.rank and step == steps // 2:
            _flip(next(inner.parameters()))
        digests.append(digest(inner.parameters()))
    loss_end = _mean_loss(inner, loss_of, inputs, labels)
    fall = (loss_start - loss_end) / loss_start if loss_start else 0.0
    return {
        "epochs": wanted["epochs"],
        "batch_size": batch,
        "samples": wanted["samples"],
        "steps": steps,
        "loss_start": loss_start,
        "loss_end": loss_end,
        "fall": fall,
        "min_fall": wanted["min_fall"],
        "digest": digests[-1],
        "local_ms": local_ms,
        **compare(_all_digests(group, digests)),
    }


def _network(wanted: dict[str, Any]) -> Any:
    """The same weights on every rank."""
    import torch
    from torch import nn

    torch.manual_seed(_SEED)
    return nn.Sequential(
        nn.Linear(wanted["features"], 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, wanted["classes"])
    )


def compare(by_rank: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Which ranks left the others, at which step. Without a majority all of them are named."""
    for step, there in enumerate(zip(*by_rank, strict=True)):
        (usual, votes), *others = Counter(there).most_common()
        if others:
            tied = votes * 2 <= len(there)
            differing = [rank for rank, one in enumerate(there) if tied or one != usual]
            return {"hashes_equal": False, "differing": differing, "first_step": step, "majority": not tied}
    return {"hashes_equal": True, "differing": [], "first_step": None, "majority": True}


def _samples(device: Any, group: RankGroup, wanted: dict[str, Any]) -> tuple[Any, Any]:
    """Another part for each rank, of classes that can be distinguished; drawn on the CPU, so the same anywhere."""
    import torch

    centers = torch.randn(wanted["classes"], wanted["features"], generator=torch.Generator().manual_seed(_SEED))
    own = torch.Generator().manual_seed(_SEED + 1 + group.rank)
    labels = torch.randint(wanted["classes"], (wanted["samples"],), generator=own)
    inputs = _APART * centers[labels] + torch.randn(wanted["samples"], wanted["features"], generator=own)
    return inputs.to(device.torch), labels.to(device.torch)


def _mean_loss(model: Any, loss_of: Any, inputs: Any, labels: Any) -> float:
    """Of all samples of all ranks, on the same data before and after."""
    import torch
    import torch.distributed as dist

    with torch.no_grad():
        loss = loss_of(model(inputs), labels).to(torch.float64)
    dist.all_reduce(loss)
    return float(loss.item()) / int(dist.get_world_size())


def _all_digests(group: RankGroup, mine: Sequence[str]) -> list[list[str]]:
    """Through the store, not through a collective: what compares must not depend on what is compared."""
    group.store.set(f"digests/{group.rank}", ",".join(mine))
    names = [f"digests/{rank}" for rank in range(group.world)]
    group.store.wait(names, group.timeout)
    return [group.store.get(name).decode().split(",") for name in names]


def _flip(parameter: Any) -> None:
    import torch

    bits = parameter.data.view(torch.int32).reshape(-1)
    bits[bits.numel() // 2] ^= 1
