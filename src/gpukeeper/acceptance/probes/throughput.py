"""Training speed of a real model over all ranks: samples in a second, counted once for all of them.

Warm-up steps end, and are waited for, before the clock starts. Alone, the first rank shows what one GPU does while the
others wait without computing; steps without exchanging gradients show what each GPU does by itself, which is where a
slow one shows: with the exchange all of them wait for it.

params: model, data, data_dir, batch (of each rank), classes, rate, warmup, steps, dtype (fp32: as PyTorch
does it, convolutions in tf32; or bf16), image, sequence, alone.
inject: {"slow": share, "wrong_rank": n} works that much more in every step of that rank (of all without it),
{"nan": true} breaks a weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gpukeeper.acceptance.probes.ranks import BadSetting, RankGroup, begin

_SEED = 43
_LOCAL_STEPS = 20
_ASK_EVERY = 10  # steps, for how busy the GPU is


@dataclass(frozen=True)
class ThroughputParams:
    model: str = "resnet50"
    data: str = "synthetic"
    data_dir: str | None = None
    batch: int = 32
    classes: int = 1000
    rate: float = 0.01
    warmup: int = 50
    steps: int = 100
    dtype: str = "fp32"
    image: int | None = None  # pixels each way; None: as the data is, 224 for made-up images
    sequence: int = 512  # tokens, of the transformer
    alone: bool = True  # also one rank by itself, for the scaling


def run(device: Any, group: RankGroup, params: dict[str, Any]) -> dict[str, Any]:
    wanted = settings(params)
    with device.working():
        return _measure(device, group, wanted, params.get("inject") or {})


def settings(params: dict[str, Any]) -> ThroughputParams:
    names = ThroughputParams.__dataclass_fields__
    wanted = ThroughputParams(**{name: params[name] for name in names if params.get(name) is not None})
    least = {"batch": 1, "classes": 2, "warmup": 1, "steps": 2, "sequence": 1}
    for name, value in least.items():
        if getattr(wanted, name) < value:
            raise BadSetting(f"{name}={getattr(wanted, name)}: at least {value}.")
    if wanted.sequence > ThroughputParams.sequence:
        raise BadSetting(f"sequence={wanted.sequence}: at most {ThroughputParams.sequence}.")
    if wanted.dtype not in ("fp32", "bf16"):
        raise BadSetting(f"dtype={wanted.dtype}: fp32 or bf16.")
    if wanted.model == "transformer" and wanted.data != "synthetic":
        raise BadSetting(
            f"The transformer reads tokens, and {wanted.data} contains images; use a ResNet, or synthetic."
        )
    return wanted


def _measure(device: Any, group: RankGroup, wanted: ThroughputParams, inject: dict[str, Any]) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    from gpukeeper.acceptance.probes import models

    batches = _batches(device, group, wanted)
    inner = _model(device, wanted, inject)
    trainer = _Trainer(device, inner, wanted, batches, _extra(group, inject))
    alone = _alone(group, trainer) if wanted.alone and group.world > 1 else None
    ids = [device.torch.index] if device.cuda else None
    trainer.model = DistributedDataParallel(inner, device_ids=ids) if group.world > 1 else inner
    begin(group, "training, first steps")
    trainer.steps(wanted.warmup)
    begin(group, "training, measured steps")
    timed = trainer.timed(wanted.steps, ask=True)
    begin(group, "training without exchange")
    local = trainer.timed(min(_LOCAL_STEPS, wanted.steps), exchange=False)
    return _record(device, group, wanted, timed, local, alone) | {
        "parameters": models.parameters(inner),
        "loss": trainer.last_loss(),
    }


def _record(
    device: Any, group: RankGroup, wanted: ThroughputParams, timed: TimedSteps, local: TimedSteps, alone: float | None
) -> dict[str, Any]:
    """The time of the slowest rank is the time of all of them."""
    seconds, local_seconds = (_slowest(device, group, one.seconds) for one in (timed, local))
    samples = wanted.batch * group.world * wanted.steps
    step = seconds / wanted.steps
    exchange = max(0.0, step - local_seconds / len(local.step_ms)) if group.world > 1 else 0.0
    return {
        "model": wanted.model,
        "world_size": group.world,
        "batch_size_per_gpu": wanted.batch,
        "global_batch_size": wanted.batch * group.world,
        "total_time_seconds": seconds,
        "average_step_time_seconds": step,
        "throughput_samples_per_second": samples / seconds,
        "total_samples": samples,
        "device": device.name,
        "backend": group.place.backend,
        "nccl_overhead_ms": 1e3 * exchange,
        "gpu_utilization_pct": timed.utilisation,
        "avg_step_time_ms": 1e3 * step,
        "step_ms": timed.step_ms,
        "local_step_ms": local.step_ms,
        "alone_samples_per_second": alone,
        "data": wanted.data,
        "data_missing": None,
        "dtype": wanted.dtype,
        "classes": wanted.classes,
        "rate": wanted.rate,
        "image": wanted.image,
        "warmup_steps": wanted.warmup,
        "steps": wanted.steps,
        "method": f"train/{wanted.model}/{wanted.data}/b{wanted.batch}/{wanted.dtype}/{_shape(wanted)}",
    }


def _shape(wanted: ThroughputParams) -> str:
    """What a sample is decides how fast it is: part of the method."""
    return f"s{wanted.sequence}" if wanted.model == "transformer" else f"i{wanted.image or 'own'}"


def _slowest(device: Any, group: RankGroup, seconds: float) -> float:
    import torch
    import torch.distributed as dist

    if group.world == 1:
        return seconds
    mine = torch.tensor([seconds], dtype=torch.float64, device=device.torch)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return float(mine.item())


def _alone(group: RankGroup, trainer: _Trainer) -> float | None:
    """What one GPU does while the others do nothing: they wait at the store; a collective would keep them busy."""
    if group.rank == 0:
        wanted = trainer.wanted
        trainer.steps(wanted.warmup)
        timed = trainer.timed(wanted.steps)
        group.store.set("alone", repr(wanted.batch * wanted.steps / timed.seconds))
    group.store.wait(["alone"], group.timeout)
    return float(group.store.get("alone").decode())


# Training


@dataclass(frozen=True)
class TimedSteps:
    seconds: float
    step_ms: list[float]
    utilisation: float | None


class _Trainer:
    def __init__(
        self, device: Any, model: Any, wanted: ThroughputParams, batches: Iterator[tuple[Any, Any]], extra: float
    ) -> None:
        import torch

        self._device, self.wanted, self._batches, self._extra = device, wanted, batches, extra
        self.model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=wanted.rate, momentum=0.9)
        self._loss = torch.nn.CrossEntropyLoss()
        self._last: Any = None

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()
        self._device.synchronize()

    def timed(self, count: int, *, exchange: bool = True, ask: bool = False) -> TimedSteps:
        """Wall clock over all steps, all of them done before and after; each step by events on the GPU."""
        busy = _Busy(self._device) if ask else None
        without = nullcontext() if exchange or not hasattr(self.model, "no_sync") else self.model.no_sync()
        self._device.synchronize()
        marks = [self._mark()]
        began = time.perf_counter()
        with without:
            for step in range(count):
                self._step()
                marks.append(self._mark())
                if busy and step % _ASK_EVERY == _ASK_EVERY - 1:
                    busy.ask()
        self._device.synchronize()
        seconds = time.perf_counter() - began
        return TimedSteps(seconds, self._spans(marks), busy.mean() if busy else None)

    def last_loss(self) -> float:
        return float(self._last.item())

    def _step(self) -> None:
        inputs, labels = next(self._batches)
        self._optimizer.zero_grad(set_to_none=True)
        self._last = self._backward(inputs, labels)
        if self._extra:
            more = max(1, round(len(inputs) * self._extra))
            self._forward(inputs[:more], labels[:more])
        self._optimizer.step()

    def _backward(self, inputs: Any, labels: Any) -> Any:
        loss = self._forward(inputs, labels)
        loss.backward()
        return loss.detach()

    def _forward(self, inputs: Any, labels: Any) -> Any:
        import torch

        low = self.wanted.dtype == "bf16"
        with torch.autocast(self._device.torch.type, torch.bfloat16, enabled=low):
            return self._loss(self.model(inputs), labels)

    def _mark(self) -> Any:
        import torch

        if not self._device.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _spans(self, marks: list[Any]) -> list[float]:
        pairs = pairwise(marks)
        if self._device.cuda:
            return [float(first.elapsed_time(last)) for first, last in pairs]
        return [1e3 * (last - first) for first, last in pairs]


class _Busy:
    """GPU use as reported by the driver. None if it cannot be queried: no figure is better than an invented one."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._seen: list[float] | None = [] if device.cuda else None

    def ask(self) -> None:
        import torch

        if self._seen is None:
            return
        try:
            self._seen.append(float(torch.cuda.utilization(self._device.torch)))
        except Exception:  # no NVML beside this PyTorch, or it is not allowed here
            self._seen = None

    def mean(self) -> float | None:
        return sum(self._seen) / len(self._seen) if self._seen else None


def _model(device: Any, wanted: ThroughputParams, inject: dict[str, Any]) -> Any:
    import torch

    from gpukeeper.acceptance.probes import models

    torch.manual_seed(_SEED)
    model = models.build(wanted.model, wanted.classes).to(device.torch)
    if inject.get("nan"):
        next(model.parameters()).data.view(-1)[0] = float("nan")
    return model


def _extra(group: RankGroup, inject: dict[str, Any]) -> float:
    return float(inject.get("slow") or 0) if inject.get("wrong_rank", group.rank) == group.rank else 0.0


# What it trains with


def _batches(device: Any, group: RankGroup, wanted: ThroughputParams) -> Iterator[tuple[Any, Any]]:
    if wanted.data == "synthetic":
        return _made_up(device, group, wanted)
    from gpukeeper.acceptance.probes import datasets

    images = datasets.load(wanted.data, wanted.data_dir, part=group.rank, parts=group.world)
    if len(images.labels) < wanted.batch:
        raise BadSetting(f"batch={wanted.batch}, but {wanted.data} has {len(images.labels)} images for this rank.")
    if max(images.labels) >= wanted.classes:
        raise BadSetting(f"classes={wanted.classes}, but {wanted.data} has {max(images.labels) + 1}.")
    return _read(device, images, wanted)


def _made_up(device: Any, group: RankGroup, wanted: ThroughputParams) -> Iterator[tuple[Any, Any]]:
    """One batch, on the device, again and again: what is timed is training, not reading."""
    import torch

    from gpukeeper.acceptance.probes import models

    source = torch.Generator().manual_seed(_SEED + group.rank)
    if wanted.model == "transformer":
        tokens = torch.randint(wanted.classes, (wanted.batch, wanted.sequence + 1), generator=source)
        batch = tokens[:, :-1], tokens[:, 1:]
    else:
        side = wanted.image or models.IMAGE
        images = torch.randn(wanted.batch, 3, side, side, generator=source)
        batch = images, torch.randint(wanted.classes, (wanted.batch,), generator=source)
    inputs, labels = (one.contiguous().to(device.torch) for one in batch)
    while True:
        yield inputs, labels


def _read(device: Any, images: Any, wanted: ThroughputParams) -> Iterator[tuple[Any, Any]]:
    """From the machine's memory to the GPU in every step, as training does; grey images become three equal channels."""
    import torch
    from torch.nn.functional import interpolate

    shape = (-1, images.channels, images.height, images.width)
    pixels = torch.frombuffer(images.pixels, dtype=torch.uint8).view(shape)
    labels = torch.tensor(images.labels)
    pinned: Callable[[Any], Any] = (lambda one: one.pin_memory()) if device.cuda else (lambda one: one)
    source = torch.Generator().manual_seed(_SEED)
    while True:
        for chosen in torch.randperm(len(labels), generator=source).split(wanted.batch):
            if len(chosen) < wanted.batch:
                break
            inputs = pinned(pixels[chosen]).to(device.torch, non_blocking=True).float().div(127.5).sub(1)
            inputs = inputs.expand(-1, 3, -1, -1) if images.channels == 1 else inputs
            inputs = interpolate(inputs, size=(wanted.image, wanted.image)) if wanted.image else inputs
            yield inputs.contiguous(), pinned(labels[chosen]).to(device.torch, non_blocking=True)
