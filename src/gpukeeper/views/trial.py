"""A hypothetical workload against a policy, and the timeline of what would happen to it. Behind `policy try`.

The rules themselves decide, over simulated time; what the world is assumed to do meanwhile is listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

import msgspec

from gpukeeper.config.load import Loaded
from gpukeeper.config.problems import did_you_mean
from gpukeeper.engine.schedule import next_moment
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.explain import idle_window
from gpukeeper.lifecycle.forecast import MINUTE, Ahead, course
from gpukeeper.lifecycle.holds import NotAllowed, may_hold
from gpukeeper.lifecycle.settings import Rulebook, class_of, fits
from gpukeeper.model.decision import ACTING, Action, Decision, View
from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import UsageError
from gpukeeper.model.identity import Ref, Seen
from gpukeeper.model.memory import Memory, Stopped
from gpukeeper.model.policy import WITHOUT_GPU, Mode, Policy
from gpukeeper.model.series import Series, Signal
from gpukeeper.model.subject import Marks, Outcome, State, Subject
from gpukeeper.platforms.docker.translate import CONTAINER, class_by_labels
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import Lever
from gpukeeper.platforms.kubernetes.tally import Tally
from gpukeeper.platforms.kubernetes.translate import class_of as class_in_cluster
from gpukeeper.platforms.kubernetes.wire import Meta

DOCKER, KUBERNETES = "docker", "kubernetes"
WITH_WORKLOADS = (DOCKER, KUBERNETES)  # on the others there are trees and devices only
STATES = (State.RUNNING, State.ENDED, State.CREATED)
INCARNATION = "run-1"
STEPS = 5000  # one that is in use is asked again after every idle time
BUSY = 100.0
MARGIN = timedelta(hours=2)
_SIGNALS = tuple(signal for signal in Signal if signal is not Signal.GPU)


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """The workload as somebody describes it. None: not said."""

    platform: str = DOCKER
    place: str | None = None
    namespace: str | None = None
    kind: str | None = None
    name: str = "example"
    class_: str | None = None
    image: str | None = None
    labels: Mapping[str, str] = {}
    owner: str | None = None
    group: str | None = None
    environment: str | None = None
    gpus: int = 1
    state: State = State.RUNNING
    outcome: Outcome | None = None
    running_for: timedelta = timedelta()
    idle_for: timedelta = timedelta()
    ended_since: timedelta = timedelta()
    ttl: timedelta | None = None
    hold: timedelta | None = None
    busy: bool = False
    demand: bool = False


class TrialView(msgspec.Struct, frozen=True, kw_only=True):
    """`now`: what is decided about it at once. `timeline`: what follows. `end`: how it ends, in a sentence."""

    at: datetime
    subject: Subject
    class_: str
    class_because: str
    groups: tuple[str, ...]
    now: Decision
    timeline: tuple[Ahead, ...]
    end: str
    assumes: tuple[str, ...]


def trial(loaded: Loaded, described: Described, now: datetime) -> TrialView:
    """Raises UsageError for what contradicts itself or does not exist."""
    _check(described, loaded.policy)
    policy = _with_member(loaded.policy, described)
    if described.class_ is not None:
        policy = msgspec.structs.replace(policy, match=())
    book = Rulebook(policy)
    view = _view(described, book, now)
    subject = view.subject

    def opens(at: datetime) -> datetime:
        return next_moment(policy.schedule, at)

    def measure(one: View, at: datetime) -> View:
        return _measured(one, described, book, now, at)

    view = measure(view, now)
    found = tuple(
        course(
            view,
            book,
            now,
            tuple(Action),
            measure=measure,
            opens=opens,
            after_stop=_after_stop(subject.ref),
            steps=STEPS,
            reports=True,
        )
    )
    decision = decide(view, book, now)
    return TrialView(
        at=now,
        subject=subject,
        class_=decision.class_,
        class_because=_because(loaded, described, subject),
        groups=tuple(name for name, group in policy.groups.items() if described.owner in group.members),
        now=decision,
        timeline=found,
        end=_end(found, subject, decision),
        assumes=tuple(_assumed(policy, described, found)),
    )


# What was described


def _check(one: Described, policy: Policy) -> None:
    if one.platform not in WITH_WORKLOADS:
        raise UsageError(
            f'--platform "{one.platform}": workloads are on {" and ".join(WITH_WORKLOADS)}. '
            "On other platforms gpukeeper acts on trees of files only."
        )
    if one.class_ is not None and one.class_ not in policy.classes:
        raise UsageError(f'the policy has no class "{one.class_}". {did_you_mean(one.class_, list(policy.classes))}')
    if one.group is not None and one.group not in policy.groups:
        known = did_you_mean(one.group, list(policy.groups)) if policy.groups else "It has no groups."
        raise UsageError(f'the policy has no group "{one.group}". {known}')
    if one.environment is not None and one.environment not in policy.environments:
        names = list(policy.environments)
        known = did_you_mean(one.environment, names) if names else "It has no environments."
        raise UsageError(f'the policy has no environment "{one.environment}". {known}')
    if one.platform == KUBERNETES and (one.kind or "job").lower() not in BY_NAME:
        raise UsageError(f'--kind "{one.kind}": {did_you_mean(str(one.kind), list(BY_NAME))}')
    if one.platform == DOCKER and one.kind not in (None, CONTAINER):
        raise UsageError(f'--kind "{one.kind}": on docker every workload is a {CONTAINER}.')
    if one.platform == DOCKER and one.namespace is not None:
        raise UsageError("--namespace: docker has no namespaces.")
    _check_times(one)


def _check_times(one: Described) -> None:
    """What is said of a state must be said of that state."""
    nothing = timedelta()
    if one.state is not State.RUNNING and (one.running_for or one.idle_for or one.busy):
        raise UsageError(f"--running-for, --idle-for and --busy describe running work; this one is {one.state}.")
    if one.state is not State.ENDED and (one.ended_since or one.outcome is not None):
        raise UsageError(f"--ended-since and --outcome describe ended work; this one is {one.state}.")
    if one.idle_for > one.running_for > nothing:
        raise UsageError(
            f"it cannot be idle for {in_words(one.idle_for)} and run for {in_words(one.running_for)} only."
        )
    if one.busy and one.idle_for:
        raise UsageError("--busy and --idle-for contradict each other. Choose one.")
    if one.hold is not None and one.owner is None:
        raise UsageError("--hold needs --owner: the person who holds it.")
    if one.group is not None and one.owner is None:
        raise UsageError("--group needs --owner: the member of that group.")


def _with_member(policy: Policy, one: Described) -> Policy:
    if one.group is None or one.owner is None or one.owner in policy.groups[one.group].members:
        return policy
    group = policy.groups[one.group]
    joined = msgspec.structs.replace(group, members=(*group.members, one.owner))
    return msgspec.structs.replace(policy, groups={**policy.groups, one.group: joined})


def _view(one: Described, book: Rulebook, now: datetime) -> View:
    subject = _subject(one, book.policy, now)
    started = subject.started if isinstance(subject.started, datetime) else None
    memory = Memory(
        first_start=started, started=started, state=str(one.state), incarnation=INCARNATION, first_seen_ended=None
    )
    if one.state is State.ENDED:
        ended = now - one.ended_since
        # What was stopped and not by gpukeeper was stopped by a person.
        stopped = Stopped("somebody", "", ended, INCARNATION) if subject.outcome is Outcome.STOPPED else None
        memory = msgspec.structs.replace(memory, first_seen_ended=ended, ended=ended, stopped=stopped)
    view = View(subject, (), memory, one.demand)
    if one.hold is None or one.owner is None:
        return view
    granted = may_hold(view, book, one.owner, one.hold, now)
    if isinstance(granted, NotAllowed):
        raise UsageError(f"--hold: {granted.why}")
    return msgspec.structs.replace(view, memory=msgspec.structs.replace(memory, holds=(granted,)))


def _subject(one: Described, policy: Policy, now: datetime) -> Subject:
    ref, ran = _ref(one, policy), max(one.running_for, one.idle_for)
    started = {State.RUNNING: now - ran, State.ENDED: now - one.ended_since, State.CREATED: None}[one.state]
    outcome = one.outcome or Outcome.SUCCEEDED
    labels = {**one.labels, **({"image": one.image} if one.image else {})}
    return Subject(
        seen=Seen(ref, INCARNATION, "", now),
        state=one.state,
        owner=one.owner,
        class_=one.class_ or recognised(one, ref),
        environment=one.environment,
        created=started or now,
        started=started,
        ended=now - one.ended_since if one.state is State.ENDED else None,
        outcome=outcome if one.state is State.ENDED else None,
        devices=tuple(f"GPU-{number}" for number in range(one.gpus)),
        goes_when_stopped=ref.platform == KUBERNETES and BY_NAME[ref.kind].lever is Lever.NONE,
        marks=Marks(ttl=one.ttl),
        labels=labels,
    )


def _ref(one: Described, policy: Policy) -> Ref:
    """Somewhere that the policy covers, where that was not said."""
    scope = policy.scope.get(one.platform)
    place = one.place or _covered(scope.places if scope is not None else ())
    if one.platform == DOCKER:
        return Ref(DOCKER, place, CONTAINER, one.name, "example")
    namespace = one.namespace or _covered(scope.namespaces if scope is not None else ())
    return Ref(KUBERNETES, place, (one.kind or "job").lower(), one.name, "example", namespace)


def _covered(patterns: tuple[str, ...]) -> str:
    """A name that fits the first pattern; `*` fits any."""
    first = patterns[0] if patterns else "*"
    return "example" if first == "*" else first.replace("*", "1").replace("?", "1")


def recognised(one: Described, ref: Ref) -> str:
    """The class that its platform gives it, by the platform's own function."""
    if ref.platform == KUBERNETES:
        meta = Meta(name=ref.name, namespace=ref.namespace, labels=dict(one.labels))
        held = Tally(devices=[f"{ref.name}/{number}" for number in range(one.gpus)])
        return class_in_cluster(BY_NAME[ref.kind], meta, None, held)
    if not one.gpus:
        return WITHOUT_GPU
    return "unknown" if one.owner is None else class_by_labels(one.labels, published=False)


def _after_stop(ref: Ref) -> State:
    return State.SUSPENDED if ref.platform == KUBERNETES else State.ENDED


def _measured(view: View, one: Described, book: Rulebook, now: datetime, at: datetime) -> View:
    """As a daemon would have measured it by then: in use until it became idle, and not since."""
    subject = view.subject
    if subject.state is not State.RUNNING or not isinstance(subject.started, datetime):
        return view
    reach = 2 * (idle_window(view, book) or MARGIN) + MARGIN
    start = max(subject.started, at - reach).replace(second=0, microsecond=0)
    minutes = (at - start) // MINUTE + 1
    idle_since = at + MINUTE if one.busy else now - one.idle_for
    # The minute in which it became idle counts as idle: the time that was described is the time that counts.
    used = tuple(BUSY if start + (n + 1) * MINUTE <= idle_since else 0.0 for n in range(minutes))
    devices = subject.devices if isinstance(subject.devices, tuple) else ()
    series = (
        *(Series(Signal.GPU, device, start, used) for device in devices),
        *(Series(signal, "", start, (0.0,) * minutes) for signal in _SIGNALS),
    )
    return msgspec.structs.replace(view, series=series)


# What was found


def _because(loaded: Loaded, one: Described, subject: Subject) -> str:
    """Why it has its class."""
    if one.class_ is not None:
        return "as --class says"
    for number, match in enumerate(loaded.policy.match):
        if fits(match, subject):
            return f"by match[{number}], {loaded.origin(('match', number))}"
    assert class_of(loaded.policy, subject) == subject.class_, "its owner is known, so a match fits or does not"
    listed = "; no entry of match fits" if loaded.policy.match else ""
    return f"recognised by {subject.ref.platform}{listed}"


def _end(found: tuple[Ahead, ...], subject: Subject, decision: Decision) -> str:
    last = found[-1] if found else None
    if last is None:
        return f"Nothing happens to it: {decision.reason}."
    if last.action is Action.REMOVE:
        return "Then it is gone."
    if last.action is Action.STOP and subject.goes_when_stopped:
        return "A stop removes it: then it is gone."
    if last.action is Action.STOP:
        return "Then it stays stopped."
    return "Nothing more happens to it."


def _assumed(policy: Policy, one: Described, found: tuple[Ahead, ...]) -> Iterator[str]:
    if one.state is State.RUNNING and one.gpus:
        yield "It uses its GPUs all the time." if one.busy else "It stays idle from now on, by every signal."
    yield "It is not held, stopped or restarted meanwhile."
    if one.demand:
        yield "GPUs stay scarce, so that idle times are shorter (demand)."
    if all(step.action is Action.KEEP for step in found):
        return
    if any(step.action is Action.WARN for step in found):
        yield "Every warning is delivered; otherwise there is more time (warnings.undelivered)."
    if any(step.action in ACTING for step in found):
        count = f"{_amount(policy.budget.per_pass.count, policy.budget.per_pass.share)} a pass"
        hourly = f"{_amount(policy.budget.per_hour.count, policy.budget.per_hour.share)} an hour"
        yield f"The budget ({count}, {hourly}) leaves room for it, and the breaker is closed."
    every = in_words(policy.schedule.every)
    if policy.schedule.at is None:
        yield f"A pass runs every {every}; each line comes with the first pass after its time."
    else:
        yield f"Passes act only at {policy.schedule.at} (schedule.at, local time); the timeline has these times."
    if policy.mode is Mode.PLAN:
        yield "The mode is plan: nothing of this is done unattended. It shows what mode enforce would do."


def _amount(count: int | None, share: float | None) -> str:
    words = [str(count)] if count is not None else []
    return " or ".join([*words, *([f"{share:.0%}"] if share is not None else [])]) or "no limit"
