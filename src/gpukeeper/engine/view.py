"""What a rule gets: a subject joined with its minutes of use and what the ledger remembers.

Built when a place is listed and again just before a step. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.notice import notice
from gpukeeper.engine.ports import Platform, key_of
from gpukeeper.engine.tenants import new_tenants
from gpukeeper.lifecycle.activity import active_minutes
from gpukeeper.lifecycle.rules.idle import HORIZON_SLACK, horizon, may_be_idle
from gpukeeper.lifecycle.settings import Rulebook, idle_times
from gpukeeper.model.decision import View
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.event import Event
from gpukeeper.model.fold import lasting_key, recalled, remember, with_lasting_holds
from gpukeeper.model.memory import EMPTY, Hold
from gpukeeper.model.policy import Policy
from gpukeeper.model.series import Series
from gpukeeper.model.subject import Shape, Subject
from gpukeeper.model.unknown import Unknown

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
