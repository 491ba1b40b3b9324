"""The policy as people read it: every effective value and where it came from, what applies to one owner, and the whole
as one English sentence for the runbook. Values only: printing is the CLI's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from gpukeeper.config.load import Loaded
from gpukeeper.config.problems import Path, in_words, nearest
from gpukeeper.config.sections import PolicyFile, as_written, settings_of
from gpukeeper.config.units import factor_in_words, share_in_words, size_in_words, span_in_words
from gpukeeper.lifecycle.settings import BY_GROUP, limits_for, of_group
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import (
    AfterIdle,
    Amount,
    AtFinish,
    ClassSettings,
    Exemption,
    Mode,
    OnLimit,
    PlaceScope,
    Policy,
    Retention,
    Temporary,
)
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.settings import settings_of as ray_settings_of

# The limits of a class that are shown, and the text for "there is none".
_OWNER_LIMITS = {
    "idle": "none",
    "idle_when_large": "none",
    "on_idle": "",
    "max_runtime": "none",
    "on_max_runtime": "",
    "grace": "",
    "hold": "",
    "hold_after_stop": "",
}


@dataclass(frozen=True)
class Row:
    setting: str
    value: Any
    origin: str

    @property
    def text(self) -> str:
        return _text(self.value)


def _text(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case list():
            return ", ".join(_text(item) for item in value) or "(none)"
        case dict():
            return ", ".join(f"{key} {_text(item)}" for key, item in value.items()) or "(none)"
        case _:
            return str(value)


def rows(loaded: Loaded) -> list[Row]:
    """The whole policy, one value a row, in the order of the reference page."""
    tree = as_written(loaded.file)
    inside = {"exemptions": None}  # shown from the policy itself: it has those of the other file too
    found = [Row(in_words(path), value, loaded.origin(path)) for path, value in _values(tree | inside, ())]
    return found + _exemptions(loaded)


SECTIONS = tuple(settings_of(PolicyFile))


def part_of(found: list[Row], section: str) -> list[Row]:
    """The rows of one section (`retention`, `classes.managed`, `match[2]`) or of one setting. A section without values
    has no rows; an unknown one is an error."""
    if section not in SECTIONS:
        _check_known(section, [*SECTIONS, *_prefixes(row.setting for row in found)], SECTIONS)
    return [row for row in found if _is_in(row.setting, section)]


def _is_in(setting: str, section: str) -> bool:
    return setting == section or setting.startswith((f"{section}.", f"{section}["))


def _prefixes(settings: Iterable[str]) -> list[str]:
    """classes.managed.idle: classes, classes.managed and classes.managed.idle."""
    ends = re.compile(r"(?=[.\[])|$")
    return list(dict.fromkeys(name[: end.start()] for name in settings for end in ends.finditer(name)))


def _check_known(section: str, known: list[str], listed: Iterable[str]) -> None:
    if section in known:
        return
    near = nearest(section, known)
    hint = f' Did you mean "{near}"?' if near else ""
    raise UsageError(f'unknown section "{section}".{hint}\nSections: {", ".join(listed)}')


def _values(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if value is None:
        return
    if _is_section(value):
        for key, item in value.items():
            yield from _values(item, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, item in enumerate(value):
            yield from _values(item, (*path, i))
    else:
        yield path, value


def _is_section(value: Any) -> bool:
    """An amount written both ways is one value."""
    return isinstance(value, dict) and bool(value) and set(value) != {"count", "share"}


def _exemptions(loaded: Loaded) -> list[Row]:
    exemptions = loaded.policy.exemptions
    if isinstance(exemptions, Unknown):
        return [Row("exemptions", str(exemptions), loaded.origin(("exemptions_from",)))]
    pairs = zip(exemptions, loaded.exemption_origins, strict=True)
    return [Row(f"exemptions[{i}]", exemption_words(one), origin) for i, (one, origin) in enumerate(pairs)]


def exemption_words(one: Exemption) -> str:
    named = (("owner", one.owner), ("workload", one.workload), ("class", one.class_))
    whom = ", ".join(f"{word} {name}" for word, name in named if name)
    effect = "refused" if one.refused else f"{', '.join(one.rules) or 'every rule'}{_until(one)}"
    return f"{whom}: {effect} ({one.reason or 'no reason given'})"


def _until(one: Exemption) -> str:
    if one.until is None:
        return ""
    return f", {one.until}" if isinstance(one.until, Unknown) else f" until {one.until:%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True)
class OwnerView:
    owner: str
    groups: list[str]
    classes: dict[str, list[Row]]
    exemptions: list[Row]
    demand: list[Row]
    holds: list[Row]


def for_owner(loaded: Loaded, owner: str) -> OwnerView:
    """What applies to this owner in each class, after groups."""
    policy = loaded.policy
    groups = [name for name, group in policy.groups.items() if owner in group.members]
    return OwnerView(
        owner,
        groups,
        {name: _class_rows(loaded, name, owner, groups) for name in policy.classes},
        _owner_exemptions(loaded, owner),
        _section_rows(loaded, "demand"),
        _section_rows(loaded, "holds"),
    )


def part_for_owner(view: OwnerView, section: str) -> OwnerView:
    """The same with one section only; the others are empty. Only sections that depend on the owner are known here."""
    classes = [f"classes.{name}" for name in view.classes]
    limits = [f"classes.{name}.{row.setting}" for name, found in view.classes.items() for row in found]
    listed = ("classes", "exemptions", "demand", "holds", *classes)
    _check_known(section, [*listed, *limits, *(row.setting for row in (*view.demand, *view.holds))], listed)
    kept = {
        name: [row for row in found if _is_in(f"classes.{name}.{row.setting}", section)]
        for name, found in view.classes.items()
    }
    return replace(
        view,
        classes={name: found for name, found in kept.items() if found},
        exemptions=view.exemptions if section == "exemptions" else [],
        demand=[row for row in view.demand if _is_in(row.setting, section)],
        holds=[row for row in view.holds if _is_in(row.setting, section)],
    )


def _class_rows(loaded: Loaded, class_name: str, owner: str, groups: list[str]) -> list[Row]:
    own, limits = loaded.policy.classes[class_name], limits_for(loaded.policy, class_name, owner)
    if own.untouchable:
        return [Row("untouchable", True, loaded.origin(("classes", class_name, "untouchable")))]
    found = []
    for name, none in _OWNER_LIMITS.items():
        if name == "on_idle" and limits.idle is limits.idle_when_large is None:
            continue
        if name == "on_max_runtime" and limits.max_runtime is None:
            continue
        if name == "idle_when_large" and limits.idle is not None:
            continue  # it has an idle time whatever it holds
        field = "stop_grace" if name == "grace" else name
        value = getattr(limits, field)
        origin = loaded.origin(("classes", class_name, name))
        if name in BY_GROUP:
            origin = _group_origin(loaded, class_name, groups, name) or origin
        found.append(Row(name, _limit(value, none), origin))
    idle = limits.idle
    if idle is not None:
        factor = loaded.policy.demand.idle_factor
        found.insert(1, Row("idle_in_demand", span_in_words(idle * factor), loaded.origin(("demand", "idle_factor"))))
    return found


def _group_origin(loaded: Loaded, class_name: str, groups: list[str], name: str) -> str | None:
    """The group whose value holds, with its factor; None where no group gives one."""
    policy = loaded.policy
    own = policy.classes[class_name]
    found = [(span, group) for group in groups if (span := of_group(own, policy.groups[group], name)) is not None]
    if not found:
        return None
    giver = max(found, key=lambda pair: pair[0])[1]
    given = getattr(policy.groups[giver], name)
    times = f" ({factor_in_words(given)} of {span_in_words(getattr(own, name))})" if isinstance(given, float) else ""
    return f"group {giver}{times}, {loaded.origin(('groups', giver, name))}"


def _limit(value: timedelta | str | None, none: str) -> str:
    if value is None:
        return none
    return span_in_words(value) if isinstance(value, timedelta) else str(value)


def _section_rows(loaded: Loaded, section: str) -> list[Row]:
    written = as_written(getattr(loaded.file, section))
    return [Row(f"{section}.{key}", value, loaded.origin((section, key))) for key, value in written.items()]


def _owner_exemptions(loaded: Loaded, owner: str) -> list[Row]:
    """Those that name the owner; one for a workload or class without an owner may concern every user."""
    exemptions = loaded.policy.exemptions
    if isinstance(exemptions, Unknown):
        return _exemptions(loaded)
    pairs = zip(exemptions, loaded.exemption_origins, strict=True)
    return [Row("exemption", exemption_words(one), origin) for one, origin in pairs if one.owner in (owner, None)]


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
        *_exemptions_clause(policy),
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
        yield f"dead Ray sessions {_go(ray_settings_of(policy).sessions)}"
        yield f"logs of ended processes of live Ray sessions {_go(ray_settings_of(policy).logs)}"
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


def _exemptions_clause(policy: Policy) -> Iterator[str]:
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
