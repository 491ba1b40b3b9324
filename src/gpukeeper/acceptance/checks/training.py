"""Whether each GPU trains: the loss falls, twice alike to the last bit, and like its equals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode, params_of, refuse, too_little
from gpukeeper.acceptance.judging import replies
from gpukeeper.acceptance.judging.judge import missing
from gpukeeper.acceptance.record import Finding, ProbeRequest, Remedy, Values
from gpukeeper.model.gpu import Grade

NAME = "training"
MIN_FALL = 0.30
DEFAULTS = {"samples": 4000, "features": 128, "classes": 4, "rate": 3e-3, "batch": 64, "min_fall": MIN_FALL}
SMALL = {"steps": 4, "width": 64, "sentences": 2}
METHOD = "training/adamw/seed80"


def request(serving: CheckSize, context: CheckContext) -> ProbeRequest:
    params = params_of(NAME, serving, context)
    refuse(NAME, invalid_params(params))
    return ProbeRequest(probe=NAME, params=params, deadline_s=60 + 10 * serving.seconds)


def invalid_params(params: Mapping[str, Any]) -> Iterable[str]:
    """Settings that no healthy GPU could pass with, or any would; refused before anything runs."""
    if float(params.get("epochs", 2)) < 2:
        yield f"epochs {params['epochs']} cannot show that the loss falls; use 2 or more"
    if not 0 < float(params.get("min_fall", MIN_FALL)) < 1:
        yield f"min_fall {params['min_fall']} is not between 0 and 1; 0.3 requires the loss to fall by 30 %"
    if float(params.get("classes", 4)) < 2:
        yield "one class cannot be learned, since its loss is zero from the start; use 2 or more"
    if float(params.get("rate", 3e-3)) <= 0:
        yield f"rate {params['rate']} cannot learn; 0.003 is typical"
    yield from too_little(params, samples=100, features=2, batch=1, steps=1, width=64, sentences=1)


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    wanted = params_of(NAME, trial.serving, context).get("min_fall", MIN_FALL)
    least = float(wanted) if isinstance(wanted, int | float) else MIN_FALL
    results, findings = replies.read_each(NAME, trial, lambda gpu, result: _of(gpu, result, least))
    hashes = {gpu: digest for gpu, result in results.items() if (digest := _digest(result))}
    votes = replies.against_majority(hashes, context)
    return (*findings, *(_vote(gpu, stand, n, results[gpu]) for gpu, (stand, n) in votes.items()))


def _of(gpu: str, result: Values, least: float) -> Iterable[Finding]:
    yield _loss(gpu, result["runs"], least)
    yield _repeat(gpu, result)
    yield from _not_finite(gpu, _transformer(result))


def _loss(gpu: str, runs: list[Mapping[str, Any]], least: float) -> Finding:
    falls = replies.figures([run["fall"] for run in runs])
    start, end = float(runs[0]["loss_start"]), float(runs[0]["loss_end"])
    worst = min(falls) if all(math.isfinite(fall) for fall in falls) else math.nan
    good = worst >= least  # false for not-a-number
    progress = f"from {start:.4g} to {end:.4g} in {runs[0]['steps']} steps, on the same data"
    bad = (
        f"The loss went {progress}; it must fall by {least:.0%}. The same steps converge on every healthy GPU. Test"
        " again; if it persists, take it out of service."
    )
    return Finding(
        check=NAME,
        metric="loss",
        gpu=gpu,
        verdict=Grade.PASS if good else Grade.FAIL,
        code="training-loss-ok" if good else "training-loss-did-not-fall",
        message=f"The loss fell by {worst:.0%}, {progress}." if good else bad,
        action=Remedy.NONE if good else Remedy.REPLACE_GPU,
        value=worst if math.isfinite(worst) else None,
        unit="share",
        method=METHOD,
        samples=tuple(fall for fall in falls if math.isfinite(fall)),
        floor=least,
        confirm=not good,
    )


def _not_finite(gpu: str, runs: list[Mapping[str, Any]]) -> Iterable[Finding]:
    """The transformer's losses: no figure twice alike, to the bit, is still no figure. Reported only in that case."""
    losses = [float(run[name]) for run in runs for name in ("loss_start", "loss_end")]
    if not all(math.isfinite(loss) for loss in losses):
        yield Finding(
            check=NAME,
            metric="transformer",
            gpu=gpu,
            verdict=Grade.FAIL,
            code="training-loss-not-finite",
            message=f"The transformer's loss went from {losses[0]:.4g} to {losses[1]:.4g}. The same steps give a"
            " finite loss on every healthy GPU. Test again; if it persists, take it out of service.",
            action=Remedy.REPLACE_GPU,
            confirm=True,
        )


def _repeat(gpu: str, result: Values) -> Finding:
    """No confirmation: two runs that differ are already two tries."""
    runs, promised = result["runs"], result.get("deterministic")
    if len(runs) < 2:
        return missing(NAME, "repeat", gpu, "it trained only once, so nothing was compared; do not turn off `twice`")
    repeat = partial(Finding, check=NAME, metric="repeat", gpu=gpu, method=METHOD, evidence=_evidence(result))
    if result["equal"] is True and promised is True:
        message = f"Trained twice from one seed: losses, gradients and weights are bit-identical ({runs[0]['hash']})."
        return repeat(verdict=Grade.PASS, code="training-repeat-ok", message=message)
    if promised is not True:
        why = f"results are not deterministic here ({promised}), so two runs cannot be compared"
        return missing(NAME, "repeat", gpu, why)
    message = (
        f"Trained twice from one seed with different results: {_first_difference(result)}. Deterministic kernels give"
        " bit-identical results on a healthy GPU, so this one corrupts data. Take it out of service."
    )
    action = Remedy.REPLACE_GPU
    return repeat(verdict=Grade.FAIL, code="training-not-deterministic", message=message, action=action)


def _first_difference(result: Values) -> str:
    """The step at which the two runs differ first."""
    for what, runs in (("classifier", result["runs"]), ("transformer", _transformer(result))):
        if len(runs) < 2:
            continue
        pairs = zip(runs[0].get("loss_bits", ()), runs[1].get("loss_bits", ()), strict=False)
        step = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
        if step is not None:
            return f"the {what}'s losses differ from step {step}"
        if runs[0].get("hash") != runs[1].get("hash"):
            return f"the {what}'s weights differ ({runs[0].get('hash')}, {runs[1].get('hash')})"
    return "the gradients differ"


def _vote(gpu: str, stand: str, n: int, result: Values) -> Finding:
    peers = partial(Finding, check=NAME, metric="peers", gpu=gpu, method=METHOD, evidence=_evidence(result))
    if stand == "like":
        message = f"Its weights after training are bit-identical to those of the {n - 1} other GPUs of its model."
        return peers(verdict=Grade.PASS, code="training-peers-ok", message=message)
    if stand == "odd":
        message = (
            f"Its weights after training with the same seed and steps differ from those of most of {n} identical"
            " GPUs. It corrupts data reproducibly. Take it out of service."
        )
        code, action = "training-differs-from-peers", Remedy.REPLACE_GPU
        return peers(verdict=Grade.FAIL, code=code, message=message, action=action)
    message = (
        f"The weights of {n} identical GPUs differ after the same training, and there is no majority that shows which"
        " one is wrong. Test them with a third GPU, or with exact and --within 30m."
    )
    return peers(verdict=Grade.WARN, code="training-split", message=message, action=Remedy.RETEST)


def _digest(result: Values) -> str | None:
    """All hashes of a GPU whose runs agree; a GPU whose runs differ does not count."""
    if result.get("equal") is not True or result.get("deterministic") is not True or not result.get("runs"):
        return None
    return " ".join(str(runs[0].get("hash")) for runs in (result["runs"], _transformer(result)) if runs)


def _transformer(result: Values) -> list[Mapping[str, Any]]:
    return list(replies.mapping(result.get("transformer")).get("runs") or ())


def _evidence(result: Values) -> dict[str, Any]:
    return {"hashes": [run.get("hash") for run in (*result["runs"], *_transformer(result))]}


CHECK = Check(
    name=NAME,
    title="Deterministic training",
    proves="A classifier learns (its loss falls by 30 %), a small transformer runs, and two runs with the same seed"
    " are bit-identical: on this GPU, and on all GPUs of its model.",
    cannot="A falling loss alone proves little: training often continues with corrupted weights. Covers only a minute"
    " of training.",
    how=RunMode.EACH,
    servings=(
        CheckSize(
            depth=0,
            seconds=6,
            worth=60,
            what="two epochs of the classifier and 30 steps of a transformer, twice",
            params={**DEFAULTS, "epochs": 2, "steps": 30, "twice": True},
            small=SMALL,
        ),
        CheckSize(
            depth=1,
            seconds=15,
            worth=72,
            what="three epochs of the classifier and 100 steps of a transformer, twice",
            params={**DEFAULTS, "epochs": 3, "steps": 100, "twice": True},
            small=SMALL,
        ),
    ),
    request=request,
    interpret=interpret,
)
