"""After the end: every GPU that ended work released is checked until it is clean, or found dirty.

Ends no process: what ended work left is a subject like any other, and the rule `orphan` decides about it.
A GPU that stays dirty is quarantined; with `gpu.reset` it may be reset, behind the gate of lifecycle/reset.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from itertools import pairwise

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.memory import RECENT_END, GpuCheck
from gpukeeper.engine.ports import Gpus, Platform, Ports
from gpukeeper.engine.view import build_views
from gpukeeper.lifecycle.cleanliness import (
    Cleanliness,
    CleanStatus,
    Life,
    Lives,
    ResetFacts,
    assess_gpu,
    new_baseline,
    why_no_reset,
)
from gpukeeper.lifecycle.rules import stop_hold
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Accepted, Verdict, View
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.event import BaselineSeen, Event, GpuChecked, Noticed, Quarantined, ResetTried, Returned
from gpukeeper.model.gpu import CheckResult, Condition, GpuMemory
from gpukeeper.model.policy import Mode, PlaceScope
from gpukeeper.model.subject import EMPTY, LIVE, Gone, Ref, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

CHECKS_AT = (timedelta(seconds=1), timedelta(seconds=5), timedelta(seconds=30))  # after the end; then once at `settle`
CHECKS_AFTER_RESET = (5.0, 30.0)  # seconds
LONGEST = timedelta(minutes=5)  # beyond `settle`: each check and a reset have deadlines of their own
AT_SHUTDOWN = timedelta(seconds=5)
_MAY_RUN = (*LIVE, State.CREATED)  # what is being started has processes before it is seen to run


class ReleasedGpus(msgspec.Struct, frozen=True):
    """Work that ended, and the GPUs it had."""

    ref: Ref
    incarnation: str
    devices: tuple[str, ...]


async def held(ports: Ports, platform: Platform, ref: Ref) -> ReleasedGpus | None:
    """The GPUs that a workload has now, read before it is ended. None: none that are known."""
    if ports.gpus is None or not platform.local:
        return None
    try:
        found = await platform.read(ref)
    except PlatformError:
        return None
    if not isinstance(found, Subject) or isinstance(found.devices, Unknown) or not found.devices:
        return None
    return ReleasedGpus(ref, found.seen.incarnation, found.devices)


async def newly_ended(keeper: Keeper, platform: Platform, lines: Iterable[Event]) -> list[ReleasedGpus]:
    """Work that was found to have ended by itself, or by others."""
    if keeper.gpus is None or not platform.local:
        return []
    ended = [one for one in lines if isinstance(one, Noticed) and one.state is State.ENDED]
    # What ended long ago, and is only new to us, proves nothing about its GPUs of today.
    refs = [one.ref for one in ended if one.ref and (one.ended is None or one.at - one.ended < RECENT_END)]
    found = [await held(keeper, platform, ref) for ref in refs]
    given_back = [one for one in found if one is not None]
    return [one for one in given_back if not keeper.gpu_checks.is_proven(one.ref.key, one.incarnation)]


async def prove_clean(
    keeper: Keeper,
    book: Rulebook,
    given_back: Sequence[ReleasedGpus],
    progress: Callable[[GpuChecked], None] | None = None,
) -> list[GpuChecked]:
    """Check all those GPUs at once. A daemon continues meanwhile; other callers wait for the result."""
    _raise_what_failed(keeper)
    if keeper.gpus is None:
        return []
    keeper.gpu_checks.forget(keeper.clock.now())
    started = {check.uuid: check for one in given_back for check in _begin(keeper, book, keeper.gpus, one)}
    if keeper.uptime.serving:
        return []
    for task in asyncio.as_completed([check.task for check in started.values() if check.task is not None]):
        line = await task
        if progress is not None:
            progress(line)
    _raise_what_failed(keeper)
    return [check.task.result() for check in started.values() if check.task is not None]


async def finish(keeper: Keeper, patience: timedelta = AT_SHUTDOWN) -> None:
    """At the end of a daemon: checks in progress get a moment, then they are recorded as without a result."""
    tasks = [check.task for check in keeper.gpu_checks.under_way.values() if check.task is not None]
    if tasks:
        await asyncio.wait(tasks, timeout=patience.total_seconds())
    lines = []
    for check in keeper.gpu_checks.under_way.values():
        if check.task is not None and not check.task.done():
            check.task.cancel()
            await asyncio.wait([check.task])
            why = "gpukeeper was stopped before the GPU was verified to be clean"
            lines.append(_line(keeper, check, CheckResult.UNKNOWN, why))
    _raise_what_failed(keeper)
    await keeper.ledger.append(lines)


async def learn_baselines(ports: Ports) -> None:
    """How much memory each GPU uses without holders, if that was never measured. Later checks need it."""
    shares = await ports.gpus.shares() if ports.gpus is not None else {}
    if ports.gpus is None or isinstance(shares, Unknown):
        return
    for uuid in shares:
        known = await remembered(ports, uuid)
        if known.baseline_mib is None:
            condition = await ports.gpus.condition(uuid, ports.clock.now())
            if isinstance(condition, Condition):
                await _learn(ports, condition, {}, None)


async def quarantine(ports: Ports, uuid: str, who: str, reason: str) -> bool:
    """False: it was quarantined already."""
    if (await remembered(ports, uuid)).quarantined is not None:
        return False
    await ports.ledger.append([Quarantined(at=ports.clock.now(), ref=gpu_ref(ports, uuid), by=who, reason=reason)])
    return True


async def give_back(ports: Ports, uuid: str, who: str, reason: str) -> bool:
    """The end of a quarantine. False: there was none."""
    if (await remembered(ports, uuid)).quarantined is None:
        return False
    await ports.ledger.append([Returned(at=ports.clock.now(), ref=gpu_ref(ports, uuid), by=who, reason=reason)])
    return True


async def remembered(ports: Ports, uuid: str) -> GpuMemory:
    key = gpu_ref(ports, uuid).key
    return (await ports.ledger.memories([key])).get(key, EMPTY).gpu or GpuMemory()


def gpu_ref(ports: Ports, uuid: str) -> Ref:
    return Ref("host", ports.host, "slice" if uuid.startswith("MIG-") else "gpu", uuid, uuid)


def _begin(keeper: Keeper, book: Rulebook, gpus: Gpus, one: ReleasedGpus) -> list[GpuCheck]:
    """A check of each of its GPUs; one that is in progress covers it, too."""
    keeper.gpu_checks.prove(one.ref.key, one.incarnation, keeper.clock.now())
    started = []
    for uuid in one.devices:
        check = keeper.gpu_checks.under_way.get(uuid)
        if check is None:
            check = GpuCheck(uuid, keeper.clock.now(), {one.ref.key: one.ref})
            keeper.gpu_checks.under_way[uuid] = check
            check.task = asyncio.create_task(_within_time(keeper, book, gpus, check))
        check.ended[one.ref.key] = one.ref
        started.append(check)
    return started


def _raise_what_failed(keeper: Keeper) -> None:
    """A check that could not be recorded, or a bug in it, concerns the pass; it is not lost with its task."""
    for check in keeper.gpu_checks.take_finished():
        if check.task is not None and not check.task.cancelled():
            check.task.result()


async def _within_time(keeper: Keeper, book: Rulebook, gpus: Gpus, check: GpuCheck) -> GpuChecked:
    try:
        async with asyncio.timeout((book.policy.gpu.settle + LONGEST).total_seconds()):
            result, reason = await _check(keeper, book, gpus, check)
    except TimeoutError:
        result, reason = CheckResult.UNKNOWN, "reading its condition timed out"
    line = _line(keeper, check, result, reason)
    lines: list[Event] = [line]
    bad = result in (CheckResult.DIRTY, CheckResult.RESET_FAILED)
    if bad and (await remembered(keeper, check.uuid)).quarantined is None:
        lines.append(Quarantined(at=line.at, ref=line.ref, reason=reason))
    await keeper.ledger.append(lines)
    return line


async def _check(keeper: Keeper, book: Rulebook, gpus: Gpus, check: GpuCheck) -> tuple[CheckResult, str]:
    found, residue_since = await _assess(keeper, gpus, check), None
    for pause in _pauses(book.policy.gpu.settle):
        if found.settled:
            break
        residue_since = (residue_since or keeper.clock.now()) if found.residue else None
        await asyncio.sleep(pause)
        found = await _assess(keeper, gpus, check)
    if found.status is not CleanStatus.DIRTY:
        return found.result, found.reason
    residue_for = keeper.clock.now() - residue_since if residue_since is not None and found.residue else None
    return await _reset(keeper, book, gpus, check, found, residue_for)


def _pauses(settle: timedelta) -> list[float]:
    """Between checks; the first one is immediate."""
    at = [timedelta(), *(after for after in CHECKS_AT if after < settle), settle]
    return [(after - before).total_seconds() for before, after in pairwise(at)]


async def _assess(ports: Ports, gpus: Gpus, check: GpuCheck) -> Cleanliness:
    condition = await gpus.condition(check.uuid, check.began)
    if isinstance(condition, Unknown):
        return assess_gpu(condition, {}, None)
    lives = await _lives(ports, check, condition)
    known = (await remembered(ports, check.uuid)).baseline_mib
    return assess_gpu(condition, lives, await _learn(ports, condition, lives, known))


async def _learn(ports: Ports, condition: Condition, lives: Lives, known: int | None) -> int | None:
    """The baseline after this check."""
    lower = new_baseline(condition, lives, known)
    if lower is None:
        return known
    ref = gpu_ref(ports, condition.uuid)
    await ports.ledger.append([BaselineSeen(at=ports.clock.now(), ref=ref, memory_used_mib=lower)])
    return lower


async def _lives(ports: Ports, check: GpuCheck, condition: Condition) -> dict[str, Life | Unknown]:
    """Of each workload that a holder belongs to, as its platform reports now."""
    ids = {holder.workload_id for holder in condition.holders if isinstance(holder.workload_id, str)}
    return {one: await _life(ports, check, one) for one in ids}


async def _life(ports: Ports, check: GpuCheck, uid: str) -> Life | Unknown:
    """As reported by the places whose work had that GPU."""
    for ref in {(one.platform, one.place): one for one in check.ended.values()}.values():
        platform = ports.platform_at(ref)
        if platform is None:
            return Unknown(f"{ref.platform}/{ref.place} cannot be queried")
        try:
            found = await platform.read_by_id(uid)
        except PlatformError as problem:
            return Unknown(str(problem))
        if isinstance(found, Unknown):
            return found
        if isinstance(found, Gone):
            continue
        if isinstance(found.state, Unknown):
            return found.state
        return Life.LIVE if found.state in _MAY_RUN else Life.ENDED
    if any(ref.uid == uid for ref in check.ended.values()) or await ports.ledger.about(uid):
        return Life.ENDED
    return Life.STRANGER


async def _reset(
    keeper: Keeper, book: Rulebook, gpus: Gpus, check: GpuCheck, found: Cleanliness, residue_for: timedelta | None
) -> tuple[CheckResult, str]:
    """What a dirty GPU comes to: reset and clean, reset without effect, or just dirty."""
    if not book.policy.gpu.reset:
        return found.result, found.reason
    refused = await _why_no_reset(keeper, book, gpus, check, residue_for)
    if refused:
        return found.result, f"{found.reason}; not reset: {'; '.join(refused)}"
    # Durable before it happens: a crash in between must not lead to a second one.
    ref = gpu_ref(keeper, check.uuid)
    await keeper.ledger.append([ResetTried(at=keeper.clock.now(), ref=ref, reason=found.reason)])
    answer = await gpus.reset(check.uuid)
    if not isinstance(answer, Accepted):
        return CheckResult.RESET_FAILED, f"{found.reason}; the reset failed: {answer.why}"
    after = found
    for seconds in CHECKS_AFTER_RESET:
        await asyncio.sleep(seconds)
        after = await _assess(keeper, gpus, check)
        if after.status is CleanStatus.CLEAN:
            return CheckResult.CLEANED, f"{found.reason}; reset, and {after.reason}"
    return CheckResult.RESET_FAILED, f"{found.reason}; reset, and then: {after.reason}"


async def _why_no_reset(
    keeper: Keeper, book: Rulebook, gpus: Gpus, check: GpuCheck, residue_for: timedelta | None
) -> tuple[str, ...]:
    paused = await keeper.ledger.paused()
    if paused is not None or keeper.permission.stopping or book.policy.mode is not Mode.ENFORCE:
        return (f"everything is paused ({paused})" if paused else "gpukeeper may not act now",)
    facts = ResetFacts(
        enabled=book.policy.gpu.reset,
        root=os.geteuid() == 0,
        condition=await gpus.condition(check.uuid, check.began),
        residue_for=residue_for,
        users=await _users(keeper, book, check.uuid),
        last_reset=(await remembered(keeper, check.uuid)).last_reset,
    )
    return why_no_reset(facts, keeper.clock.now())


async def _users(keeper: Keeper, book: Rulebook, uuid: str) -> tuple[str, ...] | Unknown:
    """Workloads that have it: running, paused, or stopped by their owner a moment ago."""
    now, users = keeper.clock.now(), []
    for platform in keeper.platforms:
        try:
            async for page in platform.observe(book.policy.scope.get(platform.name, PlaceScope())):
                if page.unseen:
                    return Unknown(f"{page.unseen[0].what} could not be read: {page.unseen[0].why}")
                subjects = [one for one in page.subjects if one.shape in (Shape.WORKLOAD, Shape.ORPHAN)]
                for view in await build_views(keeper, platform, subjects, book, [], now):
                    has = _has(view, book, uuid, now)
                    if isinstance(has, Unknown):
                        return has
                    users += [view.subject.ref.path] if has else []
        except PlatformError as problem:
            return Unknown(str(problem))
    return tuple(users)


def _has(view: View, book: Rulebook, uuid: str, now: datetime) -> bool | Unknown:
    subject = view.subject
    kept = stop_hold.evaluate(view, book.settings(subject), now).verdict in (Verdict.PROTECT, Verdict.UNKNOWN)
    if isinstance(subject.state, State) and subject.state not in _MAY_RUN and not kept:
        return False
    if isinstance(subject.devices, Unknown):
        return Unknown(f"which GPUs {subject.ref.path} has is unknown ({subject.devices.why})")
    return uuid in subject.devices


def _line(ports: Ports, check: GpuCheck, result: CheckResult, reason: str) -> GpuChecked:
    return GpuChecked(
        at=ports.clock.now(),
        ref=gpu_ref(ports, check.uuid),
        result=result,
        reason=reason,
        workload=", ".join(sorted(ref.path for ref in check.ended.values())),
    )
