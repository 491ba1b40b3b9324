"""What a running gpukeeper remembers between passes: what failed, is followed, is missing, is scarce, was listed,
awaits a confirmation. Nothing of it is needed after a restart: what must survive is in the ledger. Each part is
bounded.
"""

from __future__ import annotations

import asyncio
import posixpath
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from gpukeeper.engine.ports import Platform, Ports, key_of
from gpukeeper.lifecycle.rules import temporary_tree, unused_image
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import ACTING, Action, Decision, PlaceHead, Result, Step, Tenant, Verdict, View
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.event import Closed, GpuChecked, Vanished
from gpukeeper.model.policy import Demand, DiskMarks, Images
from gpukeeper.model.subject import LIVE, Gone, PlaceKey, Ref, Seen, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

BACK_OFF = timedelta(minutes=20)
LONGEST_BACK_OFF = timedelta(days=1)
_WITHOUT_EFFECT = (Result.REFUSED, Result.STILL_THERE, Result.NOT_CAPTURED)


class FailedStep(NamedTuple):
    """`wait`: before it is tried again."""

    at: datetime
    wait: timedelta
    refused: str  # why; empty: it was not refused


@dataclass
class BackOff:
    """Steps that came to nothing are not tried again at once: what is refused now is refused in five minutes, too, and
    must not keep everything behind it waiting. What is refused again for the same reason waits twice as long, up to
    a day.

    Bounded: by the steps of the last two days.
    """

    _failed: dict[str, FailedStep] = field(default_factory=dict)  # by key: the last step on it that came to nothing

    def note(self, line: Closed) -> None:
        assert line.ref is not None
        last = self._failed.pop(line.ref.key, None)
        if line.result in _WITHOUT_EFFECT:
            refused = line.reason if line.result is Result.REFUSED else ""
            again = last is not None and last.refused != "" and last.refused == refused
            again = again and last is not None and line.at - last.at < 2 * last.wait
            wait = min(2 * last.wait, LONGEST_BACK_OFF) if last is not None and again else BACK_OFF
            self._failed[line.ref.key] = FailedStep(line.at, wait, refused)

    def failed(self, key: str, now: datetime) -> FailedStep | None:
        """The step on it that came to nothing, while it is too early to try again."""
        last = self._failed.get(key)
        return last if last is not None and timedelta() <= now - last.at < last.wait else None

    def postponed(self, decision: Decision, now: datetime) -> Decision | None:
        """When it is tried again, and why not now. None: it is not postponed."""
        tried = self.failed(decision.seen.ref.key, now) if decision.action in ACTING else None
        if tried is None:
            return None
        how = f"was refused {in_words(now - tried.at)} ago ({tried.refused})" if tried.refused else ""
        how = how or f"failed {in_words(now - tried.at)} ago"
        return msgspec.structs.replace(
            decision,
            action=Action.KEEP,
            reason=f"{decision.reason}; a step on it {how}, retried after {in_words(tried.wait)}",
            verdict=Verdict.REPORT,
            stage=0,
            due=tried.at + tried.wait,
        )

    def forget(self, now: datetime) -> None:
        """A refusal is remembered for as long again as it waits: the next one may be the same."""
        self._failed = {
            key: one
            for key, one in self._failed.items()
            if timedelta() <= now - one.at < one.wait * (2 if one.refused else 1)
        }

    def keys(self) -> Iterable[str]:
        return self._failed.keys()


@dataclass
class WorkBeside:
    """Work that a step found running beside a temporary tree: the steps on trees in the same directory are then
    skipped.

    Bounded: by the directories of the plan of each place; the next pass starts without any.
    """

    _why: dict[tuple[str, str, str, str], str] = field(default_factory=dict)

    def note(self, step: Step, found: Subject) -> str | None:
        """What work runs beside it now, or may. None: none, or it is no temporary tree."""
        work = temporary_tree.work_beside(found) if step.decision.rule == temporary_tree.NAME else None
        if work is None:
            return None
        self._why[_directory_of(step)] = work.reason
        return work.reason

    def found(self, step: Step) -> tuple[str, str] | None:
        """Its directory and what an earlier step found running there."""
        where = _directory_of(step)
        if step.decision.rule != temporary_tree.NAME or where not in self._why:
            return None
        return "/".join(part for part in where[:3] if part) + where[3], self._why[where]

    def forget(self, place: PlaceKey) -> None:
        self._why = {where: why for where, why in self._why.items() if where[:2] != place}


def _directory_of(step: Step) -> tuple[str, str, str, str]:
    """What it shares with trees that stay while work runs beside it: its node, and its directory."""
    ref = step.decision.seen.ref
    return ref.platform, ref.place, ref.namespace, posixpath.dirname(ref.name)


class FollowedRemoval(NamedTuple):
    ref: Ref
    gpus: int | Unknown
    size: int | Unknown


@dataclass
class Followed:
    """Removals that a platform accepted from this process and that take their time: what each of them gives back.

    Bounded: by the open intents of each place.
    """

    _by_step: dict[str, FollowedRemoval] = field(default_factory=dict)

    def note(self, step: str, removal: FollowedRemoval) -> None:
        self._by_step[step] = removal

    def take(self, step: str) -> FollowedRemoval | None:
        return self._by_step.pop(step, None)

    def keep_only(self, place: PlaceKey, steps: Collection[str]) -> None:
        """Those whose intents are still open; another process may have settled some."""
        self._by_step = {
            step: one
            for step, one in self._by_step.items()
            if (one.ref.platform, one.ref.place) != place or step in steps
        }

    def keys(self) -> Iterable[str]:
        return [one.ref.key for one in self._by_step.values()]


async def confirmed_gone(platform: Platform, missing: Sequence[Ref]) -> Sequence[Gone]:
    if not missing:
        return ()
    try:
        return await platform.gone(missing)
    except PlatformError:
        return ()  # nothing is proven; the next pass checks again


@dataclass
class Absences:
    """What is not listed any more and not yet accepted as gone. Bounded: by what the last lists did not show."""

    patience: timedelta = timedelta()  # how long something must be missing to count as gone while the breaker is open
    _since: dict[PlaceKey, dict[str, datetime]] = field(default_factory=dict)  # by place, then by key

    async def record(
        self, ports: Ports, platform: Platform, missing: Sequence[Ref], gone: Sequence[Gone], *, believe: bool
    ) -> None:
        """While the breaker is open, absence is accepted only after a while: an engine that lost its data reports
        everything as gone. A removal that the platform announced is accepted at once."""
        now, before = ports.clock.now(), self._since.get(key_of(platform), {})
        since = self._since[key_of(platform)] = {ref.key: before.get(ref.key, now) for ref in missing}
        lost = [
            one.ref for one in gone if believe or one.announced or now - since.get(one.ref.key, now) >= self.patience
        ]
        if lost:
            await ports.ledger.append([Vanished(at=now, ref=ref) for ref in lost])
            for ref in lost:
                since.pop(ref.key, None)

    def keys(self) -> Iterable[str]:
        return [key for since in self._since.values() for key in since]


@dataclass
class LastPasses:
    """What the last pass at each place came to, as far as the next one needs it. Bounded: one entry for each place."""

    _counted: dict[PlaceKey, tuple[int, int]] = field(default_factory=dict)
    _breakers: dict[PlaceKey, str] = field(default_factory=dict)
    _failures: dict[PlaceKey, str] = field(default_factory=dict)

    def count(self, place: PlaceKey, seen: int, running: int) -> None:
        """How much a full pass found."""
        self._counted[place] = (seen, running)

    def counted(self, place: PlaceKey) -> tuple[int, int] | None:
        return self._counted.get(place)

    def set_breaker(self, place: PlaceKey, breaker: str | None) -> None:
        """Hints come one by one, and for one object at a time never too much is due: what a full pass found
        applies until the next one."""
        self._breakers.pop(place, None)
        if breaker is not None:
            self._breakers[place] = breaker

    def breaker(self, place: PlaceKey) -> str | None:
        return self._breakers.get(place)

    def set_failure(self, place: PlaceKey, why: str | None) -> bool:
        """Why the pass stopped midway. True: it is a new failure, or another one."""
        before = self._failures.pop(place, None)
        if why is not None:
            self._failures[place] = why
        return why is not None and why != before

    @property
    def failures(self) -> Mapping[PlaceKey, str]:
        return self._failures


class Tenancy(NamedTuple):
    """Running work that has a device, as a list showed it."""

    ref: Ref
    started: datetime


Tenancies = dict[str, dict[str, Tenancy]]  # by device, by key


@dataclass
class Tenants:
    """Bounded: what runs with GPUs in the last whole list of each place, and what was noted since.

    Which workload got a GPU between the stop of another and its next start. A list gives a hint, a read by uid
    proof.
    """

    _known: dict[PlaceKey, Tenancies] = field(default_factory=dict)

    def at(self, place: PlaceKey) -> Tenancies:
        return self._known.setdefault(place, {})

    def replace(self, place: PlaceKey, known: Tenancies) -> None:
        """From the result of a full pass."""
        self._known[place] = known


def note_tenants(subjects: Iterable[Subject], book: Rulebook, *into: Tenancies) -> None:
    """Work that runs, has GPUs and may block others; not monitors, which have all of them."""
    for one in subjects:
        if _has_gpus(one) and isinstance(one.started, datetime) and book.settings(one).untouchable is False:
            key, tenancy = one.ref.key, Tenancy(one.ref, one.started)
            for device in _devices_of(one):
                for known in into:
                    known.setdefault(device, {})[key] = tenancy


async def new_tenants(
    tenants: Tenants, platform: Platform, subjects: Sequence[Subject], book: Rulebook
) -> dict[str, Tenant]:
    """By key of the workload that was started again."""
    known = tenants.at(key_of(platform))
    found = {}
    for one in subjects:
        for device, hint in _tenancy_hints(one, known, book):
            tenant = await _proven_tenant(platform, one, device, hint)
            if tenant is not None:
                found[one.ref.key] = tenant
                break
    return found


def _tenancy_hints(one: Subject, known: Tenancies, book: Rulebook) -> Iterator[tuple[str, Tenancy]]:
    """Those that began after its stop-hold was over, and before it was started again."""
    if not isinstance(one.previous_end, datetime) or not isinstance(one.started, datetime) or not _has_gpus(one):
        return
    limits = book.settings(one).limits
    if isinstance(limits, Unknown):
        return
    free = one.previous_end + limits.hold_after_stop
    for device in _devices_of(one):
        for key, hint in known.get(device, {}).items():
            if key != one.ref.key and free <= hint.started < one.started:
                yield device, hint


async def _proven_tenant(platform: Platform, one: Subject, device: str, hint: Tenancy) -> Tenant | None:
    """It runs now, as then, and has that device; and it has another owner."""
    with suppress(PlatformError):
        found = await platform.read(hint.ref)
        if not isinstance(found, Subject) or not _has_gpus(found) or found.started != hint.started:
            return None
        owner = found.owner if isinstance(found.owner, str) else None
        if device in _devices_of(found) and (owner is None or owner != one.owner):
            return Tenant(found.ref.path, owner, device, hint.started)
    return None


def _has_gpus(one: Subject) -> bool:
    return one.shape is Shape.WORKLOAD and one.root is None and one.state in LIVE and bool(_devices_of(one))


def _devices_of(one: Subject) -> tuple[str, ...]:
    return () if isinstance(one.devices, Unknown) else one.devices


@dataclass
class _Demanded:
    since: float | None = None  # when it went over the mark, as a timestamp
    high: bool = False


@dataclass
class Pressure:
    """What is scarce: the GPUs of a place, the bytes and inodes of a disk, the bytes for unused images. Kept between
    passes, because GPUs and disks are scarce from a high mark on, until they are below a low one, and because an
    image is read again without the others.

    Bounded: one entry for each place, and one for each disk and image that the last complete list of its place
    showed.
    """

    _demand: dict[PlaceKey, _Demanded] = field(default_factory=dict)
    _held: dict[PlaceKey, frozenset[str]] = field(default_factory=dict)  # GPUs that are open in no workload
    _full: dict[PlaceKey, set[str]] = field(default_factory=dict)  # disks
    # Unused images: since when, when built (of two that came together the newer is kept longer), bytes.
    _images: dict[PlaceKey, dict[str, tuple[datetime, float, int]]] = field(default_factory=dict)

    def is_too_full(self, subject: Subject, marks: DiskMarks) -> bool:
        """The disk it lies on: from the high mark on, until it is below the low one."""
        if subject.disk is None:
            return False
        full = self._full.setdefault((subject.ref.platform, subject.ref.place), set())
        high = subject.disk.full >= marks.high or (subject.disk_name in full and subject.disk.full >= marks.low)
        if high:
            full.add(subject.disk_name)
        else:
            full.discard(subject.disk_name)
        return high

    def is_full(self, place: PlaceKey, disk: str) -> bool:
        """When something on it was last read."""
        return disk in self._full.get(place, ())

    def keep_disks(self, place: PlaceKey, disks: Collection[str]) -> None:
        """Forgets the others: a complete list of the place did not show them."""
        self._full[place] = self._full.get(place, set()).intersection(disks)

    def with_images(self, views: Sequence[View], images: Images) -> list[View]:
        """Unused images, each with the bytes of all that were used as lately, itself included."""
        if images.above is None or not any(one.subject.shape is Shape.IMAGE for one in views):
            return list(views)
        here = self._images.setdefault((views[0].subject.ref.platform, views[0].subject.ref.place), {})
        for one in views:
            since, created, size = unused_image.free_since(one, images), one.subject.created, one.subject.size
            here.pop(one.subject.ref.key, None)
            if isinstance(since, datetime) and isinstance(size, int):
                built = created.timestamp() if isinstance(created, datetime) else 0.0
                here[one.subject.ref.key] = (since, built, size)
        newest_first = sorted(here, key=lambda key: (here[key], key), reverse=True)
        sums = dict(zip(newest_first, accumulate(here[key][2] for key in newest_first), strict=True))
        return [
            replace(one, subject=replace(one.subject, together=sums[one.subject.ref.key]))
            if one.subject.ref.key in sums
            else one
            for one in views
        ]

    def keep_images(self, place: PlaceKey, keys: Collection[str]) -> None:
        """Forgets the others, like disks."""
        self._images[place] = {key: one for key, one in self._images.get(place, {}).items() if key in keys}

    def set_held(self, place: PlaceKey, held: Iterable[str], *, among: Collection[str] | None = None) -> None:
        """GPUs that something outside of workloads has open. `among`: only these were checked."""
        before = frozenset[str]() if among is None else self._held.get(place, frozenset()).difference(among)
        self._held[place] = before.union(held)

    def claimed_share(
        self, claimed: Collection[str], devices: Collection[str], shares: Mapping[str, float] | None
    ) -> float | None:
        """How much of the GPUs is taken. By weight where this machine's GPUs are meant (`shares`), so that a slice is
        not a GPU; by number if a place lists GPUs of its own. None: unknown."""
        held, listed = frozenset[str]().union(*self._held.values()), frozenset(devices)
        taken = held.union(claimed)
        if shares and (not listed or listed & shares.keys()):
            return sum(weight for device, weight in shares.items() if device in taken) / sum(shares.values())
        return len((held & listed).union(claimed)) / len(listed) if listed else None

    def update_demand(self, place: PlaceKey, share: float, marks: Demand, now: datetime) -> None:
        state = self._demand.setdefault(place, _Demanded())
        if share < marks.below:
            state.since, state.high = None, False
        elif share >= marks.above:
            state.since = state.since if state.since is not None else now.timestamp()
            state.high = state.high or now.timestamp() - state.since >= marks.settle.total_seconds()
        elif not state.high:
            state.since = None

    def set_scarce(self, place: PlaceKey) -> None:
        """As the daemon whose ledger this is reports it."""
        self._demand[place] = _Demanded(high=True)

    def gpus_are_scarce(self, place: PlaceKey) -> bool:
        return self._demand.get(place, _Demanded()).high

    def scarce_places(self) -> tuple[PlaceKey, ...]:
        return tuple(place for place, one in self._demand.items() if one.high)


RECENT_END = timedelta(hours=1)  # what ended longer ago proves nothing about its GPUs of today


@dataclass
class GpuCheck:
    """A GPU that is being checked because work on it ended."""

    uuid: str
    began: datetime
    ended: dict[str, Ref] = field(default_factory=dict)  # by key; more may end while it is checked
    task: asyncio.Task[GpuChecked] | None = None  # ends with how it came out


@dataclass
class GpuChecks:
    """Checks of GPUs that ended work gave back: those in progress, and which ends were checked already.

    Bounded: one check for each GPU, and the ends of the last RECENT_END.
    """

    under_way: dict[str, GpuCheck] = field(default_factory=dict)  # by uuid
    _proven: dict[tuple[str, str], datetime] = field(default_factory=dict)  # ended work (key, incarnation)

    def is_proven(self, key: str, incarnation: str) -> bool:
        return (key, incarnation) in self._proven

    def prove(self, key: str, incarnation: str, now: datetime) -> None:
        self._proven[key, incarnation] = now

    def forget(self, now: datetime) -> None:
        """What ended so long ago is not checked again anyway."""
        self._proven = {run: at for run, at in self._proven.items() if timedelta() <= now - at < RECENT_END}

    def take_finished(self) -> list[GpuCheck]:
        over = [check for check in self.under_way.values() if check.task is not None and check.task.done()]
        for check in over:
            del self.under_way[check.uuid]
        return over

    def keys(self) -> Iterable[str]:
        return [key for key, _ in self._proven]


CONFIRMATION_LASTS = timedelta(minutes=2)
MOST_CONFIRMATIONS_EACH = 16  # of one person; the oldest is forgotten
MOST_CONFIRMATIONS = 1024


class Asker(msgspec.Struct, frozen=True):
    """The user of a request. `uid` comes from the kernel; None: unknown."""

    name: str
    uid: int | None = None


class Pending(msgspec.Struct, frozen=True):
    asker: Asker
    seen: Seen
    action: Action
    until: datetime


def revision_of(seen: Seen) -> str:
    """Which object it is, and which run of it: what a preview showed, for a request on that condition."""
    return blake2b(f"{seen.ref.key}\0{seen.incarnation}".encode(errors="surrogateescape"), digest_size=12).hexdigest()


class Confirmations:
    """Of people: what exactly would be done, and a token that lets it be done once.

    The token is made here and never by the client. It is bound to the user, to the object that was read and to the
    action; it works once and for a short time. Kept in memory: after a restart users must confirm again.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}  # by token, oldest first

    def ask(self, asker: Asker, seen: Seen, action: Action, now: datetime) -> str:
        """The token with which this person confirms it."""
        self._forget(now)
        mine = [token for token, one in self._pending.items() if one.asker == asker]
        for token in mine[: len(mine) - MOST_CONFIRMATIONS_EACH + 1] if len(mine) >= MOST_CONFIRMATIONS_EACH else []:
            del self._pending[token]
        if len(self._pending) >= MOST_CONFIRMATIONS:
            del self._pending[next(iter(self._pending))]
        token = secrets.token_urlsafe(24)
        self._pending[token] = Pending(asker, seen, action, now + CONFIRMATION_LASTS)
        return token

    def take(self, token: str, asker: Asker, action: Action, now: datetime) -> Pending | None:
        """What was requested, once. A token of another user, or for another action, is not touched."""
        self._forget(now)
        found = self._pending.get(token)
        if found is None or (found.asker, found.action) != (asker, action):
            return None
        return self._pending.pop(token)

    def _forget(self, now: datetime) -> None:
        # A clock that was turned back must not make them last longer.
        old = [token for token, one in self._pending.items() if not one.until - CONFIRMATION_LASTS <= now < one.until]
        for token in old:
            del self._pending[token]


@dataclass(frozen=True)
class Listing:
    """What one full list of a place contained."""

    begun: float  # steady time
    refs: tuple[Ref, ...] = ()
    unseen: tuple[str, ...] = ()


@dataclass
class Outlook:
    """What the passes at a place decided about each object there."""

    head: PlaceHead
    decisions: dict[str, Decision] = field(default_factory=dict)  # by key
    left_out: int = 0  # beyond what is kept


@dataclass
class RequestState:
    """What a daemon with a socket keeps for requests, so that they cost its passes nothing: the lists and decisions of
    its last passes, pending confirmations, whose pass waits. Nothing is kept where no socket listens.

    Bounded: one list and one outlook for each place, the latter of at most outlook.MOST decisions; confirmations
    expire.
    """

    enabled: bool = False
    listings: dict[PlaceKey, Listing] = field(default_factory=dict)  # the last whole list
    outlooks: dict[PlaceKey, Outlook] = field(default_factory=dict)
    listing: asyncio.Lock = field(default_factory=asyncio.Lock)  # one list at a time for all requests
    next_list: float = 0.0  # steady time before which no list is made for a request
    turned_away: set[PlaceKey] = field(default_factory=set)  # places whose pass waits for a request to end
    confirmations: Confirmations = field(default_factory=Confirmations)

    def keep_list(self, place: PlaceKey, listing: Listing) -> None:
        if self.enabled:
            self.listings[place] = listing
