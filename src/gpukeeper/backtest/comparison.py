"""Recorded work under several policies, on several processes or on a Ray cluster. The result does not depend on
where. Runs are read one after the other and judged in the order of the trace; a few are in memory at a time.

Results can be kept in a file, so that a backtest that was interrupted goes on. Each part is found by a hash of all
that decides its result: an old file can never give a result of another policy, other values or another version.
"""

from __future__ import annotations

import os
import sqlite3
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from gpukeeper import __version__
from gpukeeper.backtest.workers import process_pool, ray_tasks
from gpukeeper.config.sections import digest_of
from gpukeeper.engine.schedule import opening
from gpukeeper.ledger.files import why_untrusted
from gpukeeper.lifecycle.decide import answers
from gpukeeper.lifecycle.replay import (
    Listed,
    Passes,
    Variant,
    applied,
    beginning,
    covering,
    deciding,
    earlier,
    later,
    proposals,
    replay,
)
from gpukeeper.lifecycle.replay_outcome import NOTHING_LIMITED, JudgedRun, Judging, Limited, Usage, judge
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Answer, Decision, View
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Policy
from gpukeeper.model.series import BadRow, MadePasses, RecordedRun, Signal, Trace, TraceTime
from gpukeeper.model.subject import PlaceKey

KIND = 0x67706B62  # application_id of such a file
Results = list[tuple[JudgedRun, ...]]  # of some runs, in their order
Read = Callable[[], Results]


def _bytes_of(values: object) -> bytes:
    assert isinstance(values, array), f"{type(values).__name__} in a recorded run: this is a bug"
    return values.tobytes()


_encode = msgspec.msgpack.Encoder(enc_hook=_bytes_of).encode
_decode = msgspec.msgpack.Decoder(Results).decode


class KeptResults:
    """`about`: identifies the policies, how runs are judged, and the version. Raises UsageError."""

    def __init__(self, path: Path, about: str) -> None:
        self._path, self._about = path, about.encode()
        self.taken = 0  # parts that were not computed again

    def __enter__(self) -> KeptResults:
        self._must_be_own()
        try:
            self._file = sqlite3.connect(self._path, timeout=10)
            (kind,) = self._file.execute("PRAGMA application_id").fetchone()
            (tables,) = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if kind != KIND and (kind or tables):
                raise UsageError(
                    f"{self._path} is not a file of an interrupted backtest. Name another file. Nothing was changed."
                )
            with self._file:
                self._file.execute(f"PRAGMA application_id = {KIND}")
                self._file.execute("CREATE TABLE IF NOT EXISTS parts (key BLOB PRIMARY KEY, results BLOB NOT NULL)")
        except sqlite3.Error as error:
            raise UsageError(f"{self._path} cannot be used for --resume: {error}. Name another file.") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _must_be_own(self) -> None:
        """Another user who can write it could put results there that were never computed."""
        # SQLite also reads `FILE-journal`, so other users must not be able to write to the directory.
        why = why_untrusted(self._path.absolute().parent) or why_untrusted(self._path)
        if why is not None:
            raise UsageError(
                f"{self._path} can be changed by other users, so its results are not used: {why}. Name another "
                "file, in a directory that only you can write. Nothing was changed."
            )

    def or_else(self, runs: Sequence[RecordedRun], start: Callable[[Sequence[RecordedRun]], Read]) -> Read:
        """The kept results of these runs. Without any, begins the work on them; its results are kept."""
        key = sha256(self._about + _encode(runs)).digest()
        found = self._file.execute("SELECT results FROM parts WHERE key = ?", (key,)).fetchone()
        if found is not None:
            with suppress(ValueError, RecursionError):  # of a damaged file: computed again
                results = _decode(found[0])
                self.taken += 1
                return lambda: results
        wait = start(runs)

        def kept() -> Results:
            computed = wait()
            with self._file:
                self._file.execute("INSERT OR REPLACE INTO parts VALUES (?, ?)", (key, _encode(computed)))
            return computed

        return kept


AT_ONCE = 8  # runs in one task
R = TypeVar("R")
Work = Callable[[str, "Comparison", Sequence[RecordedRun]], list[R]]
Wait = Callable[[], list[R]]
Start = Callable[[Sequence[RecordedRun]], Wait[R]]
Progress = Callable[[int], None]


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
    """What every process needs. `time`, `signals` and `made` are those of the trace. `scarce`: when GPUs were, in place
    of what `made` has. `limits`: of each variant, what budget and breaker refuse."""

    policy: Policy
    variants: tuple[Variant, ...]
    judging: Judging
    time: TraceTime
    signals: frozenset[str]
    made: Mapping[PlaceKey, MadePasses] = {}
    scarce: tuple[datetime, ...] | None = None
    limits: tuple[Limited, ...] = ()
    listed: Mapping[str, tuple[Listed, ...]] = {}  # of each run, for each variant: to be continued


class Judge:
    """Judges runs under each policy of the comparison. One in each process."""

    def __init__(self, given: Comparison) -> None:
        self.given = given
        self._policies = [applied(given.policy, variant) for variant in given.variants]
        self._limits = given.limits or (NOTHING_LIMITED,) * len(given.variants)
        self._books: dict[PlaceKey, list[tuple[Rulebook, Passes]]] = {}

    def judged(self, run: RecordedRun) -> tuple[JudgedRun, ...]:
        given, place = self.given, (run.platform, run.place)
        usage, subject = Usage(run, given.judging, given.time), beginning(run).subject
        found: list[JudgedRun] = []
        same: dict[Hashable, JudgedRun] = {}  # policies that differ in nothing that concerns this run
        for (book, passes), limits in zip(self._for(place), self._limits, strict=True):
            refused = limits.of(run.name, place)
            key = (deciding(book, subject), refused)
            if key not in same:
                same[key] = judge(usage, replay(run, book, passes, given.time, given.signals, refused=refused))
            found.append(same[key])
        return tuple(found)

    def proposed(self, run: RecordedRun) -> tuple[Listed, ...]:
        given, place = self.given, (run.platform, run.place)
        return tuple(
            proposals(run, book, passes, given.time, given.signals, limits.of(run.name, place).closed, known)
            for (book, passes), limits, known in zip(
                self._for(place), self._limits, given.listed[run.name], strict=True
            )
        )

    def _for(self, place: PlaceKey) -> list[tuple[Rulebook, Passes]]:
        if place not in self._books:
            self._books[place] = [
                (Rulebook(covering(policy, (place[0],))), passes_at(place, policy, self.given))
                for policy in self._policies
            ]
        return self._books[place]


def passes_at(place: PlaceKey, policy: Policy, given: Comparison) -> Passes:
    made = given.made.get(place, MadePasses())
    scarce = made.scarce if given.scarce is None else given.scarce
    return Passes(policy.schedule.every, opening(policy.schedule), made.at, scarce)


class Evaluation(msgspec.Struct, frozen=True):
    at: datetime
    decision: Decision
    answers: tuple[Answer, ...]  # of all rules, also those that another one suspends


def course_of(
    run: RecordedRun,
    policy: Policy,
    trace: Trace,
    scarce: tuple[datetime, ...] | None = None,
    also: datetime | None = None,
) -> list[Evaluation]:
    """Every evaluation of one run: why it was not stopped sooner, and not later. `also`: in the last pass before it."""
    found: list[Evaluation] = []
    book = Rulebook(covering(policy, (run.platform,)))

    def watch(at: datetime, view: View, decision: Decision) -> None:
        found.append(Evaluation(at, decision, answers(view, book, at)))

    given = comparison(trace, policy, (), Judging(), scarce)
    passes = passes_at((run.platform, run.place), policy, given)
    replay(run, book, passes, given.time, given.signals, watch, also=also)
    return found


_judges: dict[str, Judge] = {}  # of this process; the last one only
_numbers = count()


def judged(name: str, given: Comparison, runs: Sequence[RecordedRun]) -> Results:
    """In a worker. `name`: of the comparison, so that its policies are read once in each process."""
    judge = _judge(name, given)
    return [judge.judged(run) for run in runs]


def proposed(name: str, given: Comparison, runs: Sequence[RecordedRun]) -> list[tuple[Listed, ...]]:
    judge = _judge(name, given)
    return [judge.proposed(run) for run in runs]


def _judge(name: str, given: Comparison) -> Judge:
    if name not in _judges:
        _judges.clear()
        _judges[name] = Judge(given)
    return _judges[name]


def compare(
    trace: Trace,
    policy: Policy,
    variants: Sequence[Variant],
    judging: Judging,
    where: Where = HERE,
    progress: Progress = lambda done: None,
) -> Mapping[Variant, list[JudgedRun]]:
    """The runs of the trace, in its order, judged under each variant of the policy, each run for itself."""
    return judged_runs(trace, comparison(trace, policy, variants, judging), where, progress)


def comparison(
    trace: Trace,
    policy: Policy,
    variants: Sequence[Variant],
    judging: Judging,
    scarce: tuple[datetime, ...] | None = None,
) -> Comparison:
    return Comparison(
        policy=policy,
        variants=tuple(variants),
        judging=judging,
        time=TraceTime(trace.begin, trace.end),
        signals=frozenset(trace.signals),
        made=trace.made,
        scarce=scarce,
    )


def judged_runs(
    trace: Trace, given: Comparison, where: Where, progress: Progress = lambda done: None
) -> Mapping[Variant, list[JudgedRun]]:
    found: dict[Variant, list[JudgedRun]] = {variant: [] for variant in given.variants}
    with ExitStack() as stack:
        kept = None if where.resume is None else stack.enter_context(KeptResults(where.resume, _identity(given)))
        keep = None if kept is None else kept.or_else
        for number, results in enumerate(results_of(judged, trace.runs(), given, where, keep), 1):
            for variant, one in zip(given.variants, results, strict=True):
                found[variant].append(one)
            progress(number)
    return found


def results_of(
    work: Work[R],
    runs: Iterator[RecordedRun],
    given: Comparison,
    where: Where,
    keep: Callable[[Sequence[RecordedRun], Start[R]], Wait[R]] | None = None,
) -> Iterator[R]:
    """In the order of the runs. `keep`: has the results of some of them, or starts the work."""
    with ExitStack() as stack:
        start, at_once = _started(stack, work, given, where)
        waiting: deque[Wait[R]] = deque()
        for some in _chunks(runs):
            waiting.append(start(some) if keep is None else keep(some, start))
            if len(waiting) > at_once:
                yield from waiting.popleft()()
        while waiting:
            yield from waiting.popleft()()


def _started(stack: ExitStack, work: Work[R], given: Comparison, where: Where) -> tuple[Start[R], int]:
    """What begins the work on some runs, and how many parts of it may wait at a time."""
    if where.on is not None:
        tasks = stack.enter_context(ray_tasks(where.on, work, given, where.workers))
        return tasks.start, 2 * tasks.size
    size, name = where.workers or cores(), str(next(_numbers))
    if size == 1:
        return lambda runs: partial(list, work(name, given, runs)), 0
    pool = stack.enter_context(process_pool(size, _take_given, (name, given)))
    return lambda runs: pool.submit(_worked, work, runs).result, 2 * size


_given: list[tuple[str, Comparison]] = []  # in a process of the pool


def _take_given(name: str, given: Comparison) -> None:
    """Once in each process: the passes of a month are many."""
    _given[:] = [(name, given)]


def _worked(work: Work[R], runs: Sequence[RecordedRun]) -> list[R]:
    return work(*_given[0], runs)


def _identity(given: Comparison) -> str:
    """All that decides a result, but the runs themselves."""
    passes = (sorted(given.made.items()), given.scarce)
    rest = (given.variants, given.judging, given.time, sorted(given.signals), *passes)
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

    @property
    def made(self) -> Mapping[PlaceKey, MadePasses]:
        return self._whole.made

    def runs(self) -> Iterator[RecordedRun]:
        cut = later if self._is_later else earlier
        for run in self._whole.runs():
            part = cut(run, self._split)
            if part is not None:
                yield part
