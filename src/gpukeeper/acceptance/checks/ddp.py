"""Data-parallel training over all GPUs: the loss falls, and all of them hold the same parameters after every step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode, params_of
from gpukeeper.acceptance.judging.judge import percent
from gpukeeper.acceptance.judging.replies import interpret_ranks, named_ranks, rank_uuid
from gpukeeper.acceptance.record import Finding, ProbeRequest, Remedy, Values
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Grade

NAME = "ddp"
MIN_FALL = 0.20
DEFAULTS = {
    "epochs": 2,
    "batch": 256,
    "samples": 4000,
    "features": 128,
    "classes": 4,
    "rate": 3e-3,
    "min_fall": MIN_FALL,
}
METHOD = "ddp/adamw/seed41"


def request(serving: CheckSize, context: CheckContext) -> ProbeRequest:
    params = params_of(NAME, serving, context)
    problems = list(invalid_params(params))
    if problems:
        raise UsageError(f"ddp: {'; '.join(problems)}. Nothing was run.")
    return ProbeRequest(probe=NAME, params=params, deadline_s=180 + 5 * serving.seconds)


def invalid_params(params: Mapping[str, Any]) -> Iterable[str]:
    """Settings that no healthy machine could pass with, or any would; refused before anything runs."""
    wanted = {**DEFAULTS, **params}
    if wanted["epochs"] < 2:
        yield f"epochs {wanted['epochs']} cannot show that the loss falls; use 2 or more"
    if not 0 < wanted["min_fall"] < 1:
        yield f"min_fall {wanted['min_fall']} is not between 0 and 1; 0.2 requires the loss to fall by 20 %"
    if wanted["classes"] < 2:
        yield "one class cannot be learned, since its loss is zero from the start; use 2 or more"
    if not 0 < wanted["batch"] <= wanted["samples"]:
        yield f"batch {wanted['batch']} of {wanted['samples']} samples gives no step; use 1 to {wanted['samples']}"
    if wanted["rate"] <= 0:
        yield f"rate {wanted['rate']} cannot learn; 0.003 is typical"


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    return interpret_ranks(NAME, trial, context, _interpret)


def _interpret(results: Mapping[int, Values], context: CheckContext) -> tuple[Finding, ...]:
    return (*_parameters(results, context), _loss(results[0]))


def _parameters(results: Mapping[int, Values], context: CheckContext) -> tuple[Finding, ...]:
    """Any rank that saw a difference counts: the wrong one may report no difference. No confirmation of a difference: a
    second try that shows none does not undo the first."""
    differing = next((one for one in results.values() if one["hashes_equal"] is not True), None)
    evidence = {"digests": {str(rank): one.get("digest") for rank, one in results.items()}}
    parameters = partial(Finding, check=NAME, metric="parameters", method=METHOD, evidence=evidence)
    if differing is None:
        steps = results[0]["steps"]
        message = f"All {len(results)} ranks had bit-identical parameters after each of {steps} steps."
        return (parameters(verdict=Grade.PASS, code="ddp-parameters-ok", message=message),)
    odd, step = [int(rank) for rank in differing["differing"]], differing.get("first_step")
    if not differing.get("majority"):
        message = (
            f"From step {step} on, {named_ranks(odd, context)} had different parameters, and there is no majority"
            " that shows which is wrong. All get the same gradients, so one corrupts data: see exact and training,"
            " and test each with a third GPU."
        )
        action = Remedy.CONTACT_VENDOR
        return (parameters(verdict=Grade.FAIL, code="ddp-ranks-differ", message=message, action=action),)
    return tuple(
        parameters(
            gpu=rank_uuid(rank, context),
            verdict=Grade.FAIL,
            code="ddp-rank-differs",
            message=f"From step {step} on, {named_ranks([rank], context)} had different parameters from the"
            f" {len(results) - len(odd)} ranks that agree. All get the same gradients, so it corrupts data. Take it"
            " out of service.",
            action=Remedy.REPLACE_GPU,
        )
        for rank in odd
    )


def _loss(result: Values) -> Finding:
    start, end, fall = (float(result[name]) for name in ("loss_start", "loss_end", "fall"))
    least = float(result.get("min_fall", MIN_FALL))
    good = fall >= least  # false for not-a-number
    progress = f"from {start:.4g} to {end:.4g} in {result['steps']} steps, on the same data"
    bad = f"The loss went {progress}; it must fall by {percent(least)}, as it does on healthy GPUs. Test again."
    return Finding(
        check=NAME,
        metric="loss",
        verdict=Grade.PASS if good else Grade.FAIL,
        code="ddp-loss-ok" if good else "ddp-loss-did-not-fall",
        message=f"The loss fell by {percent(fall)}, {progress}." if good else bad,
        action=Remedy.NONE if good else Remedy.CONTACT_VENDOR,
        value=fall if math.isfinite(fall) else None,
        unit="share",
        method=METHOD,
        samples=(fall,) if math.isfinite(fall) else (),
        floor=least,
        confirm=not good,
    )


CHECK = Check(
    name=NAME,
    title="Training over all GPUs",
    proves="All GPUs train one model together: its loss falls by 20 %, and after every step all of them have"
    " bit-identical parameters.",
    cannot="Says little about performance (throughput does), and covers only a few dozen steps.",
    how=RunMode.TOGETHER,
    servings=(
        CheckSize(
            depth=0,
            seconds=12,
            worth=36,
            what="two epochs, batches of 256, parameters compared after every step",
            params=DEFAULTS,
            small={"samples": 1024, "batch": 128},
        ),
        CheckSize(
            depth=1,
            seconds=16,
            worth=42,
            what="ten epochs, batches of 256, parameters compared after every step",
            params={**DEFAULTS, "epochs": 10},
            small={"samples": 1024, "batch": 128, "epochs": 3},
        ),
    ),
    request=request,
    interpret=interpret,
    least_gpus=2,
    slices=False,
)
