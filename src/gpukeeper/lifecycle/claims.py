"""Which workload has which GPU, and what does not fit together. Pure; `observe` shows it, and nothing is repaired.

A device is a whole GPU or a slice of one, known from the inventory of its place. Only a place whose inventory is
there can show that a device is free or missing; elsewhere a claim is shown as the workload names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from math import isnan
from typing import TypeAlias

import msgspec

from gpukeeper.lifecycle.cleanliness import TOLERANCE_MIB
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.rules import exemption, stop_hold, target
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, Verdict, View
from gpukeeper.model.gpu import FIRST_BASELINE_MIB
from gpukeeper.model.series import Signal
from gpukeeper.model.subject import EMPTY, LIVE, Memory, Ref, Shape, State, Subject
from gpukeeper.model.unknown import Unknown, direct

BARE = "bare"  # the class of what a person runs outside any workload
MINUTE = timedelta(minutes=1)
NOT_MEASURED = (Unknown("not measured"), None)
# By place: the verbs that are offered there. A place that is not named offers all.
Offers = Mapping[tuple[str, str], Collection[Action]]


@direct
class ClaimState(StrEnum):
    """How a device is held."""

    RUNNING = "running"
    PAUSED = "paused"
    CHILDREN = "living children"  # its workload ended, and parts of it run on
    STARTING = "starting"  # it was given its devices, and has not begun to run
    ORPHAN = "orphan"
    BARE = "outside"  # a person's, in no workload
    INFRASTRUCTURE = "infrastructure"  # never touched, and blocks no other use
    KEPT = "kept for its owner"  # after a stop by hand
    FREE = "free"
    HELD = "held"  # by a process that is no workload: root's, one that has just begun, one of another engine
    UNSURE = "perhaps free"
    QUARANTINE = "quarantine"


CLAIMING = (ClaimState.RUNNING, ClaimState.PAUSED, ClaimState.CHILDREN)
_SHARED = (ClaimState.INFRASTRUCTURE,)  # a device with only these is free


class GpuClaim(msgspec.Struct, frozen=True, kw_only=True):
    """One device and one holder. `device` is empty if it is unknown which it is."""

    device: str
    name: str  # the path of the device, or what the workload calls it
    place: str
    how: ClaimState
    holder: Ref | None = None  # None: no workload
    by: str = ""  # processes that hold it and are no workload
    owner: str | Unknown | None = None
    since: datetime | None = None
    use: float | Unknown = Unknown("not measured")  # percent, newest
    use_at: datetime | None = None
    next: str = ""  # what happens next, or why nothing does, in words
    next_at: datetime | None = None

    @property
    def key(self) -> str:
        """Of its holder; empty: it has none."""
        return "" if self.holder is None else self.holder.key


def claims(
    views: Sequence[View],
    book: Rulebook,
    now: datetime,
    *,
    recorded: Mapping[str, Memory] = {},
    offers: Offers | None = None,
    decisions: Mapping[str, Decision] = {},
) -> tuple[GpuClaim, ...]:
    """One entry for each device and holder, and one for each device without a holder.

    `recorded`: what the ledger remembers, of devices too. `decisions`: those that were made already, by key.
    """
    inventory = Inventory([view.subject for view in views])
    found: list[GpuClaim] = []
    for view in views:
        how = claim_state(view, book, now)
        if how is not None:
            decision = decisions.get(view.subject.ref.key) or decide(view, book, now)
            words, devices = why_nothing(decision, offers), devices_of(view.subject)
            found += [claim_on(one, view, how, inventory, words, decision.due, now) for one in devices]
    found += _unheld(inventory, found, recorded)
    return tuple(sorted(found, key=inventory.order))


@direct
class MayUse(StrEnum):
    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


def may_use(
    place: str,
    uid: str,
    user: str,
    found: Sequence[GpuClaim],
    inventory: Inventory,
    unread: Sequence[str] = (),
) -> tuple[MayUse, str]:
    """Whether this device may be given to that user now, and why. `found`: every claim; `unread`: what could not be
    read, which may be a holder. For allocators: it is as of now, and reserves nothing."""
    device = inventory.devices.get((place, uid))
    if (place, uid) in inventory.cut:
        return MayUse.NO, "it is divided into slices; name one of them"
    near = inventory.overlapping(place, uid)
    claimed = [one for one in found if one.place == place and one.device in (*near, "")]
    answers = [_may_use(one, user) for one in claimed]
    answers += [(MayUse.UNKNOWN, f"{words} could not be read") for words in unread]
    if device is None:  # then only workloads are known, and no other holder
        answers.append((MayUse.UNKNOWN, "it is in no inventory; is host in the scope of the policy?"))
    elif any(one.how is ClaimState.KEPT for one in claimed) and device.busy is not None:
        answers.append((MayUse.NO if isinstance(device.busy, str) else MayUse.UNKNOWN, f"held: {device.busy}"))
    return max(answers, key=lambda one: _WORST.index(one[0]))


_WORST = (MayUse.YES, MayUse.UNKNOWN, MayUse.NO)


def _may_use(claim: GpuClaim, user: str) -> tuple[MayUse, str]:
    owner = claim.owner if isinstance(claim.owner, str) else "owner unknown"
    who = claim.by if claim.holder is None else f"{claim.holder.path} ({owner})"
    match claim.how:
        case ClaimState.FREE | ClaimState.INFRASTRUCTURE:
            return MayUse.YES, "free"
        case ClaimState.KEPT if claim.owner == user:
            return MayUse.YES, f"kept for {user} since {who} was stopped"
        case ClaimState.KEPT if isinstance(claim.owner, Unknown):
            return MayUse.UNKNOWN, f"kept for the owner of {claim.holder and claim.holder.path}, who is unknown"
        case ClaimState.UNSURE:
            return MayUse.UNKNOWN, f"perhaps free: {claim.next}"
        case ClaimState.QUARANTINE:
            return MayUse.NO, f"quarantine: {claim.next}"
        case _ if not claim.device:
            return MayUse.UNKNOWN, f"{who} has a GPU here, and which one is unknown"
        case _:
            return MayUse.NO, f"{claim.how}: {who}"


def why_nothing(decision: Decision, offers: Offers | None = None) -> str:
    """The reason, for where nothing comes next. What comes has words of its own (forecast.py)."""
    ref, wanted = decision.seen.ref, decision.then if decision.action is Action.WARN else decision.action
    offered = None if offers is None else offers.get((ref.platform, ref.place))
    if wanted is not Action.KEEP and offered is not None and wanted not in offered:
        return f"nothing: {decision.reason}; {ref.platform} offers no {wanted}"
    if decision.action is not Action.KEEP:
        return decision.reason
    match decision.verdict:
        case Verdict.REPORT:
            return f"reported only: {decision.reason}"
        case Verdict.SILENT:
            return "nothing: no rule applies to it"
        case _:
            return f"kept: {decision.reason}"


def runs_on_gpus(subject: Subject) -> bool:
    """A workload that runs and holds GPUs, or may: which it holds can be unknown."""
    if subject.shape is not Shape.WORKLOAD or subject.root is not None:
        return False
    return subject.state in LIVE and subject.devices != ()


def left_alone(view: View, book: Rulebook, now: datetime, offers: Offers) -> str | None:
    """Why not even an emergency stop touches it; None when it may."""
    settings, ref = book.settings(view.subject), view.subject.ref
    standing = target.evaluate(view, settings, now)
    if standing.verdict is not Verdict.SILENT:
        return standing.reason
    exempt = exemption.evaluate(view, settings, now)
    if "*" in exempt.suspends:  # from every rule; an exemption from some is not one from this
        return exempt.reason
    if Action.STOP not in offers.get((ref.platform, ref.place), ()):
        return f"{ref.platform} offers no stop"
    return None


class Inventory:
    """The devices of every place, from the subjects that are devices."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        devices = [subject for subject in subjects if subject.shape is Shape.DEVICE]
        self.devices = {(one.ref.place, one.ref.uid): one for one in devices}
        self.places = {place for place, _ in self.devices}
        self._numbers = {key: number for number, key in enumerate(self.devices)}
        wholes = {one.ref.path: one.ref.uid for one in devices if one.root is None}
        self._whole = {
            (one.ref.place, one.ref.uid): wholes[one.root]
            for one in devices
            if isinstance(one.root, str) and one.root in wholes
        }
        self._parts: dict[tuple[str, str], set[str]] = {}
        for (place, part), whole in self._whole.items():
            self._parts.setdefault((place, whole), set()).add(part)
        self.cut = set(self._parts)

    def is_like(self, other: Inventory) -> bool:
        """The same devices, cut in the same way."""
        return self.devices.keys() == other.devices.keys() and self._whole == other._whole

    def name(self, place: str, device: str) -> str:
        known = self.devices.get((place, device))
        return known.ref.path if known is not None else device

    def overlapping(self, place: str, device: str) -> list[str]:
        """Itself, the GPU it is a slice of, and the slices it is cut into."""
        if not self._whole:
            return [device]
        whole = self._whole.get((place, device))
        return sorted({device, *self._parts.get((place, device), ())} | ({whole} if whole is not None else set()))

    def order(self, claim: GpuClaim) -> tuple[str, bool, int, str, str]:
        """As the driver counts them; what is in no inventory comes last."""
        number = self._numbers.get((claim.place, claim.device), len(self._numbers))
        return (claim.place, not claim.device, number, claim.device, claim.holder.path if claim.holder else "")


def claim_state(view: View, book: Rulebook, now: datetime) -> ClaimState | None:
    """None: it has no device now."""
    subject = view.subject
    if subject.shape not in (Shape.WORKLOAD, Shape.ORPHAN) or subject.devices == ():
        return None
    if subject.shape is Shape.ORPHAN:
        return ClaimState.ORPHAN
    if subject.root is not None and not isinstance(subject.root, Unknown):
        return None  # its root has them
    settings = book.settings(subject)
    if subject.state in LIVE:
        if not isinstance(settings.untouchable, Unknown) and settings.untouchable:
            return ClaimState.INFRASTRUCTURE
        if subject.class_ == BARE:
            return ClaimState.BARE
        return ClaimState.PAUSED if subject.state is State.PAUSED else ClaimState.RUNNING
    if subject.starting:
        return ClaimState.STARTING
    if subject.state is State.ENDED and stop_hold.evaluate(view, settings, now).verdict is Verdict.PROTECT:
        return ClaimState.KEPT
    return ClaimState.CHILDREN if subject.state is State.ENDED and subject.live_children != 0 else None


def devices_of(subject: Subject) -> tuple[str, ...]:
    """An empty name: it has some, and which is unknown."""
    return ("",) if isinstance(subject.devices, Unknown) else subject.devices


def claim_on(
    device: str, view: View, how: ClaimState, inventory: Inventory, words: str, due: datetime | None, now: datetime
) -> GpuClaim:
    """Of a workload on one of its devices. `words`: why nothing comes next; `due`: when that is decided again."""
    subject = view.subject
    place = subject.ref.place
    unknown = isinstance(subject.devices, Unknown)
    since = subject.ended if how is ClaimState.KEPT else subject.started
    use, use_at = newest_use(view, device, inventory.devices.get((place, device)))
    return GpuClaim(
        device=device,
        name=f"which GPU is {subject.devices}" if unknown else inventory.name(place, device),
        place=place,
        how=how,
        holder=subject.ref,
        owner=subject.owner,
        since=since if isinstance(since, datetime) else None,
        use=use,
        use_at=use_at,
        next=words,
        next_at=due if due is not None and due > now else None,
    )


def newest_use(view: View, device: str, known: Subject | None = None) -> tuple[float | Unknown, datetime | None]:
    """The newest minute that was measured; else what the driver reported for the whole device just now."""
    for one in view.series:
        if one.signal is not Signal.GPU or one.device != device:
            continue
        for back in range(len(one.minutes) - 1, -1, -1):
            if not isnan(one.minutes[back]):
                return one.minutes[back], one.start + back * MINUTE
    try:
        return (
            (float(known.labels.get("utilisation_percent", "")), known.seen.at) if known is not None else NOT_MEASURED
        )
    except ValueError:
        return NOT_MEASURED


def _unheld(inventory: Inventory, found: Sequence[GpuClaim], recorded: Mapping[str, Memory]) -> Iterator[GpuClaim]:
    taken: set[tuple[str, str]] = set()
    shared: set[tuple[str, str]] = set()
    for claim in found:
        here = {(claim.place, device) for device in inventory.overlapping(claim.place, claim.device)}
        if blocks_use(claim.how):
            taken |= here
        else:
            shared |= here
    for (place, device), subject in inventory.devices.items():
        memory = recorded.get(subject.ref.key, EMPTY)
        blocked = (place, device) in taken or (place, device) in inventory.cut
        known = (place, device) in shared
        claim_of_it = unheld(subject, memory, taken=blocked, perhaps=(place, "") in taken, shared=known)
        if claim_of_it is not None:
            yield claim_of_it


def blocks_use(how: ClaimState) -> bool:
    """Whether a device that is held so is not free."""
    return how not in _SHARED


def unheld(device: Subject, memory: Memory, *, taken: bool, perhaps: bool, shared: bool = False) -> GpuClaim | None:
    """A device in quarantine, or that no workload has; None: a workload has it, a slice of it, or the whole of it.
    `perhaps`: a workload of its place has a device, and which one is unknown. `shared`: infrastructure has it, and the
    processes that have it open may be part of that."""
    ref, gpu = device.ref, memory.gpu
    free = GpuClaim(device=ref.uid, name=ref.path, place=ref.place, how=ClaimState.FREE)
    if gpu is not None and gpu.quarantined is not None:
        words = f"until an admin returns it: {gpu.quarantine_reason}"
        return msgspec.structs.replace(free, how=ClaimState.QUARANTINE, since=gpu.quarantined, next=words)
    if taken:
        return None
    if perhaps:
        words = "a workload here has a GPU, and which one is unknown"
        return msgspec.structs.replace(free, how=ClaimState.UNSURE, next=words)
    if isinstance(device.busy, str):
        words = "nothing: no known workload has it"
        if shared:
            words = "nothing: only infrastructure has it, of which these processes may be a part"
        return msgspec.structs.replace(free, how=ClaimState.HELD, by=device.busy, next=words)
    doubt = why_unsure(device, None if gpu is None else gpu.baseline_mib)
    return free if doubt is None else msgspec.structs.replace(free, how=ClaimState.UNSURE, next=doubt)


def why_unsure(device: Subject, baseline_mib: int | None) -> str | None:
    """Why it may not be free although nothing is known to hold it. Where every process was seen, as much memory as the
    driver itself may need counts as none. Where only the driver's list is known, memory must be at a known baseline."""
    if isinstance(device.busy, Unknown) and (baseline_mib is None or not device.busy.by_design):
        return f"which processes have it open is unknown: {device.busy.why}"
    used = device.labels.get("memory_used_mib", "not measured")
    if not used.isdecimal():
        return f"its used memory is unknown: {used}"
    if int(used) <= (FIRST_BASELINE_MIB if baseline_mib is None else baseline_mib + TOLERANCE_MIB):
        return None
    if baseline_mib is None:
        return f"{used} MiB are in use without a visible process, and its baseline is unknown"
    return f"{used} MiB are in use without a visible process, {baseline_mib} MiB when it is free"


# By place and device: what has it, and how.
Holders: TypeAlias = dict[tuple[str, str], list[tuple[Subject, ClaimState]]]


class Contradiction(msgspec.Struct, frozen=True, kw_only=True):
    """A contradiction that a person should check."""

    kind: str
    about: tuple[Ref, ...]
    words: str


def contradictions(
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
        words = f"{name} is claimed by {len(claiming)} running workloads: {_all_named(claiming)}{_came_back(claiming)}"
        yield Contradiction(kind="duplicate", about=tuple(s.ref for s in claiming), words=words)
    for subject, how in mine:
        if how is ClaimState.BARE and claiming:
            words = f"{_named(subject)} runs outside any workload on {name}, which {_all_named(claiming)} claims"
            yield Contradiction(kind="bare", about=(subject.ref, *(s.ref for s in claiming)), words=words)
        others = [s for s in claiming if s.owner != subject.owner]
        if how is ClaimState.KEPT and others:
            words = f"{name} is kept for {_named(subject)} after its stop, and in use by {_all_named(others)}"
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
        yield Contradiction(kind="reported", about=(subject.ref,), words=_about_holders(subject, words))


def _not_there(subject: Subject, inventory: Inventory, doubtful: Collection[str]) -> Iterator[Contradiction]:
    place = subject.ref.place
    if isinstance(subject.devices, Unknown) or place not in inventory.places or place in doubtful:
        return
    for device in subject.devices:
        if (place, device) not in inventory.devices:
            words = _about_holders(subject, f"it claims {device}, and {place} has no such GPU")
            yield Contradiction(kind="missing device", about=(subject.ref,), words=words)


def _orphan(subject: Subject) -> Iterator[Contradiction]:
    if subject.shape is not Shape.ORPHAN:
        return
    says = "it holds a GPU in an unknown workload, perhaps of another engine"
    if isinstance(subject.proof, str):
        says = f"it outlived its workload ({subject.proof})"
    yield Contradiction(kind="orphan", about=(subject.ref,), words=_about_holders(subject, says))


def _against_the_record(subject: Subject, memory: Memory | None) -> Iterator[Contradiction]:
    if memory is None or memory.state != State.ENDED or subject.state not in LIVE:
        return
    if memory.incarnation == subject.seen.incarnation:
        words = _about_holders(subject, "the ledger has it as ended, but it runs and was not restarted")
        yield Contradiction(kind="record", about=(subject.ref,), words=words)


def _no_longer_listed(ref: Ref) -> Contradiction:
    words = f"{ref.path}: it is in the ledger and no longer listed; the next pass records that"
    return Contradiction(kind="record", about=(ref,), words=words)


def _about_holders(subject: Subject, words: str) -> str:
    return f"{subject.ref.path}: {words}"


def _named(subject: Subject) -> str:
    return f"{subject.ref.path} ({subject.owner if isinstance(subject.owner, str) else 'owner unknown'})"


def _all_named(subjects: Sequence[Subject]) -> str:
    return ", ".join(_named(subject) for subject in subjects)
