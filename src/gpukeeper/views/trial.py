"""A hypothetical workload against a policy, and the timeline of what would happen to it. Behind `policy try`.

The rules themselves decide, over simulated time; what the world is assumed to do meanwhile is listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.engine.schedule import opening
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.explain import idle_window
from gpukeeper.lifecycle.forecast import MINUTE, Assumptions, UpcomingAction, course
from gpukeeper.lifecycle.holds import NotAllowed, may_hold
from gpukeeper.lifecycle.rules import idle
from gpukeeper.lifecycle.rules.idle import horizon
from gpukeeper.lifecycle.settings import Rulebook, fits
from gpukeeper.model.decision import ACTING, Action, Decision, View
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Mode, Policy
from gpukeeper.model.series import Series, Signal
from gpukeeper.model.subject import Memory, Outcome, State, Stopped, Subject
from gpukeeper.model.words import in_words

INCARNATION = "run-1"
STEPS = 5000  # one that is in use is evaluated again after every idle time
BUSY = 100.0
MARGIN = timedelta(hours=2)
LONGEST_IDLE = timedelta(days=7)
STATES = (State.RUNNING, State.ENDED, State.CREATED)  # that a person may describe
_SIGNALS = tuple(signal for signal in Signal if signal is not Signal.GPU)


class WorkloadWords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workload as a person describes it, on the command line or in a form. Empty: not given."""

    platform: str = "docker"
    class_: str = msgspec.field(default="", name="class")
    name: str = "example"
    label: Sequence[str] = ()
    image: str = ""
    kind: str = ""
    namespace: str = ""
    environment: str = ""
    owner: str = ""
    group: str = ""
    gpus: int = 1
    state: str = ""
    outcome: str = ""
    running_for: str = ""
    idle_for: str = ""
    busy: bool = False
    ended_since: str = ""
    ttl: str = ""
    hold: str = ""
    demand: bool = False

    def named(self, field: str) -> str:
        """The field as the person who described the workload wrote it, for messages."""
        return field


class TrialInput(msgspec.Struct, frozen=True, kw_only=True):
    """The workload, and what is assumed of it. `after_stop`: the state in which its platform leaves what it stops."""

    words: WorkloadWords
    subject: Subject
    idle_for: timedelta = timedelta()
    hold: timedelta | None = None
    after_stop: State = State.ENDED


class TrialPolicy(msgspec.Struct, frozen=True):
    source: str
    digest: str
    mode: Mode


class PolicyTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A trial with the policy it was made with, and why the workload has its class."""

    policy: TrialPolicy
    at: datetime
    workload: Subject
    class_: str = msgspec.field(name="class")
    class_because: str
    groups: tuple[str, ...]
    decision: Decision
    timeline: tuple[UpcomingAction, ...]
    end: str
    assumes: tuple[str, ...]


class TrialView(msgspec.Struct, frozen=True, kw_only=True):
    """`match`: the entry of the policy's match list that gives its class. None: none fits. `now`: what is decided about
    it at once. `timeline`: what follows. `end`: how it ends, in a sentence."""

    at: datetime
    subject: Subject
    class_: str
    match: int | None
    groups: tuple[str, ...]
    now: Decision
    timeline: tuple[UpcomingAction, ...]
    end: str
    assumes: tuple[str, ...]


def trial(policy: Policy, given: TrialInput, now: datetime) -> TrialView:
    """Raises UsageError for a hold that would not be granted."""
    book, subject = Rulebook(policy), given.subject

    def measure(view: View, at: datetime) -> View:
        return _measured(view, given, book, now, at)

    view = measure(_view(given, book, now), now)
    assumed = Assumptions(
        measure=measure,
        opens=opening(policy.schedule),
        after_stop=given.after_stop,
        steps=STEPS,
        reports=True,
        busy=given.words.busy,
    )
    found = tuple(course(view, book, now, tuple(Action), assumed))
    decision = decide(view, book, now)
    return TrialView(
        at=now,
        subject=subject,
        class_=decision.class_,
        match=next((number for number, one in enumerate(policy.match) if fits(one, subject)), None),
        groups=tuple(name for name, group in policy.groups.items() if group.has(subject.owner)),
        now=decision,
        timeline=found,
        end=_end(found, subject, decision),
        assumes=tuple(_assumed(policy, given, found)),
    )


def _view(given: TrialInput, book: Rulebook, now: datetime) -> View:
    subject = given.subject
    started = subject.started if isinstance(subject.started, datetime) else None
    memory = Memory(first_start=started, started=started, state=str(subject.state), incarnation=INCARNATION)
    if isinstance(subject.ended, datetime):
        # What was stopped and not by gpukeeper was stopped by a person.
        by_hand = Stopped("somebody", "", subject.ended, INCARNATION) if subject.outcome is Outcome.STOPPED else None
        memory = msgspec.structs.replace(memory, first_seen_ended=subject.ended, ended=subject.ended, stopped=by_hand)
    view = View(subject, (), memory, given.words.demand)
    if given.hold is None:
        return view
    assert isinstance(subject.owner, str), "the holder is the owner"
    granted = may_hold(view, book, subject.owner, given.hold, now)
    if isinstance(granted, NotAllowed):
        raise UsageError(f"{given.words.named('hold')}: {granted.why}")
    return msgspec.structs.replace(view, memory=msgspec.structs.replace(memory, holds=(granted,)))


def _measured(view: View, given: TrialInput, book: Rulebook, now: datetime, at: datetime) -> View:
    """As a daemon would have measured it by then: in use until it became idle, and not since."""
    subject = view.subject
    if subject.state is not State.RUNNING or not isinstance(subject.started, datetime):
        return view
    reach = horizon(book.policy, 2 * (idle_window(view, book) or MARGIN)) + MARGIN
    described = now - min(given.idle_for, LONGEST_IDLE) - MINUTE  # so that the reason can name the whole time
    start = max(subject.started, min(at - reach, described)).replace(second=0, microsecond=0)
    minutes = (at - start) // MINUTE + 1
    idle_since = at + MINUTE if given.words.busy else now - given.idle_for
    # The minute in which it became idle counts as idle: the time that was described is the time that counts.
    used = tuple(BUSY if start + (n + 1) * MINUTE <= idle_since else 0.0 for n in range(minutes))
    devices = subject.devices if isinstance(subject.devices, tuple) else ()
    series = (
        *(Series(Signal.GPU, device, start, used) for device in devices),
        *(Series(signal, "", start, (0.0,) * minutes) for signal in _SIGNALS),
    )
    return msgspec.structs.replace(view, series=series)


def _end(found: tuple[UpcomingAction, ...], subject: Subject, decision: Decision) -> str:
    last = found[-1] if found else None
    if last is None:
        return f"No action: {decision.reason}."
    if last.action is Action.REMOVE:
        return "The workload is then removed."
    if last.action is Action.STOP and subject.goes_when_stopped:
        return "Stopping removes the workload."
    if last.action is Action.STOP:
        return "The workload then stays stopped."
    return "No further actions."


def _assumed(policy: Policy, given: TrialInput, found: tuple[UpcomingAction, ...]) -> Iterator[str]:
    if given.subject.state is State.RUNNING and given.subject.devices:
        yield (
            "The GPUs are in use all the time."
            if given.words.busy
            else "The workload stays idle from now on, by every signal."
        )
    yield "The workload is not held, stopped or restarted."
    if given.words.demand:
        shortened = policy.demand.idle_factor < 1
        effect = (
            ", so idle times are shorter (demand)" if shortened else "; that changes no idle time (demand.idle_factor)"
        )
        yield f"GPUs stay scarce{effect}."
    if all(step.action is Action.KEEP for step in found):
        return
    if any(step.action is Action.WARN for step in found):
        kept = policy.warnings.require_delivery and any(step.rule == idle.NAME for step in found)
        later = (
            "work is not stopped for idleness (warnings.require_delivery)"
            if kept
            else "the stop comes later (warnings.undelivered)"
        )
        yield f"Every warning is delivered; otherwise {later}."
    if any(step.action in ACTING for step in found):
        count = f"{_amount(policy.budget.per_pass.count, policy.budget.per_pass.share)} a pass"
        hourly = f"{_amount(policy.budget.per_hour.count, policy.budget.per_hour.share)} an hour"
        yield f"The budget ({count}, {hourly}) is not used up, and the breaker is closed."
    every = in_words(policy.schedule.every)
    if policy.schedule.at is None:
        yield f"A pass runs every {every}; an action is taken in the first pass after its time."
    else:
        yield f"Passes act only at {policy.schedule.at} (schedule.at, local time); the timeline shows these times."
    if policy.mode is Mode.PLAN:
        yield "The mode is plan: no action is taken unattended. The timeline shows what mode enforce would do."


def _amount(count: int | None, share: float | None) -> str:
    words = [str(count)] if count is not None else []
    return " or ".join([*words, *([f"{share:.0%}"] if share is not None else [])]) or "no limit"
