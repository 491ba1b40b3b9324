"""Read-only requests to the web server of a fleet, answered from the copy of what machines recorded.

People get their own work in full, and of the work of others what `observe` shows, as from a daemon. What the copy does
not hold gets a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from gpukeeper.engine.outlook import NOT_SHOWN
from gpukeeper.engine.requests import DataReply, Reply, Request
from gpukeeper.interfaces.daemon.queries import ACCEPTANCE, LONGEST_TIMELINE, MOST_LINES, SHOWN_TIMELINE
from gpukeeper.interfaces.link import NO_COPY, NOT_COPIED
from gpukeeper.interfaces.terminal.usage_report import zone_named
from gpukeeper.ledger.copy import questions
from gpukeeper.ledger.copy.reader import CopyReader, CopyUnavailable
from gpukeeper.ledger.lines import TYPES, NumberedLine
from gpukeeper.ledger.queries import LineFilter
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.policy import Prices
from gpukeeper.views.acceptance_history import RunLines, run_lines
from gpukeeper.views.live import MachineView, WorkloadLine
from gpukeeper.views.savings import SOON, SavingsSums
from gpukeeper.views.timeline import Timeline, copied_timeline
from gpukeeper.views.usage import UsageSums
from gpukeeper.views.usage_report import ReportQuery, UsageReport, usage_report

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection

LONGEST_REPORT = timedelta(days=400)
MISSING = {
    "explain": "each rule's verdict is not in the copy of the fleet. On {machine}: gpukeeper explain {workload}",
    "plan": "the plan with its reasons is not in the copy of the fleet. On {machine}: gpukeeper plan",
    "policy": "the policy is not in the copy of the fleet. On {machine}: gpukeeper policy show",
    "backtest": "the backtest is not in the copy of the fleet. On {machine}: gpukeeper backtest ledger",
    "try": "the policy is not in the copy of the fleet. On {machine}: gpukeeper policy try",
    "preview": "a preview is not in the copy of the fleet. Use the buttons on each workload's own page",
}


class NotCopied(KeeperError):
    """The copy does not hold what was asked for."""


class FleetReader(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks. `name`: as machines know them."""

    name: str
    admin: bool


class FleetQueries:
    """`views`: of every machine, by its name."""

    def __init__(self, copy: CopyReader, views: Callable[[], Mapping[str, MachineView]], prices: Prices) -> None:
        self._copy, self._views, self._prices = copy, views, prices

    async def answer(self, who: FleetReader, machine: str, request: Request) -> Reply:
        """Every refusal is a sentence."""
        try:
            return _reply(await self._answer(who, machine, request))
        except OverflowError:
            return Reply(done=False, words="the time span is too long", exit_code=UsageError.exit_code)
        except CopyUnavailable as problem:
            return Reply(done=False, words=f"the fleet database could not be read: {problem}", exit_code=NO_COPY)
        except NotCopied as missing:
            return Reply(done=False, words=str(missing), exit_code=NOT_COPIED)
        except KeeperError as problem:
            return Reply(done=False, words=str(problem), exit_code=problem.exit_code)

    async def _answer(self, who: FleetReader, machine: str, request: Request) -> object:
        match request.verb:
            case "ledger":
                return await self._lines(who, machine, request)
            case "runs":
                return await self._runs(machine, request)
            case "report":
                return await self._report(who, machine, request)
            case "signals":
                return await self._signals(who, machine, request)
            case "health":
                raise NotCopied(await self._health(machine))
            case _:
                words = MISSING.get(request.verb, "the copy of the fleet does not hold this. Ask on {machine} itself")
                named = {"machine": machine or "the machine", "workload": self._path(machine, request.workload)}
                for name, value in named.items():
                    words = words.replace("{" + name + "}", value)
                raise NotCopied(words)

    async def _lines(self, who: FleetReader, machine: str, request: Request) -> NumberedLine:
        """Lines about one's own work; an admin's are all."""
        unknown = [name for name in request.types if name not in TYPES]
        if unknown:
            raise UsageError(f'unknown line type "{unknown[0]}". Types: {", ".join(sorted(TYPES))}')
        if not who.admin and request.owner not in (None, who.name):
            raise UsageError(f"{who.name} may read only lines about their own work")
        wanted = LineFilter(
            last=min(max(request.last, 1), MOST_LINES),
            types=request.types,
            owner=request.owner if who.admin else who.name,
            workload=request.workload or None,
            errors_only=request.errors,
            since=None if request.seconds is None else datetime.now(UTC) - timedelta(seconds=request.seconds),
            search=request.search or None,
            before=request.before,
        )
        return NumberedLine(tuple(await self._copy.ask(lambda c: questions.copied_lines(c, machine, wanted))))

    async def _runs(self, machine: str, request: Request) -> RunLines:
        """Of the machine, and so of nobody: everybody may read them."""
        wanted = LineFilter(last=min(max(request.last, 1), MOST_LINES), types=(ACCEPTANCE,), before=request.before)
        return run_lines(await self._copy.ask(lambda c: questions.copied_lines(c, machine, wanted)))

    async def _report(self, who: FleetReader, machine: str, request: Request) -> UsageReport:
        """One's own figures and the totals; an admin's are all."""
        if not who.admin and request.owner not in (None, who.name):
            raise UsageError(f"{who.name} may read only their own figures and the totals")
        if request.since is None or request.until is None:
            raise UsageError("a report needs the beginning and the end of its time span")
        if request.until - request.since > LONGEST_REPORT:
            raise UsageError(f"a report over machines covers {LONGEST_REPORT.days} days at most")
        query = ReportQuery(
            since=request.since,
            until=request.until,
            zone=request.zone,
            owner=request.owner,
            person=None if who.admin else who.name,
        )
        machines = [machine] if machine else sorted(self._views())
        zone = zone_named(query.zone)

        def read(connection: Connection) -> UsageReport:
            sums = UsageSums(query.since, query.until, zone)
            models: dict[str, set[str]] = {}
            for one in questions.hours(connection, machines, query.since, query.until):
                sums.add(one)
                models.setdefault(one.device.place, set()).add(one.device.model)
            savings = SavingsSums(query.since, query.until, zone, self._prices, models)
            for line in questions.outcomes(connection, machines, query.since, query.until + SOON):
                savings.add(line)
            oldest = questions.oldest_hour(connection, machines)
            return usage_report(query, zone, sums, savings, self._prices, recorded_from=oldest)

        return await self._copy.ask(read)

    async def _signals(self, who: FleetReader, machine: str, request: Request) -> Timeline:
        """Of one's own work; an admin's is all."""
        line = self._line(machine, request.workload)
        if not who.admin and not (line.owner == who.name and line.owner_verified):
            raise UsageError(f"the signals of {line.path} are {NOT_SHOWN}")
        span = SHOWN_TIMELINE if request.seconds is None else timedelta(seconds=request.seconds)
        now = datetime.now(UTC)
        since = now - min(max(span, timedelta()), LONGEST_TIMELINE)
        wanted = LineFilter(last=MOST_LINES, workload=line.uid, since=since)

        def read(connection: Connection) -> Timeline:
            minutes = questions.signal_minutes(connection, machine, line.key, since)
            lines = [event for _, event in questions.copied_lines(connection, machine, wanted)]
            points = ((one.signal, one.device, one.minute, one.mean) for one in minutes)
            return copied_timeline(line, points, lines, since, now)

        return await self._copy.ask(read)

    def _line(self, machine: str, words: str) -> WorkloadLine:
        view = self._views().get(machine)
        found: Sequence[WorkloadLine] = [] if view is None else [one for one in view.workloads if one.uid == words]
        if len(found) != 1:
            raise UsageError(f'there is no workload "{words[:200]}" on {machine} now')
        return found[0]

    def _path(self, machine: str, words: str) -> str:
        """As people name it; of what is not there now, as it was named."""
        try:
            return self._line(machine, words).path
        except UsageError:
            return words

    async def _health(self, machine: str) -> str:
        found = await self._copy.ask(lambda c: questions.copied_ledger(c, machine))
        newest = "none" if found.newest is None else f"of {found.newest.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        return (
            "Budget, channels, stopped passes and disk are not in the copy of the fleet. "
            f"On {machine}: gpukeeper doctor. The copy has its ledger up to line {found.lines}, {newest}."
        )


def _reply(body: object) -> DataReply:
    return DataReply(done=True, words="", body=msgspec.Raw(msgspec.json.encode(body)))
