"""A Keeper over the platforms that are reachable, with the policy that applies."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gpukeeper.blocking import SystemClock
from gpukeeper.config.load import Loaded, Stamp, load_policy, policy_file, stamp
from gpukeeper.devices.gpus import LocalGpus
from gpukeeper.devices.holders import boot_id, user_name
from gpukeeper.devices.meter import GpuMeter, GpuUsage
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.messages import breaker_closed, for_admins, overdue_message, stopped_message
from gpukeeper.engine.ports import key_of, place_name
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.ledger.evidence import DirectoryEvidence
from gpukeeper.ledger.files import evidence_folder, ledger_path, make_private, usage_path
from gpukeeper.ledger.in_memory import RecalledSignals
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.signals import SqliteSignals, open_signals
from gpukeeper.ledger.usage import SqliteUsage, open_usage
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import LedgerError, PolicyError, UsageError
from gpukeeper.model.event import Event
from gpukeeper.model.policy import Mode
from gpukeeper.model.ports import MessageKind, StorageReader
from gpukeeper.notify.catalog import admin_channels, owner_channels
from gpukeeper.notify.messages import Messages
from gpukeeper.wiring.messages import SEND_AT_END, configure, continue_messages, record_message
from gpukeeper.wiring.places import Reach, find_platforms, local_meters, past_meter

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.admin import CopyState
    from gpukeeper.wiring.present import PresentView


@dataclass
class Session:
    """A Keeper over what is reachable, with the policy that applies and messages about both."""

    keeper: Keeper
    book: Rulebook
    loaded: Loaded
    reaches: list[Reach]
    ledger: SqliteLedger
    signals: SqliteSignals
    evidence: DirectoryEvidence
    user: str
    messages: Messages
    usage: GpuUsage | None = None
    gpu_meter: GpuMeter | None = None
    hours: SqliteUsage | None = None  # how GPUs are used, for programs that stay
    storage: Sequence[StorageReader] = ()
    notes: list[str] = field(default_factory=list)
    copy_state: Callable[[], CopyState | None] = lambda: None  # of the fleet database; None: there is no copy

    @cached_property
    def present(self) -> PresentView:
        """For programs that stay; others start without its modules."""
        from gpukeeper.wiring.present import PresentView

        return PresentView(self)

    def record_hours(self, log: Callable[[str], None]) -> None:
        """For programs that stay. A file that cannot be opened is reported, and stops nothing else."""
        try:
            self.hours = open_usage(usage_path(self.ledger.path), write=True)
        except LedgerError as problem:
            log(f"how the GPUs are used is not recorded: {problem}")
            return
        self.keeper = replace(self.keeper, usage=self.hours)

    def observe_only(self) -> Rulebook:
        """The last good policy, without the right to act."""
        return Rulebook(msgspec.structs.replace(self.loaded.policy, mode=Mode.PLAN))

    @asynccontextmanager
    async def owners_notified(self) -> AsyncIterator[None]:
        """While the block runs: of what was stopped. At its end it waits for messages that are being sent."""
        self.ledger.on_append = self._notify_owners
        try:
            yield
        finally:
            self.ledger.on_append = lambda lines: None
            await self.messages.close(SEND_AT_END)

    @asynccontextmanager
    async def admins_notified(self, log: Callable[[str], None]) -> AsyncIterator[None]:
        """While the block runs, owners too. For programs that stay: a command prints what it finds."""
        messages, settings = self.messages, self.loaded.policy.notify
        messages.log = log
        messages.admins = admin_channels(settings, log)
        messages.digest = settings.digest
        await continue_messages(messages, self.ledger, self.keeper.clock.now())
        self.ledger.on_append = self._notify_of
        try:
            yield
        finally:
            await messages.close()

    def _notify_owners(self, lines: Sequence[Event]) -> None:
        for line in lines:
            message = stopped_message(line)
            if message is not None:
                self.messages.later(message)

    def _notify_of(self, lines: Sequence[Event]) -> None:
        self._notify_owners(lines)
        for line in lines:
            closed = breaker_closed(line)
            if closed is not None:
                self.messages.is_over(MessageKind.BREAKER, closed)
            message = for_admins(line)
            if message is not None:
                self.messages.to_admins(message)

    def passed(self, report: PassReport) -> None:
        """Called after each pass of a program that stays."""
        message = overdue_message(report, self.book.policy.mode)
        if message is not None:
            self.messages.to_admins(message)

    def close(self) -> None:
        if self.usage is not None:
            self.usage.close()
        if self.hours is not None:
            self.hours.close()
        self.ledger.close()
        self.signals.close()


def open_session(
    policy: Path | None = None, *, write: bool, environ: Mapping[str, str] = os.environ, only: str | None = None
) -> Session:
    """`write`: the ledger will be written. `only` narrows to one platform, or one place of it."""
    clock = SystemClock()
    loaded = load_policy(policy, environ=environ)
    if write:
        _trust(loaded)
    gpus = LocalGpus()
    found = find_platforms(loaded, clock, environ, gpus)
    platforms, reaches = tuple(found.platforms), found.reaches
    # Of all platforms: however narrow the pass, what is acted on is measured again first.
    meters = local_meters(found, loaded, clock)
    usage = None if meters is None else meters.usage
    if only is not None:
        platforms = tuple(p for p in platforms if only in (p.name, place_name(p)))
        if not platforms:
            known = ", ".join(f"{r.platform}/{r.place}" for r in reaches if r.reachable)
            why = "".join(f" ({r.why})" for r in reaches if r.platform == only.partition("/")[0] and not r.reachable)
            raise UsageError(f'"{only}" is not a reachable platform{why}. Reachable: {known}')
    path = ledger_path(environ)
    ledger, signals = open_ledger(path, write=write), open_signals(path, write=write)
    capture = loaded.policy.capture
    evidence = DirectoryEvidence(Path(capture.to) if capture.to else evidence_folder(path), capture.quota)
    if usage is not None:
        gpus.let_go = partial(asyncio.to_thread, usage.close)  # no process may hold a GPU that is reset, nor we
    messages = Messages(owner_channels(platforms))
    messages.now, messages.record = clock.now, partial(record_message, ledger, clock)
    keeper = Keeper(
        platforms=platforms,
        ledger=ledger,
        signals=signals if write else RecalledSignals(signals),
        evidence=evidence,
        notifier=messages,
        clock=clock,
        meter=None if meters is None else meters.all,
        recall=past_meter(found, loaded),
        gpus=gpus if usage is not None else None,
        boot=boot_id(),
    )
    configure(messages, loaded.policy, keeper.host)
    book, user = Rulebook(loaded.policy), user_name(os.getuid())
    session = Session(keeper, book, loaded, reaches, ledger, signals, evidence, user, messages, usage)
    here = {key_of(one) for one in platforms}
    session.gpu_meter = None if meters is None else meters.gpus
    session.storage = tuple(one for one in found.storage if (one.name, one.place) in here)
    return session


class PolicyRead(NamedTuple):
    loaded: Loaded
    stamp: Stamp | None


def read_policy(policy: Path | None, last: PolicyRead | None = None, *, needs_scope: bool = True) -> PolicyRead:
    """As in the file now; `last` if it did not change since. Blocks: a daemon calls it in a thread. PolicyError:
    it is broken, or others could change it, and so nothing acts by it."""
    file, now = policy_file(policy), time.time()
    if last is not None and last.stamp is not None and stamp(last.loaded, file, now) == last.stamp:
        _trust(last.loaded)
        return last
    loaded = load_policy(policy, needs_scope=needs_scope)
    _trust(loaded)
    return PolicyRead(loaded, stamp(loaded, file, now))


def follow_policy(session: Session, loaded: Loaded) -> None:
    """A changed policy file counts from the next pass on."""
    session.loaded = loaded  # also if no value changed: a value may be in another line, and warnings name it
    if loaded.policy.digest != session.book.policy.digest:
        session.book = Rulebook(loaded.policy)
        configure(session.messages, loaded.policy, session.keeper.host)
        if session.messages.admins:
            session.messages.admins = admin_channels(loaded.policy.notify, session.messages.log)
            session.messages.digest = loaded.policy.notify.digest
        for one in session.keeper.platforms:
            one.follow(loaded.policy)


def _trust(loaded: Loaded) -> None:
    """Refuses to act by a policy that other users can change. Commands that only read print a warning instead."""
    if loaded.untrusted:
        raise PolicyError([f"{one}. A policy that other users can change is not applied." for one in loaded.untrusted])
    if loaded.policy.capture.to:
        try:
            make_private(Path(loaded.policy.capture.to))
        except LedgerError as problem:
            raise PolicyError([f"{loaded.source}: capture.to: {problem}"]) from problem
