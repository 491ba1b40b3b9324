"""From findings to verdicts: what several tries agree on, what a slow figure is worth, the verdict on a GPU and on
a run. Pure.

A figure measured beside another program, or with lowered settings, is INCONCLUSIVE: the sentence names the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from gpukeeper.acceptance.check import ALWAYS, CheckContext, CheckRun, RunRequest
from gpukeeper.acceptance.judging import judge
from gpukeeper.acceptance.record import Finding, GpuSummary, Remedy
from gpukeeper.model.gpu import Fact, Gpu, Grade, Health, Reading, rank, worst
from gpukeeper.model.unknown import Unknown

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


UNDER_LOAD = 50.0  # percent of use
FIXED_CLOCKS = 0x2  # the driver's bit for clocks that an application or an admin set
HELD_BY_LOAD = 0x4 | 0x8 | 0x20 | 0x40 | 0x80  # power cap, slowdowns: the clock would be low without any setting
LOW_CLOCK = 0.95  # of the highest clock: a healthy GPU with power to spare comes nearer
FLAT_MHZ = 15.0  # a step of the clock: one that is fixed does not move
LEAST_READINGS = 3  # readings under load
POWER_TO_SPARE = 0.90  # of its limit


# A power limit can be read. Application clocks and locked clocks show in the driver's reasons for the clocks; where
# it gives none, a clock that stays at one value far below the maximum, with power and heat to spare, is one that was
# fixed by a setting.
def held_back(uuid: str, trial: CheckRun, context: CheckContext) -> str:
    """The setting that explains a slow figure and the command that undoes it, without a full stop; empty: none.
    By all readings of the run so far: a setting stays, and a short check alone has too few."""
    gpu = context.gpu(uuid)
    reading = next((one[uuid] for one in reversed(trial.around) if uuid in one), context.before.get(uuid))
    if reading is None:
        return ""
    loaded = [one for one in context.readings if one.uuid == uuid and (one.utilisation or 0.0) >= UNDER_LOAD]
    return power_limited(gpu, reading) or clocks_fixed(gpu, reading, loaded) or memory_clock_fixed(gpu, reading, loaded)


def power_limited(gpu: Gpu, reading: Health) -> str:
    limit, usual = as_number(reading.states.get("power_limit_w")), as_number(reading.states.get("power_default_w"))
    if limit is None or usual is None or limit >= usual - 0.5:
        return ""
    return (
        f"Its power limit is set to {limit:.0f} W, the default is {usual:.0f} W. To reset it: nvidia-smi -i"
        f" {gpu.index} -pl {usual:.0f}; then test again"
    )


def clocks_fixed(gpu: Gpu, reading: Health, loaded: Sequence[Reading]) -> str:
    undo = f"nvidia-smi -i {gpu.index} -rgc (application clocks: nvidia-smi -i {gpu.index} -rac)"
    if any((one.reasons or 0) & FIXED_CLOCKS for one in loaded):
        return f"Its clocks are locked by a setting. To reset it: {undo}; then test again"
    most, limit = as_number(reading.states.get("sm_mhz_max")), as_number(reading.states.get("power_limit_w"))
    clocks = [one.sm_mhz for one in loaded if one.sm_mhz is not None]
    watts = [one.power_w for one in loaded if one.power_w is not None]
    free = all(one.reasons is not None and not one.reasons & HELD_BY_LOAD for one in loaded)
    if most is None or limit is None or len(clocks) < LEAST_READINGS or not watts or not free:
        return ""
    flat = max(clocks) - min(clocks) <= FLAT_MHZ and max(clocks) < LOW_CLOCK * most
    if not flat or max(watts) > POWER_TO_SPARE * limit:
        return ""
    return (
        f"Its clock stays at {max(clocks):.0f} MHz of {most:.0f} MHz below its power limit, as if locked by a"
        f" setting. To reset it: {undo}; then test again"
    )


def memory_clock_fixed(gpu: Gpu, reading: Health, loaded: Sequence[Reading]) -> str:
    most = as_number(reading.states.get("memory_mhz_max"))
    seen = [one.memory_mhz for one in loaded if one.memory_mhz is not None]
    if most is None or not seen or max(seen) >= 0.98 * most:
        return ""
    return (
        f"Its memory runs at {max(seen):.0f} MHz of {most:.0f} MHz under load, as if locked by a setting. To reset"
        f" it: nvidia-smi -i {gpu.index} -rmc (application clocks: nvidia-smi -i {gpu.index} -rac); then test again"
    )


def as_number(value: Fact) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


SPEED_UNITS = frozenset({"TFLOP/s", "GB/s", "samples/s", "us", "ms", "s"})
SPEED_CODES = (
    *("-below-floor", "-near-floor", "-slower-than-peers", "-slower-than-before", "-slow-pair", "-under-half"),
    *("-high-latency", "-unsteady", "-slows-down", "-low-power"),
)
MOST_NAMED = 3  # processes in one sentence
STOP_IT = "Stop it, or wait until it ends, and test again"


# Another program on the GPU, fixed clocks and a lowered power limit make a healthy GPU slow. A figure that was
# measured so is INCONCLUSIVE: it neither fails the GPU nor warns about it, and the sentence names the cause and what
# to do. Wrong results stay a FAIL: no load and no clock makes a healthy GPU compute wrong.
def is_slow(finding: Finding) -> bool:
    """A FAIL or WARN about speed, or a speed that was too noisy to judge."""
    if finding.verdict is Grade.INCONCLUSIVE:
        return finding.code.endswith(NOISY)
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
    if held := [words for gpu in gpus if (words := held_back(gpu, trial, context))]:
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


# Where other processes cannot be seen at all (no root, a pid namespace of our own) and nothing hints at one, a slow
# figure counts: otherwise no slow GPU would ever be found there. A list of processes that could not be read, or
# memory or load that no visible process accounts for, is such a hint.
def disturbance(gpu: str, readings: Sequence[Mapping[str, Health]]) -> str:
    """Other processes on the GPU, or why they are unknown although there are signs of some; empty: none found."""
    seen = [reading.get(gpu) for reading in readings]
    if who := named_processes(one for one in seen if one is not None):
        return f"Another program used the GPU at the same time: {who}. {STOP_IT}"
    for one in seen:
        foreign = Unknown("the driver did not respond") if one is None else one.foreign
        if isinstance(foreign, Unknown) and not foreign.by_design:
            return (
                f"Whether another program used the GPU at the same time is unknown ({foreign.why}). Make sure that"
                " nothing else runs on it, and test again"
            )
    return ""


def named_processes(readings: Iterable[Health]) -> str:
    """All that were seen, by pid: "pid 4242 (ann: python train.py)"."""
    named: dict[int, str] = {}
    for reading in readings:
        if not isinstance(reading.foreign, Unknown):
            named |= {pid: named.get(pid) or reading.named.get(pid, f"pid {pid}") for pid in reading.foreign}
    listed = [words for _, words in sorted(named.items())]
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more
