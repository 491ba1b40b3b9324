"""`gpukeeper advise`: the idle times that win most at the regret you allow. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping as PerPlatform
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpukeeper.config.load import Loaded, load_policy
from gpukeeper.config.units import read_percent
from gpukeeper.interfaces.cli.backtest import (
    Horizon,
    Mapping,
    On,
    Restart,
    Resume,
    Source,
    TrustCluster,
    Workers,
    judging_of,
    progress,
    swept,
    trace_facts,
    where_of,
    write,
)
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.backtest_tables import share, stamp
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.lifecycle.backtest.parts import middle
from gpukeeper.lifecycle.backtest.variants import GIVEN
from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import PlaceScope
from gpukeeper.model.printable import plain
from gpukeeper.traces.open import open_trace
from gpukeeper.views.advice import Advice, ClassAdvice, Request
from gpukeeper.views.advice import advise as advice_from
from gpukeeper.wiring.backtests import PartOfTrace, Where, compare

SPLIT = 2 / 3
Scope = PerPlatform[str, PlaceScope]


def advise(
    source: Source,
    mapping: Mapping = None,
    regret: Annotated[
        str, typer.Option("--regret", metavar="PERCENT", help="At most this share of stops may be regretted.")
    ] = "2%",
    sweep: Annotated[
        str, typer.Option("--sweep", metavar="RANGES", help="Idle times and GPU thresholds to try.")
    ] = "window=15m..24h",
    policy: o.PolicyFile = None,
    horizon: Horizon = "3d",
    restart: Restart = "30m",
    workers: Workers = None,
    on: On = None,
    trust_cluster: TrustCluster = False,
    resume: Resume = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the advice as a policy, with its figures.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Find the idle times that win most at an allowed regret.

    They are found on the first two thirds of the recorded time. The figures are from the last third, which was not used
    to find them. Nothing is switched on.
    """
    where = where_of(workers, on, resume, trust_cluster=trust_cluster)
    loaded = load_policy(policy)
    found = _advice(source, mapping, loaded, _allowed(regret), sweep, (horizon, restart), where)
    if out is not None and not found.refused:
        write(out, as_policy(found, loaded.policy.scope))
    if json:
        show.as_json("advice", found)
    else:
        _print(found)
    if found.refused:
        raise typer.Exit(3)


def _allowed(words: str) -> float:
    try:
        return read_percent(words) / 100
    except ValueError as problem:
        raise UsageError(f"--regret: {problem}") from problem


def _advice(
    source: str,
    mapping: Path | None,
    loaded: Loaded,
    allowed: float,
    sweep: str,
    judged_by: tuple[str, str],
    where: Where,
) -> Advice:
    variants = (GIVEN, *swept(sweep))
    if len(variants) == 1:
        raise UsageError("--sweep names nothing to try. Write it like window=15m..24h.")
    judging = judging_of(loaded, *judged_by)
    trace = open_trace(source, mapping)
    split = middle(trace.begin, trace.end, SPLIT)
    parts = [PartOfTrace(trace, split, is_later=is_later) for is_later in (False, True)]
    found, later = (compare(part, loaded.policy, variants, judging, where, progress) for part in parts)
    return advice_from(
        Request(
            policy=loaded.source,
            trace=trace_facts(trace, loaded, len(found[GIVEN])),
            judging=judging,
            allowed=allowed,
            split=split,
            idle={name: one.idle for name, one in loaded.policy.classes.items()},
            threshold=loaded.policy.activity.gpu,
        ),
        found,
        later,
    )


def _print(found: Advice) -> None:
    show.text(
        f"{found.trace.source}: found on {stamp(found.trace.begin)} to {stamp(found.split)}, "
        f"figures from {stamp(found.split)} to {stamp(found.trace.end)}"
    )
    if found.refused:
        print_message(found.refused)
        return
    rows = [_row(one) for one in found.classes]
    head = ("class", "today", "advice", "stops", "regretted", "GPU-hours won", "of", "today", "")
    show.table(rows, head)
    show.text(
        f"A GPU below {found.threshold:g}% counts as not in use. Nothing was changed; --out FILE writes a policy."
    )
    if not any(one.window for one in found.classes):
        print_message("No class has an idle time to advise. Allow more with --regret, or record longer.")


def _row(one: ClassAdvice) -> tuple[str, ...]:
    then = one.later
    return (
        one.class_,
        _span(one.today),
        "-" if one.window is None else _span(one.window),
        str(then.stops),
        share(then.regret),
        f"{then.won:,.0f}",
        f"{then.unused_tail:,.0f}",
        f"{one.today_later.won:,.0f}",
        _words(one),
    )


def _words(one: ClassAdvice) -> str:
    if one.window is None:
        return one.why
    match one.held_up:
        case True:
            return "within the allowed regret"
        case False:
            return "more regret than allowed in the later part"
        case None:
            return "no stop with a known end in the later part"


def _scope(scope: Scope) -> dict[str, dict[str, object]]:
    """Patterns only where they are not the default."""
    found: dict[str, dict[str, object]] = {}
    for name, one in scope.items():
        given = {"places": one.places, "namespaces": one.namespaces}
        found[name] = {key: value for key, value in given.items() if value != ("*",)}
        if name == "kubernetes":
            found[name]["namespaces"] = one.namespaces  # never by default
    return found or {"docker": {}}


def _span(span: timedelta | None) -> str:
    return "never" if span is None else in_words(span)


def as_policy(found: Advice, scope: Scope) -> str:
    """Only what is advised, in the scope of the given policy; the mode is plan."""
    lines = [
        "# Idle times by gpukeeper advise. Copy them into your policy; nothing is switched on by this file.",
        f"# Trace: {plain(found.trace.source)}, {stamp(found.trace.begin)} to {stamp(found.trace.end)} UTC.",
        f"# Found before {stamp(found.split)}; the figures below are from the time after it.",
        f"# Allowed regret: {found.allowed:.1%} of stops.",
        "mode: plan",
        f"scope: {msgspec.json.encode(_scope(scope)).decode()}",
        f"activity: {{gpu: {found.threshold:g}%}}",
    ]
    advised = [one for one in found.classes if one.window is not None]
    lines.append("classes:" if advised else "# No class has an idle time to advise.")
    for one in advised:
        then = one.later
        lines += [
            f"  # {then.stops} stops, regretted: {share(then.regret)}; {then.won:,.0f} GPU-hours won of "
            f"{then.unused_tail:,.0f} (with {_span(one.today)}: {one.today_later.won:,.0f}); {_words(one)}.",
            f"  {msgspec.json.encode(one.class_).decode()}: {{idle: {_span(one.window)}}}",
        ]
    return "\n".join(lines) + "\n"
