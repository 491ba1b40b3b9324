"""Which settings apply to a subject: its class by the policy's match list, its owner's groups, its environment. Pure.

And the same with short times, to try a policy on named workloads (idle times stay: use is measured by the minute);
and the narrowing flags of plan, apply and observe, which choose among what the policy covers and never widen it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

import msgspec

from gpukeeper.model.policy import ClassSettings, Group, Match, Policy, Retention, Warnings
from gpukeeper.model.subject import Ref, Shape, Subject
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
    mine = [group for group in policy.groups.values() if group.has(owner) and group.limits(class_name)]
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
    for name, limits in policy.classes.items():
        found = [limits.idle, limits.idle_when_large]
        found += [of_group(limits, group, "idle") for group in policy.groups.values() if group.limits(name)]
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


NOT_COMPRESSED = "not named with --compress, so it is kept"


class CompressedBook(Rulebook):
    """`names`: full paths. A leftover has no name that would include it.

    Divided are times after the end and before the start, runtime and the lead of warnings. Everything that is not
    named is kept.
    """

    def __init__(self, policy: Policy, divisor: int, names: Collection[str]) -> None:
        assert divisor > 1, "a policy is only ever made shorter"
        super().__init__(policy)
        self.divisor, self.names = divisor, frozenset(names)
        self._short = Rulebook(divided(policy, divisor))

    def settings(self, subject: Subject) -> Settings:
        if subject.shape is Shape.WORKLOAD and subject.ref.path in self.names:
            return msgspec.structs.replace(self._short.settings(subject), divisor=self.divisor)
        return msgspec.structs.replace(super().settings(subject), kept=NOT_COMPRESSED)


def divided(policy: Policy, by: int) -> Policy:
    return msgspec.structs.replace(
        policy,
        retention=_short_retention(policy.retention, by),
        environments={name: _short_retention(one, by) for name, one in policy.environments.items()},
        classes={name: _short_limits(one, by) for name, one in policy.classes.items()},
        groups={name: _short_group(one, by) for name, one in policy.groups.items()},
        warnings=_short_warnings(policy.warnings, by),
    )


def _short_retention(given: Retention, by: int) -> Retention:
    return Retention(
        succeeded=_short_span(given.succeeded, by),
        failed=_short_span(given.failed, by),
        stopped=_short_span(given.stopped, by),
        max=given.max / by,
    )


def _short_limits(given: ClassSettings, by: int) -> ClassSettings:
    return msgspec.structs.replace(
        given,
        max_runtime=_short_span(given.max_runtime, by),
        never_started=_short_span(given.never_started, by),
        hold_after_stop=given.hold_after_stop / by,
    )


def _short_group(given: Group, by: int) -> Group:
    """A number is a factor of the class's value, which is divided already."""
    spans = {name: getattr(given, name) for name in ("max_runtime", "hold_after_stop")}
    return msgspec.structs.replace(
        given, **{name: one / by for name, one in spans.items() if isinstance(one, timedelta)}
    )


def _short_warnings(given: Warnings, by: int) -> Warnings:
    return msgspec.structs.replace(given, lead=given.lead / by, undelivered=given.undelivered / by)


def _short_span(given: timedelta | None, by: int) -> timedelta | None:
    return None if given is None else given / by


SHORT_ID = 12  # letters of an id that are enough to mean one image


class Narrow(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing given means everything. A fact that is not known fits no narrowing on it."""

    platform: str | None = None  # its name, or name/place
    namespace: str | None = None
    label: str | None = None
    kind: str | None = None
    owner: str | None = None
    nobodys: bool = False  # with an owner: also what has no owner
    class_: str | None = None
    outcome: str | None = None
    older_than: timedelta | None = None
    name: str | None = None
    image: str | None = None
    paths: frozenset[str] | None = None  # full paths, without patterns

    def fits(self, subject: Subject, now: datetime) -> bool:
        if not self.fits_ref(subject.ref, subject.owner):
            return False
        if self.outcome is not None and not _like(subject.outcome, self.outcome):
            return False
        if self.label is not None and not has_label(subject, self.label):
            return False
        if self.image is not None and not is_made_from(subject, self.image):
            return False
        return self.older_than is None or _age_of(subject, now) >= self.older_than

    def fits_ref(self, ref: Ref, owner: object) -> bool:
        """As far as that is known without its other facts."""
        if self.paths is not None and ref.path not in self.paths:
            return False
        named = (
            (self.namespace, ref.namespace),
            (self.kind and self.kind.lower(), ref.kind.lower()),
            (None if self.nobodys and owner is None else self.owner, owner),
        )
        if not all(wanted is None or _like(value, wanted) for wanted, value in named):
            return False
        if self.platform is not None and not _like(f"{ref.platform}/{ref.place}", self.platform, prefix=True):
            return False
        return self.name is None or fnmatchcase(ref.name, self.name) or ref.ends_with(self.name)

    def fits_class(self, class_: str) -> bool:
        """The one whose limits apply, so that the policy's match list counts."""
        return self.class_ is None or _like(class_, self.class_)


def is_made_from(subject: Subject, wanted: str) -> bool:
    """By the name it was made from, or by the id of its image. A name without a tag means every tag and digest of it;
    an engine's own filter would mean `latest`."""
    if subject.shape is not Shape.WORKLOAD:
        return False
    name, id_ = subject.labels.get("image", ""), subject.labels.get("image_id", "").removeprefix("sha256:")
    hex_ = wanted.removeprefix("sha256:")
    if len(hex_) >= SHORT_ID and id_.startswith(hex_):
        return True
    tagged = ":" in wanted.rpartition("/")[2] or "@" in wanted
    patterns = (wanted,) if tagged else (wanted, f"{wanted}:*", f"{wanted}@*")
    return bool(name) and any(fnmatchcase(name, pattern) for pattern in patterns)


def _like(value: object, wanted: str, *, prefix: bool = False) -> bool:
    if not isinstance(value, str):
        return False
    return fnmatchcase(value, wanted) or (prefix and value.startswith(wanted.rstrip("/") + "/"))


def _age_of(subject: Subject, now: datetime) -> timedelta:
    """Since its end, else its start, else its creation; what has no known time is not older than anything."""
    times = (subject.ended, subject.last_used, subject.started, subject.created)
    at = next((one for one in times if one is not None), None)
    return now - at if isinstance(at, datetime) else timedelta(-1)
