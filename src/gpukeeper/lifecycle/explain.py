"""What `explain` shows about one workload, as values: every signal, and what would change the decision. Pure."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from math import isnan

import msgspec

from gpukeeper.lifecycle.activity import PAIR, measured_span, secondary_threshold
from gpukeeper.lifecycle.decide import NOT_HELD
from gpukeeper.lifecycle.forecast import Opens, UpcomingAction, ahead, coming_in_words, next_steps
from gpukeeper.lifecycle.rules import exemption, idle, keep_alive, max_runtime, target
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.series import Series, Signal
from gpukeeper.model.subject import Hold, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import size_in_words

MINUTE = timedelta(minutes=1)
GPUKEEPER = "gpukeeper"  # who stopped it
_PENDING = (Verdict.WAIT, Verdict.DUE, Verdict.REPORT)


class MeasuredSignal(msgspec.Struct, frozen=True, kw_only=True):
    """One signal over the idle window against its threshold. None: not one minute was measured."""

    signal: Signal
    device: str
    window: timedelta
    threshold: float
    newest: float | None = None
    newest_at: datetime | None = None
    maximum: float | None = None
    since: datetime | None = None  # measured without a gap since then
    missing: Unknown | None = None


def signals(view: View, book: Rulebook, now: datetime) -> tuple[MeasuredSignal, ...]:
    """Every series that the idle rule reads. None without an idle time."""
    window = idle_window(view, book)
    return () if window is None else tuple(_measured(one, book, window, now) for one in _series_of_held(view))


def idle_window(view: View, book: Rulebook) -> timedelta | None:
    """The time over which the idle rule judges it, or None."""
    limits = book.settings(view.subject).limits
    if isinstance(limits, Unknown):
        return None
    allowed = limits.idle
    if allowed is None:
        if not idle.is_large(view.subject):
            return None
        if limits.idle_when_large is None:
            return idle.REPORTED_AFTER
        allowed = limits.idle_when_large
    return allowed * book.policy.demand.idle_factor if view.pressure else allowed


def _series_of_held(view: View) -> list[Series]:
    """A slice that was created again leaves a series behind; only what is held now counts."""
    devices = view.subject.devices
    held = None if isinstance(devices, Unknown) else devices
    return [one for one in view.series if one.signal is not Signal.GPU or held is None or one.device in held]


def _measured(one: Series, book: Rulebook, window: timedelta, now: datetime) -> MeasuredSignal:
    thresholds = book.policy.activity
    gpu = thresholds.gpu_slice if one.slice else thresholds.gpu
    threshold = gpu if one.signal is Signal.GPU else secondary_threshold(one.signal, thresholds, window)
    minutes = max(1, window // MINUTE)
    first = now.replace(second=0, microsecond=0) - (minutes - 1) * MINUTE
    known = [(one.start + n * MINUTE, value) for n, value in enumerate(one.minutes) if not isnan(value)]
    inside = [value for at, value in known if first <= at <= now]
    newest_at, newest = known[-1] if known else (None, None)
    span = measured_span(one, now)
    return MeasuredSignal(
        signal=one.signal,
        device=one.device,
        window=window,
        threshold=threshold,
        newest=newest,
        newest_at=newest_at,
        maximum=max(inside, default=None),
        since=span[0] if span is not None else None,
        missing=one.missing,
    )


def amount(signal: Signal, value: float) -> str:
    """A value of that signal in words."""
    match signal:
        case Signal.GPU:
            return f"{value:.3g} %"
        case Signal.CPU:
            return f"{value:.3g} % of a core"
        case Signal.TERMINAL:
            return "input" if value else "no input"
        case _:
            return f"{size_in_words(value)}/s"


def threshold_in_words(one: MeasuredSignal) -> str:
    if one.signal is Signal.TERMINAL:
        return "any input"
    lone = "" if one.signal is Signal.GPU else f", twice within {PAIR}m"
    return amount(one.signal, one.threshold) + lone


def in_spite_of(
    view: View, book: Rulebook, granted: Hold, now: datetime, offered: Collection[Action], opens: Opens
) -> UpcomingAction | None:
    """What ends it although it is held: the first act that comes before the hold is over. None: nothing does."""
    memory = msgspec.structs.replace(view.memory, holds=(*view.memory.holds, granted))
    coming = ahead(msgspec.structs.replace(view, memory=memory), book, now, offered, opens)
    return next((one for one in coming if one.action is not Action.WARN and one.at < granted.until), None)


def remedies(view: View, book: Rulebook, answers: tuple[Answer, ...], now: datetime, opens: Opens) -> tuple[str, ...]:
    """What would change what happens, in sentences for the owner. Empty: nothing is going to happen."""
    path = view.subject.ref.path
    by_rule = {answer.rule: answer for answer in answers}
    if by_rule[target.NAME].verdict is not Verdict.SILENT:
        return ()
    exempt = by_rule[exemption.NAME]
    pending = {a.rule for a in answers if a.verdict in _PENDING and not exempt.suspends & {a.rule, "*"}}
    limits = book.settings(view.subject).limits
    if isinstance(limits, Unknown) or limits.longest is None:
        pending.discard(max_runtime.NAME)  # nothing follows from it
    found = [f"what is unknown becomes known: {a.reason}" for a in answers if a.verdict is Verdict.UNKNOWN]
    if exempt.verdict is Verdict.PROTECT:
        found.append(f"an admin ends its exemption in the policy; currently {exempt.reason}")
    if was_stopped(view):
        found.append(_bring_it_back(view, book, now, opens))
    if idle.NAME in pending:
        found.append(_use_it(view, book))
    if pending - NOT_HELD:
        found.append(f"hold it: gpukeeper workload hold {path}")
    # For work without an owner the file does not count.
    counts = view.subject.marks.keep_alive is False and isinstance(view.subject.owner, str)
    if pending - NOT_HELD and counts and book.settings(view.subject).class_name != keep_alive.UNOWNED:
        found.append("touch the keep-alive file inside it")
    if max_runtime.NAME in pending:
        command = f"gpukeeper workload hold {path} --suspends {max_runtime.NAME}"
        found.append(f"an admin grants more time: {command}")
    if pending and exempt.verdict is not Verdict.PROTECT:
        found.append("an admin exempts it in the policy")
    if any(one.until > now for one in view.memory.holds):
        found.append(f"end its hold: gpukeeper workload release {path}")
    return tuple(found)


def was_stopped(view: View) -> bool:
    """By gpukeeper, and it was not started since."""
    stopped, subject = view.memory.stopped, view.subject
    over = subject.state in (State.ENDED, State.SUSPENDED)
    ours = stopped is not None and stopped.by == GPUKEEPER and stopped.incarnation == subject.seen.incarnation
    return over and ours


def _bring_it_back(view: View, book: Rulebook, now: datetime, opens: Opens) -> str:
    words = f"restore it: gpukeeper restore {view.subject.ref.path}"
    coming = ahead(view, book, now, tuple(Action), opens)
    goes = [one for one in coming if one.action is Action.REMOVE]
    if not goes:
        return words
    return (
        f"{words}. It {coming_in_words(next_steps(goes, now), now)}; after that only what was captured can be restored"
    )


def _use_it(view: View, book: Rulebook) -> str:
    """Every GPU series has its threshold; the smallest is the one to reach."""
    thresholds = book.policy.activity
    parts = [one.slice for one in _series_of_held(view) if one.signal is Signal.GPU]
    least = min((thresholds.gpu_slice if part else thresholds.gpu for part in parts), default=thresholds.gpu)
    return f"use the GPU above {least:g} %"
