"""What the web server of a fleet knows and asks: the last view of every machine; read-only requests, answered from
the copy of what machines recorded; requests of people to machines, signed and written to the database.

People get their own work in full, and of the work of others what `observe` shows. What the copy does not hold gets
a sentence. Nothing is decided here: the daemon of a machine verifies the signature and decides by its own policy.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from gpukeeper.engine.outlook import NOT_SHOWN
from gpukeeper.engine.requests import SECONDS_MAX, DataReply, Reply, Request
from gpukeeper.interfaces.daemon.queries import ACCEPTANCE, LONGEST_TIMELINE, MOST_LINES, SHOWN_TIMELINE
from gpukeeper.interfaces.daemon.requests import Identity
from gpukeeper.interfaces.link import NO_COPY, NOT_COPIED
from gpukeeper.interfaces.terminal.usage import zone_named
from gpukeeper.ledger.copy import inbox, reader
from gpukeeper.ledger.copy.inbox import REQUEST_LASTS, SignedRequest, sign_request
from gpukeeper.ledger.copy.reader import CopyReader, CopyUnavailable, MachineHead
from gpukeeper.ledger.lines import TYPES, NumberedLine
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.policy import Prices
from gpukeeper.views.acceptance_history import RunLines, run_lines
from gpukeeper.views.explain import Timeline, copied_timeline
from gpukeeper.views.live import MachineView, WorkloadLine, aged, read_view
from gpukeeper.views.usage import UsageSums
from gpukeeper.views.usage_report import SOON, ReportQuery, SavingsSums, UsageReport, usage_report

if TYPE_CHECKING:
    from gpukeeper.ledger.copy.connect import Connection


JITTER = timedelta(seconds=2)
OLD = timedelta(minutes=2)  # a view that its machine did not confirm for longer is not shown as present


class FleetState:
    """What is known of every machine. Implements Observer: the watcher's thread calls it, the event loop reads it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Callable[[str], None]) -> None:
        self._loop, self._log = loop, log
        self.views: dict[str, MachineView] = {}  # as last read
        self.seen: dict[str, datetime] = {}  # when each of them was last confirmed, by our clock
        self.silent: dict[str, str] = {}  # machines without a view, and why
        self.problem = "it was not read yet"
        self.changed = asyncio.Event()
        self.on_replied: Callable[[int], None] = lambda request: None
        self._unreadable: dict[str, str] = {}
        self._shown: dict[str, tuple[tuple[MachineView, datetime, bool], MachineView]] = {}  # and what it was made of

    def on_round(self, heads: tuple[MachineHead, ...]) -> None:
        self._later(lambda: self._round(heads, datetime.now(UTC)))

    def on_view(self, machine: str, body: str | None) -> None:
        try:
            view = None if body is None else read_view(machine, body)
            why = "" if view is not None else "its view is too large"
        except (msgspec.MsgspecError, ValueError) as problem:
            view, why = None, f"its view could not be read ({problem}); is it another version of gpukeeper?"
        if why:
            self._log(f"{machine}: {why}")
        self._later(lambda: self._view(machine, view, why))

    def on_reply(self, request: int) -> None:
        self._later(partial(self.on_replied, request))

    def on_problem(self, words: str) -> None:
        self._later(lambda: self._problem(words))

    def _later(self, work: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(work)

    def _problem(self, words: str) -> None:
        if words != self.problem:
            self.problem = words
            self.changed.set()

    def _view(self, machine: str, view: MachineView | None, why: str) -> None:
        if view is None:
            self._unreadable[machine] = why
        else:
            self._unreadable.pop(machine, None)
            self.views[machine] = view

    def _round(self, heads: tuple[MachineHead, ...], now: datetime) -> None:
        """A machine that is not in the database any more, or whose view cannot be read, gets older."""
        for one in heads:
            if one.view_ago is not None and one.machine not in self._unreadable:
                self._confirm(one.machine, now - timedelta(seconds=min(one.view_ago, SECONDS_MAX)))
        silent = [one for one in heads if one.machine not in self.views or one.machine in self._unreadable]
        self.silent = {one.machine: self._why_silent(one) for one in silent}
        self.changed.set()

    def _confirm(self, machine: str, seen: datetime) -> None:
        """Computed from an age, so that the same moment is a little different each time."""
        if machine not in self.seen or abs(seen - self.seen[machine]) > JITTER:
            self.seen[machine] = seen

    def _why_silent(self, head: MachineHead) -> str:
        if head.machine in self._unreadable:
            return self._unreadable[head.machine]
        if head.seen_ago is None:
            return "it was added to the fleet database and has not connected yet"
        return "it has connected, and has not sent a view yet"

    def present(self, now: datetime) -> dict[str, MachineView]:
        """As they are shown: what is old is marked, with the time of the last confirmation by our clock."""
        found = {}
        for machine, view in self.views.items():
            seen = self.seen.get(machine, view.at)
            made = (view, seen, now - seen > OLD)
            if machine not in self._shown or self._shown[machine][0] != made:
                self._shown[machine] = (made, aged(view, seen) if made[2] else msgspec.structs.replace(view, at=seen))
            found[machine] = self._shown[machine][1]
        return found

    def is_old(self, machine: str, now: datetime) -> bool:
        return machine in self.seen and now - self.seen[machine] > OLD


SECONDS_MAX_REPORT = timedelta(days=400)
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
            return DataReply.of(await self._answer(who, machine, request))
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
            since=None if request.span is None else datetime.now(UTC) - request.span,
            search=request.search or None,
            before=request.before,
        )
        return NumberedLine(tuple(await self._copy.ask(lambda c: reader.copied_lines(c, machine, wanted))))

    async def _runs(self, machine: str, request: Request) -> RunLines:
        """Of the machine, and so of nobody: everybody may read them."""
        wanted = LineFilter(last=min(max(request.last, 1), MOST_LINES), types=(ACCEPTANCE,), before=request.before)
        return run_lines(await self._copy.ask(lambda c: reader.copied_lines(c, machine, wanted)))

    async def _report(self, who: FleetReader, machine: str, request: Request) -> UsageReport:
        """One's own figures and the totals; an admin's are all."""
        if not who.admin and request.owner not in (None, who.name):
            raise UsageError(f"{who.name} may read only their own figures and the totals")
        if request.since is None or request.until is None:
            raise UsageError("a report needs the beginning and the end of its time span")
        if request.until - request.since > SECONDS_MAX_REPORT:
            raise UsageError(f"a report over machines covers {SECONDS_MAX_REPORT.days} days at most")
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
            for one in reader.hours(connection, machines, query.since, query.until):
                sums.add(one)
                models.setdefault(one.device.place, set()).add(one.device.model)
            savings = SavingsSums(query.since, query.until, zone, self._prices, models)
            for line in reader.outcomes(connection, machines, query.since, query.until + SOON):
                savings.add(line)
            oldest = reader.oldest_hour(connection, machines)
            return usage_report(query, zone, sums, savings, self._prices, recorded_from=oldest)

        return await self._copy.ask(read)

    async def _signals(self, who: FleetReader, machine: str, request: Request) -> Timeline:
        """Of one's own work; an admin's is all."""
        line = self._line(machine, request.workload)
        if not who.admin and not (line.owner == who.name and line.owner_verified):
            raise UsageError(f"the signals of {line.path} are {NOT_SHOWN}")
        span = SHOWN_TIMELINE if request.span is None else request.span
        now = datetime.now(UTC)
        since = now - min(max(span, timedelta()), LONGEST_TIMELINE)
        wanted = LineFilter(last=MOST_LINES, workload=line.uid, since=since)

        def read(connection: Connection) -> Timeline:
            minutes = reader.signal_minutes(connection, machine, line.key, since)
            lines = [event for _, event in reader.copied_lines(connection, machine, wanted)]
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
        found = await self._copy.ask(lambda c: reader.copied_ledger(c, machine))
        newest = "none" if found.newest is None else f"of {found.newest.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        return (
            "Budget, channels, stopped passes and disk are not in the copy of the fleet. "
            f"On {machine}: gpukeeper doctor. The copy has its ledger up to line {found.lines}, {newest}."
        )


POLL = 2.0  # seconds between two looks if no reply is announced
GRACE = timedelta(seconds=20)  # after a request expired, for the reply that says so
EACH, ALL = 4, 64  # requests in progress, of one person and of all


class FleetRequests:
    """`realm`: the machine where people log in to this web server. `key` None: no requests are sent."""

    def __init__(self, copy: CopyReader, realm: str, key: str | None, lasts: timedelta = REQUEST_LASTS) -> None:
        self._copy, self._realm, self._key, self._lasts = copy, realm, key, lasts
        self._replied: dict[int, asyncio.Event] = {}
        self._open: Counter[str] = Counter()  # by person

    def on_reply(self, number: int) -> None:
        """A reply to that request is there."""
        if number in self._replied:
            self._replied[number].set()

    async def send(self, who: Identity, machine: str, request: Request) -> Reply:
        """Every refusal is a sentence."""
        if self._key is None:
            return _failed("this web server has no key for requests (--key-file); nothing was done")
        if self._open[who.name] >= EACH or self._open.total() >= ALL:
            return _failed("too many requests are waiting for replies; nothing was done. Try again in a minute")
        self._open[who.name] += 1
        try:
            return await self._send(who, machine, request, self._key)
        except CopyUnavailable as problem:
            done = "whether the request was sent is not known; see the history" if problem.begun else "nothing was done"
            return _failed(f"the fleet database could not be used: {problem}; {done}")
        finally:
            self._open[who.name] -= 1
            self._open += Counter()  # without those that have none

    async def _send(self, who: Identity, machine: str, request: Request, key: str) -> Reply:
        now = datetime.now(UTC)
        expires = now + self._lasts
        signed = SignedRequest(
            machine=machine,
            nonce=secrets.token_hex(16),
            issued=now,
            expires=expires,
            person=who.name,
            realm=self._realm,
            via=f"{who.via}, at {self._realm}",
            request=msgspec.Raw(msgspec.json.encode(request)),
        )
        document, signature = sign_request(signed, key)
        number = await self._copy.ask(lambda c: inbox.ask(c, machine, expires, document, signature))
        self._replied[number] = asyncio.Event()
        try:
            return await self._wait(number, machine)
        finally:
            del self._replied[number]

    async def _wait(self, number: int, machine: str) -> Reply:
        """A database that goes away meanwhile may come back in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + (self._lasts + GRACE).total_seconds()
        while loop.time() < end:
            with suppress(CopyUnavailable):
                answer = await self._copy.ask(lambda c: inbox.reply_to(c, number))
                if answer is not None:
                    return read_answer(answer)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._replied[number].wait(), POLL)
            self._replied[number].clear()
        words = f"no reply of {machine} could be read before the request expired"
        return _failed(f"{words}; whether it was carried out is in the history of {machine}")


def read_answer(answer: inbox.Answer) -> Reply:
    try:
        return reading.decode(answer.body, type=Reply)
    except msgspec.MsgspecError as error:
        raise KeeperError(f"the reply could not be read ({error}); the history shows whether it was done") from error


def _failed(words: str) -> Reply:
    return Reply(done=False, words=words, exit_code=1)
