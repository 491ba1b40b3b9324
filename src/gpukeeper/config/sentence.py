"""A policy as one English sentence, for the runbook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta

from gpukeeper.config.units import share_in_words, size_in_words, span_in_words
from gpukeeper.model.policy import (
    AfterIdle,
    Amount,
    AtFinish,
    ClassSettings,
    Mode,
    OnLimit,
    PlaceScope,
    Policy,
    Retention,
    Temporary,
)
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.settings import settings_of

RAY = "ray"


def sentence(policy: Policy) -> str:
    clauses = [
        f"{_mode(policy)}: on {_all(_scope(name, scope) for name, scope in policy.scope.items())}",
        f"finished work is removed {_retention(policy.retention)}",
        *(f"in environment {name} {_retention(one)}" for name, one in policy.environments.items()),
        *_children(policy),
        *_classes(policy),
        *_trees(policy),
        *_images(policy),
        *_exemptions(policy),
        f"at most {_amount(policy.budget.per_pass)} steps per pass and {_amount(policy.budget.per_hour)} per hour",
        *_most_trees(policy),
        f"no step if more than {share_in_words(policy.breaker.running)} of the running work is due at once",
    ]
    return "; ".join(clauses) + "."


def _mode(policy: Policy) -> str:
    return "Acts unattended (mode enforce)" if policy.mode is Mode.ENFORCE else "Dry run (mode plan)"


def _scope(name: str, scope: PlaceScope) -> str:
    where = "everywhere" if "*" in scope.places else f"at {_all(scope.places)}"
    if name != "kubernetes":
        return f"{name} {where}"
    namespaces = "every namespace" if "*" in scope.namespaces else f"namespaces {_all(scope.namespaces)}"
    at = "" if "*" in scope.places else f" {where}"
    return f"kubernetes{at} in {namespaces}"


def _retention(kept: Retention) -> str:
    if kept.succeeded is kept.failed is kept.stopped is None:
        return "only by a person"
    parts = (("succeeded", kept.succeeded), ("failed", kept.failed), ("was stopped", kept.stopped))
    return _all(_after(word, span) for word, span in parts)


def _after(word: str, span: timedelta | None) -> str:
    if span is None:
        return f"never if it {word}"
    if not span:
        return f"as soon as its evidence is captured if it {word}"
    return f"{span_in_words(span)} after it {word}"


def _children(policy: Policy) -> Iterator[str]:
    if policy.at_finish is not AtFinish.NONE:
        which = "running children" if policy.at_finish is AtFinish.RUNNING else "all children"
        yield f"{which} are ended when their root finishes"


def _classes(policy: Policy) -> Iterator[str]:
    live = {name: one for name, one in policy.classes.items() if not one.untouchable}
    stopped = {name: one.idle for name, one in live.items() if one.idle is not None and one.on_idle is OnLimit.STOP}
    reported = {name: one.idle for name, one in live.items() if one.idle is not None and one.on_idle is OnLimit.REPORT}
    large = {
        name: one.idle_when_large
        for name, one in live.items()
        if one.idle is None and one.idle_when_large is not None and one.on_idle is OnLimit.STOP
    }
    limited = {name: one.longest for name, one in live.items() if one.longest is not None}
    watched = {name: one.max_runtime for name, one in live.items() if one.max_runtime is not None and not one.longest}
    if stopped:
        yield f"idle work is stopped after {_by_span(stopped)}{_afterwards(live, stopped)}"
    if reported:
        yield f"idle work is only reported after {_by_span(reported)}"
    if large:
        yield f"idle work that holds more than a slice is stopped after {_by_span(large)}{_afterwards(live, large)}"
    if stopped or reported or large:
        yield from _demand(policy)
    if limited:
        yield f"running work is stopped after {_by_span(limited)}"
    if watched:
        yield f"running work is only reported after {_by_span(watched)}"
    if untouchable := [name for name, one in policy.classes.items() if one.untouchable]:
        yield f"{_all(untouchable)} {'are' if len(untouchable) > 1 else 'is'} never touched"
    if changing := [name for name, group in policy.groups.items() if group.members]:
        yield f"members of {_all(changing)} have their own limits"


def _afterwards(classes: Mapping[str, ClassSettings], stopped: Iterable[str]) -> str:
    """What becomes of it after an idle stop."""
    names = list(stopped)
    kept = [name for name in names if classes[name].after_idle is AfterIdle.KEEP]
    if len(kept) == len(names):
        return ", and then kept like other stopped work"
    return ", and then removed" + (f", except {_all(kept)}" if kept else "")


def _demand(policy: Policy) -> Iterator[str]:
    demand = policy.demand
    if demand.idle_factor < 1:
        yield (
            f"while more than {share_in_words(demand.above)} of the GPUs are in use, idle times are"
            f" {share_in_words(demand.idle_factor)} of this"
        )


def _by_span(limits: dict[str, timedelta]) -> str:
    """30m (managed, docker) or 15m (unknown): longest first."""
    by_span: dict[timedelta, list[str]] = {}
    for name, span in limits.items():
        by_span.setdefault(span, []).append(name)
    ordered = sorted(by_span.items(), reverse=True)
    return _all((f"{span_in_words(span)} ({', '.join(names)})" for span, names in ordered), "or")


def _trees(policy: Policy) -> Iterator[str]:
    for entry in policy.temporary:
        spared = f", except {_all(entry.keep)}," if entry.keep else ""
        yield (
            f"temporary trees {_all(entry.names)}{spared} below {entry.root}{_of_whom(entry)} are deleted"
            f" after {span_in_words(entry.older_than)} without use if their total is above {size_in_words(entry.above)}"
        )
    if RAY in policy.scope:
        yield f"dead Ray sessions {_go(settings_of(policy).sessions)}"
        yield f"logs of ended processes of live Ray sessions {_go(settings_of(policy).logs)}"
    yield from _reports(policy)
    if policy.temporary or RAY in policy.scope:
        high, low = share_in_words(policy.disk.high), share_in_words(policy.disk.low)
        yield f"shorter ages apply to a disk above {high} until it is below {low}"


def _of_whom(entry: Temporary) -> str:
    return " of each idle Ray node" if entry.platform == RAY else ""


def _go(span: timedelta | None) -> str:
    return "are only reported" if span is None else f"are deleted after {span_in_words(span)} without use"


def _reports(policy: Policy) -> Iterator[str]:
    reports = policy.reports
    if not reports.roots:
        return
    if reports.older_than is None:
        yield f"reports below {_all(reports.roots)} are only reported"
        return
    spared = [f"the newest {reports.keep_last}"] if reports.keep_last else []
    but = f", except {_all([*spared, *reports.keep])}" if spared or reports.keep else ""
    saved = ", saved first" if reports.archive else ""
    yield f"reports below {_all(reports.roots)} {_go(reports.older_than)}{saved}{but}"


def _most_trees(policy: Policy) -> Iterator[str]:
    if policy.temporary or policy.reports.roots or RAY in policy.scope:
        yield f"in addition at most {policy.budget.trees} trees per hour"


def _images(policy: Policy) -> Iterator[str]:
    images = policy.images
    ages = [f"after {span_in_words(images.unused)} without use"] if images.unused is not None else []
    if images.under_pressure is not None:
        ages.append(f"after {span_in_words(images.under_pressure)} while the disk is too full")
    if images.above is not None:
        ages.append(f"the least recently used first while unused ones are larger than {size_in_words(images.above)}")
    if ages:
        spared = f", except {_all(images.keep)}" if images.keep else ""
        yield f"images are removed {_all(ages, 'or')}{spared}"
    if policy.build_cache.unused is not None:
        yield f"build cache is removed after {span_in_words(policy.build_cache.unused)} without use"
    if policy.volumes.anonymous_unused is not None:
        yield f"volumes without a name are removed after {span_in_words(policy.volumes.anonymous_unused)} without use"
    if policy.networks.unused is not None:
        yield f"networks are removed after {span_in_words(policy.networks.unused)} without use"


def _exemptions(policy: Policy) -> Iterator[str]:
    if isinstance(policy.exemptions, Unknown):
        yield "everything is kept, because the exemptions could not be read"
    elif policy.exemptions:
        count = len(policy.exemptions)
        yield f"{count} exemption{'s' if count > 1 else ''} suspend{'s' if count == 1 else ''} rules"


def _amount(amount: Amount) -> str:
    if amount.share is None:
        return str(amount.count)
    share = share_in_words(amount.share)
    return share if amount.count is None else f"{amount.count} or {share}, whichever is smaller,"


def _all(words: Iterable[str], last: str = "and") -> str:
    *rest, final = words
    return f"{', '.join(rest)} {last} {final}" if rest else final
