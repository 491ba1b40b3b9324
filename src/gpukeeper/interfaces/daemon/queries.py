"""Read-only requests to `serve`: plans, explanations, lines, figures and its own state. Changes nothing.

The caller's own work in full; of the work of others what `observe` shows. The cost of a reply is bounded: the plan
is that of the last passes, one workload is read by its uid, and the ledger is read over a separate connection, so
that no long search keeps the passes from writing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper import __version__
from gpukeeper.blocking import in_thread, real_seconds
from gpukeeper.config.sections import deciding_digest
from gpukeeper.config.show import rows, sentence
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.live import STEP, STEPS
from gpukeeper.engine.loop import in_slices
from gpukeeper.engine.outlook import (
    HISTORY,
    NOT_SHOWN,
    PolicyHead,
    as_others_see,
    daemon_state,
    explained,
    not_there,
    outlooks,
)
from gpukeeper.engine.requests import DataReply, Reply, Request, preview
from gpukeeper.engine.view import find
from gpukeeper.interfaces.terminal.usage import read_report
from gpukeeper.ledger.archive import status
from gpukeeper.ledger.files import usage_path
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.lines import TYPES, NumberedLine
from gpukeeper.ledger.meta import PolicyRecord, backtest_record, newest_backtest, policy_record
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.ledger.usage import SqliteUsage, open_usage
from gpukeeper.lifecycle.budget import TREES
from gpukeeper.lifecycle.holds import is_admin, may_act
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.event import Event, NodeTested
from gpukeeper.model.subject import Memory
from gpukeeper.views.acceptance_history import RunLines, run_lines
from gpukeeper.views.backtest import BacktestOnRecord
from gpukeeper.views.explain import Timeline, timeline
from gpukeeper.views.history import line_row
from gpukeeper.views.live import Delta, MachineView
from gpukeeper.views.live_rows import LiveRows
from gpukeeper.views.own_state import (
    BudgetHealth,
    HealthView,
    LastPolicyChange,
    LedgerHealth,
    PolicySetting,
    PolicyView,
    backtest_warning,
)
from gpukeeper.views.trial import PolicyTrial, WorkloadWords
from gpukeeper.views.usage_report import ReportQuery, UsageReport
from gpukeeper.wiring.hypothetical import read_description, try_policy
from gpukeeper.wiring.session import Session

REMEMBERED = 5.0  # seconds: then the ledger is read again though no pass was made
FORECASTS = 0.05  # seconds of each update for forecasts; those that are not made then are made by the next ones


class PresentView:
    """Of one reader. Costs what changed since it was read last; `busy`: the seconds that this took."""

    def __init__(self, session: Session) -> None:
        self.busy = 0.0
        self._session = session
        self._rows = LiveRows(session.keeper.host)
        self._updating = asyncio.Lock()
        self._remembered: Mapping[str, Memory] = {}
        self._reads, self._read_at = -1, float("-inf")

    async def view(self) -> MachineView:
        async with self._updating:
            return self._rows.view(await self._update())

    async def changes(self, since: int) -> tuple[Delta, int, bool]:
        """What changed after that generation, the generation after it, and whether this is everything: after 0, or if
        that generation is too old."""
        async with self._updating:
            head, rows = await self._update(), self._rows
            return rows.delta(head, since), rows.generation, since < rows.oldest

    async def _update(self) -> MachineView:
        """Returns the head: everything but the rows."""
        session, keeper, rows = self._session, self._session.keeper, self._rows
        await _recall(keeper)
        live, book, now = keeper.live, session.book, keeper.clock.now()
        self.busy = await in_slices(live.forecast(book, now), FORECASTS)
        self.busy += await in_slices(rows.update(live, book, now))
        self.busy += await in_slices(rows.update_gpus(live, now, await self._of_gpus()))
        policy = book.policy
        return MachineView(
            machine=keeper.host,
            at=now,
            version=__version__,
            policy=PolicyHead(session.loaded.source, policy.digest, policy.preset, policy.mode),
            paused=await keeper.ledger.paused(),
            places=tuple(place.state for _, place in sorted(live.places.items())),
            gpus=(),
            workloads=(),
            notes=self._rows.notes,
        )

    async def _of_gpus(self) -> Mapping[str, Memory]:
        """What the ledger remembers of each GPU; measurements do not change it."""
        loop, keeper = asyncio.get_running_loop(), self._session.keeper
        if keeper.live.reads != self._reads or loop.time() - self._read_at > REMEMBERED:
            self._reads, self._read_at = keeper.live.reads, loop.time()
            self._remembered = await keeper.ledger.memories(self._rows.devices)
        return self._remembered


async def _recall(keeper: Keeper) -> None:
    """Use that was recorded before this daemon started, or before the workload was first seen."""
    keys = keeper.live.unknown_history()
    if keys:
        now = keeper.clock.now()
        found = await keeper.signals.series(keys, now - STEPS * STEP, now)
        for key, series in found.items():
            keeper.live.recall(key, series)


ERRORS = 5  # of the last day
DISK = timedelta(seconds=5)
FOR_ADMINS = ("notify", "fleet", "web.proxy", "web.tls")  # commands, addresses and paths


def policy_view(
    session: Session, record: PolicyRecord | None, *, named: bool, admin: bool, now: datetime
) -> PolicyView:
    """`named`: the reader is logged in; everybody else reads the sentence only."""
    loaded = session.loaded
    settings = (
        PolicySetting(one.setting, one.value, one.origin)
        for one in (rows(loaded) if named else ())
        if admin or not one.setting.startswith(FOR_ADMINS)
    )
    return PolicyView(
        source=loaded.source,
        digest=loaded.policy.digest,
        mode=loaded.policy.mode,
        sentence=sentence(loaded.policy),
        warnings=(*loaded.warnings, *loaded.expired(now)),
        settings=tuple(settings),
        recorded_since=record.since if named and record is not None else None,
        change=_last_change(record, admin=admin) if named and record is not None else None,
    )


def _last_change(record: PolicyRecord, *, admin: bool) -> LastPolicyChange | None:
    line = record.last
    if line is None:
        return None
    shown = tuple(one for one in line.changes if admin or not one.setting.startswith(FOR_ADMINS))
    return LastPolicyChange(
        at=line.at,
        before=line.before,
        digest=line.digest,
        changes=shown,
        hidden=len(line.changes) - len(shown),
    )


async def health_view(session: Session, ledger: SqliteLedger, *, admin: bool, now: datetime) -> HealthView:
    """Errors name the work of others, so that only admins get them."""
    budget = session.book.policy.budget
    hour, day = now - timedelta(hours=1), now - timedelta(days=1)
    acted = await ledger.acts_since(hour, TREES, but=True)
    errors: Sequence[tuple[int, Event]] = (
        await ledger.lines(LineFilter(last=ERRORS, errors_only=True, since=day)) if admin else ()
    )
    return HealthView(
        now=now,
        ledger=await _ledger(ledger),
        budget=BudgetHealth(
            per_pass_count=budget.per_pass.count,
            per_pass_share=budget.per_pass.share,
            per_hour_count=budget.per_hour.count,
            per_hour_share=budget.per_hour.share,
            acted_last_hour=acted,
        ),
        paused=await session.keeper.ledger.paused(),
        failures=tuple(
            (f"{place[0]}/{place[1]}", why if admin else "the last pass stopped midway")
            for place, why in session.keeper.last_passes.failures.items()
        ),
        owner_channels=tuple(one.name for one in session.messages.owners),
        admin_channels=tuple(one.name for one in session.messages.admins),
        last_errors=tuple(f"{row.where}: {row.words}" for row in (line_row(*one) for one in errors)),
        copy=session.copy_state() if admin else None,
    )


async def _ledger(ledger: SqliteLedger) -> LedgerHealth:
    found = await status(ledger)
    disk = await in_thread(lambda: os.statvfs(ledger.path.parent), DISK)
    return LedgerHealth(
        lines=found.lines,
        oldest=found.oldest,
        newest=found.newest,
        size=found.size,
        archives=len(found.archives),
        damaged_archives=sum(one.damage is not None for one in found.archives),
        reserve=found.reserve,
        disk_free=disk.f_bavail * disk.f_frsize,
        disk_total=disk.f_blocks * disk.f_frsize,
    )


VERBS = (
    *("plan", "explain", "ledger", "report", "standing", "signals", "runs", "policy", "health", "try", "preview"),
    "backtest",
)
MOST_LINES = 1000
NOT_NAMED = "\0"  # who asks without a login
ACCEPTANCE = str(NodeTested.__struct_config__.tag)
READING = timedelta(seconds=20)
LONGEST_TIMELINE = timedelta(days=7)
SHOWN_TIMELINE = timedelta(hours=24)
MOST_TRIED_GPUS = 64


class Queries:
    def __init__(self, session: Session, web_warnings: Callable[[], tuple[str, ...]] = tuple) -> None:
        self._session, self._web_warnings = session, web_warnings
        self._reader: SqliteLedger | None = None
        self._hours: SqliteUsage | None = None
        self._trying = asyncio.Lock()

    def close(self) -> None:
        if self._hours is not None:
            self._hours.close()
        if self._reader is not None:
            self._reader.close()

    async def answer(self, who: str, request: Request) -> Reply:
        """Every refusal is a sentence."""
        try:
            return await self._answer(who, request)
        except OverflowError:
            return Reply(done=False, words="the time span is too long", exit_code=UsageError.exit_code)
        except TimeoutError:
            return Reply(done=False, words="the ledger could not be read in time; try again", exit_code=1)
        except KeeperError as problem:
            return Reply(done=False, words=str(problem), exit_code=problem.exit_code)

    async def _answer(self, who: str, request: Request) -> DataReply:
        keeper, book = self._session.keeper, self._session.book
        match request.verb:
            case "plan":
                return DataReply.of(await outlooks(keeper, book, who, self._session.loaded.source))
            case "standing":
                return DataReply.of(daemon_state(keeper))
            case "report":
                return DataReply.of(await self._report(who, request))
            case "explain":
                return await self._explain(who, request.workload)
            case "signals":
                return DataReply.of(await self._signals(who, request))
            case "runs":
                return DataReply.of(await self._runs(request))
            case "preview":
                return DataReply.of(await preview(keeper, book, who, request))
            case "try":
                return DataReply.of(await self._try(who, request))
            case "backtest":
                return DataReply.of(await self._backtest(who))
            case "policy" | "health":
                return DataReply.of(await self._own_state(who, request.verb))
            case _:
                return DataReply.of(await self._ledger(who, request))

    async def _explain(self, who: str, words: str) -> DataReply:
        keeper, book = self._session.keeper, self._session.book
        try:
            found = await find(keeper, book, words)
        except UsageError as problem:
            mine = [one for one in await self._about(words) if is_admin(book, who) or one.owner == who]
            raise UsageError(not_there(str(problem), mine, book, keeper.clock.now())) from problem
        subject = found.view.subject
        full = may_act(found.view, book, who) is None
        history = await self._about(subject.ref.uid, HISTORY) if full else ()
        one = await explained(keeper, book, found, history)
        if full:
            return DataReply.of(one)
        return DataReply.of(as_others_see(one, one.decision.reason if subject.owner == who else NOT_SHOWN))

    async def _signals(self, who: str, request: Request) -> Timeline:
        """Of one's own work; an admin's is all."""
        keeper, book = self._session.keeper, self._session.book
        found = await find(keeper, book, request.workload)
        refused = may_act(found.view, book, who)
        if refused is not None:
            raise UsageError(f"the signals of {found.view.subject.ref.path} are {NOT_SHOWN}")
        span = SHOWN_TIMELINE if request.span is None else request.span
        now, key = keeper.clock.now(), found.view.subject.ref.key
        since = now - min(max(span, timedelta()), LONGEST_TIMELINE)
        series = await keeper.signals.series([key], since, now)
        lines = await self._about(found.view.subject.ref.uid)
        return timeline(found.view, book, series.get(key, ()), lines, since, now)

    async def _runs(self, request: Request) -> RunLines:
        """Of the machine, and so of nobody: everybody may read them."""
        async with _reading():
            found = await self._lines().lines(
                LineFilter(last=min(max(request.last, 1), MOST_LINES), types=(ACCEPTANCE,), before=request.before)
            )
        return run_lines(found)

    async def _own_state(self, who: str, verb: str) -> PolicyView | HealthView:
        admin, now = is_admin(self._session.book, who), self._session.keeper.clock.now()
        async with _reading():
            if verb == "policy":
                record, policy = await policy_record(self._lines()), self._session.loaded.policy
                found = policy_view(self._session, record, named=who != NOT_NAMED, admin=admin, now=now)
                untested = backtest_warning(policy, await backtest_record(self._lines(), deciding_digest(policy)))
                if untested is None or not admin:
                    return found
                return msgspec.structs.replace(found, warnings=(*found.warnings, untested))
            health = await health_view(self._session, self._lines(), admin=admin, now=now)
        return msgspec.structs.replace(health, web_warnings=self._web_warnings())

    async def _backtest(self, who: str) -> BacktestOnRecord:
        """Of all work on this machine, and so for admins."""
        if not is_admin(self._session.book, who):
            raise UsageError("the recorded backtest is shown to admins only")
        policy = self._session.loaded.policy
        async with _reading():
            mine = await backtest_record(self._lines(), deciding_digest(policy))
            record = await newest_backtest(self._lines()) if mine is None else mine
        return BacktestOnRecord(record=record, in_effect=mine is not None, regret_max=policy.backtest.regret_max)

    async def _try(self, who: str, request: Request) -> PolicyTrial:
        """In a thread and one at a time: many GPUs that are in use take seconds."""
        if who == NOT_NAMED:
            raise UsageError("log in first: the policy is tried for users with a login only")
        loaded, now = self._session.loaded, self._session.keeper.clock.now().replace(second=0, microsecond=0)
        try:
            words = msgspec.convert(request.described, WorkloadWords)
            if not 0 <= words.gpus <= MOST_TRIED_GPUS:
                raise UsageError(f"gpus: a number from 0 to {MOST_TRIED_GPUS} is expected")
            described = read_description(words)
            async with self._trying:
                return await in_thread(lambda: try_policy(loaded, described, now), READING)
        except msgspec.ValidationError as problem:
            raise UsageError(f"the description is not valid: {problem}") from problem
        except TimeoutError as problem:
            raise UsageError("the trial took too long. Describe fewer GPUs, or a shorter time") from problem

    async def _about(self, words: str, last: int = MOST_LINES) -> Sequence[Event]:
        async with _reading():
            return [line for _, line in await self._lines().lines(LineFilter(last=last, workload=words))]

    async def _ledger(self, who: str, request: Request) -> NumberedLine:
        """Lines about one's own work; an admin's are all."""
        unknown = [name for name in request.types if name not in TYPES]
        if unknown:
            raise UsageError(f'unknown line type "{unknown[0]}". Types: {", ".join(sorted(TYPES))}')
        admin = is_admin(self._session.book, who)
        if not admin and request.owner not in (None, who):
            raise UsageError(f"{who} may read only lines about their own work")
        now = self._session.keeper.clock.now()
        async with _reading():
            found = await self._lines().lines(
                LineFilter(
                    last=min(max(request.last, 1), MOST_LINES),
                    types=request.types,
                    owner=request.owner if admin else who,
                    workload=request.workload or None,
                    errors_only=request.errors,
                    since=None if request.span is None else now - request.span,
                    search=request.search or None,
                    before=request.before,
                )
            )
        return NumberedLine(tuple(found))

    async def _report(self, who: str, request: Request) -> UsageReport:
        """One's own figures and the totals; an admin's are all."""
        admin, book = is_admin(self._session.book, who), self._session.book
        if not admin and request.owner not in (None, who):
            raise UsageError(f"{who} may read only their own figures and the totals")
        if request.since is None or request.until is None:
            raise UsageError("a report needs the beginning and the end of its time span")
        query = ReportQuery(
            since=request.since,
            until=request.until,
            zone=request.zone,
            owner=request.owner,
            person=None if admin else who,
        )
        now = self._session.keeper.clock.now()
        async with _reading():
            return await read_report(self._lines(), self._usage(), query, book.policy.prices, now)

    def _usage(self) -> SqliteUsage:
        if self._hours is None:
            self._hours = open_usage(usage_path(self._session.ledger.path), write=False)
        return self._hours

    def _lines(self) -> SqliteLedger:
        if self._reader is None:
            self._reader = open_ledger(self._session.ledger.path, write=False)
        return self._reader


def _reading() -> asyncio.Timeout:
    return asyncio.timeout(real_seconds(READING.total_seconds()))
