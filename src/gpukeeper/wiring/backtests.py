"""Recorded work under several policies, on several processes or on a Ray cluster. The result does not depend on where.

Runs are read one after the other and judged in the order of the trace; a few are in memory at a time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import msgspec

from gpukeeper import __version__
from gpukeeper.config.digest import digest_of
from gpukeeper.engine.schedule import opening
from gpukeeper.lifecycle.backtest.outcome import JudgedRun, Judging, Usage, judge
from gpukeeper.lifecycle.backtest.parts import earlier, later
from gpukeeper.lifecycle.backtest.replay import Passes, beginning, replay
from gpukeeper.lifecycle.backtest.variants import Variant, applied, covering, deciding
from gpukeeper.lifecycle.decide import answers
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Answer, Decision, View
from gpukeeper.model.policy import Policy
from gpukeeper.model.series import Signal
from gpukeeper.model.trace import BadRow, RecordedRun, Trace, TraceTime
from gpukeeper.wiring.backtest_results import KeptResults, Results, Wait
from gpukeeper.wiring.ray_tasks import ray_tasks

AT_ONCE = 8  # runs in one task


def cores() -> int:
    return len(os.sched_getaffinity(0))


class Where(msgspec.Struct, frozen=True):
    """Where runs are replayed. `workers`: at most so many; None: one for each core. `on`: the address of a Ray cluster
    whose cores are used instead of this machine's. `resume`: a file in which results are kept, and found again."""

    workers: int | None = 1
    on: str | None = None
    resume: Path | None = None


HERE = Where()


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What every process needs. `time` and `signals` are those of the trace."""

    policy: Policy
    variants: tuple[Variant, ...]
    judging: Judging
    time: TraceTime
    signals: frozenset[str]


class Judge:
    """Judges runs under each policy of the comparison. One in each process."""

    def __init__(self, given: Comparison) -> None:
        self.given = given
        policies = [applied(given.policy, variant) for variant in given.variants]
        self._books = [(policy, Passes(policy.schedule.every, opening(policy.schedule))) for policy in policies]
        self._covering: dict[str, list[tuple[Rulebook, Passes]]] = {}

    def judged(self, run: RecordedRun) -> tuple[JudgedRun, ...]:
        usage, subject = Usage(run, self.given.judging, self.given.time), beginning(run).subject
        found: list[JudgedRun] = []
        same: dict[Hashable, JudgedRun] = {}  # policies that differ in nothing that concerns this run
        for book, passes in self._for(run.platform):
            key = deciding(book, subject)
            if key not in same:
                same[key] = judge(usage, replay(run, book, passes, self.given.time, self.given.signals))
            found.append(same[key])
        return tuple(found)

    def _for(self, platform: str) -> list[tuple[Rulebook, Passes]]:
        if platform not in self._covering:
            books = [(Rulebook(covering(policy, (platform,))), passes) for policy, passes in self._books]
            self._covering[platform] = books
        return self._covering[platform]


class Evaluation(msgspec.Struct, frozen=True):
    at: datetime
    decision: Decision
    answers: tuple[Answer, ...]  # of all rules, also those that another one suspends


def course_of(run: RecordedRun, policy: Policy, trace: Trace) -> list[Evaluation]:
    """Every evaluation of one run: why it was not stopped sooner, and not later."""
    found: list[Evaluation] = []
    book = Rulebook(covering(policy, (run.platform,)))

    def watch(at: datetime, view: View, decision: Decision) -> None:
        found.append(Evaluation(at, decision, answers(view, book, at)))

    passes = Passes(policy.schedule.every, opening(policy.schedule))
    replay(run, book, passes, TraceTime(trace.begin, trace.end), frozenset(trace.signals), watch)
    return found


_judges: dict[str, Judge] = {}  # of this process; the last one only


def judged(name: str, given: Comparison, runs: Sequence[RecordedRun]) -> Results:
    """In a worker. `name`: of the comparison, so that its policies are read once in each process."""
    if name not in _judges:
        _judges.clear()
        _judges[name] = Judge(given)
    return [_judges[name].judged(run) for run in runs]


def compare(
    trace: Trace,
    policy: Policy,
    variants: Sequence[Variant],
    judging: Judging,
    where: Where = HERE,
    progress: Callable[[int], None] = lambda done: None,
) -> Mapping[Variant, list[JudgedRun]]:
    """The runs of the trace, in its order, judged under each variant of the policy."""
    given = Comparison(
        policy=policy,
        variants=tuple(variants),
        judging=judging,
        time=TraceTime(trace.begin, trace.end),
        signals=frozenset(trace.signals),
    )
    found: dict[Variant, list[JudgedRun]] = {variant: [] for variant in variants}
    for number, results in enumerate(_results(trace.runs(), given, where), 1):
        for variant, one in zip(variants, results, strict=True):
            found[variant].append(one)
        progress(number)
    return found


def _results(runs: Iterator[RecordedRun], given: Comparison, where: Where) -> Iterator[tuple[JudgedRun, ...]]:
    with ExitStack() as stack:
        kept = None if where.resume is None else stack.enter_context(KeptResults(where.resume, _identity(given)))
        start, at_once = _started(stack, given, where)
        waiting: deque[Wait] = deque()
        for some in _chunks(runs):
            waiting.append(start(some) if kept is None else kept.or_else(some, start))
            if len(waiting) > at_once:
                yield from waiting.popleft()()
        while waiting:
            yield from waiting.popleft()()


def _started(stack: ExitStack, given: Comparison, where: Where) -> tuple[Callable[[Sequence[RecordedRun]], Wait], int]:
    """What begins the work on some runs, and how many parts of it may wait at a time."""
    if where.on is not None:
        tasks = stack.enter_context(ray_tasks(where.on, judged, given, where.workers))
        return tasks.start, 2 * tasks.size
    size = where.workers or cores()
    if size == 1:
        one = Judge(given)
        return lambda runs: partial(list, [one.judged(run) for run in runs]), 0
    pool = stack.enter_context(ProcessPoolExecutor(size, mp_context=get_context("spawn")))
    stack.callback(pool.shutdown, cancel_futures=True)
    return lambda runs: pool.submit(judged, "", given, runs).result, 2 * size


def _identity(given: Comparison) -> str:
    """All that decides a result, but the runs themselves."""
    rest = (given.variants, given.judging, given.time, sorted(given.signals))
    return f"{__version__} {digest_of(given.policy)} {msgspec.json.encode(rest).decode()}"


def _chunks(runs: Iterable[RecordedRun]) -> Iterator[list[RecordedRun]]:
    iterator = iter(runs)
    while some := list(islice(iterator, AT_ONCE)):
        yield some


class PartOfTrace:
    """The earlier or the later part of a trace."""

    def __init__(self, whole: Trace, split: datetime, *, is_later: bool) -> None:
        self._whole, self._split, self._is_later = whole, split, is_later

    @property
    def source(self) -> str:
        return self._whole.source

    @property
    def begin(self) -> datetime:
        return self._split if self._is_later else self._whole.begin

    @property
    def end(self) -> datetime:
        return self._whole.end if self._is_later else self._split

    @property
    def signals(self) -> frozenset[Signal]:
        return self._whole.signals

    @property
    def rows(self) -> int:
        return self._whole.rows

    @property
    def bad_count(self) -> int:
        return self._whole.bad_count

    @property
    def bad(self) -> tuple[BadRow, ...]:
        return self._whole.bad

    def runs(self) -> Iterator[RecordedRun]:
        cut = later if self._is_later else earlier
        for run in self._whole.runs():
            part = cut(run, self._split)
            if part is not None:
                yield part
