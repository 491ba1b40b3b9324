"""Training speed of a real model: of all GPUs together, of each by itself, and how well it scales.

No table of training speeds is known that was measured rightly, so speeds are held against equal GPUs and earlier runs;
a first run's are noted. An implausible result (several GPUs faster than possible) is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode, params_of
from gpukeeper.acceptance.judging import judge, replies
from gpukeeper.acceptance.judging.replies import as_noted, interpret_ranks, named_ranks, rank_uuid, with_evidence
from gpukeeper.acceptance.record import Finding, Measurement, ProbeRequest, Remedy, Values
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade

NAME = "throughput"
MODELS = ("resnet50", "resnet18", "transformer")
DATA = ("synthetic", "fashion_mnist", "cifar10", "cifar100", "imagenet")
DEFAULTS = {"model": "resnet50", "data": "synthetic", "batch": 32, "classes": 1000, "rate": 0.01} | {
    "warmup": 50,
    "steps": 100,
}
SCALES = (8, 16, 32, 64)  # what the reference table has shares for; fewer GPUs are held to those of the next


def request(serving: CheckSize, context: CheckContext) -> ProbeRequest:
    params = params_of(NAME, serving, context)
    problems = list(invalid_params(params))
    if problems:
        raise UsageError(f"throughput: {'; '.join(problems)}. Nothing was run.")
    return ProbeRequest(probe=NAME, params=params, deadline_s=240 + 10 * serving.seconds)


def invalid_params(params: Mapping[str, Any]) -> Iterable[str]:
    wanted = {**DEFAULTS, **params}
    if wanted["model"] not in MODELS:
        yield f"unknown model {wanted['model']!r}; valid values: {', '.join(MODELS)}"
    if wanted["data"] not in DATA:
        yield f"unknown data set {wanted['data']!r}; valid values: {', '.join(DATA)}"
    if wanted["data"] in DATA[1:] and not wanted.get("data_dir"):
        yield f"{wanted['data']} needs data_dir, the directory of the data set; nothing is downloaded"
    if wanted["model"] == "transformer" and wanted["data"] in DATA[1:]:
        yield f"the transformer reads tokens and {wanted['data']} contains images; use a ResNet, or data=synthetic"
    for name, least in (("batch", 1), ("warmup", 1), ("steps", 2), ("classes", 2)):
        if wanted[name] < least:
            yield f"{name} {wanted[name]} is too small; use {least} or more"


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    return interpret_ranks(NAME, trial, context, _interpret)


def _interpret(results: Mapping[int, Values], context: CheckContext) -> tuple[Finding, ...]:
    """Every rank's record has the speed of all ranks: it is taken from one, never added up."""
    record = results[0]
    return (
        *_samples(record, context),
        *_local(results, context),
        *_scaling(record, context),
        *_loss(results, context),
    )


def _samples(record: Values, context: CheckContext) -> tuple[Finding, ...]:
    per_step = float(record["global_batch_size"])
    rates = tuple(1e3 * per_step / one for one in _tens(replies.figures(record["step_ms"])))
    measurement = Measurement(
        check=NAME,
        metric="samples",
        gpu=None,
        unit="samples/s",
        method=f"{record['method']}/n{record['world_size']}",
        samples=rates,
    )
    evidence = {
        key: value for key, value in record.items() if key not in ("step_ms", "local_step_ms", "rank", "local_rank")
    }
    return with_evidence(as_noted(judge.assess([measurement], context)), evidence)


def _local(results: Mapping[int, Values], context: CheckContext) -> tuple[Finding, ...]:
    """Each GPU by itself, all at once: with the exchange of gradients all wait for the slowest."""
    measurements = [
        Measurement(
            check=NAME,
            metric="step",
            gpu=rank_uuid(rank, context),
            unit="ms",
            method=f"{result['method']}/local",
            samples=_tens(replies.figures(result["local_step_ms"]), 4),
            lower_is_better=True,
        )
        for rank, result in results.items()
    ]
    return as_noted(judge.assess(measurements, context))


def _tens(steps: tuple[float, ...], size: int = 10) -> tuple[float, ...]:
    """Means of a few steps: single ones jump with the loader and the clock of the GPU."""
    return tuple(sum(steps[at : at + size]) / size for at in range(0, len(steps) - size + 1, size)) or steps


def scale(world: int) -> int:
    return next((most for most in SCALES if world <= most), SCALES[-1])


def _scaling(record: Values, context: CheckContext) -> tuple[Finding, ...]:
    """What n GPUs do, as a share of n times one."""
    world, alone = int(record["world_size"]), record.get("alone_samples_per_second")
    if world < 2:
        return ()
    if not alone:
        return (judge.missing(NAME, "scaling", None, "one GPU alone was not measured; do not turn off `alone`"),)
    share = float(record["throughput_samples_per_second"]) / (world * float(alone))
    measurement = Measurement(
        check=NAME,
        metric="scaling",
        gpu=None,
        unit="share",
        method=f"{record['method']}/n{scale(world)}",
        samples=(share,),
    )
    found = as_noted(judge.assess([measurement], context))
    return tuple(_explained(one, record, context) for one in found)


def _explained(finding: Finding, record: Values, context: CheckContext) -> Finding:
    if context.small:
        words = (
            f"throughput scaling: {judge.amount(finding.value or 0.0, 'share')}. Not judged, since the ranks share"
            " the CPU's cores."
        )
        return msgspec.structs.replace(
            finding,
            verdict=Grade.SKIPPED,
            code=judge.code_of(NAME, "noted"),
            message=words,
            action=Remedy.NONE,
            confirm=False,
        )
    if finding.verdict not in (Grade.WARN, Grade.FAIL):
        return finding
    why = (
        f" The gradient exchange takes {float(record['nccl_overhead_ms']):.1f} of"
        f" {float(record['avg_step_time_ms']):.1f} ms of a step: check collectives, links and the load of the CPU."
    )
    return msgspec.structs.replace(finding, message=f"{finding.message}{why}")


def _loss(results: Mapping[int, Values], context: CheckContext) -> tuple[Finding, ...]:
    """Speed of nonsense is no speed."""
    odd = [rank for rank, result in results.items() if not math.isfinite(float(result["loss"]))]
    return tuple(
        Finding(
            check=NAME,
            metric="loss",
            gpu=rank_uuid(rank, context),
            verdict=Grade.FAIL,
            code=judge.code_of(NAME, "loss-not-a-number"),
            message=f"The loss on {named_ranks([rank], context)} is {results[rank]['loss']}. The same steps give a"
            " finite loss on healthy GPUs: see exact and training.",
            action=Remedy.CONTACT_VENDOR,
            confirm=True,
        )
        for rank in odd
    )


CHECK = Check(
    name=NAME,
    title="Training speed",
    proves="A real model trains as fast on each GPU as on its peers, as fast as in earlier runs, and scales from one"
    " GPU to all.",
    cannot="Has no reference for a good machine: a first run on one GPU is reported, not judged. Synthetic data does"
    " not cover storage and data loaders.",
    how=RunMode.TOGETHER,
    servings=(
        CheckSize(
            depth=1,
            seconds=35,
            worth=24,
            what="ResNet-50 on synthetic images, batch 32, 50 warm-up steps and 100 measured",
            params=DEFAULTS,
            small={"model": "resnet18", "image": 32, "batch": 4, "classes": 10, "warmup": 1, "steps": 4},
        ),
        CheckSize(
            depth=2,
            seconds=120,
            worth=36,
            what="ResNet-50 on synthetic images, batch 32, 50 warm-up steps and 1,000 measured",
            params={**DEFAULTS, "steps": 1000},
            small={"model": "resnet18", "image": 32, "batch": 4, "classes": 10, "warmup": 1, "steps": 4},
        ),
    ),
    request=request,
    interpret=interpret,
    slices=False,
)
