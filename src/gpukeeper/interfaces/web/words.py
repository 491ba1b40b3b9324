"""Filters of the templates: times, numbers and missing values, as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from jinja2 import Environment
from markupsafe import Markup, escape

from gpukeeper.engine.live import PlaceState
from gpukeeper.lifecycle.forecast import NextStep, done_word, phrases
from gpukeeper.lifecycle.rules.hold import only_in_words
from gpukeeper.lifecycle.warnings import without_steps
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import SOON, UTC_TIME, in_words, size_in_words
from gpukeeper.views.live import GpuTile, MachineView, WorkloadLine


def moment(at: datetime | None, mode: str = "time") -> Markup:
    """A time element: UTC in the page, the viewer's zone by script. `mode`: time, hour (of a chart), ago, for (since
    then), in (a countdown)."""
    if at is None:
        return Markup('<span class="none">unknown</span>')
    at = at.astimezone(UTC)
    day, time = at.date().isoformat(), at.time().isoformat("seconds")
    words = f"{at:%a} {time[:5]} UTC" if mode == "hour" else f"{'since ' if mode == 'for' else ''}{day} {time[:5]} UTC"
    # Nothing in it needs escaping, which would take half of the time of a page with hundreds of them.
    return Markup(f'<time datetime="{day}T{time}Z" data-mode="{mode}">{words}</time>')  # noqa: S704


def said(words: str) -> Markup:
    """A sentence of gpukeeper, with its times in the time zone of the reader."""
    return Markup("").join(
        _time(part) if number % 2 else escape(part) for number, part in enumerate(UTC_TIME.split(words))
    )


def _time(words: str) -> Markup:
    try:
        return moment(datetime.fromisoformat(f"{words}+00:00"))
    except ValueError:  # a name that only looks like a time
        return escape(f"{words} UTC")


def coming(steps: Sequence[NextStep]) -> Markup:
    """What happens next, as a sentence with countdowns."""
    parts = [
        Markup("{}<b>{}</b> {}").format(one.join, one.words, moment(one.at, "in") if one.at else SOON)
        for one in phrases(steps)
    ]
    return Markup("").join(parts)


def reason(one: GpuTile | WorkloadLine) -> Markup:
    """Why, without the times that its steps have: those in the reason are as old as the last pass."""
    return said(without_steps(one.reason) if one.steps else one.reason)


def known(value: object, unit: str = "", missing: str = "not measured") -> Markup:
    if value is None or isinstance(value, Unknown):
        why = value.why if isinstance(value, Unknown) else missing
        return Markup('<span class="none" title="{}">{}</span>').format(why, missing)
    if isinstance(value, float):
        value = f"{value:.0f}"
    return escape(f"{value}{unit}")


def span(value: timedelta | float) -> str:
    return in_words(value if isinstance(value, timedelta) else timedelta(seconds=value))


def size(value: int | Unknown | None) -> Markup:
    return known(value) if value is None or isinstance(value, Unknown) else escape(size_in_words(value))


def fact(value: object) -> Markup:
    """A fact of any kind as people read it."""
    match value:
        case None | () | []:
            return Markup('<span class="none">none</span>')
        case datetime():
            return moment(value)
        case timedelta():
            return escape(in_words(value))
        case bool():
            return escape("yes" if value else "no")
        case Unknown():
            return known(value, missing="unknown")
        case tuple() | list() | set() | frozenset():
            return Markup(", ").join(fact(one) for one in value)
        case dict():
            return Markup(", ").join(Markup("{} {}").format(key, fact(one)) for key, one in value.items())
        case _:
            return escape(str(value))


def places_of(views: Iterable[MachineView]) -> list[PlaceState]:
    return [place for view in views for place in view.places]


def install(environment: Environment) -> None:
    environment.filters.update(
        moment=moment,
        known=known,
        span=span,
        size=size,
        fact=fact,
        coming=coming,
        said=said,
        done_word=done_word,
        rules=only_in_words,
        reason=reason,
    )
