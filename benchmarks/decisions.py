"""Decisions a second on one core, over a mixed fleet: every rule asked, and until the first decisive one.

The peer is a loop that only makes the Decision values, which no decision can do without. Seconds of this core are
counted, so that other work on the machine does not.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

from benchmarks.population import NOW, policy, population
from benchmarks.report import Figure, fastest, met, print_figure, print_table
from benchmarks.size import sized
from gpukeeper.lifecycle.decide import answers, decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, Verdict, View

VIEWS = sized(5000, tiny=200)
RUNS = sized(15, tiny=1)
EVERY_RULE, DECISIVE = 50_000, 200_000  # targets, a second


def run() -> None:
    shapes = population(VIEWS)
    book = Rulebook(policy())
    everything = [view for views in shapes.values() for view in views]
    gc.freeze()  # the views are not what is measured
    rows = [_row(name, views, book, len(everything)) for name, views in shapes.items()]
    every, first = _pace(_ask_all(book), everything), _pace(_decide_all(book), everything)
    peer = _pace(_make_all, everything)
    rows.append(("all", str(len(everything)), "100%", f"{every:,.0f}", f"{first:,.0f}", ""))
    print_table(("shape", "views", "share", "every rule/s", "decisions/s", ""), rows)
    print(f"every rule asked: target at least {EVERY_RULE:,}/s, {met(every, EVERY_RULE, least=True)}")
    print(f"first decisive one: target at least {DECISIVE:,}/s, {met(first, DECISIVE, least=True)}")
    print(f"peer, only making the Decision: {peer:,.0f}/s\n")
    print_figure(Figure("decisions", round(first), "decisions/s", round(first / peer, 3), "making the Decision alone"))


def _row(name: str, views: Sequence[View], book: Rulebook, total: int) -> tuple[str, ...]:
    every, first = _pace(_ask_all(book), views), _pace(_decide_all(book), views)
    return (name, str(len(views)), f"{len(views) / total:.0%}", f"{every:,.0f}", f"{first:,.0f}", "")


def _pace(work: Callable[[Sequence[View]], None], views: Sequence[View]) -> float:
    return len(views) / fastest(lambda: work(views), RUNS, clock=time.thread_time)


def _ask_all(book: Rulebook) -> Callable[[Sequence[View]], None]:
    def work(views: Sequence[View]) -> None:
        for view in views:
            answers(view, book, NOW)

    return work


def _decide_all(book: Rulebook) -> Callable[[Sequence[View]], None]:
    def work(views: Sequence[View]) -> None:
        for view in views:
            decide(view, book, NOW)

    return work


def _make_all(views: Sequence[View]) -> None:
    for view in views:
        Decision(
            seen=view.subject.seen,
            action=Action.KEEP,
            rule="retention",
            reason="succeeded 2h ago, kept for 1d",
            verdict=Verdict.WAIT,
            due=NOW,
        )
