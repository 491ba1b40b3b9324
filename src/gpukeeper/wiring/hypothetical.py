"""The workload that is described to `policy try` or to the policy page, and what the policy would do to it. What cannot
be is refused; its platform's own functions give it the class and the kind that a real one would have."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

from gpukeeper.clients.kubernetes.wire import Meta
from gpukeeper.config.load import Loaded
from gpukeeper.config.problems import did_you_mean
from gpukeeper.config.units import read_span
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import WITHOUT_GPU, Policy
from gpukeeper.model.subject import Marks, Outcome, Ref, Seen, State, Subject
from gpukeeper.model.words import in_words
from gpukeeper.platforms.docker.translate import CONTAINER, class_by_labels
from gpukeeper.platforms.kubernetes.gpus import PodTotals
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import Lever
from gpukeeper.platforms.kubernetes.translate import class_of as class_in_cluster
from gpukeeper.views.trial import (
    INCARNATION,
    STATES,
    PolicyTrial,
    TrialInput,
    TrialPolicy,
    TrialView,
    WorkloadWords,
    trial,
)

DOCKER, KUBERNETES = "docker", "kubernetes"
WITH_WORKLOADS = (DOCKER, KUBERNETES)  # on the others there are trees and devices only


class WorkloadDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The words, and what was read from those that are more than words. `place` empty: not given."""

    words: WorkloadWords
    platform: str
    place: str
    labels: Mapping[str, str]
    state: State
    outcome: Outcome | None
    running_for: timedelta
    idle_for: timedelta
    ended_since: timedelta
    ttl: timedelta | None
    hold: timedelta | None


def try_policy(loaded: Loaded, described: WorkloadDescription, now: datetime) -> PolicyTrial:
    """Raises UsageError, with names as they were written."""
    assumed, applied = hypothetical_workload(described, loaded.policy, now)
    found = trial(applied, assumed, now)
    return PolicyTrial(
        policy=TrialPolicy(loaded.source, loaded.policy.digest, loaded.policy.mode),
        at=found.at,
        workload=found.subject,
        class_=found.class_,
        class_because=_because(loaded, described, found),
        groups=found.groups,
        decision=found.now,
        timeline=found.timeline,
        end=found.end,
        assumes=found.assumes,
    )


def _because(loaded: Loaded, described: WorkloadDescription, found: TrialView) -> str:
    """Why it has its class."""
    if described.words.class_:
        return f"by {described.words.named('class')}"
    if found.match is not None:
        return f"by match[{found.match}], {loaded.origin(('match', found.match))}"
    listed = "; no entry of match applies" if loaded.policy.match else ""
    return f"recognized by {described.platform}{listed}"


def read_description(words: WorkloadWords) -> WorkloadDescription:
    """Raises UsageError, with names as they were written."""
    platform, _, place = words.platform.partition("/")
    ended = bool(words.ended_since or words.outcome)
    return WorkloadDescription(
        words=words,
        platform=platform,
        place=place,
        labels=_labels(words),
        state=_state(words, ended=ended),
        outcome=_outcome(words),
        running_for=_span(words, "running_for") or timedelta(),
        idle_for=_span(words, "idle_for") or timedelta(),
        ended_since=_span(words, "ended_since") or timedelta(),
        ttl=_span(words, "ttl"),
        hold=_span(words, "hold"),
    )


def _span(words: WorkloadWords, field: str) -> timedelta | None:
    written: str = getattr(words, field)
    try:
        return read_span(written) if written else None
    except ValueError as problem:
        raise UsageError(f"{words.named(field)}: {problem}") from problem


def _labels(words: WorkloadWords) -> dict[str, str]:
    wrong = [one for one in words.label if not one.partition("=")[0]]
    if wrong:
        raise UsageError(f'{words.named("label")} "{wrong[0]}" has no key. Write it like team=vision, or team.')
    return {key: value for key, _, value in (one.partition("=") for one in words.label)}


def _state(words: WorkloadWords, *, ended: bool) -> State:
    if not words.state:
        return State.ENDED if ended else State.RUNNING
    if words.state not in STATES:
        raise UsageError(f'{words.named("state")} "{words.state}" is not one of: {", ".join(STATES)}')
    return State(words.state)


def _outcome(words: WorkloadWords) -> Outcome | None:
    if words.outcome and words.outcome not in tuple(Outcome):
        raise UsageError(f'{words.named("outcome")} "{words.outcome}" is not one of: {", ".join(Outcome)}')
    return Outcome(words.outcome) if words.outcome else None


def hypothetical_workload(one: WorkloadDescription, policy: Policy, now: datetime) -> tuple[TrialInput, Policy]:
    """The workload, and the policy as it applies to it: with its owner in the group that was named, and without `match`
    where the class was. Raises UsageError for what contradicts itself or does not exist."""
    _check(one, policy)
    policy = _with_member(policy, one.words)
    if one.words.class_:
        policy = msgspec.structs.replace(policy, match=())
    subject = _subject(one, policy, now)
    return TrialInput(
        words=one.words,
        subject=subject,
        idle_for=one.idle_for,
        hold=one.hold,
        after_stop=State.SUSPENDED if one.platform == KUBERNETES else State.ENDED,
    ), policy


def _check(one: WorkloadDescription, policy: Policy) -> None:
    words, named = one.words, one.words.named
    if one.platform not in WITH_WORKLOADS:
        raise UsageError(
            f'{named("platform")} "{one.platform}": only {" and ".join(WITH_WORKLOADS)} have workloads. '
            "On other platforms gpukeeper acts on directory trees only."
        )
    if words.class_ and words.class_ not in policy.classes:
        known = did_you_mean(words.class_, list(policy.classes))
        raise UsageError(f'the policy has no class "{words.class_}". {known}')
    if words.group and words.group not in policy.groups:
        known = did_you_mean(words.group, list(policy.groups)) if policy.groups else "It has no groups."
        raise UsageError(f'the policy has no group "{words.group}". {known}')
    if words.environment and words.environment not in policy.environments:
        names = list(policy.environments)
        known = did_you_mean(words.environment, names) if names else "It has no environments."
        raise UsageError(f'the policy has no environment "{words.environment}". {known}')
    if one.platform == KUBERNETES and (words.kind or "job").lower() not in BY_NAME:
        raise UsageError(f'{named("kind")} "{words.kind}": {did_you_mean(words.kind, list(BY_NAME))}')
    if one.platform == DOCKER and words.kind not in ("", CONTAINER):
        raise UsageError(f'{named("kind")} "{words.kind}": on docker every workload is a {CONTAINER}.')
    if one.platform == DOCKER and words.namespace:
        raise UsageError(f"{named('namespace')}: docker has no namespaces.")
    _check_times(one)


def _check_times(one: WorkloadDescription) -> None:
    """Options that describe a state must fit the state."""
    nothing, named = timedelta(), one.words.named
    if one.state is not State.RUNNING and (one.running_for or one.idle_for or one.words.busy):
        names = f"{named('running_for')}, {named('idle_for')} and {named('busy')}"
        raise UsageError(f"{names} describe running work; this one is {one.state}.")
    if one.state is not State.ENDED and (one.ended_since or one.outcome is not None):
        names = f"{named('ended_since')} and {named('outcome')}"
        raise UsageError(f"{names} describe ended work; this one is {one.state}.")
    if one.idle_for > one.running_for > nothing:
        raise UsageError(
            f"a workload cannot be idle for {in_words(one.idle_for)} and run for {in_words(one.running_for)} only."
        )
    if one.words.busy and one.idle_for:
        raise UsageError(f"{named('busy')} and {named('idle_for')} cannot be combined.")
    if one.hold is not None and not one.words.owner:
        raise UsageError(f"{named('hold')} needs {named('owner')}: the user who holds it.")
    if one.words.group and not one.words.owner:
        raise UsageError(f"{named('group')} needs {named('owner')}: the member of that group.")


def _with_member(policy: Policy, words: WorkloadWords) -> Policy:
    if not words.group or policy.groups[words.group].has(words.owner):
        return policy
    group = policy.groups[words.group]
    joined = msgspec.structs.replace(group, members=(*group.members, words.owner))
    return msgspec.structs.replace(policy, groups={**policy.groups, words.group: joined})


def _subject(one: WorkloadDescription, policy: Policy, now: datetime) -> Subject:
    words, ref, ran = one.words, _ref(one, policy), max(one.running_for, one.idle_for)
    started = {State.RUNNING: now - ran, State.ENDED: now - one.ended_since, State.CREATED: None}[one.state]
    outcome = one.outcome or Outcome.SUCCEEDED
    labels = {**one.labels, **({"image": words.image} if words.image else {})}
    return Subject(
        seen=Seen(ref, INCARNATION, "", now),
        state=one.state,
        owner=words.owner or None,
        class_=words.class_ or _recognized(one, ref),
        environment=words.environment or None,
        created=started or now,
        started=started,
        ended=now - one.ended_since if one.state is State.ENDED else None,
        outcome=outcome if one.state is State.ENDED else None,
        devices=tuple(f"GPU-{number}" for number in range(words.gpus)),
        goes_when_stopped=ref.platform == KUBERNETES and BY_NAME[ref.kind].lever is Lever.NONE,
        marks=Marks(ttl=one.ttl),
        labels=labels,
    )


def _ref(one: WorkloadDescription, policy: Policy) -> Ref:
    """A place that the policy covers, if none was given."""
    scope = policy.scope.get(one.platform)
    place = one.place or _covered(scope.places if scope is not None else ())
    if one.platform == DOCKER:
        return Ref(DOCKER, place, CONTAINER, one.words.name, "example")
    namespace = one.words.namespace or _covered(scope.namespaces if scope is not None else ())
    return Ref(KUBERNETES, place, (one.words.kind or "job").lower(), one.words.name, "example", namespace)


def _covered(patterns: tuple[str, ...]) -> str:
    """A name that fits the first pattern; `*` fits any."""
    first = patterns[0] if patterns else "*"
    return "example" if first == "*" else first.replace("*", "1").replace("?", "1")


def _recognized(one: WorkloadDescription, ref: Ref) -> str:
    """The class that its platform gives it, by the platform's own function."""
    if ref.platform == KUBERNETES:
        meta = Meta(name=ref.name, namespace=ref.namespace, labels=dict(one.labels))
        held = PodTotals(devices=[f"{ref.name}/{number}" for number in range(one.words.gpus)])
        return class_in_cluster(BY_NAME[ref.kind], meta, None, held)
    if not one.words.gpus:
        return WITHOUT_GPU
    return "unknown" if not one.words.owner else class_by_labels(one.labels, name=ref.name, published=False)
