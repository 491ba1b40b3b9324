"""What a rule gets: a subject joined with its minutes of use and what the ledger remembers.

Built when a place is listed and again just before a step. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.notice import notice
from gpukeeper.engine.ports import Platform, key_of
from gpukeeper.engine.tenants import new_tenants
from gpukeeper.lifecycle.rules.idle import HORIZON_SLACK, horizon, may_be_idle
from gpukeeper.lifecycle.settings import Rulebook, idle_times
from gpukeeper.model.decision import View
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.event import Event
from gpukeeper.model.fold import lasting_key, recalled, remember, with_lasting_holds
from gpukeeper.model.memory import EMPTY, Hold
from gpukeeper.model.subject import Shape, Subject
from gpukeeper.model.unknown import Unknown

HOUR = timedelta(hours=1)


async def build_views(
    keeper: Keeper, platform: Platform, subjects: Sequence[Subject], book: Rulebook, lines: list[Event], now: datetime
) -> list[View]:
    """Subjects joined with memory and signals. Newly noticed facts are folded in at once and added to `lines`."""
    keys = [s.ref.key for s in subjects if s.shape not in (Shape.DEVICE, Shape.NODE)]
    keys += [key for s in subjects if (key := lasting_key(s)) is not None]
    live = [s.ref.key for s in subjects if may_be_idle(s, book)]
    series = dict(await keeper.signals.series(live, now - _horizon(book), now)) if live else {}
    asking = [s for s in subjects if s.marks.keep_alive is True]
    elsewhere = {s.ref.key: await holds_elsewhere(keeper, book, s, now) for s in asking}
    if leased := [key for key in live if key in elsewhere]:
        # Whether it was used since its last lease, which may be longer ago than any idle time.
        series |= await keeper.signals.series(leased, now - max(book.policy.hold_within, _horizon(book)), now)
    memories = await keeper.ledger.memories(keys)  # last: a hold that was granted while we waited counts
    tenants = await new_tenants(keeper.tenants, platform, subjects, book)
    joined = []
    for subject in subjects:
        key = subject.ref.key
        memory = memories.get(key, EMPTY)
        line = notice(subject, memory, now)
        if line is not None:
            lines.append(line)
            memory = remember(memory, line) or EMPTY
        memory = with_lasting_holds(subject, memory, memories.get(lasting_key(subject) or "", EMPTY))
        subject = recalled(subject, memory)  # noqa: PLW2901
        scarce = _is_scarce(keeper, platform, subject, book)
        held = elsewhere.get(key, ())
        watched, tenant = keeper.uptime.watched_since(now), tenants.get(key)
        joined.append(View(subject, series.get(key, ()), memory, scarce, held, watched, tenant))
    return joined


def _is_scarce(keeper: Keeper, platform: Platform, subject: Subject, book: Rulebook) -> bool:
    """Scarce GPUs shorten idle times, a full disk the ages of trees."""
    if subject.shape is Shape.WORKLOAD:
        return keeper.pressure.gpus_are_scarce(key_of(platform))
    return keeper.pressure.is_too_full(subject, book.policy.disk)


async def recall(keeper: Keeper, subjects: Sequence[Subject], book: Rulebook) -> None:
    """A single `plan` or `apply` has no minutes of its own to judge by; what others measured has."""
    live = [one for one in subjects if may_be_idle(one, book)]
    if keeper.recall is None or keeper.uptime.serving or not live:
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


def _horizon(book: Rulebook) -> timedelta:
    """Far enough for the longest idle window and the warnings about it."""
    return horizon(book.policy, max(idle_times(book.policy), default=HOUR)) + HORIZON_SLACK
