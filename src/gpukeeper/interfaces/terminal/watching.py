"""What `serve` and `operator` share: reloading the policy and recording its changes, rotating the ledger daily, and
the lines they print, each once, as soon as it exists. A line begins with its time in UTC, unless the systemd
journal adds one itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from pathlib import Path
from typing import TextIO

import msgspec
import typer

from gpukeeper.blocking import in_thread
from gpukeeper.config.load import Loaded
from gpukeeper.config.machine import UsersNotListed
from gpukeeper.config.show import rows
from gpukeeper.engine.ports import bug_words, place_name
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.ledger.archive import pack_signals, rotate
from gpukeeper.ledger.meta import record_policy
from gpukeeper.ledger.usage import KEPT
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError, PolicyError
from gpukeeper.model.event import Closed, WarningSent
from gpukeeper.model.words import plain
from gpukeeper.views.plan import unseen_notes
from gpukeeper.wiring.session import PolicyRead, Session, follow_policy, read_policy


def log(words: str) -> None:
    """On stderr."""
    stamp = stamped(sys.stderr, datetime.now(UTC))
    print_message("\n".join(stamp + line for line in words.split("\n")))


def stamped(stream: TextIO, at: datetime, environ: Mapping[str, str] = os.environ) -> str:
    """The prefix of a line of that time on that stream."""
    return "" if goes_to_journal(stream, environ) else f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ} "


def goes_to_journal(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """systemd names the socket of its journal in JOURNAL_STREAM, which is inherited: only the stream that is this
    socket goes there, and one that was redirected does not."""
    try:
        facts = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{facts.st_dev}:{facts.st_ino}"


class UnreportedLines:
    def __init__(self) -> None:
        self._reported: dict[tuple[str, str], tuple[PassReport, int, int, int]] = {}  # by place: of the current pass

    def new(self, report: PassReport, *, over: bool) -> tuple[list[Closed], list[WarningSent]]:
        """Outcomes and warnings since the last call for this pass. `over`: nothing more will come of it."""
        place = report.survey.platform.name, report.survey.platform.place
        before, settled, outcomes, warnings = self._reported.pop(place, (report, 0, 0, 0))
        if before is not report:
            settled = outcomes = warnings = 0
        if not over:
            self._reported[place] = (report, len(report.settled), len(report.outcomes), len(report.warnings))
        return [*report.settled[settled:], *report.outcomes[outcomes:]], report.warnings[warnings:]


NOT_RECORDED = ("notify", "fleet")  # commands and addresses: only that they differ


async def record_policy_change(session: Session) -> None:
    loaded, now = session.loaded, session.keeper.clock.now()
    await record_policy(session.ledger, loaded.policy.digest, loaded.source, _values(loaded), now)


def _values(loaded: Loaded) -> dict[str, str]:
    return {
        one.setting: f"value {_digest(one.text)}" if one.setting.startswith(NOT_RECORDED) else one.text
        for one in rows(loaded)
    }


def _digest(words: str) -> str:
    return blake2b(words.encode(errors="surrogateescape"), digest_size=6).hexdigest()


DAY = timedelta(days=1)
READ_WITHIN = timedelta(seconds=60)  # a policy; its directory may be on a mount that hangs
GROUPS_FRESH = 600.0  # seconds: the members of a Unix group may change while the file does not


class PolicyReloader:
    """The policy file, read again in a thread when it changed. While it is invalid, the last valid one is used
    to observe, not to act."""

    def __init__(self, session: Session, policy: Path | None, log: Callable[[str], None]) -> None:
        self._session, self._policy, self._log = session, policy, log
        self._read: PolicyRead | None = None
        self._groups_at = 0.0  # steady time at which Unix groups were last read
        self._silent = False  # they could not be read the last time
        self._lock = asyncio.Lock()  # places call at the same time
        self.problem: str | None = None
        self._recorded = ""  # the digest of the policy that the ledger has
        self._expired = self._expired_now()  # printed when the session was opened

    @property
    def last(self) -> Rulebook:
        """As of the last reading that went well."""
        return self._session.book

    def __call__(self) -> Rulebook:
        return self.last if self.problem is None else self._session.observe_only()

    async def refresh(self) -> None:
        """Before each pass."""
        async with self._lock:
            before = self.problem
            try:
                self._read = await self._read_now()
                follow_policy(self._session, self._read.loaded)
                self.problem = None
            except PolicyError as problem:
                self.problem = str(problem)
            except TimeoutError:
                self.problem = (
                    f"The policy could not be read within {READ_WITHIN.total_seconds():g} s. Is its disk slow?"
                )
            if self.problem not in (None, before):
                self._log(f"the policy is not valid any more, so no action is taken:\n{self.problem}")
            elif self.problem is None and before is not None:
                self._log(f"the policy is valid again: mode {self.last.policy.mode}")
            if self.problem is None:
                self._log_expired()
                await self._record()

    async def _record(self) -> None:
        """What changed, for the policy page. A ledger that cannot be written is reported by the pass."""
        digest = self._session.loaded.policy.digest
        if digest != self._recorded:
            with suppress(OSError, KeeperError):
                await record_policy_change(self._session)
                self._recorded = digest

    async def _read_now(self) -> PolicyRead:
        last, steady = self._read, asyncio.get_running_loop().time()
        grouped = last is not None and any(one.unix_group for one in last.loaded.policy.groups.values())
        if last is not None and not (grouped and steady - self._groups_at >= GROUPS_FRESH):
            return await in_thread(lambda: read_policy(self._policy, last), READ_WITHIN)
        self._groups_at = steady
        try:
            found = await in_thread(lambda: read_policy(self._policy), READ_WITHIN)
            self._silent = False
        except (UsersNotListed, TimeoutError) as problem:
            if last is None:
                raise
            if not self._silent:
                self._log(f"members of Unix groups could not be read, the last known ones are used: {problem}")
            self._silent = True
            return await in_thread(lambda: read_policy(self._policy, last), READ_WITHIN)
        return found

    def _expired_now(self) -> tuple[str, ...]:
        return self._session.loaded.expired(self._session.keeper.clock.now())

    def _log_expired(self) -> None:
        """Printed once, when it expires: what it protected may be due from now on."""
        before, self._expired = self._expired, self._expired_now()
        for words in self._expired:
            if words not in before:
                self._log(f"policy: {words}")


async def rotate_daily(session: Session, stop: asyncio.Event, log: Callable[[str], None]) -> None:
    while not stop.is_set():
        policy, now = session.book.policy, session.keeper.clock.now()
        try:
            done = await rotate(session.ledger, policy.ledger, now, keep_unsent=policy.fleet.kept_unsent)
            if done.believed is not None:
                await session.evidence.prune(policy.capture.keep, done.believed)
                if session.hours is not None:
                    await session.hours.prune(done.believed - KEPT)
            await pack_signals(session.ledger, now, stop)  # last: a full disk forbids it, and the others make room
        except (OSError, KeeperError) as problem:
            log(f"the ledger could not be rotated: {problem}")
        except Exception as bug:  # nothing that is watched depends on it
            log(f"the ledger could not be rotated: {bug_words(bug)}")
        waiting = asyncio.ensure_future(stop.wait())
        await asyncio.wait([waiting], timeout=DAY.total_seconds())
        waiting.cancel()


class PassPrinter:
    """One line for every outcome and warning on stdout; on stderr what becomes unreadable and readable again."""

    def __init__(self, log: Callable[[str], None], *, json: bool, quiet: bool) -> None:
        self._log, self._json, self._quiet = log, json, quiet
        self._unseen: dict[str, list[str]] = {}
        self._unreported = UnreportedLines()

    def in_progress(self, report: PassReport) -> None:
        self._print(report, over=False)

    def finished(self, report: PassReport) -> None:
        self._print(report, over=True)
        if report.plan.breaker and not self._json:
            typer.echo(stamped(sys.stdout, report.survey.at) + plain(f"breaker: {report.plan.breaker}"))
        if not self._quiet:
            for words in report.relief:
                self._log(words)
            self._log_unseen(report)

    def _print(self, report: PassReport, *, over: bool) -> None:
        outcomes, warnings = self._unreported.new(report, over=over)
        if self._json:
            for line in (*outcomes, *warnings):
                typer.echo(msgspec.json.encode(line))
            return
        stamps = [stamped(sys.stdout, line.at) for line in (*outcomes, *warnings)]
        show.table([*map(show.outcome_row, outcomes), *map(show.warning_row, warnings)], stamps=stamps)

    def _log_unseen(self, report: PassReport) -> None:
        """Printed when it begins and when it ends: no output must not be mistaken for no problem."""
        if not report.survey.whole or report.stopped is not None:
            return  # a narrow pass reads only what changed
        place = place_name(report.survey.platform)
        now = unseen_notes(report)
        if now != self._unseen.get(place, []):
            self._log("\n".join(now) if now else f"{place}: everything can be read again")
        self._unseen[place] = now
