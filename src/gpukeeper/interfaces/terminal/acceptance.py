"""The report of an acceptance run on a terminal: the GPUs, what was not tested, the verdict and what to do next."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from gpukeeper.acceptance.judging.messages import FAILURE_KINDS
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports import lines
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.layout import width_of, wrapped
from gpukeeper.model.printable import plain
from gpukeeper.views.acceptance import coverage_lines, gpu_rows, next_steps, verdict_line


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
    for words in lines.closing(report, folder):
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
