"""Recorded work under several policies, on several processes. The result does not depend on how many.

Runs are read one after the other and judged in the order of the trace; a few are in memory at a time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from itertools import islice
from multiprocessing import get_context

import msgspec

from gpukeeper.engine.schedule import opening
from gpukeeper.lifecycle.backtest.outcome import JudgedRun, Judging, Usage, judge
from gpukeeper.lifecycle.backtest.parts import earlier, later
from gpukeeper.lifecycle.backtest.replay import Passes, replay
from gpukeeper.lifecycle.backtest.variants import Variant, applied, covering
from gpukeeper.lifecycle.decide import answers
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Answer, Decision, View
from gpukeeper.model.policy import Policy
from gpukeeper.model.series import Signal
from gpukeeper.model.trace import BadRow, RecordedRun, Trace, TraceTime

AT_ONCE = 8  # runs in one task


def cores() -> int:
    return len(os.sched_getaffinity(0))


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
        usage = Usage(run, self.given.judging, self.given.time)
        found = []
        for book, passes in self._for(run.platform):
            found.append(judge(usage, replay(run, book, passes, self.given.time, self.given.signals)))
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


_judge: list[Judge] = []  # of this worker process


def _start(given: Comparison) -> None:
    _judge[:] = [Judge(given)]


def _work(runs: Sequence[RecordedRun]) -> list[tuple[JudgedRun, ...]]:
    return [_judge[0].judged(run) for run in runs]


def compare(
    trace: Trace,
    policy: Policy,
    variants: Sequence[Variant],
    judging: Judging,
    *,
    workers: int = 1,
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
    for number, results in enumerate(_results(trace.runs(), given, workers), 1):
        for variant, one in zip(variants, results, strict=True):
            found[variant].append(one)
        progress(number)
    return found


def _results(runs: Iterator[RecordedRun], given: Comparison, workers: int) -> Iterator[tuple[JudgedRun, ...]]:
    if workers == 1:
        one = Judge(given)
        yield from map(one.judged, runs)
        return
    with ExitStack() as stack:
        pool = stack.enter_context(
            ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start, initargs=(given,))
        )
        stack.callback(pool.shutdown, cancel_futures=True)
        waiting: deque[Future[list[tuple[JudgedRun, ...]]]] = deque()
        for some in _chunks(runs):
            waiting.append(pool.submit(_work, some))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


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
