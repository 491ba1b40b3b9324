"""What a slow figure is worth when something else made it slow. Pure.

Another program on the GPU, fixed clocks and a lowered power limit make a healthy GPU slow. A figure that was measured
so is INCONCLUSIVE: it neither fails the GPU nor warns about it, and the sentence names the cause and what to do. Wrong
results stay a FAIL: no load and no clock makes a healthy GPU compute wrong.

Where other processes cannot be seen at all (no root, a pid namespace of our own) and nothing hints at one, a slow
figure counts: otherwise no slow GPU would ever be found there. A list of processes that could not be read, or memory or
load that no visible process accounts for, is such a hint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpukeeper.acceptance.check import CheckContext, CheckRun
from gpukeeper.acceptance.judging import judge, settings, verdicts
from gpukeeper.acceptance.record import Finding, Remedy
from gpukeeper.model.gpu import Health
from gpukeeper.model.grade import Grade
from gpukeeper.model.unknown import Unknown

SPEED_UNITS = frozenset({"TFLOP/s", "GB/s", "samples/s", "us", "ms", "s"})
SPEED_CODES = (
    *("-below-floor", "-near-floor", "-slower-than-peers", "-slower-than-before", "-slow-pair", "-under-half"),
    *("-high-latency", "-unsteady", "-slows-down", "-low-power"),
)
MOST_NAMED = 3  # processes in one sentence
STOP = "Stop it, or wait until it ends, and test again"


def is_slow(finding: Finding) -> bool:
    """A FAIL or WARN about speed, or a speed that was too noisy to judge."""
    if finding.verdict is Grade.INCONCLUSIVE:
        return finding.code.endswith(verdicts.NOISY)
    judged = finding.verdict in (Grade.FAIL, Grade.WARN)
    return judged and (finding.unit in SPEED_UNITS or finding.code.endswith(SPEED_CODES))


def qualified(findings: Iterable[Finding], trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    """The findings of one try of a check, by what else was going on while it ran."""
    if context.small:
        return tuple(findings)
    return tuple(_qualified(one, trial, context) if is_slow(one) else one for one in findings)


def _qualified(finding: Finding, trial: CheckRun, context: CheckContext) -> Finding:
    gpus = [finding.gpu] if finding.gpu is not None else [gpu.uuid for gpu in context.gpus]
    if disturbed := [words for gpu in gpus if (words := disturbance(gpu, trial.around))]:
        return _not_judged(finding, "disturbed", disturbed[0], Remedy.RETEST)
    if held := [words for gpu in gpus if (words := settings.held_back(gpu, trial, context))]:
        return _not_judged(finding, "held-back", held[0], Remedy.RESET_SETTING)
    return finding


def _not_judged(finding: Finding, what: str, words: str, action: Remedy) -> Finding:
    return msgspec.structs.replace(
        finding,
        verdict=Grade.INCONCLUSIVE,
        code=judge.code_of(finding.check, what),
        message=f"{words}. This measurement is therefore not judged: {finding.message}",
        action=action,
        confirm=False,
        evidence={**finding.evidence, "instead_of": {"verdict": finding.verdict, "code": finding.code}},
    )


def disturbance(gpu: str, readings: Sequence[Mapping[str, Health]]) -> str:
    """Other processes on the GPU, or why they are unknown although there are signs of some; empty: none found."""
    seen = [reading.get(gpu) for reading in readings]
    if who := processes(one for one in seen if one is not None):
        return f"Another program used the GPU at the same time: {who}. {STOP}"
    for one in seen:
        foreign = Unknown("the driver did not respond") if one is None else one.foreign
        if isinstance(foreign, Unknown) and not foreign.by_design:
            return (
                f"Whether another program used the GPU at the same time is unknown ({foreign.why}). Make sure that"
                " nothing else runs on it, and test again"
            )
    return ""


def processes(readings: Iterable[Health]) -> str:
    """All that were seen, by pid: "pid 4242 (ann: python train.py)"."""
    named: dict[int, str] = {}
    for reading in readings:
        if not isinstance(reading.foreign, Unknown):
            named |= {pid: named.get(pid) or reading.named.get(pid, f"pid {pid}") for pid in reading.foreign}
    listed = [words for _, words in sorted(named.items())]
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more
