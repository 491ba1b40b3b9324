"""Health of each GPU before, during and after the run, as driver and kernel report it. Counters are judged by change.

The rules are data: a signal, from where on it is bad, what that means and what to do. A signal that the model does not
have says nothing; one that matters and could not be read leaves the verdict open.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode
from gpukeeper.acceptance.judging.health_rules import (
    LEVELS,
    RISES,
    STATES,
    XIDS_OF_PROGRAMS,
    RiseRule,
    StateRule,
    meaning_of_xid,
)
from gpukeeper.acceptance.judging.verdicts import (
    STOP_IT,
    as_number,
    clocks_fixed,
    memory_clock_fixed,
    named_processes,
    power_limited,
)
from gpukeeper.acceptance.record import Finding, Remedy
from gpukeeper.model.gpu import Fact, Gpu, Grade, Health, Reading, Xid
from gpukeeper.model.unknown import Unknown

NAME = "health"
LOADED = 50.0  # percent of use: above it a reading counts as under load
MATTERS = ("ecc_enabled", "ecc_uncorrected_volatile", "remap_pending", "remap_failed")
START = ""  # the reading before the first check

# Why the clocks are held back: bits of NVML.
HARD_REASONS = {0x8: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "external power brake"}
OFTEN = 0.6 / 120  # of the readings: 0.6 in a minute (gpud's rule), of which two are taken in a second
SOFT_HEAT = 0x20
SOFT_HEAT_SHARES = (0.01, 0.05)

NVLINKS = (("A100-SXM4", 12), ("H100( SXM5)? 80GB HBM3| H200$|B200|B300", 18))
SXM_ALONE = "no NVLink is active. With one GPU on this machine this may be intended: the links may belong to the host"
MARGIN_C = 5
ABOVE_PEERS_C = 8
EQUAL_POWER = 0.05
BY_ADVICE = {
    "none": Remedy.NONE,
    "reset": Remedy.RESET_GPU,
    "drain and reset": Remedy.RESET_GPU,
    "bus reset": Remedy.RESET_GPU,
}


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    if context.wish.device == "cpu":
        return (_finding(None, Grade.SKIPPED, "no-gpu", "there is no GPU"),)
    return tuple(finding for gpu in context.gpus for finding in _of_gpu(gpu, context))


def _of_gpu(gpu: Gpu, context: CheckContext) -> list[Finding]:
    before, after = context.before.get(gpu.uuid), context.after.get(gpu.uuid)
    if before is None:
        words = "the driver did not report its health. Check that nvidia-smi works, and run it again"
        return [_finding(gpu, Grade.INCONCLUSIVE, "not-known", words, Remedy.RETEST)]
    readings = [before, *(reading for _, _, reading in _steps(gpu.uuid, context))]
    found = [
        *_unknown(gpu, readings),
        *_gone(gpu, after, context),
        *_bad_states(gpu, readings),
        *_power(gpu, before),
        *_links(gpu, readings[-1], context),
        *_slot(gpu, before),
        *_levels(gpu, before),
        *_rises(gpu, context),
        *_kernel(gpu, readings, context),
        *_foreign(gpu, readings),
        *_while_running(gpu, before, context),
    ]
    wrong = [finding for finding in found if finding.verdict is not Grade.SKIPPED]
    return found if wrong else [*found, _finding(gpu, Grade.PASS, "ok", f"no problem found in {len(readings)} reads")]


def _steps(uuid: str, context: CheckContext) -> Iterator[tuple[str, Health, Health]]:
    """Reads of one GPU in their order: the check that ran, the read before it, the one after it."""
    last = context.before.get(uuid)
    for check, readings in (*context.at_check.items(), ("the end", context.after)):
        reading = readings.get(uuid)
        if last is not None and reading is not None:
            yield check, last, reading
            last = reading


def _unknown(gpu: Gpu, readings: Sequence[Health]) -> Iterator[Finding]:
    """In every read: a counter that became unreadable during the run may have risen since."""
    unread: dict[str, str] = {}
    for reading in readings:
        facts: Mapping[str, Fact] = {**reading.counters, **reading.states}
        unread |= {name: why for name in MATTERS if (why := _why(facts, name)) and name not in unread}
    if unread:
        names = ", ".join(name.replace("_", " ") for name in unread)
        first = next(iter(unread.values()))
        words = f"{names} could not be read ({first}). Check that nvidia-smi -q works, and run it again"
        yield _finding(gpu, Grade.INCONCLUSIVE, "not-known", words, Remedy.RETEST)


def _why(facts: Mapping[str, Fact], name: str) -> str:
    fact = facts.get(name, Unknown("not read from the driver"))
    return fact.why if isinstance(fact, Unknown) and not fact.by_design else ""


def _gone(gpu: Gpu, after: Health | None, context: CheckContext) -> Iterator[Finding]:
    if after is None and context.after:
        words = "it was lost during the run: it no longer responds. Reboot; if it happens again, reseat or replace it"
        yield _finding(gpu, Grade.FAIL, "lost", words, Remedy.REBOOT)
    elif after is None:
        words = "the driver did not report its health after the run. Check that nvidia-smi works, and run it again"
        yield _finding(gpu, Grade.INCONCLUSIVE, "after-not-known", words, Remedy.RETEST)


def _bad_states(gpu: Gpu, readings: Sequence[Health]) -> Iterator[Finding]:
    for rule in STATES:
        values = [value for reading in readings if _known(value := reading.states.get(rule.state))]
        if any(rule.bad(value) for value in values):
            yield _finding(gpu, _grade_for(gpu, rule), rule.code, rule.words, rule.remedy)
    for advice in {str(value) for reading in readings if _known(value := reading.states.get("advice"))} - {"none"}:
        remedy = BY_ADVICE.get(advice, Remedy.REBOOT)
        yield _finding(gpu, Grade.FAIL, "advice", f"the driver recommends: {advice}. Do that, then test again", remedy)
    ecc, pending = readings[-1].states.get("ecc_enabled"), readings[-1].states.get("ecc_pending")
    if isinstance(ecc, bool) and isinstance(pending, bool) and ecc != pending:
        turned = "on" if pending else "off"
        words = f"error correction will be {turned} after the next reset. Reset or reboot, then test with that setting"
        yield _finding(gpu, Grade.FAIL, "ecc-pending", words, Remedy.RESET_GPU)


def _grade_for(gpu: Gpu, rule: StateRule) -> Grade:
    """Cards for desks are sold with error correction off."""
    for_desks = isinstance(gpu.name, str) and re.search("RTX|Quadro|GeForce|TITAN", gpu.name)
    return Grade.WARN if rule.code == "ecc-off" and for_desks else rule.grade


def _power(gpu: Gpu, before: Health) -> Iterator[Finding]:
    if words := power_limited(gpu, before):
        yield _finding(gpu, Grade.WARN, "power-limited", words, Remedy.RESET_SETTING)


def links_expected(gpu: Gpu) -> int | None:
    """None: not a model whose links are known, or a slice, which uses those of its GPU."""
    if gpu.part_of is not None or not isinstance(gpu.name, str):
        return None
    return next((count for pattern, count in NVLINKS if re.search(pattern, gpu.name)), None)


def _links(gpu: Gpu, last: Health, context: CheckContext) -> Iterator[Finding]:
    expected, active = links_expected(gpu), last.states.get("nvlinks_active")
    if expected is None:
        return
    if isinstance(active, Unknown) and not active.by_design:
        words = (
            f"its NVLinks could not be counted ({active.why}). Check that nvidia-smi nvlink -s works, and run it again"
        )
        yield _finding(gpu, Grade.INCONCLUSIVE, "nvlink-not-known", words, Remedy.RETEST)
        return
    up = active if isinstance(active, int) else 0
    if up == expected:
        return
    if up == 0 and len(context.gpus) == 1:
        yield _finding(gpu, Grade.SKIPPED, "nvlink-none", SXM_ALONE)
        return
    words = (
        f"{up} of {expected} NVLinks are active. Reseat the board; check nvidia-smi nvlink -s and the fabric manager"
    )
    yield _finding(gpu, Grade.FAIL, "nvlink-down", words, Remedy.RESEAT_OR_CABLE)


def _slot(gpu: Gpu, before: Health) -> Iterator[Finding]:
    here, can = (
        as_number(before.states.get("pcie_generation_max")),
        as_number(before.states.get("pcie_generation_gpu_max")),
    )
    if here is not None and can is not None and here < can:
        words = f"its slot supports PCIe generation {here:.0f}, the GPU supports {can:.0f}. Check slot, riser and BIOS"
        yield _finding(gpu, Grade.WARN, "pcie-slot", words, Remedy.CHECK_CONFIG)


def _levels(gpu: Gpu, before: Health) -> Iterator[Finding]:
    for rule in LEVELS:
        value = before.counters.get(rule.counter)
        if isinstance(value, int) and (grade := _grade(value, rule.fail, rule.warn)):
            yield _finding(gpu, grade, rule.code, _counted(rule.words, str(value)), rule.remedy, value=value)


def _rises(gpu: Gpu, context: CheckContext) -> Iterator[Finding]:
    """One of each kind and check: two counters of one cause are not two faults."""
    seen: set[tuple[str, str]] = set()
    for check, earlier, later in _steps(gpu.uuid, context):
        for rule in RISES:
            rise = _rise(rule, earlier, later)
            grade = _grade(rise[1], rule.fail, rule.warn) if rise else None
            if rise and grade and (check, rule.code) not in seen:
                seen.add((check, rule.code))
                amount = f"{rise[0] / 1e6:.0f} ms" if rule.counter.endswith("_ns") else f"{rise[0]:.0f}"
                words = _counted(rule.words, f"{amount}, {_during(check)}")
                yield _finding(gpu, grade, rule.code, words, rule.remedy, value=rise[0], at=check)
        yield from _fell(gpu, check, earlier, later)


def _rise(rule: RiseRule, earlier: Health, later: Health) -> tuple[float, float] | None:
    """The rise, and the value that is compared with its limits."""
    was, now = earlier.counters.get(rule.counter), later.counters.get(rule.counter)
    if not isinstance(was, int) or not isinstance(now, int) or now <= was:
        return None
    seconds = max((later.at - earlier.at).total_seconds(), 1.0)
    return now - was, (now - was) / (seconds if rule.per_second else 1)


def _fell(gpu: Gpu, check: str, earlier: Health, later: Health) -> Iterator[Finding]:
    was, now = earlier.counters.get("energy_mj"), later.counters.get("energy_mj")
    if isinstance(was, int) and isinstance(now, int) and now < was:
        words = f"its counters were reset {_during(check)}: the GPU was reset, or the driver was reloaded. Run it again"
        yield _finding(gpu, Grade.INCONCLUSIVE, "counters-began-anew", words, Remedy.RETEST, at=check)


def _kernel(gpu: Gpu, readings: Sequence[Health], context: CheckContext) -> Iterator[Finding]:
    """Of all reads: what was read once stays true when the log is overwritten or closed to us."""
    unread = next((reading.xids for reading in readings if isinstance(reading.xids, Unknown)), None)
    if unread is not None:
        words = f"GPU errors in the kernel log (Xids) could not be read: {unread.why}"
        yield _finding(gpu, Grade.SKIPPED, "xid-not-read", words)
    logged = dict.fromkeys(xid for reading in readings if not isinstance(reading.xids, Unknown) for xid in reading.xids)
    for number in dict.fromkeys(xid.number for xid in logged):
        yield from _of_xid(gpu, number, [xid for xid in logged if xid.number == number], context)


def _of_xid(gpu: Gpu, number: int, logged: Sequence[Xid], context: CheckContext) -> Iterator[Finding]:
    meanings = [meaning_of_xid(xid) for xid in logged]
    worst = max(meanings, key=lambda one: (one.grade is Grade.FAIL, one.grade is Grade.WARN))
    if worst.grade is Grade.PASS:
        return
    checks = _checks_with(gpu.uuid, number, context)
    grade, again = worst.grade, ""
    if number in XIDS_OF_PROGRAMS and len(checks) > 1:
        grade, again = Grade.FAIL, ". It occurred again in another check, so the GPU is the cause"
    words = f"the kernel logged Xid {number} {_during(checks[0] if checks else START)}: {worst.words}{again}"
    found = _finding(gpu, grade, f"xid-{number}", words, worst.remedy, at=checks[0] if checks else "")
    yield replace(found, evidence={"words": [xid.words for xid in logged][:8], **found.evidence})


def _checks_with(uuid: str, number: int, context: CheckContext) -> list[str]:
    """In which it was logged again. The log of a reading has everything since the run began, if it could be read."""
    found, most = [], _count(context.before[uuid].xids, number)
    for check, _, later in _steps(uuid, context):
        now = _count(later.xids, number)
        if now > most:
            found.append(check)
        most = max(most, now)
    return found


def _count(logged: tuple[Xid, ...] | Unknown, number: int) -> int:
    return 0 if isinstance(logged, Unknown) else sum(xid.number == number for xid in logged)


def _foreign(gpu: Gpu, readings: Iterable[Health]) -> Iterator[Finding]:
    seen = list(readings)
    unknown = [reading.foreign for reading in seen if isinstance(reading.foreign, Unknown)]
    unseen = max(unknown, key=lambda one: not one.by_design, default=None)
    if who := named_processes(seen):
        words = f"another program used the GPU: {who}. Its measurements are not used. {STOP_IT}"
        yield _finding(gpu, Grade.INCONCLUSIVE, "foreign-process", words, Remedy.RETEST)
    elif unseen is not None:
        grade = Grade.SKIPPED if unseen.by_design else Grade.INCONCLUSIVE
        yield _finding(
            gpu, grade, "foreign-not-known", f"other processes on it could not be listed: {unseen.why}", Remedy.RETEST
        )


def _while_running(gpu: Gpu, before: Health, context: CheckContext) -> Iterator[Finding]:
    mine = [reading for reading in context.readings if reading.uuid == gpu.uuid]
    if not mine and context.at_check:
        words = "no samples during the run, so throttling is unknown. Run it again"
        yield _finding(gpu, Grade.INCONCLUSIVE, "no-readings", words, Remedy.RETEST)
    loaded = [reading for reading in mine if (reading.utilisation or 0.0) >= LOADED]
    yield from _hard_reasons(gpu, mine)
    yield from _soft_reasons(gpu, loaded)
    yield from _link_under_load(gpu, before, loaded)
    yield from _heat(gpu, before, loaded, context)
    if words := clocks_fixed(gpu, before, loaded):
        yield _finding(gpu, Grade.WARN, "clocks-fixed", words, Remedy.RESET_SETTING)
    if words := memory_clock_fixed(gpu, before, loaded):
        yield _finding(gpu, Grade.WARN, "memory-clock", words, Remedy.RESET_SETTING)


def _hard_reasons(gpu: Gpu, mine: Sequence[Reading]) -> Iterator[Finding]:
    """Even one counts, unless the run is so long that it is rare. A share: of a long run not every reading is kept."""
    hit = [reading for reading in mine if reading.reasons is not None and reading.reasons & sum(HARD_REASONS)]
    if not hit:
        return
    what = ", ".join(what for bit, what in HARD_REASONS.items() if any((one.reasons or 0) & bit for one in hit))
    where = f"in {len(hit)} of {len(mine)} readings, first {_during(hit[0].check)}"
    grade = Grade.WARN if len(hit) < OFTEN * len(mine) else Grade.FAIL
    words = f"{what} {where}. Check cooling and power supply"
    yield _finding(gpu, grade, "clocks-slowed", words, Remedy.CHECK_CONFIG, value=len(hit), at=hit[0].check)


def _soft_reasons(gpu: Gpu, loaded: Sequence[Reading]) -> Iterator[Finding]:
    known = [reading.reasons for reading in loaded if reading.reasons is not None]
    if not known:
        return
    share = sum(bool(reasons & SOFT_HEAT) for reasons in known) / len(known)
    warn, fail = SOFT_HEAT_SHARES
    if share > warn:
        words = (
            f"the driver throttled it because of heat in {100 * share:.0f} % of the readings under load. Check its"
            " cooling"
        )
        yield _finding(
            gpu, Grade.FAIL if share > fail else Grade.WARN, "slowed-by-heat", words, Remedy.CHECK_CONFIG, value=share
        )


def _link_under_load(gpu: Gpu, before: Health, loaded: Sequence[Reading]) -> Iterator[Finding]:
    """A link that sleeps is slow, so only readings under load count, and of those the best."""
    for name, what in (("pcie_generation", "generation"), ("pcie_width", "width")):
        could = as_number(before.states.get(f"{name}_max"))
        seen = [value for reading in loaded if (value := getattr(reading, name)) is not None]
        if could is not None and seen and max(seen) < could:
            words = f"under load its PCIe {what} is {max(seen)} instead of {could:.0f}. Reseat it, check riser and slot"
            yield _finding(gpu, Grade.FAIL, f"pcie-{what}", words, Remedy.RESEAT_OR_CABLE, value=max(seen))


def _heat(gpu: Gpu, before: Health, loaded: Sequence[Reading], context: CheckContext) -> Iterator[Finding]:
    temperatures = [reading.temperature_c for reading in loaded if reading.temperature_c is not None]
    limit = as_number(before.states.get("slowdown_c"))
    if temperatures and limit is not None and max(temperatures) > limit - MARGIN_C:
        words = f"it reached {max(temperatures):.0f} °C, {limit:.0f} °C is its slowdown temperature. Check its cooling"
        yield _finding(gpu, Grade.WARN, "hot", words, Remedy.CHECK_CONFIG, value=max(temperatures))
    here, others = _heat_and_power(gpu.uuid, context), _peers(gpu, context)
    equal = [heat for heat, power in others if here and abs(power - here[1]) <= EQUAL_POWER * here[1]]
    if here and len(equal) > 1 and here[0] > statistics.median(equal) + ABOVE_PEERS_C:
        usual = statistics.median(equal)
        words = f"under load it is {here[0]:.0f} °C, its peers at the same power {usual:.0f} °C. Check its cooling"
        yield _finding(gpu, Grade.WARN, "hotter-than-peers", words, Remedy.CHECK_CONFIG, value=here[0])


def _peers(gpu: Gpu, context: CheckContext) -> list[tuple[float, float]]:
    others = [other for other in context.gpus if other.uuid != gpu.uuid and other.name == gpu.name]
    return [both for other in others if (both := _heat_and_power(other.uuid, context))]


def _heat_and_power(uuid: str, context: CheckContext) -> tuple[float, float] | None:
    """Means under load."""
    both = [
        (reading.temperature_c, reading.power_w)
        for reading in context.readings
        if reading.uuid == uuid and (reading.utilisation or 0.0) >= LOADED
        if reading.temperature_c is not None and reading.power_w is not None
    ]
    if not both:
        return None
    return statistics.fmean(heat for heat, _ in both), statistics.fmean(power for _, power in both)


def _grade(value: float, fail: float | None, warn: float | None) -> Grade | None:
    if fail is not None and value >= fail:
        return Grade.FAIL
    return Grade.WARN if warn is not None and value >= warn else None


def _known(value: Fact) -> bool:
    return value is not None and not isinstance(value, Unknown)


def _counted(words: str, count: str) -> str:
    """How many goes behind what it is, before what to do."""
    what, _, advice = words.partition(". ")
    return f"{what}: {count}. {advice}"


def _during(check: str) -> str:
    if not check:
        return "outside of the checks"
    return "between the last check and the end" if check == "the end" else f"while {check} ran"


def _finding(
    gpu: Gpu | None,
    grade: Grade,
    code: str,
    words: str,
    remedy: Remedy = Remedy.NONE,
    *,
    value: float | None = None,
    at: str = "",
) -> Finding:
    return Finding(
        check=NAME,
        metric=" ".join(part for part in (code.replace("-", "_"), at) if part),  # one of each kind, GPU and check
        gpu=gpu.uuid if gpu else None,
        verdict=grade,
        code=f"{NAME}-{code}",
        message=f"{words[:1].upper()}{words[1:]}.",
        action=remedy,
        value=value,
        evidence={"during": at} if at else {},
    )


CHECK = Check(
    name=NAME,
    title="Health",
    proves="Driver and kernel report no error of the GPU before, during and after the run, and the GPU was not"
    " throttled.",
    cannot="Reports what the driver reports: errors without a counter, such as silent corruption, are not detected.",
    how=RunMode.LOOK,
    servings=(CheckSize(depth=0, seconds=0.5, worth=100, what="all counters and states, before, during and after"),),
    interpret=interpret,
)
