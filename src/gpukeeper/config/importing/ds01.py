"""The settings of the DS01 container lifecycle as a policy of a Docker host: its limits file (resource-limits.yaml),
and beside it the members of groups, the overrides of users and the exemptions. Pure.

A group's limits apply to the containers that DS01's own commands made, class `managed`; other types have limits of
their own. gpukeeper applies them to verified owners only, so the class has the longest of all groups: nobody's work is
stopped earlier because its owner was not verified. What the files do not limit has no limit, and rules that DS01 does
not have are suspended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, time, timedelta
from typing import Any

import msgspec

from gpukeeper.config.importing.result import Imported, Noted, NotTranslated, policy_text, refuse, source_document
from gpukeeper.config.problems import Path, line_of
from gpukeeper.config.units import percent_in_words, shown, size_in_words, span_in_words
from gpukeeper.model import reading
from gpukeeper.model.policy import EVERYONE, Activity, Policy, Retention

MANAGED, INFRASTRUCTURE, UNKNOWN, SERVING = "managed", "infrastructure", "unknown", "serving"
# Classes by type of container. Older files have no `api`: it had the limits of `unknown`.
TYPES = {
    "devcontainer": ("devcontainer",),
    "compose": ("compose",),
    "docker": ("docker",),
    "unknown": ("unknown", "api"),
    "api": ("api",),
}
OWNER_LABELS = ("ds01.user", "aime.mlc.USER")
SECTIONS = ("defaults", "default_group", "groups", "container_types", "policies", "monitoring", "user_overrides")
OVERRIDES, EXEMPTIONS = "user-overrides.yaml", "lifecycle-exemptions.yaml"
LIMITS = {"idle_timeout": "idle", "max_runtime": "max_runtime", "gpu_hold_after_stop": "hold_after_stop"}
HOLD = "container_hold_after_stop"
# Of all classes.
ALSO = {
    "grace_period": "start_grace",
    "created_container_timeout": "never_started",
    "keepalive_max_duration": "hold",
    "sigterm_grace": "grace",
    "gpu_hold_after_manual_stop": "hold_after_stop",
}
# What is below a threshold is idle in both tools, so the lower one protects more.
THRESHOLDS = {"gpu_idle_threshold": "gpu", "cpu_idle_threshold": "cpu", "network_idle_threshold": "network"}
RULES = {"idle_timeout": "idle", "max_runtime": "max_runtime"}
NO_LIMIT = "none"
SHORTEST = timedelta(minutes=15)  # owners are warned before, and need time to react
NOT_LIMITED = {one: Noted(NO_LIMIT, "not in the file") for one in ("idle", "max_runtime", "never_started")}
_UNIT_OF = {"": "h", "_h": "h", "_m": "m", "_s": "s", "_seconds": "s"}  # of a bare number, by the ending of its key
_SPAN = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,100}\$?")
_TODO = {
    "access_control": "For those who may act on the work of all users, write admins: [root, NAME]",
    "bare_metal_access": "GPU processes outside containers are only reported. To report none of a user: "
    "exemptions: [{owner: NAME, class: bare, reason: …}]",
}

Limit = timedelta | None  # None: no limit


class Companions(msgspec.Struct, frozen=True, kw_only=True):
    """The files beside the limits file; None and a group that is missing: there is no such file."""

    members: Mapping[str, str] = {}  # by group: groups/<group>.members
    overrides: str | None = None
    exemptions: str | None = None


def import_limits(text: str, name: str, beside: Companions | None = None) -> Imported:
    """Raises UsageError with every problem of the files."""
    document = source_document(text, name)
    if not isinstance(document.tree, dict) or not any(key in document.tree for key in ("defaults", "container_types")):
        raise refuse([f"{name}:1: this is not a limits file of DS01: it has neither defaults nor container_types."])
    return _Import(_File(name, document.tree, document.lines, []), beside or Companions()).result()


class _File:
    """A YAML file with its lines. `problems` are those of all files."""

    def __init__(self, name: str, tree: Any, lines: Mapping[Path, int], problems: list[str]) -> None:
        self.name, self._tree, self._lines, self.problems = name, tree, lines, problems

    def beside(self, name: str, text: str) -> _File:
        document = source_document(text, name)
        return _File(name, document.tree, document.lines, self.problems)

    def section(self, *path: str) -> Mapping[str, Any]:
        found: Any = self._tree
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None:
            return {}
        if isinstance(found, Mapping) and all(isinstance(key, str) for key in found):
            return found
        self.complain(path, f"{path[-1] if path else 'the file'} must be a mapping.")
        return {}

    def limit(self, path: tuple[str, ...], key: str) -> Iterator[tuple[str, Limit]]:
        """Its place and value, or nothing if the file has no such key. A bare number is in the unit of the key."""
        section = self.section(*path)
        for ending, unit in _UNIT_OF.items():
            if key + ending in section:
                value = section[key + ending]
                span = None if value is None else _span(value, unit)
                if value is not None and span is None:
                    why = f"{shown(value)} is not a duration, like 30m, 0.5h or 24h."
                    self.complain((*path, key + ending), why)
                else:
                    yield ".".join((*path, key + ending)), span
                return

    def at(self, path: Path) -> str:
        return f"{self.name}:{line_of(path, self._lines)}"

    def complain(self, path: Path, why: str) -> None:
        words = f"{self.at(path)}: {'.'.join(str(one) for one in path)}: {why}"
        if words not in self.problems:
            self.problems.append(words)


class _Import:
    def __init__(self, limits: _File, beside: Companions) -> None:
        self._limits, self._beside = limits, beside
        self._missed: list[NotTranslated] = []
        self._exempt: list[Noted] = []
        self._overrides, self._overridden = self._override_file()
        self._groups = list(limits.section("groups"))
        self._members = {group: self._members_of(group) for group in self._groups}

    def result(self) -> Imported:
        classes = {**self._types(), SERVING: {"never_started": NOT_LIMITED["never_started"], **self._of_all()}}
        classes = {MANAGED: self._managed(), **classes}
        groups = {**self._group_limits(), **self._limits_of_users()}
        self._exemptions_of_users()
        tree = {
            "preset": Noted("ds01", "for what the files do not set"),
            "mode": Noted("plan", "an import never enforces anything"),
            "scope": {
                "host": Noted({}, "GPU processes outside containers are reported"),
                "docker": Noted({}, "all containers of this host"),
            },
            **self._retention(),
            "classes": classes,
            "groups": groups,
            "owner_labels": Noted(list(OWNER_LABELS), "DS01 believes them; remove what users can set themselves"),
            **self._demand(),
            **self._activity(),
            **self._holds(classes),
            **self._match(),
            "exemptions": [*self._exempt, *(_without("restart_loop", one) for one in classes)],
        }
        self._add_the_rest()
        if self._limits.problems:
            raise refuse(self._limits.problems)
        head = [f"Imported from the limits of DS01 in {self._limits.name}.", "Read the plan before you enforce this."]
        written = {key: value for key, value in tree.items() if value}
        policy = policy_text(head, written, self._missed)
        return Imported(source=self._limits.name, policy=policy, not_translated=tuple(self._missed))

    # Limits

    def _managed(self) -> dict[str, Noted]:
        """Of containers that DS01 made: the longest limit of all groups, for owners that are not verified."""
        found = {}
        for theirs, ours in LIMITS.items():
            given = [self._of_group(group, theirs) for group in self._for_all()]
            # Those whose members are named can be exempt from a limit of the class.
            named = [self._of_group(group, theirs) for group in self._groups if group not in self._for_all()]
            named += [self._of_user(user, theirs) for user in self._overridden]
            given += [one for one in named if one[1] is not None]
            where, limit = max(given, key=lambda one: _length(one[1]))
            if limit is None and any(one[1] is not None for one in given):
                nothing = where or "the default group"
                why = f"managed containers have no {theirs}: {nothing} has none, and no group gives a class one"
                self._miss(("groups",), why, "Give the class one, and exempt those without")
            if where:
                note = where if len({one[1] for one in given}) == 1 else f"{where}, the longest of all groups"
                found[ours] = Noted(_words(limit, ours), note)
        return {**NOT_LIMITED, **self._of_all(), **found}

    def _for_all(self) -> list[str]:
        """Groups whose members cannot be named: the one of users who are in no file, and those without a file."""
        unnamed = [one for one in self._groups if self._members[one] is None and one != self._default()]
        return [self._default(), *unnamed]

    def _default(self) -> str:
        named = self._limits.section().get("default_group", "student")
        return named if isinstance(named, str) else ""

    def _of_group(self, group: str, key: str) -> tuple[str, Limit]:
        """A group without the key has that of the defaults; nothing there: no limit."""
        of_group = self._limits.limit(("groups", group), key) if group in self._groups else iter(())
        return next(of_group, None) or next(self._limits.limit(("defaults",), key), ("", None))

    def _of_user(self, user: str, key: str) -> tuple[str, Limit]:
        """An override replaces the group: what it does not set is as in the defaults."""
        own = next(self._overrides.limit((*self._over, user), key), None)
        return own or next(self._limits.limit(("defaults",), key), ("", None))

    def _types(self) -> dict[str, dict[str, Noted]]:
        classes = {}
        given = self._limits.section("container_types")
        for type_ in sorted(given, key=lambda one: [*TYPES].index(one) if one in TYPES else -1):
            path = ("container_types", type_)
            if type_ not in TYPES:
                todo = "Write a class and an entry of match for it."
                self._miss(path, "gpukeeper has no such type of container", todo)
                continue
            limits = {
                ours: Noted(_words(limit, ours), where)
                for theirs, ours in {**LIMITS, "sigterm_grace": "grace"}.items()
                for where, limit in self._limits.limit(path, theirs)
            }
            for class_ in TYPES[type_]:
                classes[class_] = {**NOT_LIMITED, **self._of_all(), **limits}
        unnamed = (one for names in TYPES.values() for one in names if one not in classes)
        classes |= {one: {**NOT_LIMITED, **self._of_all()} for one in unnamed}
        if classes["devcontainer"]["idle"].value != NO_LIMIT:
            why = "DS01's idle check skips dev containers, whatever the file says; here they have no idle time either"
            self._miss(("container_types", "devcontainer"), why, "To stop idle ones, write idle in that class")
            classes["devcontainer"]["idle"] = Noted(NO_LIMIT, "DS01 never stops them as idle")
        classes[UNKNOWN] |= self._ownerless()
        return classes

    def _ownerless(self) -> dict[str, Noted]:
        """DS01 goes by the type of the container there, too."""
        types = [("container_types", one) for one in ("devcontainer", "compose", "docker", "unknown")]
        of_types = [next(self._limits.limit(path, "max_runtime"), ("", None))[1] for path in types]
        self._miss(
            ("container_types", UNKNOWN),
            "DS01 gives containers without an owner the limits of their type, by labels that any user can write. Here "
            "all of them are of class unknown: idle ones are only reported, the maximum runtime is the longest of all "
            "types",
            "To stop them, write on_idle: stop and max_runtime: 24h in that class",
        )
        longest = max([self._of_group(self._default(), "max_runtime")[1], *of_types], key=_length)
        return {
            "on_idle": Noted("report", "DS01 stops them by type"),
            "max_runtime": Noted(_words(longest, "max_runtime"), "the longest of all types"),
        }

    def _of_all(self) -> dict[str, Noted]:
        held = dict(self._held())
        kept = {} if held and None not in held.values() else {"after_idle": Noted("keep", f"no {HOLD}")}
        return kept | {
            ours: Noted(_words(limit, ours), where)
            for theirs, ours in ALSO.items()
            for where, limit in self._limits.limit(("policies",), theirs)
        }

    def _held(self) -> Iterator[tuple[str, Limit]]:
        for path in (("defaults",), *(("groups", one) for one in self._groups)):
            yield from self._limits.limit(path, HOLD)

    def _retention(self) -> dict[str, Any]:
        """Only where theirs is longer: retention is by outcome, and longer by default."""
        given = dict(self._held())
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
                "retention is by outcome; the default, which is longer, is used",
                "If it may be shorter: retention: {stopped: …}",
            )
        if limit is not None and limit > defaults.max:
            found["max"] = Noted(span_in_words(limit), where)
        return {"retention": found} if found else {}

    # People

    def _members_of(self, group: str) -> tuple[str, ...] | None:
        """Of its file and of the limits file. None: neither names any."""
        listed = self._limits.section("groups", group).get("members")
        text = self._beside.members.get(group)
        if listed is None and text is None:
            return None
        lines = [line.partition("#")[0].strip() for line in (text or "").splitlines()]
        names = [*(listed if isinstance(listed, list) else []), *(one for one in lines if one)]
        for one in names:
            if not isinstance(one, str) or not _USER.fullmatch(one):
                self._limits.complain(("groups", group), f"member {shown(one)} is not a user name.")
        return tuple(dict.fromkeys(one for one in names if isinstance(one, str)))

    def _group_limits(self) -> dict[str, Any]:
        """A user is in the first group that names them; in none: in the default group; an override replaces it."""
        found, taken = {}, set(self._overridden)
        everybody_is_named = self._for_all() == [self._default()]
        for group in [
            *self._groups,
            *([self._default()] if self._groups and self._default() not in self._groups else []),
        ]:
            members = self._members.get(group)
            mine = [one for one in members or () if one not in taken]
            taken |= set(mine)
            short = [one for one in mine if "_" in one and "@" not in one]
            if members is None and group != self._default():
                self._miss(
                    ("groups", group),
                    f"there is no file groups/{group}.members with its members; all managed containers have the "
                    "longest limits of all groups",
                    f"Write groups: {{{group}: {{members: […], classes: [{MANAGED}], idle: …}}}}",
                )
                continue
            if group == self._default() and everybody_is_named:
                mine = [EVERYONE]
            elif short:
                why = f"{', '.join(short[:8])}: DS01 also accepts its own short form of a login name here"
                self._miss(("groups", group), why, "Write the login name, if this is not one")
            if mine:
                limits = {theirs: self._of_group(group, theirs) for theirs in LIMITS}
                found[group] = self._limited(mine, group, limits, ("groups", group))
        return found

    def _limits_of_users(self) -> dict[str, Any]:
        found = {}
        for user in self._overridden:
            path = (*self._over, user)
            limits = {theirs: self._of_user(user, theirs) for theirs in LIMITS}
            found[f"user {user}"] = self._limited([user], f"the override of {user}", limits, path)
            for _, limit in self._overrides.limit(path, HOLD):
                if limit is None:
                    why = f"the override of {user} has no {HOLD}"
                    self._exempt.append(
                        Noted({"owner": user, "rules": ["retention"], "reason": why}, self._overrides.name)
                    )
                else:
                    why, todo = f"retention is for all users, and not shorter than {HOLD} there", "Nothing"
                    self._miss(path, why, todo, file=self._overrides)
            known = {*LIMITS, HOLD, "policies"}
            if rest := sorted(key for key in self._overrides.section(*path) if _base(key) not in known):
                why = f"gpukeeper sets no quotas ({', '.join(rest[:8])})"
                self._miss(path, why, "Keep what enforces them", file=self._overrides)
        return found

    def _limited(
        self, members: list[str], whose: str, limits: Mapping[str, tuple[str, Limit]], path: tuple[str, ...]
    ) -> dict[str, Any]:
        """A group of the policy. It cannot lift a limit of its class: its members are exempt instead."""
        found: dict[str, Any] = {"members": Noted(members, whose), "classes": Noted([MANAGED], "others: by type")}
        file = self._limits if path[0] == "groups" else self._overrides
        for theirs, (where, limit) in limits.items():
            ours, of_default = LIMITS[theirs], self._of_group(self._default(), theirs)[1]
            if limit is not None:
                found[ours] = Noted(_words(limit, ours), where)
                if members != [EVERYONE] and _length(limit) < _length(of_default):
                    why = f"{whose}: {theirs} is shorter than that of the default group, which applies to everyone"
                    self._miss(path, why, "List the members of the default group instead of *", file=file)
            else:
                found[ours] = Noted("as class", where or "no limit")
                if theirs in RULES and members != [EVERYONE] and of_default is not None:
                    given = {"class": MANAGED, "rules": [RULES[theirs]], "reason": f"no {theirs} in {whose}"}
                    self._exempt += [Noted({"owner": one, **given}, where) for one in members]
        return found

    def _override_file(self) -> tuple[_File, list[str]]:
        """In a file of their own, or in the limits file."""
        text = self._beside.overrides
        inline = self._limits.section("user_overrides")
        if text is None:
            self._over: tuple[str, ...] = ("user_overrides",)
            if not inline:
                self._miss((), f"there is no {OVERRIDES} beside it", "If users have overrides, import again with it")
            return self._limits, self._users(self._limits)
        if inline:
            self._miss(("user_overrides",), f"{OVERRIDES} is used instead", "Move these there, then import again")
        self._over = ()
        file = self._limits.beside(OVERRIDES, text)
        return file, self._users(file)

    def _users(self, file: _File) -> list[str]:
        found = file.section(*self._over)
        for one in found:
            if not _USER.fullmatch(one):
                file.complain((*self._over, one), "this is not a user name.")
        return list(found)

    def _exemptions_of_users(self) -> None:
        """One that ended is translated, too: it has no effect, and stays on record."""
        text = self._beside.exemptions
        if text is None:
            self._miss((), f"there is no {EXEMPTIONS} beside it", "If users are exempt, import again with it")
            return
        file = self._limits.beside(EXEMPTIONS, text)
        listed = file.section().get("exemptions") or []
        for number, one in enumerate(listed if isinstance(listed, list) else [listed]):
            path: Path = ("exemptions", number)
            user = one.get("username") if isinstance(one, Mapping) else None
            if not isinstance(user, str) or not _USER.fullmatch(user):
                file.complain(path, "it has no user name.")
                continue
            rules = one.get("exempt_from") if isinstance(one.get("exempt_from"), list) else []
            known = [RULES[base] for rule in rules if (base := _base(str(rule))) in RULES]
            for rule in rules:
                if _base(str(rule)) not in RULES:
                    file.complain((*path, "exempt_from"), f"{shown(rule)} is not idle_timeout_h or max_runtime_h.")
            reason, until = one.get("reason"), _until(one.get("expires_on"))
            if until is ...:
                why = f"{shown(one['expires_on'])} is not a date. Write it like 2026-09-01 or 2026-09-01T18:00:00Z."
                file.complain((*path, "expires_on"), why)
            elif known:
                words = reason if isinstance(reason, str) and reason.strip() else "no reason in the file"
                ends = {} if until is None else {"until": until.isoformat().replace("+00:00", "Z")}
                self._exempt.append(Noted({"owner": user, "rules": known, "reason": words, **ends}, EXEMPTIONS))

    # What is not about time

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
        value = self._limits.section("policies").get(key)
        if value is None:
            return None
        if isinstance(value, float) and 0.01 <= value <= 0.99:
            return round(value * 100)
        self._limits.complain(("policies", key), f"{shown(value)} is not a share between 0.01 and 0.99.")
        return None

    def _activity(self) -> dict[str, Any]:
        """The lowest of all groups and users, if it is lower than the default."""
        found: dict[str, Noted] = {}
        paths: list[tuple[_File, tuple[str, ...]]] = [(self._limits, ("policies",))]
        paths += [(self._limits, ("groups", one, "policies")) for one in self._groups]
        paths += [(self._overrides, (*self._over, one, "policies")) for one in self._overridden]
        for theirs, ours in THRESHOLDS.items():
            given = {}
            for file, path in paths:
                value = file.section(*path).get(theirs)
                if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
                    given[".".join((*path, theirs))] = value
                elif value is not None:
                    file.complain((*path, theirs), f"{shown(value)} is not a number.")
            default = getattr(Activity(), ours)
            where, lowest = min(given.items(), key=lambda one: one[1], default=("", default))
            if lowest < default:
                least = max(lowest, 1 if ours == "network" else 0.1)
                found[ours] = Noted(size_in_words(int(least)) if ours == "network" else percent_in_words(least), where)
            for where, value in given.items():
                if value > min(lowest, default):
                    self._miss(tuple(where.split(".")), "a lower threshold is used, which stops less", "Nothing")
        return {"activity": found} if found else {}

    def _holds(self, classes: Mapping[str, Mapping[str, Noted]]) -> dict[str, Any]:
        """A hold may not be longer than all holds together."""
        defaults = Policy()
        held = next((limit for _, limit in self._limits.limit(("policies",), "keepalive_max_duration")), None)
        if "hold" not in classes[MANAGED] or (held is not None and held <= defaults.hold_total):
            return {}
        longest = timedelta(days=365) if held is None else held
        note, within = classes[MANAGED]["hold"].note, max(longest, defaults.hold_within)
        return {"holds": {"total": Noted(span_in_words(longest), note), "within": Noted(span_in_words(within), note)}}

    def _match(self) -> dict[str, Any]:
        listed = self._limits.section("monitoring").get("infrastructure_containers") or []
        found = []
        for number, one in enumerate(listed if isinstance(listed, list) else [listed]):
            path = ("monitoring", "infrastructure_containers", number)
            if isinstance(one, str) and _PREFIX.fullmatch(one):
                entry = {"class": INFRASTRUCTURE, "platform": "docker", "name": f"{one}*"}
                found.append(Noted(entry, "monitoring.infrastructure_containers: never touched"))
            else:
                self._limits.complain(path, f"{shown(one)} is not the beginning of a container's name.")
        return {"match": found} if found else {}

    # What is left

    def _add_the_rest(self) -> None:
        known = {*LIMITS, HOLD, "sigterm_grace", "policies", "members"}
        if quotas := sorted({key for key in self._keys() if _base(key) not in known}):
            named = ", ".join(quotas[:8]) + (", …" if len(quotas) > 8 else "")
            self._miss(("defaults",), f"gpukeeper sets no quotas ({named})", "Keep what enforces them")
        for key in self._limits.section():
            if key not in SECTIONS:
                todo = _TODO.get(key, "Keep what uses it, or read the reference of the policy")
                self._miss((key,), "gpukeeper has no such setting", todo)
        policies = {*ALSO, *THRESHOLDS, "high_demand_threshold", "high_demand_idle_reduction"}
        for key in self._limits.section("policies"):
            if key == "idle_detection_window":
                why = "DS01 checks once an hour and stops after several idle checks in a row; gpukeeper at the limit"
                self._miss(("policies", key), why, "To keep the delay, write longer idle times")
            elif _base(key) not in policies:
                self._miss(("policies", key), "gpukeeper measures use in its own way", "Read activity in the reference")
        for key in self._limits.section("monitoring"):
            if key not in ("infrastructure_containers", "infrastructure_label"):
                self._miss(("monitoring", key), "gpukeeper has no such setting", "Nothing, if it is about labels")
        self._miss(
            ("container_types",),
            "DS01 takes every container for a dev container whose image has the label devcontainer.metadata, unless "
            "its wrapper labelled it; here labels of an image do not count, so that it has the limits of class docker",
            "Exempt those that must go on: exemptions: [{workload: NAME, rules: [idle, max_runtime], reason: …}]",
        )

    def _keys(self) -> Iterator[str]:
        yield from self._limits.section("defaults")
        for group in self._groups:
            yield from self._limits.section("groups", group)
        for type_ in self._limits.section("container_types"):
            yield from self._limits.section("container_types", type_)

    def _miss(self, path: Path, why: str, todo: str, file: _File | None = None) -> None:
        file = file or self._limits
        what = ".".join(str(one) for one in path) or file.name
        self._missed.append(NotTranslated(where=file.at(path), what=what, why=why, todo=todo))


def _without(rule: str, class_: str) -> Noted:
    return Noted({"class": class_, "rules": [rule], "reason": "DS01 has no such rule"}, "DS01 has no such rule")


def _until(value: object) -> Any:
    """`...`: it is no date. One without a zone is in UTC; a day lasts until its end."""
    if value is None:
        return None
    try:
        found = reading.moment(value, naive_is_utc=True) if isinstance(value, str) else ...
    except ValueError:
        return ...
    if found is ... or not isinstance(value, str):
        return ...
    return datetime.combine(found.date(), time.max, UTC) if len(value) <= len("2026-09-01") else found


def _span(value: object, unit: str) -> timedelta | None:
    """None: it is none. A limit of nothing is none either: it would stop everything at once."""
    text = f"{value}{unit}" if isinstance(value, int | float) and not isinstance(value, bool) else value
    found = _SPAN.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    span = timedelta(**{_UNITS[found[2]]: float(found[1])})
    return timedelta(seconds=round(span.total_seconds())) if timedelta(seconds=1) <= span <= reading.SPAN_MAX else None


def _length(limit: Limit) -> timedelta:
    return timedelta.max if limit is None else limit


def _words(limit: Limit, setting: str) -> str:
    """No limit: for a time that a policy must give, the longest that it takes."""
    if limit is not None:
        return span_in_words(max(limit, SHORTEST) if setting in ("idle", "max_runtime") else limit)
    return NO_LIMIT if setting in ("idle", "max_runtime", "never_started") else span_in_words(timedelta(days=365))


def _base(key: str) -> str:
    """The key without the ending that names its unit."""
    return next((key.removesuffix(one) for one in _UNIT_OF if one and key.endswith(one)), key)
