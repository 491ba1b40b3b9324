"""The line that the ledger gets about a subject that is new, or not as remembered. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpukeeper.model.event import Noticed
from gpukeeper.model.memory import Memory
from gpukeeper.model.policy import WITHOUT_GPU
from gpukeeper.model.subject import Outcome, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

ANOTHER_END = timedelta(seconds=5)  # two clocks may differ by less
_LIVE = (State.RUNNING, State.PAUSED)
_UNUSED = (Shape.IMAGE, Shape.VOLUME, Shape.NETWORK)  # noticed for the time since when they are unused
_REMEMBERED = (Shape.WORKLOAD, Shape.ORPHAN, *_UNUSED)


def notice(subject: Subject, memory: Memory, now: datetime) -> Noticed | None:
    """A line when it is new, or in another state, incarnation or class than remembered. Trees always change: none."""
    state = subject.state
    if subject.shape not in _REMEMBERED or isinstance(state, Unknown) or is_strange(subject):
        return None
    if state is State.ENDED and isinstance(subject.outcome, Unknown):
        return None  # whether a person stopped it is noticed once it is known, not as "no one did"
    class_ = _class_worth_a_line(subject)
    same = (memory.state, memory.incarnation) == (state.value, subject.seen.incarnation)
    if same and class_ in (None, memory.class_) and not _ended_again(subject, memory):
        return None
    if subject.shape in _UNUSED and _is_still_unused(subject, memory):
        return None
    return Noticed(
        at=now,
        ref=subject.ref,
        owner=subject.owner if isinstance(subject.owner, str) else None,
        incarnation=subject.seen.incarnation,
        state=state,
        started=_when(subject.started),
        ended=_when(subject.ended),
        previous_end=_when(subject.previous_end),
        outcome=subject.outcome if isinstance(subject.outcome, Outcome) else None,
        ended_with=subject.ended_with if state is State.ENDED else "",
        class_=class_,
    )


def is_strange(subject: Subject) -> bool:
    """A process that nothing ties to a workload of this place: another engine's, perhaps. Shown, and nothing else."""
    return subject.shape is Shape.ORPHAN and subject.proof is None


def _ended_again(subject: Subject, memory: Memory) -> bool:
    """It ran in between, unobserved."""
    if not subject.ends_for_good or subject.state is not State.ENDED or memory.ended is None:
        return False
    return isinstance(subject.ended, datetime) and subject.ended - memory.ended > ANOTHER_END


def _class_worth_a_line(subject: Subject) -> str | None:
    """Of what runs: ended, it may not be seen any more that it held a GPU, and it would never be removed."""
    runs = subject.shape is Shape.WORKLOAD and subject.state in _LIVE
    return subject.class_ if runs and isinstance(subject.class_, str) and subject.class_ != WITHOUT_GPU else None


def _is_still_unused(subject: Subject, memory: Memory) -> bool:
    """An engine that lost the last use of it reports nothing new: the time in the ledger is later."""
    since, used = memory.first_seen_ended, _when(subject.last_used)
    unused = subject.state is State.ENDED and memory.state == State.ENDED.value
    return unused and since is not None and (used is None or used <= since)


def _when(fact: datetime | Unknown | None) -> datetime | None:
    return fact if isinstance(fact, datetime) else None
