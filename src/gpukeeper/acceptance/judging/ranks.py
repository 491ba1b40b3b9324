"""What the ranks of one probe answered, and what is common to all checks over several GPUs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gpukeeper.acceptance.check import CheckContext, CheckRun
from gpukeeper.acceptance.judging import judge, messages
from gpukeeper.acceptance.record import Finding, ProbeFailure, ProbeResult, Remedy, Values
from gpukeeper.model.gpu import Gpu
from gpukeeper.model.grade import Grade

NODE = "node"  # a fact of a GPU, where ranks are on several nodes: which one
STOPPED = "was stopped because rank"  # of a rank that ended because another one did: that one has the reason


Reader = Callable[[Mapping[int, Values], CheckContext], Iterable[Finding]]


def interpret(check: str, trial: CheckRun, context: CheckContext, reader: Reader) -> tuple[Finding, ...]:
    """The findings of the reader about all ranks' results. Called only if every rank has one: half a collective is
    none.

    A reply without the fields that a probe always sends is no measurement.
    """
    answers = results(trial)
    found = broken(check, trial, context)
    if found or not answers:
        return found or (judge.missing(check, "", None, "no rank returned a result"),)
    if wrong := _other_world(answers, len(context.gpus)):
        return (judge.missing(check, "", None, wrong),)
    try:
        return tuple(reader(answers, context))
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        why = f"the probe's result could not be read ({type(error).__name__}: {error})"
        return (judge.missing(check, "", None, why),)


def _other_world(answers: Mapping[int, Values], gpus: int) -> str:
    """Ranks that met in smaller groups tested each group, not the machine."""
    worlds = ((rank, answer.get("world", answer.get("world_size", gpus))) for rank, answer in answers.items())
    other = (f"rank {rank} reported {world} ranks instead of {gpus}" for rank, world in worlds if world != gpus)
    return next(other, "")


def results(trial: CheckRun) -> dict[int, Values]:
    """By rank: those that measured."""
    done = {int(rank): answer.result for rank, answer in trial.answers.items() if isinstance(answer, ProbeResult)}
    return dict(sorted(done.items()))


def gpu(rank: int, context: CheckContext) -> Gpu | None:
    """Ranks are started in the order of the GPUs."""
    return context.gpus[rank] if 0 <= rank < len(context.gpus) else None


def uuid(rank: int, context: CheckContext) -> str | None:
    found = gpu(rank, context)
    return None if found is None else found.uuid


def named(ranks: Iterable[int], context: CheckContext) -> str:
    """rank 2 (GPU 2) and rank 3 (GPU 3); over several nodes: rank 9 (gpu-2 GPU 1)."""
    words = []
    for rank in ranks:
        found = gpu(rank, context)
        node = "" if found is None or found.facts.get(NODE) is None else f"{found.facts[NODE]} "
        words.append(f"rank {rank}" if found is None else f"rank {rank} ({node}GPU {found.index})")
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def broken(check: str, trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    """One for each cause: of several ranks it is the node's. Ranks that only followed another one add nothing."""
    missing = [rank for rank in range(len(context.gpus)) if str(rank) not in trial.answers]
    failures = {int(rank): answer for rank, answer in trial.answers.items() if isinstance(answer, ProbeFailure)}
    causes = {rank: answer for rank, answer in failures.items() if STOPPED not in answer.words} or failures
    by_kind: dict[str, list[int]] = defaultdict(list)
    for rank, answer in sorted(causes.items()):
        by_kind[answer.kind].append(rank)
    found = [_of_cause(check, ranks, causes[ranks[0]], context) for ranks in by_kind.values()]
    if missing and not failures:
        why = f"{named(missing, context)} returned no result"
        found.append(judge.missing(check, "", uuid(missing[0], context) if len(missing) == 1 else None, why))
    return tuple(found)


def _of_cause(check: str, ranks: Sequence[int], answer: ProbeFailure, context: CheckContext) -> Finding:
    whose = uuid(ranks[0], context) if len(ranks) == 1 else None
    found = messages.broken_finding(check, whose, answer)
    return msgspec.structs.replace(
        found, message=f"{named(ranks, context)}: {found.message}", evidence={**found.evidence, "ranks": list(ranks)}
    )


def noted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Values without a reference at first: reported and kept for comparison in later runs, neither good nor bad.

    Only for secondary values of a check: its main value stays inconclusive without a reference.
    """
    return tuple(_noted(one) if one.code.endswith("-no-yardstick") else one for one in findings)


def _noted(finding: Finding) -> Finding:
    what = " ".join(part for part in (finding.check, finding.metric) if part).replace("_", " ")
    return msgspec.structs.replace(
        finding,
        verdict=Grade.SKIPPED,
        code=judge.code_of(finding.check, "noted"),
        message=f"{what}: {judge.amount(finding.value or 0.0, finding.unit)}. Reported, not judged: no reference"
        " value yet. Later runs are compared with it.",
        action=Remedy.NONE,
    )


def with_evidence(findings: Iterable[Finding], evidence: Mapping[str, Any]) -> tuple[Finding, ...]:
    return tuple(msgspec.structs.replace(one, evidence={**one.evidence, **evidence}) for one in findings)
