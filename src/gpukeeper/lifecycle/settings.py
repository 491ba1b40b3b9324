"""Which settings apply to a subject: its class by the policy's match list, its owner's groups, its environment."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from fnmatch import fnmatchcase

import msgspec

from gpukeeper.model.policy import ClassSettings, Group, Match, Policy, Retention
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown, is_known

NO_LIMITS = ClassSettings(never_started=None)
REMEMBERED = 65536
BY_GROUP = ("idle", "max_runtime", "hold_after_stop")


class Settings(msgspec.Struct, frozen=True):
    """What the rules need for one subject. An Unknown here means keep. `kept`: why no rule acts on it. `divisor`: how
    much shorter than in the policy its times are."""

    policy: Policy
    class_name: str
    class_: str | Unknown
    untouchable: bool | Unknown
    limits: ClassSettings | Unknown
    retention: Retention | Unknown
    kept: str = ""
    divisor: int = 1


class Rulebook:
    """A policy with cached results: most subjects share class, owner, environment and what `match` reads."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.gpu_alone = msgspec.structs.replace(policy.activity, signals=())  # activity without other signals
        self._known: dict[object, Settings] = {}
        self._last: tuple[Subject, Settings] | None = None  # a pass asks several times about one subject, then the next
        self._parts, self._labels = _matched_on(policy.match)

    def settings(self, subject: Subject) -> Settings:
        if self._last is not None and self._last[0] is subject:
            return self._last[1]
        key: tuple[object, ...] = (subject.class_, subject.owner, subject.owner_verified, subject.environment)
        if self._labels:
            key += tuple(map(subject.labels.get, self._labels))
        if self._parts:
            key += tuple([getattr(subject.ref, part) for part in self._parts])
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= REMEMBERED:  # names come and go; a daemon must not keep them all
                self._known.clear()
            found = self._known[key] = _settle(self.policy, class_of(self.policy, subject), subject)
        self._last = (subject, found)
        return found


def _matched_on(matches: tuple[Match, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Everything that decides which match fits, besides the owner: parts of the ref, and labels."""
    named = ("platform", "namespace", "kind", "name")
    parts = tuple(part for part in named if any(getattr(match, part) is not None for match in matches))
    labels = {match.label.partition("=")[0] for match in matches if match.label is not None}
    return parts, tuple(sorted(labels | ({"image"} if any(match.image is not None for match in matches) else set())))


def class_of(policy: Policy, subject: Subject) -> str | Unknown:
    """The first match of the policy, else what the platform recognized."""
    for match in policy.match:
        if fits(match, subject):
            return match.class_
        if isinstance(subject.owner, Unknown) and _may_fit(match, subject):
            return Unknown(f"its owner is unknown ({subject.owner.why}), and class {match.class_} depends on the owner")
    return subject.class_


def _may_fit(match: Match, subject: Subject) -> bool:
    """It fits except for the owner, which is unknown."""
    return match.owner is not None and fits(msgspec.structs.replace(match, owner=None), subject)


def limits_for(policy: Policy, class_name: str, owner: str | None) -> ClassSettings:
    """The class's limits, with those that its owner's groups give in their place."""
    limits = policy.classes.get(class_name, NO_LIMITS)
    if limits.untouchable or owner is None:
        return limits
    mine = [group for group in policy.groups.values() if owner in group.members]
    return msgspec.structs.replace(limits, **dict(_replaced(limits, mine)))


def _replaced(limits: ClassSettings, groups: list[Group]) -> Iterator[tuple[str, timedelta]]:
    """Shorter or longer than the class's; of several groups the most generous."""
    for name in BY_GROUP:
        given = [span for group in groups if (span := of_group(limits, group, name)) is not None]
        if given:
            yield name, max(given)


def of_group(limits: ClassSettings, group: Group, name: str) -> timedelta | None:
    """What a group makes of one limit of a class. None: nothing, also where the class has no such limit."""
    own: timedelta | None = getattr(limits, name)
    given: timedelta | float | None = getattr(group, name)
    if own is None or given is None:
        return None
    return given if isinstance(given, timedelta) else own * given


def idle_times(policy: Policy) -> Iterator[timedelta]:
    """Every idle time that any work may have."""
    for limits in policy.classes.values():
        found = [limits.idle, limits.idle_when_large]
        found += [of_group(limits, group, "idle") for group in policy.groups.values()]
        yield from (span for span in found if span is not None)


def _settle(policy: Policy, class_: str | Unknown, subject: Subject) -> Settings:
    return Settings(
        policy=policy,
        class_name=class_ if is_known(class_) else "unknown",
        class_=class_,
        untouchable=_untouchable(policy, class_),
        limits=_limits(policy, class_, subject.owner, verified=subject.owner_verified),
        retention=_retention(policy, subject.environment),
    )


def _untouchable(policy: Policy, class_: str | Unknown) -> bool | Unknown:
    """Of the class alone, whoever owns it. An unknown class may be the untouchable one."""
    if isinstance(class_, Unknown):
        return class_ if any(one.untouchable for one in policy.classes.values()) else False
    return policy.classes.get(class_, NO_LIMITS).untouchable


def _limits(
    policy: Policy, class_: str | Unknown, owner: str | Unknown | None, *, verified: bool
) -> ClassSettings | Unknown:
    """A group's limits apply to verified members; to claimed members those of the class apply."""
    if isinstance(class_, Unknown):
        return Unknown(f"its class is unknown ({class_.why})")
    if isinstance(owner, Unknown):
        if policy.groups:
            return Unknown(f"its owner is unknown ({owner.why}), and owners have different limits")
        owner = None
    return limits_for(policy, class_, owner if verified else None)


def _retention(policy: Policy, environment: str | Unknown | None) -> Retention | Unknown:
    if not policy.environments or environment is None:
        return policy.retention
    if isinstance(environment, Unknown):
        return Unknown(f"its environment is unknown ({environment.why}), and environments have different retention")
    return policy.environments.get(environment, policy.retention)


def fits(match: Match, subject: Subject) -> bool:
    ref = subject.ref
    owner = subject.owner if isinstance(subject.owner, str) else None
    patterns = (
        (match.platform, ref.platform),
        (match.namespace, ref.namespace),
        (match.kind and match.kind.lower(), ref.kind),  # people write capitals, too
        (match.name, ref.name),
        (match.owner, owner),
        (match.image, subject.labels.get("image")),
    )
    if not all(pattern is None or (value is not None and fnmatchcase(value, pattern)) for pattern, value in patterns):
        return False
    return match.label is None or has_label(subject, match.label)


def has_label(subject: Subject, wanted: str) -> bool:
    """`key`, `key=value` or `key=pattern`."""
    key, given, value = wanted.partition("=")
    found = subject.labels.get(key)
    return found is not None and (not given or fnmatchcase(found, value))
