"""Every check, and which of them fit into the available time: most informative checks first. Pure.

A new check is one line of CHECKS, cheap and informative ones first. Lists what is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpukeeper.acceptance.check import ALWAYS, Check, CheckContext, CheckSize, RunMode, RunRequest
from gpukeeper.acceptance.checks import (
    collectives,
    copies,
    ddp,
    environment,
    exact,
    gemm,
    health,
    links,
    memory_bandwidth,
    memory_pattern,
    nccl_tests,
    stress,
    throughput,
    topology,
    training,
)
from gpukeeper.acceptance.record import Machine, NotTested, Thresholds
from gpukeeper.model.gpu import Gpu

CHECKS: tuple[Check, ...] = (
    environment.CHECK,
    health.CHECK,
    gemm.CHECK,
    memory_bandwidth.CHECK,
    copies.CHECK,
    exact.CHECK,
    training.CHECK,
    memory_pattern.CHECK,
    topology.CHECK,
    links.CHECK,
    collectives.CHECK,
    collectives.NVLINK,
    collectives.NETWORK,
    ddp.CHECK,
    throughput.CHECK,
    nccl_tests.CHECK,
    stress.CHECK,
)


def find_check(name: str) -> Check | None:
    return next((check for check in CHECKS if check.name == name), None)


def deadline_s(check: Check, size: CheckSize) -> float | None:
    """After which the probe of a check is ended, unless --check-timeout says otherwise. None: it runs nothing."""
    if check.request is None:
        return None
    gpus = tuple(Gpu(uuid=f"gpu-{number}", index=number) for number in range(2))
    machine = Machine(node="here", gpus=gpus)
    example = CheckContext(wish=RunRequest(), machine=machine, gpus=gpus, limits=lambda *_: Thresholds())
    return check.request(size, example).deadline_s


NOT_SELECTED = "not among the selected checks"
_NOT_SELECTED_BEFORE = "not among the checks asked for"  # in reports of earlier versions
START_S = 12.0  # starting programs, loading PyTorch, the last read of health
SPANS = (("1m", 60.0), ("5m", 300.0), ("30m", 1800.0), ("4h", 14400.0), ("24h", 86400.0))


@dataclass(frozen=True)
class PlannedCheck:
    check: Check
    serving: CheckSize


@dataclass(frozen=True)
class CheckPlan:
    """The checks to run, in the order of the catalog, and the skipped ones."""

    chosen: tuple[PlannedCheck, ...]
    left_out: tuple[NotTested, ...]

    @property
    def seconds(self) -> float:
        return START_S + sum(one.serving.seconds for one in self.chosen)


def is_not_selected(why: str) -> bool:
    """Whether a check was skipped because others were selected, in a report of this or an earlier version."""
    return why in (NOT_SELECTED, _NOT_SELECTED_BEFORE)


def choose(checks: Sequence[Check], wish: RunRequest, gpus: Sequence[Gpu]) -> CheckPlan:
    fitting, left_out = _that_apply(checks, wish, gpus)
    taken = _within(fitting, wish.within_s, everything=bool(wish.only))
    chosen = tuple(PlannedCheck(check, taken[check.name]) for check in fitting if check.name in taken)
    return CheckPlan(chosen, (*left_out, *_unserved(fitting, taken)))


def _that_apply(checks: Sequence[Check], wish: RunRequest, gpus: Sequence[Gpu]) -> tuple[list[Check], list[NotTested]]:
    fitting, left_out = [], []
    for check in checks:
        why = _why_not(check, wish, gpus)
        if why is None:
            fitting.append(check)
        else:
            left_out.append(NotTested(check=check.name, why=why))
    return fitting, left_out


def _why_not(check: Check, wish: RunRequest, gpus: Sequence[Gpu]) -> str | None:
    if check.name in ALWAYS:
        return None
    if check.name in wish.skip:
        return "skipped on request (--skip)"
    if wish.only and check.name not in wish.only:
        return NOT_SELECTED
    if not gpus and check.how is not RunMode.LOOK:
        return "no GPU available"
    if 0 < len(gpus) < check.least_gpus:
        return f"needs {check.least_gpus} GPUs, {len(gpus)} available"
    if not check.slices and any(gpu.part_of is not None for gpu in gpus):
        return "does not apply to slices of a GPU"
    return None


def _within(checks: Iterable[Check], seconds: float, *, everything: bool) -> dict[str, CheckSize]:
    """First every check once, then deeper sizes; each time the most informative per minute that still fits."""
    offers = list(checks)
    taken: dict[str, CheckSize] = {}
    left = seconds - START_S
    if everything:  # selected checks run, however long they take; deeper sizes only if there is time
        taken = {check.name: check.servings[0] for check in offers}
        left -= sum(one.seconds for one in taken.values())
    while best := _best(offers, taken, left):
        check, serving = best
        left -= serving.seconds - _seconds(taken.get(check.name))
        taken[check.name] = serving
    return taken


def _best(checks: Sequence[Check], taken: dict[str, CheckSize], left: float) -> tuple[Check, CheckSize] | None:
    """A check that is not planned yet comes first, in its smallest size, before a deeper size of any other check."""
    found: list[tuple[bool, float, Check, CheckSize]] = []
    for check in checks:
        now = taken.get(check.name)
        for serving in check.servings if now is not None else check.servings[:1]:
            more, cost = serving.worth - _worth(now), serving.seconds - _seconds(now)
            if more > 0 and cost <= left:
                found.append((now is None, more / max(cost, 0.1), check, serving))
    if not found:
        return None
    _, _, check, serving = max(found, key=lambda one: one[:2])
    return check, serving


def _unserved(checks: Sequence[Check], taken: dict[str, CheckSize]) -> Iterable[NotTested]:
    longer = [(words, _within(checks, seconds, everything=False)) for words, seconds in SPANS]
    for check in checks:
        now = taken.get(check.name)
        for serving in check.servings:
            if now is None or serving.depth > now.depth:
                what = serving.what if now is not None else ""
                why, within = _no_time(longer, check, serving)
                yield NotTested(check=check.name, what=what, why=why, within=within)


def _no_time(longer: Sequence[tuple[str, dict[str, CheckSize]]], check: Check, serving: CheckSize) -> tuple[str, str]:
    for words, taken in longer:
        then = taken.get(check.name)
        if then is not None and then.depth >= serving.depth:
            return f"takes about {serving.seconds:.0f} s; --within {words} runs it", words
    return f"takes about {serving.seconds:.0f} s; to run it: --check {check.name}", ""


def _worth(serving: CheckSize | None) -> float:
    return 0.0 if serving is None else serving.worth


def _seconds(serving: CheckSize | None) -> float:
    return 0.0 if serving is None else serving.seconds
