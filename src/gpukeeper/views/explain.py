"""One workload: the facts that the rules had, what each rule answers, and what comes next (behind `explain`); and
its signals over time in steps of five minutes, with what was recorded about it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from math import isnan

import msgspec

from gpukeeper.engine.outlook import Explanation
from gpukeeper.lifecycle.activity import wasted
from gpukeeper.lifecycle.explain import MeasuredSignal, amount, idle_window, threshold_in_words
from gpukeeper.lifecycle.forecast import UpcomingAction
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Answer, Decision, Verdict, View
from gpukeeper.model.event import Captured, Closed, Decided, Event, Held, Noticed, Released, WarningSent
from gpukeeper.model.policy import Mode
from gpukeeper.model.series import MINUTE, Series, Signal
from gpukeeper.model.subject import Diagnosis, Disk, Hold, Memory, Shape, Subject, Warned
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, when_in_words
from gpukeeper.views.live import WorkloadLine

LABELS_MAX, LABEL_MAX = 40, 120  # how many are shown, and how many letters of each
_PENDING = (Verdict.DUE, Verdict.WAIT, Verdict.REPORT)


class OwnFinding(msgspec.Struct, frozen=True):
    """A finding about the workload that is explained."""

    kind: str
    words: str


class ExplainView(msgspec.Struct, frozen=True, kw_only=True):
    decision: Decision
    answers: tuple[Answer, ...]
    subject: Subject
    memory: Memory
    history: tuple[Event, ...]
    signals: tuple[MeasuredSignal, ...]
    mode: Mode
    ahead: tuple[UpcomingAction, ...]
    would_change_it: tuple[str, ...]
    findings: tuple[OwnFinding, ...]
    diagnosis: Diagnosis | Unknown | None
    whole: bool


def explain_view(found: Explanation) -> ExplainView:
    return ExplainView(
        decision=found.decision,
        answers=found.answers,
        subject=found.subject,
        memory=found.memory,
        history=found.history,
        signals=found.signals,
        mode=found.mode,
        ahead=found.ahead,
        would_change_it=found.remedies,
        findings=tuple(OwnFinding(one.kind, one.words) for one in found.findings),
        diagnosis=found.diagnosis or found.undiagnosed,
        whole=found.whole,
    )


def facts(found: Explanation) -> list[tuple[str, object]]:
    """What the rules had to go by, by name; a fact that does not exist is left out."""
    subject, memory, now = found.subject, found.memory, found.now
    rows: list[tuple[str, object]] = [
        ("state", subject.state),
        ("part of", subject.root),
        ("class", _class(found)),
        ("owner", subject.owner if subject.owner is not None else "unknown"),
        ("owner evidence", subject.evidence or None),
        ("environment", subject.environment),
        ("created", subject.created),
        ("started", subject.started),
        ("ended", subject.ended),
        ("outcome", subject.outcome),
        ("GPUs", subject.devices or None if isinstance(subject.devices, tuple) else subject.devices),
        ("running children", subject.live_children if subject.live_children != 0 else None),
        ("own TTL", subject.marks.ttl),
        ("last used", subject.last_used),
        ("in use", subject.in_use if subject.last_used is not None else None),
        ("size", subject.size),
        *_of_an_image(subject),
        *_of_a_tree(subject),
        ("keep-alive file", subject.marks.keep_alive),
        ("requests exemption", subject.marks.asks_exemption),
        *_labels(subject),
        ("removal deletes", subject.loses or None if isinstance(subject.loses, tuple) else subject.loses),
        ("first start", memory.first_start),
        ("ran before", memory.ran if memory.ran else None),
        ("times ended", memory.ends_seen or None),
        ("stopped by", memory.stopped.by if memory.stopped else None),
    ]
    rows += (("warned", f"{w.rule}, stage {w.stage}, {_delivery(w)}, {moment(w.at, now)}") for w in memory.warnings)
    rows += (("held by", f"{h.by}, until {moment(h.until, now)}") for h in memory.holds if h.until > now)
    return [(name, value) for name, value in rows if value is not None]


class EvidenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was seen, and when. `at` None: it has no time of its own."""

    what: str
    words: str
    at: datetime | None = None


def evidence(found: Explanation) -> tuple[EvidenceRow, ...]:
    """What the verdicts rest on: the object as it was read, its measurements, and what was recorded about it."""
    subject, memory, now = found.subject, found.memory, found.now
    rows = [
        EvidenceRow(what="read", words=f"{subject.state}, incarnation {subject.seen.incarnation}", at=subject.seen.at)
    ]
    rows += (EvidenceRow(what="owner", words=words) for words in subject.evidence)
    rows += (
        EvidenceRow(what=signal_name(one), words=signal_in_words(one, now), at=one.newest_at) for one in found.signals
    )
    rows += (
        EvidenceRow(what="warning", words=f"{one.rule}, stage {one.stage}, {_delivery(one)}", at=one.at)
        for one in memory.warnings
    )
    rows += (
        EvidenceRow(what="hold", words=f"by {one.by}{f': {one.reason}' if one.reason else ''}", at=one.at)
        for one in memory.holds
        if one.until > now
    )
    rows += (
        EvidenceRow(what="captured", words=one.evidence or one.note or "nothing to capture", at=one.at)
        for one in found.history
        if isinstance(one, Captured)
    )
    rows += (EvidenceRow(what="contradiction", words=one.words) for one in found.findings)
    return tuple(rows)


def signal_name(one: MeasuredSignal) -> str:
    return f"{one.signal} {one.device}".rstrip()


def signal_in_words(one: MeasuredSignal, now: datetime) -> str:
    """The newest minute, and the window: its highest minute against the threshold, and since when it was measured."""
    if one.missing is not None:
        why = "absent by design" if one.missing.by_design else "could not be read"
        return f"{why}: {one.missing.why}"
    if one.newest is None or one.newest_at is None:
        return "not measured"
    newest = f"{amount(one.signal, one.newest)} ({_ago(one.newest_at, now)})"
    most = f"at most {amount(one.signal, one.maximum)}" if one.maximum is not None else "not measured"
    covered = "not measured" if one.since is None else f"measured without a gap for {in_words(now - one.since)}"
    limit = threshold_in_words(one)
    return f"{newest}; {most} in {in_words(one.window)}, in use from {limit}; {covered}"


def _ago(at: datetime, now: datetime) -> str:
    return "just now" if now - at < timedelta(minutes=2) else f"{in_words(now - at)} ago"


def moment(at: datetime, now: datetime) -> str:
    """ "2026-03-02 08:00 UTC (3h ago)"."""
    return f"{at:%Y-%m-%d %H:%M} UTC ({when_in_words(at, now)})"


def _class(found: Explanation) -> object:
    """Whose limits apply, and by what. What the platform recognized is only where it ends without a match."""
    given, seen = found.decision.class_, found.subject.class_
    return f"{given} (by match in the policy; recognized as {seen})" if given != str(seen) else seen


def _labels(subject: Subject) -> list[tuple[str, object]]:
    """Its labels as they are: data. Only the documented ones have a meaning for a rule."""
    if subject.shape is not Shape.WORKLOAD:
        return []
    written = [f"{key}={value}" for key, value in sorted(subject.labels.items())]
    cut = [one if len(one) <= LABEL_MAX else f"{one[:LABEL_MAX]}…" for one in written]
    more = [f"and {len(cut) - LABELS_MAX} more (to see all: --json)"] if len(cut) > LABELS_MAX else []
    return [("label", one) for one in [*cut[:LABELS_MAX], *more]]


def _of_an_image(subject: Subject) -> list[tuple[str, object]]:
    """Every name goes with it."""
    if subject.shape is not Shape.IMAGE:
        return []
    return [
        ("names", ", ".join(subject.labels.get("names", "").split()) or None),
        ("total with unused images used later", subject.together),
        ("disk", _disk(subject.disk)),
    ]


def _of_a_tree(subject: Subject) -> list[tuple[str, object]]:
    """What is beside it and below it counts as much as the tree itself."""
    if subject.shape is not Shape.TREE:
        return []
    return [
        ("category", subject.category.value),
        ("used by", subject.labels.get("held_by") or subject.labels.get("kept_by")),
        ("total of similar trees", subject.together),
        ("kept by", subject.kept),
        ("active work nearby", subject.busy if subject.busy is not None else "none"),
        ("disk", _disk(subject.disk)),
    ]


def _disk(disk: Disk | None) -> str | None:
    inodes = f", {disk.inodes:.0%} of its inodes" if disk is not None and disk.inodes is not None else ""
    return None if disk is None else f"{disk.name}, {disk.used:.0%} used{inodes}"


def _delivery(warned: Warned) -> str:
    return "delivered" if warned.delivered else "not delivered"


def verdicts(answers: tuple[Answer, ...]) -> Iterator[tuple[str, Answer]]:
    """Each rule's answer, with its verdict in words: the action when it is due, or which rule suspends it."""
    suspended = _suspended(answers)
    for one in answers:
        if one.rule in suspended and one.verdict in _PENDING:
            yield f"suspended by {suspended[one.rule]}", one
        else:
            yield one.action.value if one.verdict is Verdict.DUE else one.verdict.value, one


def _suspended(answers: tuple[Answer, ...]) -> dict[str, str]:
    """Which rule keeps which other from acting."""
    found: dict[str, str] = {}
    for i, answer in enumerate(answers):
        for later in answers[i + 1 :]:
            everything = "*" in answer.suspends and later.rule not in answer.spares
            if later.rule in answer.suspends or everything:
                found.setdefault(later.rule, answer.rule)
    return found


STEP = timedelta(minutes=5)
_SIGNALS = {one.value: one for one in Signal}


class TimelineSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Means of five minutes; None: not measured."""

    signal: Signal
    device: str
    start: datetime
    values: tuple[float | None, ...]


class TimelineMark(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: warning, hold, release, decision, act or state. `until`: end of a hold, or the announced time."""

    at: datetime
    kind: str
    words: str
    until: datetime | None = None


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """`idle_window`: the time without use after which the idle rule applies. `idle_since`: not used since then."""

    since: datetime
    now: datetime
    series: tuple[TimelineSeries, ...]
    marks: tuple[TimelineMark, ...]
    idle_window: timedelta | None = None
    idle_since: datetime | None = None


def timeline(
    view: View, book: Rulebook, series: Iterable[Series], lines: Sequence[Event], since: datetime, now: datetime
) -> Timeline:
    waste = wasted(view, book, now)
    return Timeline(
        since=since,
        now=now,
        series=tuple(_means(one) for one in series),
        marks=_marks(lines, since),
        idle_window=idle_window(view, book),
        idle_since=None if waste is None else waste.since,
    )


def copied_timeline(
    line: WorkloadLine,
    points: Iterable[tuple[str, str, datetime, float | None]],
    lines: Sequence[Event],
    since: datetime,
    now: datetime,
) -> Timeline:
    """From a copy: signal, device, minute and mean of each minute, in this order. The idle window is not in it."""
    found = []
    for (name, device), group in groupby(points, key=lambda point: point[:2]):
        signal = _SIGNALS.get(name)
        if signal is not None:
            found.append(_stepped(signal, device, [(at, mean) for _, _, at, mean in group]))
    return Timeline(since=since, now=now, series=tuple(found), marks=_marks(lines, since), idle_since=line.idle_since)


def _stepped(signal: Signal, device: str, minutes: Sequence[tuple[datetime, float | None]]) -> TimelineSeries:
    start = minutes[0][0]
    parts: dict[int, list[float]] = {}
    for at, mean in minutes:
        if mean is not None and not isnan(mean):
            parts.setdefault((at - start) // STEP, []).append(mean)
    count = (minutes[-1][0] - start) // STEP + 1
    return TimelineSeries(
        signal=signal, device=device, start=start, values=tuple(_mean(parts.get(one, ())) for one in range(count))
    )


def _marks(lines: Sequence[Event], since: datetime) -> tuple[TimelineMark, ...]:
    ends = _hold_ends(lines)
    return tuple(mark for line in lines if (mark := _mark(line, ends)) is not None and _is_shown(mark, since))


def _is_shown(mark: TimelineMark, since: datetime) -> bool:
    """A hold that began earlier is shown while it lasts."""
    return mark.at >= since or (mark.kind == "hold" and mark.until is not None and mark.until > since)


def _hold_ends(lines: Sequence[Event]) -> dict[Hold, datetime]:
    """Of holds that were released before their time."""
    found: dict[Hold, datetime] = {}
    holds: list[Hold] = []
    for line in lines:
        if isinstance(line, Held):
            holds.append(line.hold)
        elif isinstance(line, Released):
            ended = [one for one in holds if one.by == line.by or not (one.admin or line.own)]
            found.update((one, line.at) for one in ended if one not in found and line.at < one.until)
    return found


def _means(one: Series) -> TimelineSeries:
    size = STEP // MINUTE
    parts = [one.minutes[first : first + size] for first in range(0, len(one.minutes), size)]
    return TimelineSeries(
        signal=one.signal, device=one.device, start=one.start, values=tuple(_mean(part) for part in parts)
    )


def _mean(minutes: Sequence[float]) -> float | None:
    known = [value for value in minutes if not isnan(value)]
    return round(sum(known) / len(known), 2) if known else None


def _mark(line: Event, ends: Mapping[Hold, datetime]) -> TimelineMark | None:
    match line:
        case WarningSent():
            words = f"warning {line.stage}{'' if line.delivered else ', not delivered'}"
            return TimelineMark(at=line.at, kind="warning", words=words, until=line.until)
        case Held():
            until = ends.get(line.hold, line.hold.until)
            return TimelineMark(at=line.at, kind="hold", words=f"held by {line.by}", until=until)
        case Released():
            return TimelineMark(at=line.at, kind="release", words=f"released by {line.by}")
        case Decided():
            return TimelineMark(at=line.at, kind="decision", words=f"{line.action} by rule {line.rule}")
        case Closed():
            return TimelineMark(at=line.at, kind="act", words=f"{line.action}: {line.result}")
        case Noticed():
            return TimelineMark(at=line.at, kind="state", words=str(line.state))
        case _:
            return None
