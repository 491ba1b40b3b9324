"""The limits file of the DS01 container lifecycle (resource-limits.yaml) as a policy of a Docker host. Pure.

Who is in which group is in other files, and a group's limit holds for its managed containers only. So the class of
managed containers gets the most generous value of all groups, and each group is listed as not translated. What the file
does not limit has no limit, and rules that DS01 does not have are suspended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from gpukeeper.config.importing.result import Imported, Noted, NotTranslated, policy_text, refuse, source_document
from gpukeeper.config.problems import Path, line_of
from gpukeeper.config.units import shown, span_in_words
from gpukeeper.model.policy import Retention
from gpukeeper.model.reading import SPAN_MAX

MANAGED, INFRASTRUCTURE = "managed", "infrastructure"
TYPES = {
    "devcontainer": ("devcontainer",),
    "compose": ("compose",),
    "docker": ("docker",),
    "unknown": ("unknown", "api"),
}
SECTIONS = ("defaults", "groups", "container_types", "policies", "monitoring")
LIMITS = {"idle_timeout": "idle", "max_runtime": "max_runtime", "gpu_hold_after_stop": "hold_after_stop"}
HOLD = "container_hold_after_stop"
# Of all classes: the longest time of the file is used, so one value is enough.
ALSO = {
    "grace_period": "start_grace",
    "created_container_timeout": "never_started",
    "keepalive_max_duration": "hold",
    "sigterm_grace_seconds": "grace",
}
NO_LIMIT = "none"
SHORTEST = timedelta(minutes=15)  # owners are warned before, and need time to react
NOT_LIMITED = {one: Noted(NO_LIMIT, "not in the file") for one in ("idle", "max_runtime", "never_started")}
_SPAN = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}")

Limit = timedelta | None  # None: no limit


def import_limits(text: str, name: str) -> Imported:
    """Raises UsageError with every problem of the file."""
    document = source_document(text, name)
    if not isinstance(document.tree, dict) or not any(key in document.tree for key in ("defaults", "container_types")):
        raise refuse([f"{name}:1: this is not a limits file of DS01: it has neither defaults nor container_types."])
    return _Import(name, document.tree, document.lines).result()


class _Import:
    def __init__(self, name: str, tree: Mapping[str, Any], lines: Mapping[Path, int]) -> None:
        self._name, self._tree, self._lines = name, tree, lines
        self._missed: list[NotTranslated] = []
        self._problems: list[str] = []

    def result(self) -> Imported:
        classes = {MANAGED: self._managed(), **self._types()}
        tree = {
            "preset": Noted("ds01", "for what the file does not set"),
            "mode": Noted("plan", "an import never enforces anything"),
            "scope": {"docker": Noted({}, "all containers of this host")},
            **self._retention(),
            "classes": classes,
            **self._demand(),
            **self._match(),
            "exemptions": [
                Noted(
                    {"class": one, "rules": ["restart_loop"], "reason": "DS01 has no such rule"},
                    "DS01 has no such rule",
                )
                for one in classes
            ],
        }
        self._add_the_rest()
        if self._problems:
            raise refuse(self._problems)
        head = [f"Imported from the limits of DS01 in {self._name}.", "Read the plan before you enforce this."]
        written = {key: value for key, value in tree.items() if value}
        return Imported(source=self._name, policy=policy_text(head, written), not_translated=tuple(self._missed))

    # Limits

    def _managed(self) -> dict[str, Noted]:
        """Of containers that DS01 started: the most generous limit of the defaults and of all groups."""
        found = {}
        for theirs, ours in LIMITS.items():
            given = dict(self._everywhere(theirs))
            if given:
                where, limit = max(given.items(), key=lambda one: _length(one[1]))
                note = where if len(given) == 1 else f"{where}, the most generous of {len(given)} values"
                found[ours] = Noted(_words(limit, ours), note)
        return {**NOT_LIMITED, **self._of_all(), **found}

    def _everywhere(self, key: str) -> Iterator[tuple[str, Limit]]:
        """In the defaults and the groups; a group without the key has that of the defaults."""
        sections = [("defaults",), *(("groups", one) for one in self._section("groups"))]
        for path in sections:
            yield from ((".".join((*path, key)), one) for one in self._limit(path, key))

    def _types(self) -> dict[str, dict[str, Noted]]:
        classes = {}
        for type_ in self._section("container_types"):
            path = ("container_types", type_)
            if type_ not in TYPES:
                self._miss(
                    path, "gpukeeper has no such type of container", "Write a class and an entry of match for it."
                )
                continue
            limits = {
                ours: Noted(_words(one, ours), ".".join((*path, theirs)))
                for theirs, ours in LIMITS.items()
                for one in self._limit(path, theirs)
            }
            for class_ in TYPES[type_]:
                classes[class_] = {**NOT_LIMITED, **self._of_all(), **limits}
        unnamed = (one for names in TYPES.values() for one in names if one not in classes)
        return {**classes, **{one: {**NOT_LIMITED, **self._of_all()} for one in unnamed}}

    def _of_all(self) -> dict[str, Noted]:
        held = dict(self._everywhere(HOLD))
        kept = {} if held and None not in held.values() else {"after_idle": Noted("keep", f"no {HOLD}")}
        return kept | {
            ours: Noted(_words(limit, ours), f"policies.{theirs}")
            for theirs, ours in ALSO.items()
            for limit in self._limit(("policies",), theirs, "s" if theirs.endswith("_seconds") else "h")
        }

    def _retention(self) -> dict[str, Any]:
        """Only where theirs is longer: it was meant for managed containers, and retention is for all."""
        given = dict(self._everywhere(HOLD))
        if not given:
            return {}
        where, limit = max(given.items(), key=lambda one: _length(one[1]))
        defaults = Retention()
        found = {}
        for ours in ("succeeded", "failed", "stopped"):
            default = getattr(defaults, ours)
            if limit is None:
                found[ours] = Noted("manual", where)
            elif isinstance(default, timedelta) and limit > default:
                found[ours] = Noted(span_in_words(limit), where)
        if limit is not None and len(found) < 3:
            self._miss(
                tuple(where.split(".")),
                "retention is for every container, not only for managed ones; the default, which is longer, is used",
                "If it may be shorter: retention: {stopped: …}",
            )
        if limit is not None and limit > defaults.max:
            found["max"] = Noted(span_in_words(limit), where)
        return {"retention": found} if found else {}

    def _demand(self) -> dict[str, Any]:
        found: dict[str, Noted] = {}
        above, factor = self._share("high_demand_threshold"), self._share("high_demand_idle_reduction")
        if above is not None and above >= 20:
            found["above"] = Noted(f"{above}%", "policies.high_demand_threshold")
            found["below"] = Noted(f"{above - 10}%", "ten percent less, so that it does not flap")
        if factor is not None:
            found["idle_factor"] = Noted(f"{max(factor, 100 - factor)}%", "policies.high_demand_idle_reduction")
        return {"demand": found} if found else {}

    def _share(self, key: str) -> int | None:
        """In percent. None: the file has none."""
        value = self._section("policies").get(key)
        if value is None:
            return None
        if isinstance(value, float) and 0.01 <= value <= 0.99:
            return round(value * 100)
        self._problem(("policies", key), f"{shown(value)} is not a share between 0.01 and 0.99.")
        return None

    def _match(self) -> dict[str, Any]:
        listed = self._section("monitoring").get("infrastructure_containers") or []
        found = []
        for number, one in enumerate(listed if isinstance(listed, list) else [listed]):
            path = ("monitoring", "infrastructure_containers", number)
            if isinstance(one, str) and _PREFIX.fullmatch(one):
                entry = {"class": INFRASTRUCTURE, "platform": "docker", "name": f"{one}*"}
                found.append(Noted(entry, "monitoring.infrastructure_containers: never touched"))
            else:
                self._problem(path, f"{shown(one)} is not the beginning of a container's name.")
        return {"match": found} if found else {}

    # What is left

    def _add_the_rest(self) -> None:
        known = {*LIMITS, HOLD}
        for group in self._section("groups"):
            self._miss(
                ("groups", group),
                "who is in it is not in this file; its managed containers have the most generous limits of all groups",
                f"Write groups: {{{group}: {{members: […], idle: …}}}}. It then counts for all classes",
            )
        quotas = sorted({key for key in self._keys() if key not in known and not _in_hours(key, known)})
        if quotas:
            named = ", ".join(quotas[:8]) + (", …" if len(quotas) > 8 else "")
            self._miss(("defaults",), f"gpukeeper sets no quotas ({named})", "Keep what enforces them")
        for key in self._tree:
            if key not in SECTIONS:
                self._miss(
                    (key,), "gpukeeper has no such setting", "Keep what uses it, or read the reference of the policy"
                )
        policies = {*ALSO, "high_demand_threshold", "high_demand_idle_reduction"}
        for key in self._section("policies"):
            if key not in policies:
                self._miss(("policies", key), "gpukeeper measures use in its own way", "Read activity in the reference")
        for key in self._section("monitoring"):
            if key != "infrastructure_containers":
                self._miss(
                    ("monitoring", key), "gpukeeper reads ds01.protected and ds01.monitoring", "Nothing, for these"
                )

    def _keys(self) -> Iterator[str]:
        yield from self._section("defaults")
        for group in self._section("groups"):
            yield from self._section("groups", group)
        for type_ in self._section("container_types"):
            yield from self._section("container_types", type_)

    # Reading

    def _section(self, *path: str) -> Mapping[str, Any]:
        found: Any = self._tree
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None:
            return {}
        if isinstance(found, Mapping) and all(isinstance(key, str) for key in found):
            return found
        self._problem(path, f"{path[-1]} must be a mapping.")
        return {}

    def _limit(self, path: tuple[str, ...], key: str, unit: str = "h") -> Iterator[Limit]:
        """One, or none if the file has no such key. Older files have hours as numbers, also under key_h."""
        section = self._section(*path)
        for name in (key, f"{key}_h"):
            if name in section:
                value = section[name]
                if value is None:
                    yield None
                elif (span := _span(value, unit)) is not None:
                    yield span
                else:
                    self._problem((*path, name), f"{shown(value)} is not a duration, like 30m, 0.5h or 24h.")
                return

    def _at(self, path: Path) -> str:
        return f"{self._name}:{line_of(path, self._lines)}"

    def _problem(self, path: Path, why: str) -> None:
        words = f"{self._at(path)}: {'.'.join(str(one) for one in path)}: {why}"
        if words not in self._problems:
            self._problems.append(words)

    def _miss(self, path: Path, why: str, todo: str) -> None:
        what = ".".join(str(one) for one in path)
        self._missed.append(NotTranslated(where=self._at(path), what=what, why=why, todo=todo))


def _span(value: object, unit: str) -> timedelta | None:
    """None: it is none. A limit of nothing is none either: it would stop everything at once."""
    text = f"{value}{unit}" if isinstance(value, int | float) and not isinstance(value, bool) else value
    found = _SPAN.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    span = timedelta(**{_UNITS[found[2]]: float(found[1])})
    return timedelta(seconds=round(span.total_seconds())) if timedelta(seconds=1) <= span <= SPAN_MAX else None


def _length(limit: Limit) -> timedelta:
    return timedelta.max if limit is None else limit


def _words(limit: Limit, setting: str) -> str:
    """No limit: for a time that a policy must give, the longest that it takes."""
    if limit is not None:
        return span_in_words(max(limit, SHORTEST) if setting in ("idle", "max_runtime") else limit)
    return NO_LIMIT if setting in ("idle", "max_runtime", "never_started") else span_in_words(timedelta(days=365))


def _in_hours(key: str, known: set[str]) -> bool:
    return key.endswith("_h") and key[:-2] in known
