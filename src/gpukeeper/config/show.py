"""Every effective value and where it came from; and what applies to one owner. Values only: printing is the CLI's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from gpukeeper.config.load import Loaded
from gpukeeper.config.problems import Path, in_words, nearest
from gpukeeper.config.sections import PolicyFile, as_written, settings_of
from gpukeeper.config.units import factor_in_words, span_in_words
from gpukeeper.lifecycle.settings import BY_GROUP, limits_for, of_group
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Exemption
from gpukeeper.model.unknown import Unknown

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
    groups = [name for name, group in policy.groups.items() if group.has(owner)]
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
    mine = [group for group in groups if policy.groups[group].limits(class_name)]
    found = [(span, group) for group in mine if (span := of_group(own, policy.groups[group], name)) is not None]
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
