"""`gpukeeper advise`: the rule that wins most at the regret you allow. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gpukeeper.config.load import Loaded, load_policy
from gpukeeper.config.units import read_percent
from gpukeeper.interfaces.cli.backtest import (
    Mapping,
    ReplayOptions,
    Source,
    judging_of,
    progress,
    swept,
    trace_facts,
    where_of,
    write,
)
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.advice_policy import as_policy, compared, held_up, more_than_idle_times, span_words
from gpukeeper.interfaces.terminal.backtest_tables import share, stamp
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.model.errors import UsageError
from gpukeeper.traces.open import open_trace
from gpukeeper.views.advice import Advice, ClassAdvice, Tried
from gpukeeper.wiring.advice import Asked, advice_on
from gpukeeper.wiring.backtests import Where


@dataclass(frozen=True, kw_only=True)
class AdviceOptions:
    """Which work, and what is tried on it."""

    source: Source
    mapping: Mapping = None
    regret: Annotated[
        str, typer.Option("--regret", metavar="PERCENT", help="At most this share of stops may be regretted.")
    ] = "2%"
    sweep: Annotated[str, typer.Option("--sweep", metavar="RANGES", help="Idle times and GPU thresholds to try.")] = (
        "window=15m..24h"
    )
    policy: o.PolicyFile = None


@o.with_options
def advise(
    options: AdviceOptions,
    replay: ReplayOptions,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the advice as a policy, with its figures.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Find the idle times that win most at an allowed regret.

    They are found on the first two thirds of the recorded time; other signals, owners who come back and acting hours
    are tried, too. The figures are from the last third, which was not used to find them. Nothing is switched on.
    """
    where = where_of(replay)
    loaded = load_policy(options.policy)
    found = _advice(options, replay, loaded, where)
    if out is not None and not found.refused:
        write(out, as_policy(found, loaded.policy))
    if json:
        show.as_json("advice", found)
    else:
        _print(found)
    if found.refused:
        raise typer.Exit(3)


def _allowed(words: str) -> float:
    try:
        allowed = read_percent(words) / 100
    except ValueError as problem:
        raise UsageError(f"--regret: {problem}") from problem
    if allowed > 1:
        raise UsageError(f"--regret: {words} is more than all stops. Write a share of them, such as 2%.")
    return allowed


def _advice(options: AdviceOptions, replay: ReplayOptions, loaded: Loaded, where: Where) -> Advice:
    allowed, variants = _allowed(options.regret), swept(options.sweep)
    if not variants:
        raise UsageError("--sweep names nothing to try. Write it like window=15m..24h.")
    asked = Asked(
        policy=loaded.policy,
        source=loaded.source,
        grid=variants,
        judging=judging_of(loaded, replay),
        allowed=allowed,
    )
    trace = open_trace(options.source, options.mapping)
    return advice_on(trace, asked, partial(trace_facts, trace, loaded), where, progress)


def _print(found: Advice) -> None:
    show.text(
        f"{found.trace.source}: found on {stamp(found.trace.begin)} to {stamp(found.split)}, "
        f"figures from {stamp(found.split)} to {stamp(found.trace.end)}"
    )
    if found.refused:
        print_message(found.refused)
        return
    rows = [_row(one) for one in found.classes]
    head = ("class", "today", "advice", "stops", "regretted", "GPU-hours won", "after last use", "today", "")
    show.table(rows, head)
    for words in more_than_idle_times(found):
        show.text(words)
    if found.choice.why:
        show.text(f"\n{found.choice.why}")
    if found.choice.tried:
        show.text(f"\n{compared(found)}")
        show.table([_tried(one) for one in found.choice.tried], ("rule", "stops", "regretted", "GPU-hours won", "", ""))
    show.text(
        f"A GPU below {found.threshold:g}% counts as not in use. Nothing was changed; --out FILE writes a policy."
    )
    if not any(one.window for one in found.classes):
        print_message("No class has an idle time to advise. Allow more with --regret, or record longer.")


def _tried(one: Tried) -> tuple[str, ...]:
    then = one.unseen
    return (one.kind.value, str(then.stops), share(then.regret), f"{then.won:,.0f}", one.words, one.why or "chosen")


def _row(one: ClassAdvice) -> tuple[str, ...]:
    then = one.later
    return (
        one.class_,
        span_words(one.today),
        "-" if one.window is None else span_words(one.window),
        str(then.stops),
        share(then.regret),
        f"{then.won:,.0f}",
        f"{then.unused_tail:,.0f}",
        f"{one.today_later.won:,.0f}",
        held_up(one),
    )
