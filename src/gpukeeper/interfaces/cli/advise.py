"""`gpukeeper advise`: the rule that wins most at the regret you allow; in sentences, and as a policy file with its
figures as comments. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpukeeper.backtest.comparison import Where
from gpukeeper.backtest.replays import Asked, advice_on
from gpukeeper.config.load import Loaded, load_policy
from gpukeeper.config.units import read_percent
from gpukeeper.interfaces.cli.backtest import (
    MappingFile,
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
from gpukeeper.interfaces.terminal.backtest import share, stamp
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import PlaceScope, Policy
from gpukeeper.model.words import in_words, plain
from gpukeeper.traces.open import open_trace
from gpukeeper.views.advice import HOURS, RETURNS_MIN, TIE, Advice, ClassAdvice, Kind, Tried
from gpukeeper.views.backtest import Tally

GROUP = "came-back"
Scope = Mapping[str, PlaceScope]


def span_words(span: timedelta | None) -> str:
    return "never" if span is None else in_words(span)


def held_up(one: ClassAdvice) -> str:
    if one.window is None:
        return one.why
    match one.held_up:
        case True:
            return "within the allowed regret"
        case False:
            return "more regret than allowed in the later part"
        case None:
            return "no stop with a known end in the later part"


def more_than_idle_times(found: Advice) -> Iterator[str]:
    """What the advice has beside idle times, and what the plain rule would do."""
    if found.kind is Kind.PLAIN:
        return
    if found.signals is not None:
        yield f"Signals that count as use: {', '.join(found.signals) or 'none'}."
    if found.at is not None:
        yield f'Passes act only {HOURS.get(found.at, "then")} ("{found.at}", local time).'
    if found.owners is not None:
        names = ", ".join(map(plain, found.owners.returns))
        yield f"Owners with an idle time of {in_words(found.owners.idle)}: {names}."
    yield f"In classes with advice: {_sums(found.total)}. The plain rule: {_sums(found.plain_total)}."


def compared(found: Advice) -> str:
    begin = found.choice.begin
    assert begin is not None, "rules were compared"
    return (
        f"Rules fitted before {stamp(begin)}, compared from then to {stamp(found.split)}. A candidate is chosen if it "
        f"wins at least {TIE:.0%} more there than idle times alone (plain), within the allowed regret:"
    )


def as_policy(found: Advice, given: Policy) -> str:
    """What is advised, with preset, scope, signals and acting times of the given policy; the mode is plan."""
    signals = given.activity.signals if found.signals is None else found.signals
    lines = [
        "# By gpukeeper advise. Copy it into your policy; nothing is switched on by this file.",
        f"# Trace: {plain(found.trace.source)}, {stamp(found.trace.begin)} to {stamp(found.trace.end)} UTC.",
        f"# Found before {stamp(found.split)}; the figures below are from the time after it.",
        f"# Allowed regret: {found.allowed:.1%} of stops.",
        *(f"# {words}" for words in _why_this(found)),
        "mode: plan",
        f"preset: {given.preset}",
        f"scope: {_json(_scope(given.scope))}",
        f"activity: {{gpu: {found.threshold:g}%, signals: {_json(signals)}}}",
    ]
    if found.at is not None:
        lines.append(f"# Passes act only {HOURS.get(found.at, 'then')}, local time.")
    if (at := found.at or given.schedule.at) is not None:
        lines.append(f"schedule: {{at: {_json(at)}}}")
    if found.owners is not None:
        lines += _group(found)
    advised = [one for one in found.classes if one.window is not None]
    lines.append("classes:" if advised else "# No class has an idle time to advise.")
    for one in advised:
        lines += [
            f"  # {_sums(one.later)}, {one.later.unused_tail:,.0f} held after the last use "
            f"(with {span_words(one.today)}: {one.today_later.won:,.0f}); {held_up(one)}.",
            f"  {_json(one.class_)}: {{idle: {span_words(one.window)}}}",
        ]
    return "\n".join(lines) + "\n"


def _why_this(found: Advice) -> Iterator[str]:
    if found.choice.why:
        yield found.choice.why
    if found.choice.tried:
        yield compared(found)
        for one in found.choice.tried:
            yield f"- {one.kind} ({one.words}): {_sums(one.unseen)}; {one.why or 'chosen'}."
    if found.kind is not Kind.PLAIN:
        yield f"In the time after {stamp(found.split)}, classes with advice: {_sums(found.total)}."
        yield f"The plain rule there: {_sums(found.plain_total)}."


def _group(found: Advice) -> list[str]:
    assert found.owners is not None, "there are owners with an idle time of their own"
    times = ", ".join(f"{plain(name)} {count}" for name, count in found.owners.returns.items())
    return [
        f"# Owners who came back at least {RETURNS_MIN} times after work of theirs would have been stopped: {times}.",
        f"groups: {{{GROUP}: {{members: {_json(tuple(found.owners.returns))}, idle: {in_words(found.owners.idle)}}}}}",
    ]


def _sums(one: Tally) -> str:
    return f"{one.stops} stops, regretted: {share(one.regret)}; {one.won:,.0f} GPU-hours won"


def _scope(scope: Scope) -> dict[str, dict[str, object]]:
    """Patterns only where they are not the default."""
    found: dict[str, dict[str, object]] = {}
    for name, one in scope.items():
        given = {"places": one.places, "namespaces": one.namespaces}
        found[name] = {key: value for key, value in given.items() if value != ("*",)}
        if name == "kubernetes":
            found[name]["namespaces"] = one.namespaces  # never by default
    return found or {"docker": {}}


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


@dataclass(frozen=True, kw_only=True)
class AdviceOptions:
    """Which work, and what is tried on it."""

    source: Source
    mapping: MappingFile = None
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
