"""Reads objects: what a rule gets of them, joined with their minutes of use and with what the ledger remembers; the
one that a user names; one snapshot of every place. Changes nothing.

With many users not every place is listed for each of them: a name is looked up in the list of the last pass, and only
that one object is read. What is not in it, or is to be acted on, is listed again, once for all requests, with pauses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.memory import Listing, new_tenants
from gpukeeper.engine.ports import Platform, bug_words, key_of, place_name
from gpukeeper.lifecycle.activity import active_minutes
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.rules.idle import HORIZON_SLACK, horizon, may_be_idle
from gpukeeper.lifecycle.rules.target import in_scope
from gpukeeper.lifecycle.settings import Rulebook, idle_times
from gpukeeper.model.decision import Action, Unseen, View
from gpukeeper.model.errors import KeeperError, PlatformError, UsageError
from gpukeeper.model.event import Event, Noticed
from gpukeeper.model.fold import lasting_key, recalled, remember, with_lasting_holds
from gpukeeper.model.policy import WITHOUT_GPU, Policy
from gpukeeper.model.series import Series
from gpukeeper.model.subject import EMPTY, LIVE, Gone, Hold, Memory, Outcome, Ref, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

ANOTHER_END = timedelta(seconds=5)  # two clocks may differ by less
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
    runs = subject.shape is Shape.WORKLOAD and subject.state in LIVE
    return subject.class_ if runs and isinstance(subject.class_, str) and subject.class_ != WITHOUT_GPU else None


def _is_still_unused(subject: Subject, memory: Memory) -> bool:
    """An engine that lost the last use of it reports nothing new: the time in the ledger is later."""
    since, used = memory.first_seen_ended, _when(subject.last_used)
    unused = subject.state is State.ENDED and memory.state == State.ENDED.value
    return unused and since is not None and (used is None or used <= since)


def _when(fact: datetime | Unknown | None) -> datetime | None:
    return fact if isinstance(fact, datetime) else None


HOUR = timedelta(hours=1)
_NOT_REMEMBERED = (Shape.DEVICE, Shape.NODE)


async def build_views(
    keeper: Keeper, platform: Platform, subjects: Sequence[Subject], book: Rulebook, lines: list[Event], now: datetime
) -> list[View]:
    """Subjects joined with memory and signals. Newly noticed facts are folded in at once and added to `lines`."""
    keys = [s.ref.key for s in subjects if s.shape not in _NOT_REMEMBERED]
    keys += [key for s in subjects if (key := lasting_key(s)) is not None]
    live = [s for s in subjects if may_be_idle(s, book)]
    series = await _minutes_of_use(keeper, live, book.policy, now)
    asking = [s for s in subjects if s.marks.keep_alive is True]
    elsewhere = {s.ref.key: await holds_elsewhere(keeper, book, s, now) for s in asking}
    if leased := [s.ref.key for s in live if s.ref.key in elsewhere]:
        # Whether it was used since its last lease, which may be longer ago than any idle time.
        series |= await keeper.signals.series(leased, now - max(book.policy.hold_within, _horizon(book.policy)), now)
    memories = await keeper.ledger.memories(keys)  # last: a hold that was granted while we waited counts
    tenants = await new_tenants(keeper.tenants, platform, subjects, book)
    watched, scarce_gpus = keeper.uptime.watched_since(now), keeper.pressure.gpus_are_scarce(key_of(platform))
    joined = []
    for subject in subjects:
        key = subject.ref.key
        memory = memories.get(key, EMPTY)
        line = notice(subject, memory, now)
        if line is not None:
            lines.append(line)
            memory = remember(memory, line) or EMPTY
        if subject.lasting is not None:
            memory = with_lasting_holds(subject, memory, memories.get(lasting_key(subject) or "", EMPTY))
        subject = recalled(subject, memory)  # noqa: PLW2901
        # Scarce GPUs shorten idle times, a full disk the ages of trees.
        is_work = subject.shape is Shape.WORKLOAD
        scarce = scarce_gpus if is_work else keeper.pressure.is_too_full(subject, book.policy.disk)
        held = elsewhere.get(key, ())
        joined.append(View(subject, series.get(key, ()), memory, scarce, held, watched, tenants.get(key)))
    return keeper.pressure.with_images(joined, book.policy.images)


async def _minutes_of_use(
    keeper: Keeper, subjects: Sequence[Subject], policy: Policy, now: datetime
) -> dict[str, tuple[Series, ...]]:
    """As far back as the idle rule searches for use. Where passes act seldom that is more than a day; so much is read
    only for what was not used within the time that is enough where they act often."""
    if not subjects:
        return {}
    often = msgspec.structs.replace(policy, schedule=msgspec.structs.replace(policy.schedule, at=None))
    far, near = _horizon(policy), min(_horizon(policy), _horizon(often))
    found = dict(await keeper.signals.series([s.ref.key for s in subjects], now - near, now))
    if near == far:
        return found
    unused = [
        s.ref.key
        for s in subjects
        if isinstance(s.devices, Unknown)
        or not active_minutes(found.get(s.ref.key, ()), s.devices, policy.activity, now - near)
    ]
    return {**found, **(await keeper.signals.series(unused, now - far, now))} if unused else found


async def recall(keeper: Keeper, subjects: Sequence[Subject], book: Rulebook) -> None:
    """A single `plan` or `apply` has no minutes of its own to judge by; what others measured has."""
    if keeper.recall is None or keeper.uptime.serving:
        return
    live = [one for one in subjects if may_be_idle(one, book)]
    if not live:
        return
    with suppress(PlatformError):  # not measured is not idle
        await keeper.signals.add(await keeper.recall.read(live))


async def holds_elsewhere(keeper: Keeper, book: Rulebook, subject: Subject, now: datetime) -> tuple[Hold, ...]:
    """Its owner's holds on other workloads that have some of its GPUs, as far back as holds add up."""
    if not isinstance(subject.owner, str) or isinstance(subject.devices, Unknown):
        return ()
    devices = frozenset(subject.devices)
    found = await keeper.ledger.holds_of(subject.owner, now - book.policy.hold_within - book.policy.hold_total)
    others = [hold for key, holds in found.items() if key != subject.ref.key for hold in holds]
    return tuple(hold for hold in others if devices.intersection(hold.devices))


def _horizon(policy: Policy) -> timedelta:
    """Far enough for the longest idle window and the warnings about it."""
    return horizon(policy, max(idle_times(policy), default=HOUR)) + HORIZON_SLACK


SHOWN_PROBLEMS = 2  # of what could not be read
FRESH = 5.0  # seconds; a list that is not older answers for the world as it is now
PAUSE = 1.0  # seconds between two lists made for requests, at least; else twice as long as the last one took
MOST_PATHS = 20  # in a sentence


class FoundSubject(msgspec.Struct, frozen=True):
    platform: Platform
    view: View


async def find(keeper: Keeper, book: Rulebook, words: str, *, acting: bool = False) -> FoundSubject:
    """The one object whose path ends with these words, as it is now. `acting`: it will be stopped or removed."""
    if not keeper.request_state.enabled:
        matches, silent = await _observed(keeper, book, words)
        return await _only_one(keeper, book, words, matches, silent)
    refs = _listed(keeper, book, words)
    by_uid = len(refs) == 1 and refs[0].uid == words
    if len(refs) == 1 and (by_uid or not acting):
        found = await _read_subjects(keeper, book, refs)
        if found:
            return found[0]
    return await _listed_anew(keeper, book, words)


async def read_subject(keeper: Keeper, book: Rulebook, ref: Ref) -> FoundSubject | None:
    """The same object as it is now. None: it does not exist, or cannot be read."""
    found = await _read_subjects(keeper, book, [ref])
    return found[0] if found else None


async def _listed_anew(keeper: Keeper, book: Rulebook, words: str) -> FoundSubject:
    steady = asyncio.get_running_loop().time
    began = steady()
    async with keeper.request_state.listing:
        if all(one.begun >= began - FRESH for one in _listings(keeper, book)):
            silent = [why for one in _listings(keeper, book) for why in one.unseen]
            matches = await _read_subjects(keeper, book, _listed(keeper, book, words))
        else:
            await asyncio.sleep(max(keeper.request_state.next_list - steady(), 0.0))
            begun = steady()
            matches, silent = await _observed(keeper, book, words)
            keeper.request_state.next_list = steady() + max(PAUSE, 2 * (steady() - begun))
    return await _only_one(keeper, book, words, matches, silent)


async def _only_one(
    keeper: Keeper, book: Rulebook, words: str, matches: list[FoundSubject], silent: list[str]
) -> FoundSubject:
    # An object whose name is the uid of another one must not prevent that one from being named.
    matches = [one for one in matches if one.view.subject.ref.uid == words] or matches
    if not matches:
        matches = [one for platform in keeper.platforms for one in await _parts(keeper, platform, book, words)]
    if not matches:
        more = f"; and {len(silent) - SHOWN_PROBLEMS} more" if len(silent) > SHOWN_PROBLEMS else ""
        unseen = f" Not everything could be read: {'; '.join(silent[:SHOWN_PROBLEMS])}{more}." if silent else ""
        raise UsageError(f'nothing in the policy\'s scope is named "{words}".{unseen} See: gpukeeper workload list')
    if len(matches) > 1:
        paths = sorted(f"{m.view.subject.ref.path} ({m.view.subject.ref.uid})" for m in matches)
        more = f"\n  and {len(paths) - MOST_PATHS} more" if len(paths) > MOST_PATHS else ""
        listed = "\n  ".join(paths[:MOST_PATHS]) + more
        raise UsageError(f'"{words}" matches {len(matches)} objects; use more of the path, or the uid:\n  {listed}')
    return matches[0]


async def _observed(keeper: Keeper, book: Rulebook, words: str) -> tuple[list[FoundSubject], list[str]]:
    """What fits among everything there is now; and what could not be listed. A bug in one adapter hides its place only,
    as in a pass."""
    matches: list[FoundSubject] = []
    silent: list[str] = []
    for platform in keeper.platforms:
        try:
            matches += await _observed_at(keeper, platform, book, words, silent)
        except Exception as problem:
            silent.append(_why_unseen(platform, problem))
    return matches, silent


def _why_unseen(platform: Platform, problem: Exception) -> str:
    """Raises what does not concern this place alone: a ledger that cannot be read."""
    if isinstance(problem, PlatformError):
        return str(problem)
    if isinstance(problem, KeeperError):
        raise problem
    return f"{place_name(platform)}: {bug_words(problem)}"


async def _observed_at(
    keeper: Keeper, platform: Platform, book: Rulebook, words: str, silent: list[str]
) -> list[FoundSubject]:
    scope = book.policy.scope.get(platform.name)
    if scope is None:
        return []
    begun = asyncio.get_running_loop().time()
    fitting: list[Subject] = []
    refs: list[Ref] = []
    unseen: list[str] = []
    async for page in platform.observe(scope):
        fitting += [one for one in page.subjects if one.ref.ends_with(words)]
        refs += [one.ref for one in page.subjects] if keeper.request_state.enabled else []
        unseen += [f"{one.what}: {one.why}" for one in page.unseen]
    keeper.request_state.keep_list(key_of(platform), Listing(begun, tuple(refs), tuple(unseen)))
    silent += unseen
    joined = await build_views(keeper, platform, fitting, book, [], keeper.clock.now())
    return [FoundSubject(platform, view) for view in joined]


async def _parts(keeper: Keeper, platform: Platform, book: Rulebook, words: str) -> list[FoundSubject]:
    """What is part of a workload: to be explained, never acted on by itself."""
    try:
        found = [await platform.read(ref) for ref in await platform.parts(words)]
    except Exception as problem:
        _why_unseen(platform, problem)
        return []
    parts = [one for one in found if isinstance(one, Subject)]
    views = await build_views(keeper, platform, parts, book, [], keeper.clock.now())
    return [FoundSubject(platform, view) for view in views]


def _listings(keeper: Keeper, book: Rulebook) -> list[Listing]:
    """Of every place that the policy covers; one that was never listed is as old as can be."""
    never = Listing(float("-inf"))
    return [
        keeper.request_state.listings.get(key_of(p), never) for p in keeper.platforms if p.name in book.policy.scope
    ]


def _listed(keeper: Keeper, book: Rulebook, words: str) -> list[Ref]:
    refs = [ref for one in _listings(keeper, book) for ref in one.refs if ref.ends_with(words)]
    refs = [ref for ref in refs if in_scope(book.policy, ref)]
    return [ref for ref in refs if ref.uid == words] or refs


async def _read_subjects(keeper: Keeper, book: Rulebook, refs: Sequence[Ref]) -> list[FoundSubject]:
    found = []
    for ref in refs[:MOST_PATHS]:
        platform = keeper.platform_at(ref)
        one_found = None if platform is None else await platform.read(ref)
        if platform is not None and isinstance(one_found, Subject):
            (view,) = await build_views(keeper, platform, [one_found], book, [], keeper.clock.now())
            found.append(FoundSubject(platform, view))
    return found


class UnseenAt(Unseen, frozen=True):
    """With its place."""

    platform: str
    place: str


@dataclass
class FleetSnapshot:
    """`recorded` and `absent`: the ledger's memory from before, and what it has that a complete list lacks."""

    views: list[View] = field(default_factory=list)
    unseen: list[UnseenAt] = field(default_factory=list)
    recorded: dict[str, Memory] = field(default_factory=dict)
    absent: list[Ref] = field(default_factory=list)
    offers: dict[tuple[str, str], frozenset[Action]] = field(default_factory=dict)

    @property
    def doubtful(self) -> frozenset[str]:
        """Places of which not everything was listed."""
        return frozenset(one.place for one in self.unseen)


async def observe_fleet(keeper: Keeper, book: Rulebook) -> FleetSnapshot:
    found = FleetSnapshot()
    for platform in keeper.platforms:
        found.offers[platform.name, platform.place] = frozenset(platform.guards)
        try:
            await _observe_place(keeper, book, platform, found)
        except PlatformError as problem:
            found.unseen.append(UnseenAt("everything", str(problem), *key_of(platform)))
        except KeeperError:
            raise
        except Exception as bug:  # of one adapter: the other places are shown
            found.unseen.append(UnseenAt("everything", bug_words(bug), *key_of(platform)))
    return found


async def _observe_place(keeper: Keeper, book: Rulebook, platform: Platform, found: FleetSnapshot) -> None:
    scope = book.policy.scope.get(platform.name)
    if scope is None:
        return
    before = await keeper.ledger.present(platform.name, platform.place)
    listed: set[str] = set()
    complete = True
    async for page in platform.observe(scope):
        keys = [subject.ref.key for subject in page.subjects]
        listed.update(keys)
        complete = complete and not page.unseen
        found.unseen += (UnseenAt(one.what, one.why, *key_of(platform)) for one in page.unseen)
        found.recorded.update(await keeper.ledger.memories(keys))
        found.views += await build_views(keeper, platform, page.subjects, book, [], keeper.clock.now())
    if complete:  # only a complete list shows what is missing
        found.absent += [r for key, r in before.items() if key not in listed and in_scope(book.policy, r)]


MOST_REFRESHED = 5  # objects that one request may be about
REFRESH_DEADLINE = 5.0  # seconds: the reply to the request waits for this


async def refresh(keeper: Keeper, book: Rulebook, words: str) -> None:
    """Reads what a request was about again. If that fails in any way, the next pass shows it: the request was executed,
    and its reply must report that."""
    if not keeper.live.enabled or not words:
        return
    with suppress(Exception):
        async with asyncio.timeout(REFRESH_DEADLINE):
            for ref in keeper.live.named(words)[:MOST_REFRESHED]:
                await _read_again(keeper, book, ref)


async def _read_again(keeper: Keeper, book: Rulebook, ref: Ref) -> None:
    found = await read_subject(keeper, book, ref)
    if found is not None:
        now = keeper.clock.now()
        keeper.live.renew(found.platform, found.view, decide(found.view, book, now), book, now)
        return
    platform = keeper.platform_at(ref)
    if platform is not None and isinstance(await platform.read(ref), Gone):
        keeper.live.remove(ref)
