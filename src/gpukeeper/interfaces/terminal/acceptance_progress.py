"""The progress of an acceptance run and of the self-test: a line for each result, and a progress line on a terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.record import Finding, Machine, NotTested, Report
from gpukeeper.acceptance.reports import lines
from gpukeeper.acceptance.reports.wording import gpu_words
from gpukeeper.acceptance.run import CheckRepeated, CheckStarted, Step
from gpukeeper.acceptance.self_test import Attempt
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.acceptance import AdviceFilter, to_stderr
from gpukeeper.interfaces.terminal.colours import overwrites
from gpukeeper.model.durations import in_words
from gpukeeper.model.printable import plain
from gpukeeper.views.acceptance import (
    finding_lines,
    machine_words,
    provisional,
)

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
                self._print(lines.line(lines.ENV, machine_words(step, self._wish)))
            case CheckStarted():
                self._now, self._began = step, time.monotonic()
                self._moving_or(lines.running(step.check, f"{step.what} ({_place(step)})"))
            case CheckRepeated():
                who = ", ".join(gpu_words(self._report, one) if self._report else one for one in step.gpus)
                self._print(lines.running(step.check, f"retry {step.attempt}: {who or 'all GPUs'}"))
            case NotTested():
                if self._verbose:
                    what = f" ({step.what})" if step.what else ""
                    self._print(lines.line(lines.SUMMARY, f"{step.check}{what}: not tested: {step.why}"))
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
