"""An acceptance run on a terminal: its progress, or that of a run over many nodes, and its report: the GPUs, what
was not tested, the verdict and what to do next. Ctrl-C and SIGTERM meanwhile: the first one asks it to end, a second
one ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import typer

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet.collect import RunReport
from gpukeeper.acceptance.fleet.launcher import NodeStatus, Phase, RunSpec, Target
from gpukeeper.acceptance.judging.replies import FAILURE_KINDS
from gpukeeper.acceptance.launchers.story import Ended, Notice, Reported
from gpukeeper.acceptance.record import Finding, Machine, NotTested, Report
from gpukeeper.acceptance.reports.legacy import (
    ENV_TAG,
    SUMMARY_TAG,
    closing_lines,
    log_line,
    parameters_line,
    running_line,
)
from gpukeeper.acceptance.reports.wording import gpu_words
from gpukeeper.acceptance.run import CheckRepeated, CheckStarted, ProbeStarted, Step
from gpukeeper.acceptance.self_test import Attempt
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.messages import overwrites, print_message, width_of, wrapped
from gpukeeper.model.gpu import Grade
from gpukeeper.model.words import in_words, plain
from gpukeeper.views.acceptance import (
    coverage_lines,
    finding_lines,
    fleet_notes,
    gpu_rows,
    machine_words,
    next_steps,
    provisional,
    run_rows,
    verdict_line,
)


class AdviceFilter:
    """Prints each advice once: if eleven checks fail for the same cause, ten of them only report the failure."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def __call__(self, words: str) -> str:
        for lesson in FAILURE_KINDS.values():
            if lesson.advice in words and lesson.advice in self._printed:
                words = f"{words.partition(f' {lesson.advice}')[0]} See above."  # also what a probe printed
            elif lesson.advice in words:
                self._printed.add(lesson.advice)
        return words


def ending(
    report: Report, folder: str, echo: Callable[[str], None], *, verbose: bool, once: AdviceFilter | None = None
) -> None:
    """The GPUs, what was not tested, the verdict, where the report is, what next. `once`: of the lines before it."""
    once = once or AdviceFilter()
    for words in closing_lines(report, folder):
        echo(plain(words))
    echo("")
    show.table([(*facts, once(reason)) for *facts, reason in gpu_rows(report)], head=_HEAD)
    for words in coverage_lines(report.coverage, verbose=verbose):
        echo(plain(words))
    if report.tallies or report.coverage:
        echo("")
    echo(plain(once(verdict_line(report))))
    if folder:
        echo(plain(f"Report: {folder}"))
    for words in next_steps(report):
        echo(plain(words))


_HEAD = ("verdict", "gpu", "name", "serial", "busy", "reason")


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """`| head` ends the output, not the run: the report is still written, and the verdict is still the exit code."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def to_stdout(words: str) -> None:
    with reader_may_leave():
        typer.echo("\n".join(wrapped(words, width_of(sys.stdout))))


def to_stderr(words: str) -> None:
    typer.echo("\n".join(wrapped(words, width_of(sys.stderr))), err=True)


REFRESH = 1.0  # seconds


class ProgressPrinter:
    """Called by the engine with every step. Results go where `echo` puts them; the moving line is stderr's."""

    def __init__(self, wish: RunRequest, echo: Callable[[str], None], *, verbose: bool) -> None:
        self._wish, self._echo, self._verbose = wish, echo, verbose
        self._report: Report | None = None  # so far: whose GPU a finding is about
        self._waiting: list[Finding] = []  # of one check, printed together
        self._now: CheckStarted | None = None
        self._began = time.monotonic()
        self._moving = overwrites(sys.stderr)
        self.once = AdviceFilter()

    def __call__(self, step: Step) -> None:
        if not isinstance(step, Finding):
            self.flush()
        match step:
            case Machine():
                self._report = provisional(step, self._wish)
                self._print(log_line(ENV_TAG, machine_words(step, self._wish)))
            case CheckStarted():
                self._now, self._began = step, time.monotonic()
                self._moving_or(running_line(step.check, f"{step.what} ({_place(step)})"))
            case ProbeStarted():
                if self._verbose:
                    self._print(parameters_line(step.params, step.check))
            case CheckRepeated():
                who = ", ".join(gpu_words(self._report, one) if self._report else one for one in step.gpus)
                self._print(running_line(step.check, f"retry {step.attempt}: {who or 'all GPUs'}"))
            case NotTested():
                if self._verbose:
                    what = f" ({step.what})" if step.what else ""
                    self._print(log_line(SUMMARY_TAG, f"{step.check}{what}: not tested: {step.why}"))
            case Finding():
                if self._waiting and self._waiting[0].check != step.check:
                    self.flush()
                self._waiting.append(step)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for words in finding_lines(waiting, self._report, verbose=self._verbose):
            self._print(words)

    async def moving(self) -> None:
        """Draws the progress line until it is cancelled."""
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
            self._print(words)

    def _draw(self) -> None:
        if self._moving and self._now is not None:
            left = max(self._now.left_s - (time.monotonic() - self._began), 0)
            words = f"{self._now.check}: {self._now.what}"
            place = f"{self._now.number} of {self._now.of}, about {in_words(timedelta(seconds=left))} left"
            show.progress_line(f"{place}  {words}")

    def _erase(self) -> None:
        if self._moving:
            show.progress_line("")

    def _print(self, words: str) -> None:
        self._erase()
        self._echo(plain(self.once(words)))
        self._draw()


def _place(step: CheckStarted) -> str:
    return f"{step.number} of {step.of}, about {in_words(timedelta(seconds=step.left_s))} left"


ATTEMPT_HEAD = ("detected", "on", "injected", "expected", "found")


def attempt_row(attempt: Attempt) -> tuple[str, ...]:
    found = attempt.found if not attempt.caught else attempt.found.partition(": ")[0]
    return ("yes" if attempt.caught else "NO", attempt.where, attempt.injected, attempt.expected, found)


def attempt_printer(json: bool) -> Callable[[Attempt], None]:
    """Progress of the self-test; the table is printed at the end."""
    count = 0

    def tell(attempt: Attempt) -> None:
        nonlocal count
        count += 1
        words = f"{count}: {attempt.injected} on {attempt.where}: {'detected' if attempt.caught else 'NOT DETECTED'}"
        if overwrites(sys.stderr):
            show.progress_line(words)
        elif not json:
            to_stderr(words)

    return tell


BAR = 24  # characters
MOST_GPUS = 40  # lines


class RunPrinter:
    """Called by the story with every step."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._err = to_stderr
        self._nodes: dict[str, str] = {}
        self._moving = overwrites(sys.stderr)

    def begin(self, spec: RunSpec, targets: Sequence[Target]) -> None:
        self._nodes = {one.node: "excluded" if one.excluded else "waiting" for one in targets}
        form = f" as {spec.form}" if spec.form else ""
        count = f"{len(targets)} node{'' if len(targets) == 1 else 's'}"
        self._print(f"Run {spec.run}: {count} on {spec.engine}{form}.")
        for one in targets:
            if one.excluded:
                self._print(f"{one.node}: excluded: {one.excluded}")

    def __call__(self, step: Notice | Reported | NodeStatus) -> None:
        match step:
            case Notice():
                self._print(step.words)
            case Reported():
                self._nodes[step.report.node] = "reported"
                self._print(f"{step.report.node}: {step.report.verdict} ({step.done} of {step.of} reported)")
            case NodeStatus():
                self._nodes[step.node] = step.phase.value
                self._print(f"{step.node}: {_words(step)}")

    def close(self) -> None:
        show.progress_line("")

    def _print(self, words: str) -> None:
        if self._moving:
            show.progress_line("")
        with reader_may_leave():
            typer.echo(plain(words), err=self._err)
        self._draw()

    def _draw(self) -> None:
        if self._moving and self._nodes:
            states = list(self._nodes.values())
            over = sum(state in ("reported", "excluded", "ended", "gone") for state in states)
            filled = BAR * over // len(states)
            counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
            show.progress_line(f"[{'#' * filled}{'.' * (BAR - filled)}] {counts}")


def _words(status: NodeStatus) -> str:
    code = f" with {status.exit_code}" if status.phase is Phase.ENDED and status.exit_code else ""
    return f"{status.phase}{code}" + (f": {status.reason}" if status.reason else "")


def print_ended(ended: Ended, folder: Path) -> None:
    with reader_may_leave():
        print_run(ended.report)
        typer.echo(f"Report: {folder}")
        if ended.removal is not None and not ended.problems:
            count = len(ended.removal.removed)
            typer.echo(f"Removed {count} object{'' if count == 1 else 's'}; nothing of the run is left.")


def print_run(report: RunReport) -> None:
    typer.echo("")
    show.table(run_rows(report), head=("verdict", "node", "gpus", "reason"))
    bad = [one for one in report.gpus if one.verdict not in (Grade.PASS, Grade.SKIPPED)]
    if bad:
        typer.echo("")
        rows = [(one.verdict.value, f"{one.node} GPU {one.gpu}", one.identity, one.reason) for one in bad[:MOST_GPUS]]
        show.table(rows, head=("verdict", "gpu", "identity", "reason"))
        if len(bad) > MOST_GPUS:
            typer.echo(f"… and {len(bad) - MOST_GPUS} more in gpus.csv")
    for words in (*fleet_notes(report.fleet), *report.notes):
        typer.echo(plain(words))
    typer.echo("")
    typer.echo(plain(f"{report.verdict}  {report.fleet.reason}"))


@contextmanager
def until_stopped(stop: asyncio.Event, words: str) -> Iterator[None]:
    """Inside a running event loop. `words`: printed at the first one."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def ask() -> None:
        stop.set()
        print_message(words)
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
