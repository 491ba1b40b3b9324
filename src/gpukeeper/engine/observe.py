"""Observe and decide: everything at one place, page by page, joined with memory and signals; and how much that is,
for breaker, budget and metrics. Writes nothing: what the ledger does not know yet, a lease that begins included, are
lines for the pass to append.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeAlias

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.memory import Listing, Tenancies, confirmed_gone, note_tenants
from gpukeeper.engine.ports import Platform, Ports, key_of, place_name
from gpukeeper.engine.usage import SightCollector
from gpukeeper.engine.view import build_views, is_strange, recall
from gpukeeper.lifecycle.activity import Waste, wasted
from gpukeeper.lifecycle.budget import BudgetFacts
from gpukeeper.lifecycle.claims import blocks_use, claim_state
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.rules.idle import may_be_idle, watched
from gpukeeper.lifecycle.rules.target import in_scope
from gpukeeper.lifecycle.settings import Narrow, Rulebook
from gpukeeper.model.decision import Action, Decision, PlaceHead, Snapshot, Unseen, Verdict, View
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.event import Complaint, Decided, Event, Held
from gpukeeper.model.subject import EMPTY, LIVE, Gone, Hold, Outcome, Ref, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
AGES, OLDER = ((HOUR, "<1h"), (DAY, "<1d"), (7 * DAY, "<7d"), (30 * DAY, "<30d")), ">=30d"
LIVE_TREE = "live"  # of a tree that is no leftover of anything: what it belongs to runs; in place of its category


@dataclass
class TreeCount:
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

    def __add__(self, other: TreeCount) -> TreeCount:
        both = (self.number + other.number, self.bytes + other.bytes)
        return TreeCount(*both, self.sized + other.sized, self.unsized + other.unsized)


@dataclass
class Counts:
    seen: int = 0
    running: int = 0
    before: int = 0  # in the last complete list
    vanished: int = 0  # of those, missing now, that ought to be there
    kinds: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # kind, state, outcome, age
    oldest: dict[str, datetime] = field(default_factory=dict)  # by kind: the end that is longest ago
    idle: Counter[tuple[str, str]] = field(default_factory=Counter)  # running work by what idle makes of it, and class
    decided: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # class, action, verdict, rule
    trees: dict[tuple[str, bool], TreeCount] = field(default_factory=dict)  # by category, and whether they are due

    def add(self, view: View, book: Rulebook, now: datetime) -> None:
        """Only workloads and orphans are `seen`. Images, build cache and trees come and go by the hundred: they are no
        sign of a broken place, nor may many of them raise a budget that is a share."""
        subject = view.subject
        if subject.shape is not Shape.WORKLOAD:
            self.seen += subject.shape is Shape.ORPHAN and not is_strange(subject)
            return
        self.seen += 1
        if subject.root is not None:
            return
        runs = subject.state in LIVE
        self.running += runs or subject.live_children != 0
        if runs:
            settings = book.settings(subject)
            self.idle[watched(view, settings, now), settings.class_name] += 1
        self._add_kind(subject, now)

    def _add_kind(self, subject: Subject, now: datetime) -> None:
        """How much of what is there, and for how long it has been over."""
        kind, state, outcome, age = subject.ref.kind, subject.state, "", ""
        if state is State.ENDED:
            ended = subject.ended
            outcome = subject.outcome if isinstance(subject.outcome, Outcome) else ""
            if isinstance(ended, datetime):
                age = _age(now - ended)
                self.oldest[kind] = min(ended, self.oldest.get(kind, ended))
        self.kinds[kind, "unknown" if isinstance(state, Unknown) else state, outcome, age] += 1

    def add_decision(self, subject: Subject, decision: Decision) -> None:
        if subject.shape is Shape.WORKLOAD and subject.root is None:
            self.decided[decision.class_, decision.action, decision.verdict, decision.rule] += 1

    def add_tree(self, subject: Subject, *, due: bool) -> None:
        if subject.shape is Shape.TREE:
            category = LIVE_TREE if subject.state in LIVE else subject.category.value
            self.trees.setdefault((category, due), TreeCount()).add(subject.size)


def _age(since: timedelta) -> str:
    for span, words in AGES:
        if since < span:
            return words
    return OLDER


TREE_LINES = 200  # of one pass: changed decisions about trees. Any user can create thousands of trees


@dataclass
class PendingLines:
    """Lines for the pass to append; observing itself writes nothing."""

    lines: list[Event] = field(default_factory=list)
    tree_lines: int = 0  # about trees, in this pass
    left_out: int = 0  # beyond TREE_LINES; the next pass finds them again

    def take(self) -> list[Event]:
        lines, self.lines = self.lines, []
        return lines


async def changed_decisions(
    ports: Ports, to_write: PendingLines, decisions: Sequence[Decision], now: datetime, trees: Collection[str] = ()
) -> list[Event]:
    """Decisions and complaints as lines, only where they differ from what was recorded last. Of trees only those that
    are due, or were, and no more than a bound: most are young or in use, and that changes from pass to pass."""
    known = await ports.ledger.decided([d.seen.ref.key for d in decisions])
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
            if to_write.tree_lines >= TREE_LINES:
                to_write.left_out += 1
                continue
            to_write.tree_lines += 1
        decided = Decided(at=now, ref=ref, action=d.action, rule=d.rule, verdict=d.verdict, reason=d.reason, due=d.due)
        lines.append(msgspec.structs.replace(decided, owner=d.owner))
        lines += (Complaint(at=now, ref=ref, owner=d.owner, what=what) for what in d.complaints)
    return lines


AT_ONCE = 16  # looks; a platform paces itself
Record: TypeAlias = "Callable[[Survey, Sequence[Decision], Collection[str]], Awaitable[None]]"


@dataclass(repr=False)
class Survey:
    """What one observation of a place found and decided; how much that was; and what the ledger does not have yet."""

    platform: Platform
    at: datetime
    whole: bool = True  # False: only what changed or became due was read
    decisions: list[Decision] = field(default_factory=list)
    unseen: list[Unseen] = field(default_factory=list)
    missing: list[Ref] = field(default_factory=list)
    gone: Sequence[Gone] = ()  # provably absent: of those that are missing, or that a narrow pass requested
    live: list[Subject] = field(default_factory=list)  # what the meter reads
    nodes: list[Subject] = field(default_factory=list)  # nodes and disks, however narrow the pass
    wasted: list[Waste] = field(default_factory=list)  # held and not used; reported only
    counts: Counts = field(default_factory=Counts)
    to_write: PendingLines = field(default_factory=PendingLines)

    @property
    def due(self) -> list[Decision]:
        return [d for d in self.decisions if d.action is not Action.KEEP]

    def head(self, breaker: str | None = None) -> PlaceHead:
        return PlaceHead(
            platform=self.platform.name,
            place=self.platform.place,
            at=self.at,
            seen=self.counts.seen,
            running=self.counts.running,
            unseen=tuple(self.unseen),
            breaker=breaker,
        )

    def budget_facts(self, acts: int, trees: int, clock: str | None, broken: str | None = None) -> BudgetFacts:
        found = self.counts
        return BudgetFacts(
            seen=found.seen,
            running=found.running,
            before=found.before,
            vanished=found.vanished,
            acts_last_hour=acts,
            clock=clock,
            trees_last_hour=trees,
            broken=broken,
        )


async def survey(
    keeper: Keeper,
    platform: Platform,
    book: Rulebook,
    narrow: Narrow | None = None,
    only: Sequence[Ref] | None = None,
    record: Record | None = None,
) -> Survey:
    """Read a place and decide about everything there. Narrowing drops decisions, not what was counted.

    `only`: just these are read; the totals are taken from the last full pass. `record`: gets the
    lines of each page and the keys of the trees on it, and then what needs no step is not kept: memory follows the
    page.
    """
    found, here = Survey(platform, keeper.clock.now(), whole=only is None), key_of(platform)
    scope = book.policy.scope.get(platform.name)
    if scope is None:
        return found
    before = {} if only is not None else await _before(keeper, platform, book)
    unsettled = {i.ref.key for i in await keeper.ledger.open_intents(platform.name, platform.place) if i.ref}
    found.counts.before = sum(map(_counts, before.values()))
    observation = _Observation(keeper, found, book, unsettled, narrow)
    if only is not None:
        # A hint may be about what the policy does not cover: a full pass would never find that it is gone.
        only = [ref for ref in only if in_scope(book.policy, ref)]
    pages = platform.observe(scope) if only is None else _read_each(platform, only, found)
    begun = asyncio.get_running_loop().time()
    refs = await observation.read(pages, before, record)
    observation.remember()
    await observation.note_usage()
    if only is not None:
        counts = found.counts
        counts.seen, counts.running = keeper.last_passes.counted(here) or (counts.seen, counts.running)
        return found
    keeper.last_passes.count(here, found.counts.seen, found.counts.running)
    keeper.request_state.keep_list(here, Listing(begun, tuple(refs), tuple(f"{u.what}: {u.why}" for u in found.unseen)))
    if not found.unseen:
        # Only a complete list shows what is missing.
        await _note_missing(keeper, found, before.values(), confirm=record is not None)
    await observation.update_demand()
    return found


@dataclass
class _Observation:
    """What the pages of one observation have in common."""

    keeper: Keeper
    found: Survey
    book: Rulebook
    unsettled: set[str]
    narrow: Narrow | None
    claimed: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    disks: set[str] = field(default_factory=set)
    images: set[str] = field(default_factory=set)
    tenants: Tenancies = field(default_factory=dict)
    usage: SightCollector | None = None

    def __post_init__(self) -> None:
        if self.keeper.usage_tracker.enabled:
            self.usage = SightCollector(self.book)

    async def read(self, pages: AsyncIterator[Snapshot], before: dict[str, Ref], record: Record | None) -> list[Ref]:
        """Decide about one page after the other, up to an error of the platform. What was read is removed from
        `before`, and returned if requests need a list."""
        keeper, found = self.keeper, self.found
        refs: list[Ref] = []
        try:
            async for page in pages:
                found.unseen += page.unseen
                made = await self.decide(page.subjects)
                if before:
                    for subject in page.subjects:
                        before.pop(subject.ref.key, None)
                refs += [one.ref for one in page.subjects] if keeper.request_state.enabled else []
                if record is not None:
                    await record(found, made, {one.ref.key for one in page.subjects if one.shape is Shape.TREE})
                    soon = keeper.clock.now() + 2 * self.book.policy.schedule.every
                    made = [d for d in made if _is_told(d, soon)]
                found.decisions += made
        except PlatformError as problem:
            found.unseen.append(Unseen(place_name(found.platform), str(problem)))
        return refs

    async def decide(self, subjects: Sequence[Subject]) -> list[Decision]:
        """About one page of them. Adds to what was found on the way."""
        keeper, found, book, now = self.keeper, self.found, self.book, self.keeper.clock.now()
        await recall(keeper, subjects, book)
        if found.platform.local:  # elsewhere the device is unknown
            note_tenants(subjects, book, self.tenants, keeper.tenants.at(key_of(found.platform)))
        made = []
        for view in await build_views(keeper, found.platform, subjects, book, found.to_write.lines, now):
            subject = view.subject
            if subject.shape is Shape.DEVICE:
                self.devices.add(subject.ref.uid)
                self.held.update([subject.ref.uid] if isinstance(subject.busy, str) else [])
            if subject.shape is Shape.IMAGE:
                self.images.add(subject.ref.key)
            if subject.disk is not None:
                self.disks.add(subject.disk_name)
            self.claimed.update(_claimed(view, book, now))
            if self.usage is not None:
                self.usage.add(view)
            found.counts.add(view, book, now)
            waste = None
            if may_be_idle(subject, book):
                found.live.append(subject)
                waste = wasted(view, book, now)
                found.wasted += [waste] if waste is not None else []
            elif keeper.live.enabled:
                waste = wasted(view, book, now)
            decision = _offered(decide(view, book, now), found.platform)
            if decision.begins is not None:
                found.to_write.lines += _begun(keeper, decision, decision.begins, now)
            decision = _not_yet(keeper, decision, self.unsettled, now)
            found.counts.add_decision(subject, decision)
            if keeper.live.enabled:
                keeper.live.note(found.platform, view, decision, now, waste)
            if subject.shape is Shape.NODE:
                found.nodes.append(subject)
            if subject.shape is not Shape.REMNANT and self._is_asked_for(subject, decision, now):
                made.append(decision)
                found.counts.add_tree(subject, due=decision.action is not Action.KEEP)
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
            keeper.pressure.keep_images(here, self.images)
        else:
            keeper.pressure.set_held(here, self.held, among=self.devices)

    async def note_usage(self) -> None:
        """For the record of how GPUs are used, if there is one."""
        if self.usage is None:
            return
        keeper, found = self.keeper, self.found
        complete = not found.unseen
        sight = await self.usage.sight(
            keeper, keeper.usage_tracker, found.at, whole=found.whole, complete=complete, gone=found.gone
        )
        keeper.usage_tracker.see(key_of(found.platform), sight, self.book.policy.schedule.every)

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
    """Due, or odd, or due so soon that a timer is set for it. The rest is found again by the next full pass."""
    if decision.verdict is Verdict.WAIT:
        return decision.due is not None and decision.due < soon
    odd = decision.verdict in (Verdict.REPORT, Verdict.UNKNOWN) or bool(decision.complaints)
    return decision.action is not Action.KEEP or odd


async def _before(keeper: Keeper, platform: Platform, book: Rulebook) -> dict[str, Ref]:
    present = await keeper.ledger.present(platform.name, platform.place)
    return {key: ref for key, ref in present.items() if in_scope(book.policy, ref)}


async def _read_each(platform: Platform, refs: Sequence[Ref], found: Survey) -> AsyncIterator[Snapshot]:
    """Just these, each by its uid, as if they had been listed; some at once, for each waits for answers."""
    for first in range(0, len(refs), AT_ONCE):
        some = refs[first : first + AT_ONCE]
        results = await asyncio.gather(*map(platform.read, some))
        found.gone = [*found.gone, *(one for one in results if isinstance(one, Gone))]
        # A part of something is no workload.
        whole = tuple(one for one in results if isinstance(one, Subject) and not isinstance(one.root, str))
        unseen = [Unseen(r.path, one.why) for r, one in zip(some, results, strict=True) if isinstance(one, Unknown)]
        yield Snapshot(platform.name, platform.place, found.at, whole, tuple(unseen))


async def _note_missing(keeper: Keeper, found: Survey, left: Collection[Ref], *, confirm: bool) -> None:
    """Of those known before, what was not listed. Work first: it must not wait behind hundreds of images."""
    found.missing = sorted(left, key=_counts, reverse=True)
    if confirm:
        found.gone = await confirmed_gone(found.platform, found.missing)
    announced = {one.ref.key for one in found.gone if one.announced}
    not_announced = [ref for ref in found.missing if ref.key not in announced]
    found.counts.vanished = await _vanished(keeper, found.platform, not_announced)


async def _vanished(keeper: Keeper, platform: Platform, missing: Sequence[Ref]) -> int:
    """How many are missing that ought to be there."""
    if not platform.tidies:
        return sum(map(_counts, missing))
    memories = await keeper.ledger.memories([ref.key for ref in missing])
    return sum(memories.get(ref.key, EMPTY).state != State.ENDED.value for ref in missing)


def _offered(decision: Decision, platform: Platform) -> Decision:
    """What a platform has no verb for is reported, never done, and causes no warning."""
    wanted = decision.then if decision.action is Action.WARN else decision.action
    if wanted is Action.KEEP or wanted in platform.guards:
        return decision
    return _kept(decision, f"{decision.reason}; {platform.name} offers no {wanted}, so it is reported only")


def _not_yet(keeper: Keeper, decision: Decision, unsettled: set[str], now: datetime) -> Decision:
    """An earlier step on it is open, or came to nothing a moment ago: it waits, and what is behind it does not."""
    if decision.action is Action.KEEP:
        return decision
    key = decision.seen.ref.key
    if key in unsettled:
        return _kept(decision, "an earlier step on it is still open, because it could not be read")
    return keeper.back_off.postponed(decision, now) or decision


def _kept(decision: Decision, reason: str) -> Decision:
    return msgspec.structs.replace(decision, action=Action.KEEP, reason=reason, verdict=Verdict.REPORT, stage=0)


def _begun(keeper: Keeper, decision: Decision, hold: Hold, now: datetime) -> list[Event]:
    """The line of a lease that begins with this decision. Not while the clock is in doubt: its end would be wrong."""
    if keeper.clock_watch.doubt(keeper.clock.now()) is not None:
        return []
    return [Held(at=now, ref=decision.seen.ref, owner=decision.owner, by=hold.by, hold=hold)]


def _counts(ref: Ref) -> bool:
    """Whether it is work. A ref has no shape; of what is remembered, images and the like are distinguished by kind."""
    return ref.kind not in (Shape.IMAGE.value, Shape.VOLUME.value, Shape.NETWORK.value)


def _claimed(view: View, book: Rulebook, now: datetime) -> tuple[str, ...]:
    """The GPUs that it takes from others, if it runs. Infrastructure takes none: `report` counts them as free, too."""
    subject = view.subject
    if not (subject.state in LIVE or subject.starting) or not isinstance(subject.devices, tuple) or not subject.devices:
        return ()
    how = claim_state(view, book, now)
    return subject.devices if how is not None and blocks_use(how) else ()
