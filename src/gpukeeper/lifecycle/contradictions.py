"""What does not fit together about GPUs and workloads. Pure; `observe` shows it, and nothing is repaired."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TypeAlias

import msgspec

from gpukeeper.lifecycle.claims import CLAIMING, LIVE, ClaimState, Inventory, claim_state
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import View
from gpukeeper.model.identity import Ref
from gpukeeper.model.memory import Memory
from gpukeeper.model.subject import Shape, State, Subject
from gpukeeper.model.unknown import Unknown

# By place and device: what has it, and how.
Holders: TypeAlias = dict[tuple[str, str], list[tuple[Subject, ClaimState]]]


class Contradiction(msgspec.Struct, frozen=True, kw_only=True):
    """A contradiction that a person should check."""

    kind: str
    about: tuple[Ref, ...]
    words: str


def findings(
    views: Sequence[View],
    book: Rulebook,
    now: datetime,
    *,
    recorded: Mapping[str, Memory] = {},
    absent: Sequence[Ref] = (),
    doubtful: Collection[str] = (),
) -> tuple[Contradiction, ...]:
    """What does not fit together.

    `recorded`: the ledger's memory from before this read. `absent`: what the ledger has and a complete list has not.
    `doubtful`: places of which not everything was seen; what is missing there proves nothing.
    """
    inventory = Inventory([view.subject for view in views])
    held = {view.subject.ref.key: how for view in views if (how := claim_state(view, book, now)) is not None}
    subjects = [view.subject for view in views]
    having = [subject for subject in subjects if subject.ref.key in held]
    by_device: Holders = {}
    for subject in having:
        for device in () if isinstance(subject.devices, Unknown) else subject.devices:
            by_device.setdefault((subject.ref.place, device), []).append((subject, held[subject.ref.key]))
    return (
        *(one for s in subjects for one in _reported(s)),
        *(one for where in by_device for one in on_device(*where, by_device, inventory)),
        *(one for s in having for one in _not_there(s, inventory, doubtful)),
        *(one for s in subjects for one in _orphan(s)),
        *(one for s in subjects for one in _against_the_record(s, recorded.get(s.ref.key))),
        *map(_no_longer_listed, absent),
    )


def about_subject(
    subject: Subject, memory: Memory | None, inventory: Inventory, doubtful: Collection[str], *, has_device: bool
) -> Iterator[Contradiction]:
    """Those of `findings` that follow from one subject, the inventory and what the ledger remembers of it."""
    yield from _reported(subject)
    if has_device:
        yield from _not_there(subject, inventory, doubtful)
    yield from _orphan(subject)
    yield from _against_the_record(subject, memory)


def on_device(place: str, device: str, holders: Holders, inventory: Inventory) -> Iterator[Contradiction]:
    """Those of `findings` about one device that more than one has: two workloads, one outside on a claimed device, one
    on what is kept for another."""
    mine = holders[place, device]
    name = inventory.name(place, device)
    wider = [one for other in inventory.overlapping(place, device) for one in holders.get((place, other), ())]
    claiming, own = _claiming(wider), _claiming(mine)
    # Where a whole GPU and its slices meet it is reported once, at the whole GPU.
    if len(claiming) > 1 and own and (len(own) == len(claiming) or (place, device) in inventory.cut):
        words = f"{name} is claimed by {len(claiming)} running workloads: {_all(claiming)}{_came_back(claiming)}"
        yield Contradiction(kind="duplicate", about=tuple(s.ref for s in claiming), words=words)
    for subject, how in mine:
        if how is ClaimState.BARE and claiming:
            words = f"{_one(subject)} runs outside any workload on {name}, which {_all(claiming)} claims"
            yield Contradiction(kind="bare", about=(subject.ref, *(s.ref for s in claiming)), words=words)
        others = [s for s in claiming if s.owner != subject.owner]
        if how is ClaimState.KEPT and others:
            words = f"{name} is kept for {_one(subject)} after its stop, and in use by {_all(others)}"
            yield Contradiction(kind="duplicate", about=(subject.ref, *(s.ref for s in others)), words=words)


def _came_back(claiming: Sequence[Subject]) -> str:
    """A claim is fixed when a workload is made: started again after its stop-hold, it may meet a workload that came
    meanwhile."""
    started = [(s.started, s) for s in claiming if isinstance(s.started, datetime)]
    if len(started) < len(claiming):
        return ""
    at, last = max(started, key=lambda pair: pair[0])
    if not isinstance(last.previous_end, datetime):
        return ""
    return f"; {last.ref.path} was restarted on it at {at:%Y-%m-%d %H:%M} UTC"


def _claiming(having: Sequence[tuple[Subject, ClaimState]]) -> list[Subject]:
    """The running workloads among them. What may be a part of another one, of unknown class, is not counted twice."""
    found = {s.ref.key: s for s, how in having if how in CLAIMING and not isinstance(s.class_, Unknown)}
    return [found[key] for key in sorted(found)]


def _reported(subject: Subject) -> Iterator[Contradiction]:
    for words in subject.findings:
        yield Contradiction(kind="reported", about=(subject.ref,), words=_about(subject, words))


def _not_there(subject: Subject, inventory: Inventory, doubtful: Collection[str]) -> Iterator[Contradiction]:
    place = subject.ref.place
    if isinstance(subject.devices, Unknown) or place not in inventory.places or place in doubtful:
        return
    for device in subject.devices:
        if (place, device) not in inventory.devices:
            words = _about(subject, f"it claims {device}, and {place} has no such GPU")
            yield Contradiction(kind="missing device", about=(subject.ref,), words=words)


def _orphan(subject: Subject) -> Iterator[Contradiction]:
    if subject.shape is not Shape.ORPHAN:
        return
    says = "it holds a GPU in an unknown workload, perhaps of another engine"
    if isinstance(subject.proof, str):
        says = f"it outlived its workload ({subject.proof})"
    yield Contradiction(kind="orphan", about=(subject.ref,), words=_about(subject, says))


def _against_the_record(subject: Subject, memory: Memory | None) -> Iterator[Contradiction]:
    if memory is None or memory.state != State.ENDED or subject.state not in LIVE:
        return
    if memory.incarnation == subject.seen.incarnation:
        words = _about(subject, "the ledger has it as ended, but it runs and was not restarted")
        yield Contradiction(kind="record", about=(subject.ref,), words=words)


def _no_longer_listed(ref: Ref) -> Contradiction:
    words = f"{ref.path}: it is in the ledger and no longer listed; the next pass records that"
    return Contradiction(kind="record", about=(ref,), words=words)


def _about(subject: Subject, words: str) -> str:
    return f"{subject.ref.path}: {words}"


def _one(subject: Subject) -> str:
    return f"{subject.ref.path} ({subject.owner if isinstance(subject.owner, str) else 'owner unknown'})"


def _all(subjects: Sequence[Subject]) -> str:
    return ", ".join(_one(subject) for subject in subjects)
