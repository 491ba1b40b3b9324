"""From findings to verdicts: what several tries agree on, the verdict on a GPU, and the verdict on a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from gpukeeper.acceptance.check import ALWAYS, RunRequest
from gpukeeper.acceptance.record import Finding, GpuSummary, Remedy
from gpukeeper.model.gpu import Gpu
from gpukeeper.model.grade import Grade, rank, worst

Key: TypeAlias = tuple[str, str, str | None]
NOISY = "-noisy"
LEAST_TO_FAIL = 2
NO_GPU = {"cpu": "This ran on the CPU", "simulated": "This was a simulation"}


def wanted(gpus: Sequence[Gpu], names: Sequence[str]) -> tuple[Gpu, ...]:
    """By uuid, index or serial number; all of them without names."""
    if not names:
        return tuple(gpus)
    return tuple(gpu for gpu in gpus if {gpu.uuid, str(gpu.index), gpu.identity} & set(names))


def key(finding: Finding) -> Key:
    return finding.check, finding.metric, finding.gpu


def find(findings: Iterable[Finding], wanted: Key) -> Finding | None:
    """The worst, where a check has several about one thing."""
    return max((one for one in findings if key(one) == wanted), key=lambda one: rank(one.verdict), default=None)


def needs_another(finding: Finding) -> bool:
    """A FAIL by a figure that may be chance, or a figure that was too noisy to judge."""
    return (finding.verdict is Grade.FAIL and finding.confirm) or _is_noisy(finding)


def undecided(tries: Sequence[Finding | None]) -> bool:
    """Noise is given one more try; a FAIL is settled as soon as two tries agree, a certain one at once."""
    fails = sum(_failed(one) for one in tries)
    quiet = len(tries) - fails
    if any(_certain(one) for one in tries):
        return False
    if tries[0] is not None and _is_noisy(tries[0]):
        return len(tries) < LEAST_TO_FAIL or fails == 1
    return fails < LEAST_TO_FAIL and quiet < LEAST_TO_FAIL


def confirmed(tries: Sequence[tuple[Finding, ...]]) -> tuple[Finding, ...]:
    """What the attempts agree on. A failure or a missing measurement counts in whichever attempt it occurred."""
    first = tuple(_settled(found, tries) for found in tries[0])
    known = {key(one) for one in first}
    worse = [one for found in tries[1:] for one in found if rank(one.verdict) > rank(Grade.WARN)]
    later = dict.fromkeys(key(one) for one in worse if key(one) not in known)
    return (*first, *(_agreed([find(one, about) for one in tries]) for about in later))


def _settled(found: Finding, tries: Sequence[tuple[Finding, ...]]) -> Finding:
    """Of several findings about one thing in the first try, only the worst is compared with the other attempts."""
    about = [find(one, key(found)) for one in tries]
    return _agreed(about) if about[0] is found else found


def _agreed(tries: Sequence[Finding | None]) -> Finding:
    """One finding from several attempts, in any order. Never a FAIL that was seen only once and may be chance."""
    seen = [one for one in tries if one is not None]
    if certain := [one for one in seen if _certain(one)]:
        return certain[0]
    fails = [one for one in seen if one.verdict is Grade.FAIL]
    if len(fails) >= LEAST_TO_FAIL:
        message = f"{fails[0].message} Confirmed: {len(fails)} of {len(tries)} attempts."
        return msgspec.structs.replace(fails[0], message=message, evidence=_with_attempts(fails[0], seen))
    if tries[0] is not None and _is_noisy(tries[0]):
        return tries[0] if fails else seen[-1]
    if unmeasured := [one for one in seen if one.verdict is Grade.INCONCLUSIVE and not _is_noisy(one)]:
        return unmeasured[0]
    if not fails or len(tries) == 1:
        return seen[0]
    return seen[-1] if _is_noisy(seen[-1]) else _not_confirmed(fails[0], seen, len(tries))


def _not_confirmed(once: Finding, seen: Sequence[Finding], tries: int) -> Finding:
    return msgspec.structs.replace(
        once,
        verdict=Grade.WARN,
        code=f"{once.code}-not-confirmed",
        message=f"{once.message} Not confirmed: {tries - 1} of {tries} attempts did not show it.",
        action=Remedy.RETEST,
        confirm=False,
        evidence=_with_attempts(once, seen),
    )


def _with_attempts(finding: Finding, seen: Sequence[Finding]) -> dict[str, Any]:
    return {**finding.evidence, "attempts": [one.value for one in seen]}


def _is_noisy(finding: Finding) -> bool:
    return finding.code.endswith(NOISY)


def _certain(finding: Finding | None) -> bool:
    """A wrong result is no chance: once is enough."""
    return finding is not None and finding.verdict is Grade.FAIL and not finding.confirm


def _failed(finding: Finding | None) -> bool:
    return finding is not None and finding.verdict is Grade.FAIL


def of_gpus(
    gpus: Sequence[Gpu], findings: Sequence[Finding], busy: Mapping[str, float], seconds: float
) -> tuple[GpuSummary, ...]:
    return tuple(_of_gpu(gpu, findings, busy.get(gpu.uuid), seconds) for gpu in gpus)


def _of_gpu(gpu: Gpu, findings: Sequence[Finding], busy: float | None, seconds: float) -> GpuSummary:
    own = [one for one in findings if one.gpu == gpu.uuid]
    share = None if busy is None or seconds <= 0 else min(busy / seconds, 1.0)
    verdict = worst(one.verdict for one in own)
    return GpuSummary(gpu=gpu.uuid, verdict=verdict, reason=_reason(verdict, own), busy=share)


def of_run(
    wish: RunRequest, gpus: Sequence[Gpu], findings: Sequence[Finding], *, interrupted: bool, self_test: bool = False
) -> tuple[Grade, str]:
    """The verdict on the node. Results on a CPU or in a simulation are not about a GPU.

    `self_test`: the result of the checks on a simulated machine; accepts no node.
    """
    verdict = worst(one.verdict for one in findings)
    reason = _reason(verdict, findings)
    if wish.device in NO_GPU and not (self_test and wish.device == "simulated"):
        where = NO_GPU[wish.device]
        return Grade.INCONCLUSIVE, f"{where}, so no GPU was tested. Result of the checks: {verdict}. {reason}"
    if interrupted:
        return worst((verdict, Grade.INCONCLUSIVE)), f"The run was interrupted; result until then: {reason}"
    if verdict not in (Grade.PASS, Grade.WARN):
        return verdict, reason
    if untested := _untested(wish, gpus, findings):
        return Grade.INCONCLUSIVE, f"{untested} {reason}"
    return verdict, f"{_narrowed(wish, gpus)}{reason}"


def _untested(wish: RunRequest, gpus: Sequence[Gpu], findings: Sequence[Finding]) -> str:
    """Some checks selected by name are about the machine alone; still, at least one probe must have run."""
    if wish.only:
        return "" if any(one.samples for one in findings) else "None of the selected checks (--check) measured a GPU."
    names = [f"GPU {gpu.index}" for gpu in gpus if not any(one.gpu == gpu.uuid and one.samples for one in findings)]
    return f"Nothing was measured on {', '.join(names)}." if names else ""


def _narrowed(wish: RunRequest, gpus: Sequence[Gpu]) -> str:
    """A good verdict on a part, or by other settings, must not read like one on the whole."""
    only = [name for name in wish.only if name not in ALWAYS]
    settings = [f"{check}.{name}={value}" for check, params in wish.params.items() for name, value in params.items()]
    words = {
        f"Only {', '.join(only)} ran besides {' and '.join(ALWAYS)}, as requested.": only,
        f"Without {', '.join(wish.skip)}, as requested.": wish.skip,
        f"Only GPU {', '.join(str(gpu.index) for gpu in gpus)} of this machine, as requested.": wish.gpus,
        f"With overridden parameters (--set {' '.join(settings)}).": settings,
    }
    return "".join(f"{sentence} " for sentence, given in words.items() if given)


def _reason(verdict: Grade, findings: Sequence[Finding]) -> str:
    """The first of the worst, and how many there are of each."""
    judged = [one for one in findings if one.verdict is not Grade.SKIPPED]
    if not judged:
        return "Nothing was tested."
    if verdict is Grade.PASS:
        return f"All {len(judged)} findings passed."
    of_worst = [one for one in judged if one.verdict is verdict]
    more = f" ({len(of_worst) - 1} more like it)" if len(of_worst) > 1 else ""
    return f"{of_worst[0].message}{more}"
