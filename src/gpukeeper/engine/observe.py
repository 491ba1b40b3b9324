"""Observe and decide: everything at one place, page by page, joined with memory and signals. Writes nothing: what the
ledger does not know yet, a lease that begins included, are lines for the pass to append."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeAlias

import msgspec

from gpukeeper.engine.answering import Listing
from gpukeeper.engine.backoff import BACK_OFF
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.missing import confirmed
from gpukeeper.engine.notice import is_strange
from gpukeeper.engine.ports import Platform, key_of
from gpukeeper.engine.tenants import Tenancies, note_tenants
from gpukeeper.engine.view import recall, views
from gpukeeper.lifecycle.budget import Fleet
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.narrow import Narrow
from gpukeeper.lifecycle.rules.idle import may_be_idle, watched
from gpukeeper.lifecycle.rules.target import in_scope
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.lifecycle.waste import Waste, wasted
from gpukeeper.model.decision import ACTING, Action, Decision, Snapshot, Unseen, Verdict, View
from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.event import Complaint, Decided, Event, Held
from gpukeeper.model.identity import Ref
from gpukeeper.model.memory import EMPTY
from gpukeeper.model.subject import Gone, Outcome, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
AGES, OLDER = ((HOUR, "<1h"), (DAY, "<1d"), (7 * DAY, "<7d"), (30 * DAY, "<30d")), ">=30d"
AT_ONCE = 16  # looks; a platform paces itself
LIVE = "live"  # of a tree that is no leftover of anything: what it belongs to runs; in place of its category
_LIVE = (State.RUNNING, State.PAUSED)
# Images, build cache and trees come and go by the hundred: they say nothing of whether the world is whole, nor may
# many of them raise a budget that is a share.
_NOT_COUNTED = (Shape.DEVICE, Shape.NODE, Shape.REMNANT, Shape.IMAGE, Shape.CACHE, Shape.TREE)


TREE_LINES = 200  # of one pass: changed decisions about trees. Anybody may make trees by the thousand
Record: TypeAlias = "Callable[[Survey, Sequence[Decision], Collection[str]], Awaitable[None]]"


@dataclass
class Pile:
    """So many trees, and what those that were measured add up to. `unsized`: the size of these could not be learned."""

    number: int = 0
    bytes: int = 0
    sized: int = 0
    unsized: int = 0

    def add(self, size: int | Unknown) -> None:
        self.number += 1
        if isinstance(size, Unknown):
            self.unsized += not size.by_design
        else:
            self.sized += 1
            self.bytes += size

    def __add__(self, other: Pile) -> Pile:
        both = (self.number + other.number, self.bytes + other.bytes)
        return Pile(*both, self.sized + other.sized, self.unsized + other.unsized)


@dataclass(repr=False)
class Survey:
    """What one look at a place found and decided. `lines` is what the ledger does not know yet."""

    platform: Platform
    at: datetime
    decisions: list[Decision] = field(default_factory=list)
    lines: list[Event] = field(default_factory=list)
    unseen: list[Unseen] = field(default_factory=list)
    missing: list[Ref] = field(default_factory=list)
    live: list[Subject] = field(default_factory=list)  # what the meter reads
    seen: int = 0
    running: int = 0
    before: int = 0
    whole: bool = True  # False: only what changed or fell due was looked at
    vanished: int = 0
    gone: Sequence[Gone] = ()  # provably not there: of those that are missing, or that a narrow look asked for
    counts: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # kind, state, outcome, age
    oldest: dict[str, datetime] = field(default_factory=dict)  # by kind: the end that is longest ago
    idle: Counter[tuple[str, str]] = field(default_factory=Counter)  # running work by what idle makes of it, and class
    nodes: list[Subject] = field(default_factory=list)  # nodes and disks, however narrow the look
    trees: dict[tuple[str, bool], Pile] = field(default_factory=dict)  # by category, and whether they are due
    wasted: list[Waste] = field(default_factory=list)  # held and not used; reported only
    tree_lines: int = 0  # written about trees in this pass
    unwritten: int = 0  # and left out beyond TREE_LINES; the next pass finds them again

    @property
    def due(self) -> list[Decision]:
        return [d for d in self.decisions if d.action is not Action.KEEP]

    def fleet(self, acts: int, trees: int, clock: str | None, broken: str | None = None) -> Fleet:
        return Fleet(self.seen, self.running, self.before, self.vanished, acts, clock, trees, broken)


async def survey(
    keeper: Keeper,
    platform: Platform,
    book: Rulebook,
    narrow: Narrow | None = None,
    only: Sequence[Ref] | None = None,
    record: Record | None = None,
) -> Survey:
    """Look at a place and decide about everything there. Narrowing drops decisions, not what was counted.

    `only`: just these are looked at; how much there is in all is taken from the last whole look. `record`: gets the
    lines of each page and the keys of the trees on it, and then what needs no step is not kept: memory follows the
    page.
    """
    found, here = Survey(platform, keeper.clock.now(), whole=only is None), key_of(platform)
    scope = book.policy.scope.get(platform.name)
    if scope is None:
        return found
    before = {} if only is not None else await _before(keeper, platform, book)
    unsettled = {i.ref.key for i in await keeper.ledger.open_intents(platform.name, platform.place) if i.ref}
    found.before = sum(map(_counts, before.values()))
    look = _Look(keeper, found, book, unsettled, narrow)
    if only is not None:
        # A hint may be about what the policy does not cover: a whole look would never find that it is gone.
        only = [ref for ref in only if in_scope(book.policy, ref)]
    pages = platform.observe(scope) if only is None else _looked_at(platform, only, found)
    begun, refs = asyncio.get_running_loop().time(), list[Ref]()
    try:
        async for page in pages:
            found.unseen += page.unseen
            made = await look.decide(page.subjects)
            for subject in page.subjects:
                before.pop(subject.ref.key, None)
            refs += [one.ref for one in page.subjects] if keeper.answering.enabled else []
            if record is not None:
                await record(found, made, {one.ref.key for one in page.subjects if one.shape is Shape.TREE})
                soon = keeper.clock.now() + 2 * book.policy.schedule.every
                made = [d for d in made if _is_told(d, soon)]
            found.decisions += made
    except PlatformError as problem:
        found.unseen.append(Unseen(f"{platform.name}/{platform.place}", str(problem)))
    look.remember()
    if only is not None:
        found.seen, found.running = keeper.last_passes.counted(here) or (found.seen, found.running)
        return found
    keeper.last_passes.count(here, found.seen, found.running)
    keeper.answering.keep_list(here, Listing(begun, tuple(refs), tuple(f"{u.what}: {u.why}" for u in found.unseen)))
    if not found.unseen:
        # Only a complete list can tell what is missing. Images last: workloads must not wait behind them.
        found.missing = sorted(before.values(), key=_counts, reverse=True)
        if record is not None:
            found.gone = await confirmed(platform, found.missing)
        announced = {one.ref.key for one in found.gone if one.announced}
        found.vanished = await _vanished(keeper, platform, [r for r in found.missing if r.key not in announced])
    await look.update_demand()
    return found


@dataclass
class _Look:
    """What the pages of one look have in common."""

    keeper: Keeper
    found: Survey
    book: Rulebook
    unsettled: set[str]
    narrow: Narrow | None
    claimed: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    disks: set[str] = field(default_factory=set)
    tenants: Tenancies = field(default_factory=dict)

    async def decide(self, subjects: Sequence[Subject]) -> list[Decision]:
        """About one page of them. Adds to what was found on the way."""
        keeper, found, book, now = self.keeper, self.found, self.book, self.keeper.clock.now()
        await recall(keeper, subjects, book)
        if found.platform.local:  # elsewhere nobody says which device it is
            note_tenants(subjects, book, self.tenants, keeper.tenants.at(key_of(found.platform)))
        made = []
        for view in await views(keeper, found.platform, subjects, book, found.lines, now):
            subject = view.subject
            if subject.shape is Shape.DEVICE:
                self.devices.add(subject.ref.uid)
                self.held.update([subject.ref.uid] if isinstance(subject.busy, str) else [])
            if subject.disk is not None:
                self.disks.add(subject.disk_name)
            _count(found, subject, self.claimed)
            _count_watched(found, view, book, now)
            _count_kind(found, subject, now)
            if may_be_idle(subject, book):
                found.live.append(subject)
                found.wasted += [one] if (one := wasted(view, book, now)) is not None else []
            decision = _offered(decide(view, book, now), found.platform)
            found.lines += _begun(keeper, decision, now)
            decision = _not_yet(keeper, decision, self.unsettled, now)
            if subject.shape is Shape.NODE:
                found.nodes.append(subject)
            if subject.shape is not Shape.REMNANT and self._is_asked_for(subject, decision, now):
                made.append(decision)
                _pile_up(found, subject, due=decision.action is not Action.KEEP)
        return made

    def _is_asked_for(self, subject: Subject, decision: Decision, now: datetime) -> bool:
        narrow = self.narrow
        return narrow is None or (narrow.fits(subject, now) and narrow.fits_class(decision.class_))

    def remember(self) -> None:
        """Of GPUs and disks at this place: what was seen now, and, where not all was seen, the rest as before."""
        here, keeper = key_of(self.found.platform), self.keeper
        if self.found.whole:
            keeper.tenants.replace(here, self.tenants)
        if self.found.whole and not self.found.unseen:
            keeper.pressure.set_held(here, self.held)
            keeper.pressure.keep_disks(here, self.disks)
        else:
            keeper.pressure.set_held(here, self.held, among=self.devices)

    async def update_demand(self) -> None:
        """Stays as it is where the share of GPUs that are taken is not known."""
        keeper, found = self.keeper, self.found
        shares = await keeper.gpus.shares() if keeper.gpus is not None else None
        if isinstance(shares, Unknown):
            return
        share = keeper.pressure.claimed_share(self.claimed, self.devices, shares)
        if share is not None:
            keeper.pressure.update_demand(key_of(found.platform), share, self.book.policy.demand, found.at)


def _is_told(decision: Decision, soon: datetime) -> bool:
    """Due, or odd, or due so soon that a timer is set for it. The rest is found again by the next whole look."""
    if decision.verdict is Verdict.WAIT:
        return decision.due is not None and decision.due < soon
    odd = decision.verdict in (Verdict.REPORT, Verdict.UNKNOWN) or bool(decision.complaints)
    return decision.action is not Action.KEEP or odd


async def _before(keeper: Keeper, platform: Platform, book: Rulebook) -> dict[str, Ref]:
    present = await keeper.ledger.present(platform.name, platform.place)
    return {key: ref for key, ref in present.items() if in_scope(book.policy, ref)}


async def _looked_at(platform: Platform, refs: Sequence[Ref], found: Survey) -> AsyncIterator[Snapshot]:
    """Just these, each by its uid, as if they had been listed; some at once, for each waits for answers."""
    for first in range(0, len(refs), AT_ONCE):
        some = refs[first : first + AT_ONCE]
        looked = await asyncio.gather(*map(platform.look, some))
        found.gone = [*found.gone, *(one for one in looked if isinstance(one, Gone))]
        # A part of something is no workload.
        whole = tuple(one for one in looked if isinstance(one, Subject) and not isinstance(one.root, str))
        unseen = [Unseen(r.path, one.why) for r, one in zip(some, looked, strict=True) if isinstance(one, Unknown)]
        yield Snapshot(platform.name, platform.place, found.at, whole, tuple(unseen))


async def _vanished(keeper: Keeper, platform: Platform, missing: Sequence[Ref]) -> int:
    """How many are missing that ought to be there."""
    if not platform.tidies:
        return sum(map(_counts, missing))
    memories = await keeper.ledger.memories([ref.key for ref in missing])
    return sum(memories.get(ref.key, EMPTY).state != State.ENDED.value for ref in missing)


async def changed_decisions(
    keeper: Keeper, found: Survey, decisions: Sequence[Decision], trees: Collection[str] = ()
) -> list[Event]:
    """Decisions and complaints as lines, only where they differ from what was recorded last. Of trees only those that
    are due, or were, and no more than a bound: most are young or in use, and that changes from pass to pass."""
    now = found.at
    known = await keeper.ledger.decided([d.seen.ref.key for d in decisions])
    lines: list[Event] = []
    for d in decisions:
        if d.verdict is Verdict.SILENT:
            continue
        ref = d.seen.ref
        if known.get(ref.key) == f"{d.action} {d.rule} {d.verdict}":
            continue
        if ref.key in trees:
            if d.action is Action.KEEP and not d.complaints and ref.key not in known:
                continue
            if found.tree_lines >= TREE_LINES:
                found.unwritten += 1
                continue
            found.tree_lines += 1
        decided = Decided(at=now, ref=ref, action=d.action, rule=d.rule, verdict=d.verdict, reason=d.reason, due=d.due)
        lines.append(msgspec.structs.replace(decided, owner=d.owner))
        lines += (Complaint(at=now, ref=ref, owner=d.owner, what=what) for what in d.complaints)
    return lines


def _offered(decision: Decision, platform: Platform) -> Decision:
    """What a platform has no verb for is reported, never done; nor is anybody warned of it."""
    wanted = decision.then if decision.action is Action.WARN else decision.action
    if wanted is Action.KEEP or wanted in platform.guards:
        return decision
    return _kept(decision, f"{decision.reason}; {platform.name} offers no {wanted}, so it is reported only")


def _not_yet(keeper: Keeper, decision: Decision, unsettled: set[str], now: datetime) -> Decision:
    """An earlier step on it is open, or came to nothing a moment ago: it waits, and what is behind it does not."""
    key = decision.seen.ref.key
    if decision.action is Action.KEEP:
        return decision
    if key in unsettled:
        return _kept(decision, "an earlier step on it is not settled yet; it could not be looked at")
    tried = keeper.back_off.failed_at(key, now)
    if tried is not None and decision.action in ACTING:
        ago = f"a step on it came to nothing {in_words(now - tried)} ago, tried again after {in_words(BACK_OFF)}"
        return _kept(decision, f"{decision.reason}; {ago}")
    return decision


def _kept(decision: Decision, reason: str) -> Decision:
    return msgspec.structs.replace(decision, action=Action.KEEP, reason=reason, verdict=Verdict.REPORT, stage=0)


def _begun(keeper: Keeper, decision: Decision, now: datetime) -> list[Event]:
    """The line of a lease that begins with this decision. Not while the clock is in doubt: its end would be wrong."""
    if decision.begins is None or keeper.clock_watch.doubt(keeper.clock.now()) is not None:
        return []
    return [Held(at=now, ref=decision.seen.ref, owner=decision.owner, by=decision.begins.by, hold=decision.begins)]


def _counts(ref: Ref) -> bool:
    """A ref does not say its shape; of what is remembered only images are told apart, by their kind."""
    return ref.kind != Shape.IMAGE.value


def _count_watched(found: Survey, view: View, book: Rulebook, now: datetime) -> None:
    subject = view.subject
    if subject.shape is Shape.WORKLOAD and subject.root is None and subject.state in _LIVE:
        settings = book.settings(subject)
        found.idle[watched(view, settings, now), settings.class_name] += 1


def _count_kind(found: Survey, subject: Subject, now: datetime) -> None:
    """For those who watch the watcher: how much of what is there, and for how long it has been over."""
    if subject.shape is not Shape.WORKLOAD or subject.root is not None:
        return
    kind, ended = subject.ref.kind, subject.ended if subject.state is State.ENDED else None
    state = "unknown" if isinstance(subject.state, Unknown) else subject.state.value
    outcome = subject.outcome.value if isinstance(subject.outcome, Outcome) and state == State.ENDED.value else ""
    age = ""
    if isinstance(ended, datetime):
        age = next((words for span, words in AGES if now - ended < span), OLDER)
        found.oldest[kind] = min(ended, found.oldest.get(kind, ended))
    found.counts[kind, state, outcome, age] += 1


def _pile_up(found: Survey, subject: Subject, *, due: bool) -> None:
    if subject.shape is Shape.TREE:
        category = LIVE if subject.state in _LIVE else subject.category.value
        found.trees.setdefault((category, due), Pile()).add(subject.size)


def _count(found: Survey, subject: Subject, claimed: set[str]) -> None:
    found.seen += subject.shape not in _NOT_COUNTED and not is_strange(subject)
    runs = subject.state in _LIVE
    if subject.root is None and subject.shape is Shape.WORKLOAD:
        found.running += runs or subject.live_children != 0
    if subject.root is None and runs and subject.shape is not Shape.DEVICE and isinstance(subject.devices, tuple):
        claimed.update(subject.devices)
