"""From findings to verdicts: what several tries agree on, the verdict on a GPU, and the verdict on a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from gpukeeper.acceptance.check import Wish
from gpukeeper.model.acceptance import Finding, Gpu, Grade, Remedy, Tally, rank, worst

Key: TypeAlias = tuple[str, str, str | None]
NOISY = "-noisy"
LEAST_TO_FAIL = 2


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
    return (finding.verdict is Grade.FAIL and finding.confirm) or finding.code.endswith(NOISY)


def undecided(tries: Sequence[Finding | None]) -> bool:
    """Noise is given one more try; a FAIL is settled as soon as two tries agree, a certain one at once."""
    fails = sum(_failed(one) for one in tries)
    quiet = len(tries) - fails
    if any(_certain(one) for one in tries):
        return False
    if tries[0] is not None and tries[0].code.endswith(NOISY):
        return len(tries) < LEAST_TO_FAIL or fails == 1
    return fails < LEAST_TO_FAIL and quiet < LEAST_TO_FAIL


def confirmed(tries: Sequence[tuple[Finding, ...]]) -> tuple[Finding, ...]:
    """What the tries agree on; and wrong results, whichever try showed them."""
    first = tuple(_agreed([found, *(find(one, key(found)) for one in tries[1:])], len(tries)) for found in tries[0])
    known = {key(one) for one in first}
    later = {key(one): one for found in tries[1:] for one in found if _certain(one) and key(one) not in known}
    return (*first, *later.values())


def _agreed(tries: Sequence[Finding | None], count: int) -> Finding:
    """One finding of what several tries said. Never better than the newest, never by chance a FAIL seen once."""
    first = tries[0]
    assert first is not None, "what is agreed on was found at first"
    seen = [one for one in tries if one is not None]
    if certain := [one for one in seen if _certain(one)]:
        return certain[0]
    if count == 1 or not needs_another(first):
        return first
    fails = [one for one in seen if one.verdict is Grade.FAIL]
    if first.code.endswith(NOISY) and len(fails) < LEAST_TO_FAIL:
        return first if fails else seen[-1]
    if first.code.endswith(NOISY):
        first = fails[0]
    samples = {"attempts": [one.value for one in seen]}
    if len(fails) >= LEAST_TO_FAIL:
        message = f"{first.message} Seen again: {len(fails)} of {len(seen)} tries."
        return msgspec.structs.replace(first, message=message, evidence={**first.evidence, **samples})
    newest = seen[-1]
    others = f"{len(seen) - len(fails)} of {len(seen)} tries did not show it"
    if rank(newest.verdict) > rank(Grade.WARN):
        return newest
    return msgspec.structs.replace(
        first,
        verdict=Grade.WARN,
        code=f"{first.code}-not-confirmed",
        message=f"{first.message} It was not confirmed: {others}.",
        action=Remedy.RETEST,
        evidence={**first.evidence, **samples},
    )


def _certain(finding: Finding | None) -> bool:
    """A wrong result is no chance: once is enough."""
    return finding is not None and finding.verdict is Grade.FAIL and not finding.confirm


def _failed(finding: Finding | None) -> bool:
    return finding is not None and finding.verdict is Grade.FAIL


def of_gpus(
    gpus: Sequence[Gpu], findings: Sequence[Finding], busy: Mapping[str, float], seconds: float
) -> tuple[Tally, ...]:
    return tuple(_of_gpu(gpu, findings, busy.get(gpu.uuid), seconds) for gpu in gpus)


def _of_gpu(gpu: Gpu, findings: Sequence[Finding], busy: float | None, seconds: float) -> Tally:
    own = [one for one in findings if one.gpu == gpu.uuid]
    share = None if busy is None or seconds <= 0 else min(busy / seconds, 1.0)
    verdict = worst(one.verdict for one in own)
    return Tally(gpu=gpu.uuid, verdict=verdict, reason=_reason(verdict, own), busy=share)


def of_run(wish: Wish, gpus: Sequence[Gpu], findings: Sequence[Finding], *, interrupted: bool) -> tuple[Grade, str]:
    """The verdict on the node. Whatever a CPU showed says nothing about a GPU."""
    verdict = worst(one.verdict for one in findings)
    reason = _reason(verdict, findings)
    if wish.device == "cpu":
        return (
            Grade.INCONCLUSIVE,
            f"This ran on the CPU, so no GPU was tested. The checks themselves: {verdict}. {reason}",
        )
    if interrupted:
        return worst((verdict, Grade.INCONCLUSIVE)), f"The run was interrupted; what was seen until then: {reason}"
    untested = [gpu for gpu in gpus if not any(one.gpu == gpu.uuid and one.samples for one in findings)]
    if untested and verdict in (Grade.PASS, Grade.WARN) and not wish.only:
        names = ", ".join(f"GPU {gpu.index}" for gpu in untested)
        return Grade.INCONCLUSIVE, f"Nothing was measured on {names}. {reason}"
    if verdict in (Grade.PASS, Grade.WARN):
        return verdict, f"{_narrowed(wish, gpus)}{reason}"
    return verdict, reason


def _narrowed(wish: Wish, gpus: Sequence[Gpu]) -> str:
    """A good verdict on a part must not read like one on the whole."""
    names = ", ".join(str(gpu.index) for gpu in gpus)
    only = f"Only {', '.join(wish.only)} ran, as asked for. " if wish.only else ""
    return only + (f"Only GPU {names} of this machine, as asked for. " if wish.gpus else "")


def _reason(verdict: Grade, findings: Sequence[Finding]) -> str:
    """The first of the worst, and how many there are of each."""
    judged = [one for one in findings if one.verdict is not Grade.SKIPPED]
    if not judged:
        return "Nothing was tested."
    if verdict is Grade.PASS:
        return f"All {len(judged)} findings are good."
    of_worst = [one for one in judged if one.verdict is verdict]
    more = f" ({len(of_worst) - 1} more like it)" if len(of_worst) > 1 else ""
    return f"{of_worst[0].message}{more}"
