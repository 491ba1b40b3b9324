"""What a check is: a question to a probe and how to read its answer. Each lives in checks/, catalog.py lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from gpukeeper.acceptance.record import Answer, Finding, Job, Limits, Machine, Values
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Gpu, Health, Reading
from gpukeeper.model.grade import Past

ALWAYS = ("environment", "health")  # they cost nothing, and without them nobody knows what was tested


class How(StrEnum):
    """What its answers come from."""

    LOOK = "look"  # what driver, kernel and machine say; nothing runs
    EACH = "each"  # a probe on every GPU, on all of them at once
    TOGETHER = "together"  # one probe over all GPUs, a rank for each


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a check. A deeper one takes the place of the shallower ones of the same check."""

    depth: int  # 0 quick, 1 minutes, 2 half an hour, 3 hours
    seconds: float  # what it takes on a GPU, as estimated
    worth: float  # how much it tells, beside the others; chosen by worth per minute
    what: str  # "bf16 and fp8, one second each"
    params: Values = {}
    small: Values = {}  # over `params` where there is no GPU


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for."""

    device: str = "cuda"  # cuda, cpu or simulated
    expected: int | None = None  # GPUs that must be here
    gpus: tuple[str, ...] = ()  # only these, by uuid, index or serial; empty: all
    within_s: float = 60.0
    profile: str = "quick"
    only: tuple[str, ...] = ()  # checks; empty: as many as fit
    skip: tuple[str, ...] = ()
    params: Mapping[str, Values] = {}  # by check: over the serving's own
    inject: Mapping[str, Values] = {}  # by check: faults, for the self-test alone


@dataclass(frozen=True)
class Trial:
    """A check that ran: what it was, and what came back, by the GPU's uuid (each) or the rank's number (together)."""

    serving: Serving
    answers: Mapping[str, Answer] = field(default_factory=dict)
    seconds: float = 0.0
    around: tuple[Mapping[str, Health], ...] = ()  # by uuid: the looks right before and right after it


@dataclass(frozen=True)
class Setting:
    """What a check reads its answers in: the machine, what is known of it, and what it is held against."""

    wish: Wish
    machine: Machine
    gpus: tuple[Gpu, ...]
    limits: Callable[[Gpu, str, str, str], Limits]  # of a GPU: check, metric, method
    history: Mapping[str, tuple[Past, ...]] = field(default_factory=dict)  # by Gpu.identity, oldest first
    before: Mapping[str, Health] = field(default_factory=dict)  # by uuid: before the first check
    after: Mapping[str, Health] = field(default_factory=dict)  # after the last one; empty while checks run
    readings: tuple[Reading, ...] = ()
    at_check: Mapping[str, Mapping[str, Health]] = field(default_factory=dict)  # by check, by uuid: right after it

    def gpu(self, uuid: str) -> Gpu:
        return next(one for one in self.gpus if one.uuid == uuid)

    @property
    def small(self) -> bool:
        """There is no GPU: the same code on figures that a CPU can bear."""
        return self.wish.device == "cpu"


Ask = Callable[[Serving, Setting], Job]
Read = Callable[[Trial, Setting], tuple[Finding, ...]]


@dataclass(frozen=True)
class Check:
    name: str
    title: str
    proves: str  # a sentence each; the reference page is written from them
    cannot: str
    how: How
    servings: tuple[Serving, ...]  # by depth
    read: Read
    ask: Ask | None = None  # None: nothing runs
    least_gpus: int = 1
    slices: bool = True  # it also makes sense on a slice of a GPU


def params_of(check: str, serving: Serving, setting: Setting) -> dict[str, object]:
    """What the probe is given: the serving's figures, then those for a CPU, the person's, and injected faults."""
    small = serving.small if setting.small else {}
    given = {**serving.params, **small, **setting.wish.params.get(check, {})}
    injected = setting.wish.inject.get(check)
    return {**given, "inject": dict(injected)} if injected else given


def refuse(check: str, problems: Iterable[str]) -> None:
    """Settings that no healthy GPU could pass with, or that any would. Raises UsageError with all of them."""
    told = list(problems)
    if told:
        raise UsageError(f"{check}: {'; '.join(told)}. Nothing was run.")


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
