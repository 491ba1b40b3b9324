"""Advice as a policy file with its figures as comments, and in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta

import msgspec

from gpukeeper.interfaces.terminal.backtest_tables import share, stamp
from gpukeeper.model.durations import in_words
from gpukeeper.model.policy import PlaceScope, Policy
from gpukeeper.model.printable import plain
from gpukeeper.views.advice import Advice, ClassAdvice
from gpukeeper.views.advice_rules import HOURS, RETURNS_MIN, TIE, Kind
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
