"""State from journal. Pure: the same lines in the same order give the same memory, on any store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

import msgspec

from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import (
    BaselineSeen,
    Closed,
    Decided,
    Event,
    GpuChecked,
    Held,
    NodeTested,
    Noticed,
    Quarantined,
    Released,
    ResetTried,
    Restored,
    Returned,
    Vanished,
    WarningSent,
)
from gpukeeper.model.gpu import GpuMemory, Past
from gpukeeper.model.policy import WITHOUT_GPU
from gpukeeper.model.subject import (
    EMPTY,
    LIVE,
    OVER,
    RESTORE,
    ClockRecord,
    Hold,
    Memory,
    Outcome,
    Ref,
    State,
    Stopped,
    Subject,
    Warned,
)

WARNINGS_KEPT = 12
HOLDS_KEPT = timedelta(days=30)
RUNS_KEPT = 10  # of each GPU
BOOTS_KEPT = 32  # several machines may share a ledger


def remember(memory: Memory, line: Event) -> Memory | None:
    """The memory of an object after one more line about it. None: nothing is left to remember.

    What vanished is remembered: a platform that lost its list for a moment must not end a hold.
    """
    match line:
        case Noticed():
            return _notice(memory, line)
        case WarningSent():
            return msgspec.structs.replace(memory, warnings=_add_warning(memory.warnings, warned_by(line)))
        case Held():
            return msgspec.structs.replace(memory, holds=_add_hold(memory.holds, line.hold))
        case Released():
            mark = line.mark or memory.released_mark
            return msgspec.structs.replace(memory, holds=_end_holds(memory, line), released_mark=mark)
        case Closed(action=Action.STOP, result=Result.RECLAIMED):
            stopped = Stopped(line.by, line.rule, line.at, line.incarnation)
            return msgspec.structs.replace(memory, stopped=stopped)
        case Closed(action=Action.REMOVE, result=Result.RECLAIMED):
            return None
        case Restored(result="restored"):
            return msgspec.structs.replace(memory, stopped=None)
        case GpuChecked() | BaselineSeen() | Quarantined() | Returned() | ResetTried():
            return msgspec.structs.replace(memory, gpu=_of_gpu(memory.gpu or GpuMemory(), line))
        case NodeTested():
            return msgspec.structs.replace(memory, tested=_tested(memory.tested, line))
        case _:
            return memory


def warned_by(line: WarningSent) -> Warned:
    return Warned(
        line.rule, line.stage, line.at, line.delivered, line.incarnation, line.limit, line.until, line.removes
    )


def _add_warning(before: tuple[Warned, ...], new: Warned) -> tuple[Warned, ...]:
    """One that announced no time is repeated until it is delivered. Of its attempts only the last is remembered, so
    that they do not displace the warnings of other rules."""
    repeated = new.limit and new.until is None and not new.delivered
    kept = [w for w in before if not (repeated and msgspec.structs.replace(w, at=new.at) == new)]
    return (*kept, new)[-WARNINGS_KEPT:]


def _tested(before: tuple[Past, ...], line: NodeTested) -> tuple[Past, ...]:
    """The newest runs of each GPU, and of each of its figures: runs in which a GPU was too slow show no figure, and
    many of them must not displace its earlier values. What was not run on a GPU proves nothing about one."""
    if line.device != "cuda":
        return before
    now = tuple(
        Past(at=line.at, run=line.run, identity=identity, verdict=verdict, values=line.values.get(identity, {}))
        for identity, verdict in sorted(line.gpus.items())
    )
    counts: Counter[tuple[str, str]] = Counter()
    kept = []
    for one in reversed((*before, *now)):
        shown = [(one.identity, figure) for figure in ("", *one.values)]
        counts.update(shown)
        if any(counts[each] <= RUNS_KEPT for each in shown):
            kept.append(one)
    return tuple(reversed(kept))


def recalled(subject: Subject, memory: Memory) -> Subject:
    """What the platform reports about ended work, with what only the ledger still has of that very run.

    A platform forgets: who stopped it with the events of an engine that was restarted, and a GPU that it held without
    asking for it with its processes.
    """
    if subject.state is not State.ENDED or subject.seen.incarnation != memory.incarnation:
        return subject
    known: dict[str, object] = {}
    if subject.class_ == WITHOUT_GPU and memory.class_:
        known["class_"] = memory.class_
    stopped = memory.stopped is not None and memory.stopped.incarnation == subject.seen.incarnation
    if stopped and subject.outcome in (Outcome.SUCCEEDED, Outcome.FAILED):
        known["outcome"] = Outcome.STOPPED
    return msgspec.structs.replace(subject, **known) if known else subject


def refs_of(line: Event) -> tuple[Ref, ...]:
    """What a line is about. A hold on a tree is also remembered by the uid that outlasts the device number."""
    if line.ref is None:
        return ()
    lasting = line.hold.lasting if isinstance(line, Held) else line.lasting if isinstance(line, Released) else ""
    return (line.ref, msgspec.structs.replace(line.ref, uid=lasting)) if lasting else (line.ref,)


def lasting_key(subject: Subject) -> str | None:
    """The second key of a tree: see `refs_of`."""
    return None if subject.lasting is None else msgspec.structs.replace(subject.ref, uid=subject.lasting).key


def with_lasting_holds(subject: Subject, memory: Memory, lasting: Memory) -> Memory:
    """`lasting`: what is remembered by the lasting key. It decides about the holds that were taken under that key: a
    release under another device number ends them only there. All others count by the device number."""
    if subject.lasting is None:
        return memory
    others = tuple(hold for hold in memory.holds if hold.lasting != subject.lasting)
    return msgspec.structs.replace(memory, holds=(*others, *lasting.holds))


def holds_from(lines: Iterable[Held | Released]) -> dict[str, tuple[Hold, ...]]:
    """The holds that these lines make, by the key of what is held."""
    memories: dict[str, Memory] = {}
    for line in lines:
        assert line.ref is not None, "a hold is always on something"
        memories[line.ref.key] = remember(memories.get(line.ref.key, EMPTY), line) or EMPTY
    return {key: memory.holds for key, memory in memories.items()}


def is_gone(line: Event) -> bool:
    """Lines after which the object does not exist any more."""
    return isinstance(line, Vanished) or (
        isinstance(line, Closed) and line.action is Action.REMOVE and line.result is Result.RECLAIMED
    )


def closes(line: Closed) -> bool:
    """Whether an outcome closes its intent. What could not be verified stays open, and is read first."""
    return line.result is not Result.UNKNOWN


def decision_words(line: Decided) -> str:
    return f"{line.action} {line.rule} {line.verdict}"


def newest_clocks(before: Mapping[str, ClockRecord], boot: str, record: ClockRecord) -> dict[str, ClockRecord]:
    """By boot, the newest last."""
    others = [(key, one) for key, one in before.items() if key != boot]
    return dict([*others, (boot, record)][-BOOTS_KEPT:])


def _notice(memory: Memory, line: Noticed) -> Memory:
    new = line.incarnation != memory.incarnation
    class_ = line.class_ or ("" if new else memory.class_)
    if new and memory.started is not None:
        memory = _add_run(memory, line.previous_end)
    if line.state is State.ENDED:
        return _notice_end(memory, line, class_)
    if line.state not in LIVE:
        return msgspec.structs.replace(memory, state=str(line.state), incarnation=line.incarnation, class_=class_)
    return msgspec.structs.replace(
        memory,
        state=str(line.state),
        incarnation=line.incarnation,
        class_=class_,
        started=line.started,
        first_start=memory.first_start or line.started or line.at,
        # What runs again after a stop was resumed by a user, even if that is no new incarnation.
        stopped=None if new or memory.state in OVER else memory.stopped,
        first_seen_ended=None,
    )


def _notice_end(memory: Memory, line: Noticed, class_: str) -> Memory:
    started, first_start = memory.started, memory.first_start
    if started is None and line.started is not None and memory.incarnation != line.incarnation:
        started, first_start = line.started, first_start or line.started
    # What is suspended does not end by itself: a user resumed it, and that run is not the one that we stopped.
    ours = (
        memory.stopped is not None
        and memory.stopped.incarnation == line.incarnation
        and memory.state != State.SUSPENDED
    )
    stopped = memory.stopped if ours else None
    if not ours and line.outcome is Outcome.STOPPED:
        # No journalled intent of ours stopped this incarnation, so a person did: the lenient reading.
        stopped = Stopped("somebody", "", line.ended or line.at, line.incarnation)
    return msgspec.structs.replace(
        memory,
        state=str(line.state),
        incarnation=line.incarnation,
        class_=class_,
        started=None,
        first_start=first_start,
        ran=memory.ran + _length(started, line.ended),
        stopped=stopped,
        first_seen_ended=(memory.first_seen_ended or line.at) if memory.incarnation == line.incarnation else line.at,
        ended=line.ended,
        ends_seen=memory.ends_seen + 1,
    )


def _add_run(memory: Memory, end: datetime | None) -> Memory:
    """Close the run that was in progress."""
    return msgspec.structs.replace(memory, ran=memory.ran + _length(memory.started, end), started=None)


def _length(start: datetime | None, end: datetime | None) -> timedelta:
    """Of a run. An end that was not observed adds nothing: less runtime keeps longer."""
    return end - start if start is not None and end is not None and end > start else timedelta()


def _add_hold(holds: tuple[Hold, ...], new: Hold) -> tuple[Hold, ...]:
    """Old ones are forgotten by age, never by number: else many short holds would hide a long one."""
    recent = [h for h in holds if h.until > new.at - HOLDS_KEPT]
    if recent and _continues(recent[-1], new):
        recent[-1] = msgspec.structs.replace(new, at=recent[-1].at, until=max(recent[-1].until, new.until))
        return tuple(recent)
    return (*recent, new)


def _continues(old: Hold, new: Hold) -> bool:
    if old.by == new.by == RESTORE:  # thousands of workloads may have had one image
        return old.suspends == new.suspends and old.until >= new.at
    return not old.admin and not new.admin and old.by == new.by and old.until == new.at


def _end_holds(memory: Memory, line: Released) -> tuple[Hold, ...]:
    """A user's release ends users' holds, or only their own; an admin's hold is ended by the admin who took it."""
    return tuple(
        h
        if h.until <= line.at or ((h.admin or line.own) and h.by not in (line.by, RESTORE))
        else msgspec.structs.replace(h, until=line.at)
        for h in memory.holds
    )


def _of_gpu(gpu: GpuMemory, line: GpuChecked | BaselineSeen | Quarantined | Returned | ResetTried) -> GpuMemory:
    match line:
        case GpuChecked():
            return msgspec.structs.replace(gpu, checked=line.at, result=line.result, reason=line.reason)
        case BaselineSeen():
            return msgspec.structs.replace(gpu, baseline_mib=line.memory_used_mib)
        case Quarantined():
            # The first reason is why it is out; what is found later does not make it younger.
            if gpu.quarantined is not None:
                return gpu
            return msgspec.structs.replace(
                gpu, quarantined=line.at, quarantine_reason=line.reason, quarantined_by=line.by
            )
        case Returned():
            # Returning it confirms that it is fine as it is; a new driver may use more memory for itself.
            return msgspec.structs.replace(
                gpu, quarantined=None, quarantine_reason="", quarantined_by="", baseline_mib=None
            )
        case ResetTried():
            return msgspec.structs.replace(gpu, last_reset=line.at)
