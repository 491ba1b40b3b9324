"""What the two programs that stay, `serve` and `operator`, share: the policy that is read again, the daily rotation of
the ledger, and the lines they print."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import typer

from gpukeeper.engine.failures import bug_words
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.heard import Heard
from gpukeeper.ledger.archive import rotate
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError, PolicyError
from gpukeeper.notify.terminals import plain
from gpukeeper.wiring import Session, reload_policy

DAY = timedelta(days=1)


class PolicyNow:
    """The policy file, read again before every pass. While it is broken, the last good one looks but does not act."""

    def __init__(self, session: Session, policy: Path | None, say: Callable[[str], None]) -> None:
        self._session, self._policy, self._say = session, policy, say
        self.problem: str | None = None

    @property
    def last(self) -> Rulebook:
        """As of the last reading that went well."""
        return self._session.book

    def __call__(self) -> Rulebook:
        before = self.problem
        try:
            reload_policy(self._session, self._policy)
        except PolicyError as problem:
            self.problem = str(problem)
            if self.problem != before:
                self._say(f"the policy cannot be used any more, so nothing is acted on:\n{problem}")
            return self._session.looking_only()
        self.problem = None
        if before is not None:
            self._say(f"the policy can be used again: mode {self.last.policy.mode}")
        return self.last


async def rotate_daily(session: Session, stop: asyncio.Event, say: Callable[[str], None]) -> None:
    while not stop.is_set():
        policy, now = session.book.policy, session.keeper.clock.now()
        try:
            done = await rotate(session.ledger, policy.ledger, now)
            if done.believed is not None:
                await session.evidence.prune(policy.capture.keep, done.believed)
        except (OSError, KeeperError) as problem:
            say(f"the ledger could not be rotated: {problem}")
        except Exception as bug:  # nothing that is watched depends on it
            say(f"the ledger could not be rotated: {bug_words(bug)}")
        waiting = asyncio.ensure_future(stop.wait())
        await asyncio.wait([waiting], timeout=DAY.total_seconds())
        waiting.cancel()


class Lines:
    """One line for every outcome and warning on stdout; on stderr what begins and ceases to be unseen."""

    def __init__(self, say: Callable[[str], None], *, json: bool, quiet: bool) -> None:
        self._say, self._json, self._quiet = say, json, quiet
        self._unseen: dict[str, list[str]] = {}
        self._heard = Heard()

    def under_way(self, report: PassReport) -> None:
        self._print(report, over=False)

    def tell(self, report: PassReport) -> None:
        self._print(report, over=True)
        if report.plan.breaker and not self._json:
            typer.echo(plain(f"breaker: {report.plan.breaker}"))
        if not self._quiet:
            for words in report.relief:
                self._say(words)
            self._say_unseen(report)

    def _print(self, report: PassReport, *, over: bool) -> None:
        outcomes, warnings = self._heard.new(report, over=over)
        if self._json:
            for line in (*outcomes, *warnings):
                typer.echo(msgspec.json.encode(line))
            return
        show.table([*map(show.outcome_row, outcomes), *map(show.warning_row, warnings)])

    def _say_unseen(self, report: PassReport) -> None:
        """When it begins and when it is over: whoever reads these lines must not take silence for rest."""
        if not report.survey.whole or report.stopped is not None:
            return  # a look at what changed says nothing of the rest
        place = f"{report.survey.platform.name}/{report.survey.platform.place}"
        now = show.unseen_lines(report)
        if now != self._unseen.get(place, []):
            self._say("\n".join(now) if now else f"{place}: everything is seen again")
        self._unseen[place] = now
