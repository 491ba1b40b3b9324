"""What a check is: a request to a probe, and how its result is interpreted. One check, one file in checks/."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from gpukeeper.acceptance.record import Finding, Machine, ProbeReply, ProbeRequest, Thresholds, Values
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Gpu, Health, Past, Reading

ALWAYS = ("environment", "health")  # they cost nothing, and without them it is unknown what was tested


class RunMode(StrEnum):
    """What a check runs on."""

    LOOK = "look"  # reads driver, kernel and machine; runs nothing
    EACH = "each"  # a probe on every GPU, on all GPUs at the same time
    TOGETHER = "together"  # one probe over all GPUs, a rank for each


class CheckSize(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a check. A deeper one replaces the shallower ones of the same check."""

    depth: int  # 0 quick, 1 minutes, 2 half an hour, 3 hours
    seconds: float  # what it takes on a GPU, as estimated
    worth: float  # how informative it is, relative to the others; the most informative per minute are chosen first
    what: str  # "bf16 and fp8, one second each"
    params: Values = {}
    small: Values = {}  # over `params` where there is no GPU


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the user requested."""

    device: str = "cuda"  # cuda, cpu or simulated
    expected: int | None = None  # GPUs that must be here
    gpus: tuple[str, ...] = ()  # only these, by uuid, index or serial; empty: all
    within_s: float = 60.0
    check_timeout_s: float | None = None  # of each check; None: its own, which is longer for a larger size
    profile: str = "quick"
    only: tuple[str, ...] = ()  # checks; empty: as many as fit
    skip: tuple[str, ...] = ()
    params: Mapping[str, Values] = {}  # by check: over the serving's own
    inject: Mapping[str, Values] = {}  # by check: faults, for the self-test alone


@dataclass(frozen=True)
class CheckRun:
    """A check that was run: its size, and the replies, by uuid of the GPU (each) or by rank (together)."""

    serving: CheckSize
    answers: Mapping[str, ProbeReply] = field(default_factory=dict)
    seconds: float = 0.0
    around: tuple[Mapping[str, Health], ...] = ()  # by uuid: health read right before and right after it


@dataclass(frozen=True)
class CheckContext:
    """What a check needs to interpret its results: the machine, its state, and the values to compare with."""

    wish: RunRequest
    machine: Machine
    gpus: tuple[Gpu, ...]
    limits: Callable[[Gpu, str, str, str], Thresholds]  # of a GPU: check, metric, method
    history: Mapping[str, tuple[Past, ...]] = field(default_factory=dict)  # by Gpu.identity, oldest first
    before: Mapping[str, Health] = field(default_factory=dict)  # by uuid: before the first check
    after: Mapping[str, Health] = field(default_factory=dict)  # after the last one; empty while checks run
    readings: tuple[Reading, ...] = ()
    at_check: Mapping[str, Mapping[str, Health]] = field(default_factory=dict)  # by check, by uuid: right after it

    def gpu(self, uuid: str) -> Gpu:
        return next(one for one in self.gpus if one.uuid == uuid)

    @property
    def small(self) -> bool:
        """There is no GPU: the same code with sizes for a CPU."""
        return self.wish.device == "cpu"


MakeRequest = Callable[[CheckSize, CheckContext], ProbeRequest]
Interpret = Callable[[CheckRun, CheckContext], tuple[Finding, ...]]


@dataclass(frozen=True)
class Check:
    name: str
    title: str
    proves: str  # a sentence each; the reference page is written from them
    cannot: str
    how: RunMode
    servings: tuple[CheckSize, ...]  # by depth
    interpret: Interpret
    request: MakeRequest | None = None  # None: nothing runs
    least_gpus: int = 1
    slices: bool = True  # it also makes sense on a slice of a GPU


def params_of(check: str, serving: CheckSize, context: CheckContext) -> dict[str, object]:
    """Parameters of the probe: of the size, then those for a CPU, those of the user, and injected faults."""
    small = serving.small if context.small else {}
    given = {**serving.params, **small, **context.wish.params.get(check, {})}
    injected = context.wish.inject.get(check)
    return {**given, "inject": dict(injected)} if injected else given


def refuse(check: str, problems: Iterable[str]) -> None:
    """Raises UsageError with all problems: parameters with which no GPU can pass, or every GPU passes."""
    found = list(problems)
    if found:
        raise UsageError(f"{check}: {'; '.join(found)}. Nothing was run.")


def too_little(params: Mapping[str, object], **least: float) -> Iterable[str]:
    """Sizes (or lists of them) that prove nothing. None is the probe's own default."""
    for name, low in least.items():
        given = params.get(name)
        sizes = given if isinstance(given, list | tuple) else [] if given is None else [given]
        if not sizes and given is not None:
            yield f"{name} is empty, so nothing would be tested"
        for one in sizes:
            if not (isinstance(one, int | float) and one >= low):
                yield f"{name} {one} is too small to prove anything; use {low:g} or more"


def unknown_words(params: Mapping[str, object], name: str, known: Sequence[str]) -> Iterable[str]:
    given = params.get(name)
    if isinstance(given, list | tuple):
        if not given:
            yield f"{name} is empty, so nothing would be tested; valid values: {', '.join(known)}"
        yield from (
            f'{name}: unknown value "{one}"; valid values: {", ".join(known)}' for one in given if one not in known
        )
