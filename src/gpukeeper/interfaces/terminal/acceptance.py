"""What an acceptance run says: a line for each result as it arrives, one line that is overwritten on a terminal, and
at the end the GPUs, what was not tested, the verdict and what to do next."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import typer

from gpukeeper.acceptance.judging.messages import TEACH
from gpukeeper.acceptance.record import Finding, Machine, NotTested, Report
from gpukeeper.acceptance.reports import lines
from gpukeeper.acceptance.reports.wording import fact, figure, gpu_words, retest_command
from gpukeeper.acceptance.run import Began, Repeated, Step
from gpukeeper.acceptance.suite import NOT_ASKED_FOR
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.colours import overwrites
from gpukeeper.interfaces.terminal.layout import width_of, wrapped
from gpukeeper.model.durations import in_words
from gpukeeper.model.grade import Grade
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.terminals import plain

if TYPE_CHECKING:
    from gpukeeper.acceptance.check import Wish
    from gpukeeper.acceptance.self_test import Attempt

REFRESH = 1.0  # seconds
ALIKE = 4  # as many reasons of a kind are told one by one
TOGETHER = frozenset({Grade.PASS, Grade.SKIPPED, Grade.INCONCLUSIVE})  # told of several GPUs in one line
TOLD = ("driver", "cuda_driver", "torch", "cuda", "nccl")  # of the environment, in the opening line


class Once:
    """Advice is printed once: where eleven checks have the same cause, ten of them only say what is wrong."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, words: str) -> str:
        for lesson in TEACH.values():
            if lesson.advice in words and lesson.advice in self._said:
                words = f"{words.partition(f' {lesson.advice}')[0]} See above."  # what a probe said as well
            elif lesson.advice in words:
                self._said.add(lesson.advice)
        return words


class Narrator:
    """Called by the engine with every step. Results go where `echo` puts them; the moving line is stderr's."""

    def __init__(self, wish: Wish, echo: Callable[[str], None], *, verbose: bool) -> None:
        self._wish, self._echo, self._verbose = wish, echo, verbose
        self._report: Report | None = None  # so far: whose GPU a finding is about
        self._waiting: list[Finding] = []  # of one check, told together
        self._now: Began | None = None
        self._began = time.monotonic()
        self._moving = overwrites(sys.stderr)
        self.once = Once()

    def __call__(self, step: Step) -> None:
        if not isinstance(step, Finding):
            self.flush()
        match step:
            case Machine():
                self._report = provisional(step, self._wish)
                self._say(lines.line(lines.ENV, machine_words(step, self._wish)))
            case Began():
                self._now, self._began = step, time.monotonic()
                self._moving_or(lines.running(step.check, f"{step.what} ({_place(step)})"))
            case Repeated():
                who = ", ".join(gpu_words(self._report, one) if self._report else one for one in step.gpus)
                self._say(lines.running(step.check, f"again, try {step.attempt}: {who or 'all of them'}"))
            case NotTested():
                if self._verbose:
                    what = f" ({step.what})" if step.what else ""
                    self._say(lines.line(lines.SUMMARY, f"{step.check}{what}: not tested: {step.why}"))
            case Finding():
                if self._waiting and self._waiting[0].check != step.check:
                    self.flush()
                self._waiting.append(step)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for words in finding_lines(waiting, self._report, verbose=self._verbose):
            self._say(words)

    async def moving(self) -> None:
        """The line that tells how far it is, until it is cancelled."""
        try:
            while self._moving:
                self._draw()
                await asyncio.sleep(REFRESH)
        finally:
            self._erase()

    def _moving_or(self, words: str) -> None:
        if self._moving:
            self._draw()
        else:
            self._say(words)

    def _draw(self) -> None:
        if self._moving and self._now is not None:
            left = max(self._now.left_s - (time.monotonic() - self._began), 0)
            words = f"{self._now.check}: {self._now.what}"
            place = f"{self._now.number} of {self._now.of}, about {in_words(timedelta(seconds=left))} left"
            show.progress_line(f"{place}  {words}")

    def _erase(self) -> None:
        if self._moving:
            show.progress_line("")

    def _say(self, words: str) -> None:
        self._erase()
        self._echo(plain(self.once(words)))
        self._draw()


def _place(step: Began) -> str:
    return f"{step.number} of {step.of}, about {in_words(timedelta(seconds=step.left_s))} left"


def provisional(machine: Machine, wish: Wish) -> Report:
    """Only for the names of GPUs in the lines of a run that has no report yet."""
    from datetime import UTC, datetime

    begin = datetime.fromtimestamp(0, UTC)
    return Report(
        run="",
        node=machine.node,
        version="",
        device=wish.device,
        started=begin,
        ended=begin,
        profile=wish.profile,
        within_s=wish.within_s,
        verdict=Grade.INCONCLUSIVE,
        reason="",
        machine=machine,
    )


def machine_words(machine: Machine, wish: Wish) -> str:
    """ "node-3: 8 × NVIDIA H200; driver 570.1, torch 2.11.0"."""
    if isinstance(machine.gpus, Unknown):
        return f"{machine.node}: its GPUs could not be learned ({machine.gpus.why})"
    names: dict[str, int] = {}
    for gpu in machine.gpus:
        name = fact(gpu.name) if not gpu.profile else f"{fact(gpu.name)} {gpu.profile}"
        names[name] = names.get(name, 0) + 1
    here = ", ".join(f"{count} × {name}" for name, count in names.items()) or "no GPU"
    facts = [f"{name.replace('_', ' ')} {fact(machine.environment[name])}" for name in TOLD if _known(machine, name)]
    mode = {"cpu": " (CPU mode: no GPU is tested)", "simulated": " (simulated: no GPU is tested)"}.get(wish.device, "")
    return f"{machine.node}: {here}{mode}" + (f"; {', '.join(facts)}" if facts else "")


def _known(machine: Machine, name: str) -> bool:
    return not isinstance(machine.environment.get(name), Unknown) and machine.environment.get(name) is not None


def finding_lines(findings: Sequence[Finding], report: Report | None, *, verbose: bool) -> list[str]:
    """One for each; but what holds for several GPUs alike is one line, unless all is wanted. A fault is told alone."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for number, one in enumerate(findings):
        apart = verbose or one.gpu is None or one.verdict not in TOGETHER
        alike.setdefault((str(number),) if apart else (one.check, one.metric, one.code), []).append(one)
    return [
        _group_line(group, report) if len(group) > 1 else lines.tagged(group[0], report)
        for group in alike.values()
        if verbose or group[0].verdict is not Grade.SKIPPED
    ]


def _group_line(group: Sequence[Finding], report: Report | None) -> str:
    first = group[0]
    name = f"{first.check}.{first.metric}" if first.metric else first.check
    values = sorted(one.value for one in group if one.value is not None)
    least = "" if not values or values[0] == values[-1] else f"{figure(values[0])} to "
    span = "" if not values else f" {least}{figure(values[-1], first.unit)}"
    why = "" if first.verdict is Grade.PASS else f": {first.message}"
    head = f"{first.verdict} {len(group)} {_kind(report)}s {name}{span}{why}"
    return lines.line(lines.tag(first.check, first.metric), head)


def _kind(report: Report | None) -> str:
    return "CPU" if report is not None and report.device == "cpu" else "GPU"


def ending(
    report: Report, folder: str, echo: Callable[[str], None], *, verbose: bool, once: Once | None = None
) -> None:
    """The GPUs, what was not tested, the verdict, where the report is, what next. `once`: of the lines before it."""
    once = once or Once()
    for words in lines.closing(report, folder):
        echo(plain(words))
    echo("")
    rows = [_gpu_row(report, number) for number in range(len(report.tallies))]
    show.table([(*row[:-1], once(row[-1])) for row in rows], head=_HEAD)
    for words in coverage_lines(report.coverage, verbose=verbose):
        echo(plain(words))
    if report.tallies or report.coverage:
        echo("")
    echo(plain(once(verdict_line(report))))
    if folder:
        echo(plain(f"Report: {folder}"))
    for words in next_steps(report):
        echo(plain(words))


_HEAD = ("verdict", "gpu", "name", "serial", "busy", "because")


def _gpu_row(report: Report, number: int) -> tuple[str, ...]:
    tally = report.tallies[number]
    assert not isinstance(report.machine.gpus, Unknown), "a tally is of a GPU that was seen"
    gpu = next(one for one in report.machine.gpus if one.uuid == tally.gpu)
    busy = "-" if tally.busy is None else f"{tally.busy:.0%}"
    return (tally.verdict.value, gpu_words(report, gpu.uuid), fact(gpu.name), gpu.identity, busy, tally.reason)


def coverage_lines(coverage: Iterable[NotTested], *, verbose: bool) -> list[str]:
    """What was left out: those for the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for one in coverage:
        if not verbose and (one.within or one.why == NOT_ASKED_FOR):
            continue  # told by the next steps, or known to who asked
        name = f"{one.check} ({one.what})" if one.what else one.check
        by_reason.setdefault(one.why, []).append(name)
    return [f"not tested: {', '.join(dict.fromkeys(names))}: {why}" for why, names in by_reason.items()]


def verdict_line(report: Report) -> str:
    took = in_words(report.ended - report.started)
    who = f"{report.node}, {len(report.tallies)} {_kind(report)}{'' if len(report.tallies) == 1 else 's'}, {took}"
    return f"{report.verdict}  {who}: {report.reason}"


def next_steps(report: Report) -> list[str]:
    steps = []
    if report.verdict in (Grade.FAIL, Grade.INCONCLUSIVE) and report.tallies and report.device == "cuda":
        steps.append(f"Test again: {retest_command(report)}")
    spans: dict[str, dict[str, str]] = {}
    for one in report.coverage:
        if one.within:
            words = f"{one.check} ({one.what})" if one.what else one.check
            spans.setdefault(one.within, {}).setdefault(one.check, words)
    if spans:
        within = min(spans, key=_seconds)
        steps.append(f"Not tested yet; --within {within} adds: {', '.join(spans[within].values())}")
    return steps


def _seconds(span: str) -> float:
    from gpukeeper.config.units import read_span

    return read_span(span).total_seconds()


def document(report: Report, folder: str) -> dict[str, object]:
    """The report for programs, without what is in samples.json, and where all of it is."""
    import msgspec

    from gpukeeper.acceptance.reports.document import report_json

    body: dict[str, object] = msgspec.json.decode(report_json(report))
    for name in ("schema", "timeline", "records"):
        body.pop(name, None)
    return {**body, "report_folder": folder or None}


ATTEMPT_HEAD = ("caught", "on", "planted", "expected", "found")


def attempt_row(attempt: Attempt) -> tuple[str, ...]:
    found = attempt.found if not attempt.caught else attempt.found.partition(": ")[0]
    return ("yes" if attempt.caught else "NO", attempt.where, attempt.injected, attempt.expected, found)


def told_attempt(json: bool) -> Callable[[Attempt], None]:
    """How far it is, for who waits; the table comes at the end."""
    count = 0

    def tell(attempt: Attempt) -> None:
        nonlocal count
        count += 1
        words = f"{count}: {attempt.injected} on {attempt.where}: {'as it must be' if attempt.caught else 'NOT FOUND'}"
        if overwrites(sys.stderr):
            show.progress_line(words)
        elif not json:
            to_stderr(words)

    return tell


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """`| head` ends the talk, not the run: the report is still written, and the verdict is still the exit code."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def to_stdout(words: str) -> None:
    with reader_may_leave():
        typer.echo("\n".join(wrapped(words, width_of(sys.stdout))))


def to_stderr(words: str) -> None:
    typer.echo("\n".join(wrapped(words, width_of(sys.stderr))), err=True)
