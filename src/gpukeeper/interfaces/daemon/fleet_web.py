"""`serve --web PORT --from postgresql://…`: the dashboard of a fleet, until it is stopped. No passes, no platforms; it
decides nothing.

The last view of every machine and read-only requests are answered from the fleet database, the copy of what machines
recorded; what the copy does not hold gets a sentence. Requests of people to machines are signed and written to it: the
daemon of a machine verifies the signature and decides by its own policy. This process identifies people by logins of
its own, holds the credentials of the database and the key that signs requests, and passes neither on.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpukeeper.engine.outlook import NOT_SHOWN
from gpukeeper.engine.requests import SECONDS_MAX, DataReply, Reply, Request
from gpukeeper.interfaces.daemon.queries import (
    MOST_LINES,
    NOT_NAMED,
    wanted_lines,
    wanted_report,
    wanted_runs,
    wanted_span,
)
from gpukeeper.interfaces.daemon.requests import LOGIN_VERBS, Identity, WebLogins, log_in
from gpukeeper.interfaces.daemon.server import listening, notify_systemd
from gpukeeper.interfaces.daemon.web import Backend, Log, Send, WebSettings, opened_logins, supervised
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.interfaces.link import NO_COPY, NOT_COPIED, Change, Condition, Person, Welcome
from gpukeeper.interfaces.terminal.usage import zone_named
from gpukeeper.ledger.copy import inbox, reader
from gpukeeper.ledger.copy.connect import load_driver, problem_of_address, problem_of_machine, shown
from gpukeeper.ledger.copy.inbox import REQUEST_LASTS, SHORTEST_KEY, SignedRequest, sign_request
from gpukeeper.ledger.copy.reader import CopyReader, CopyUnavailable, MachineHead, Watcher
from gpukeeper.ledger.files import ledger_path, make_private, read_secret, socket_path
from gpukeeper.ledger.journal import DAEMON, take_lease
from gpukeeper.ledger.lines import NumberedLine
from gpukeeper.ledger.logins import Logins
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, LeaseHeld, UsageError
from gpukeeper.model.policy import Policy, Prices
from gpukeeper.platforms.host.connect import hostname
from gpukeeper.views.acceptance_history import RunLines, run_lines
from gpukeeper.views.explain import Timeline, copied_timeline
from gpukeeper.views.live import MachineView, WorkloadLine, aged, difference, read_view
from gpukeeper.views.usage import UsageSums
from gpukeeper.views.usage_report import SOON, SavingsSums, UsageReport, usage_report

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


class FleetQueries:
    """A person is named as machines know them. `views`: of every machine, by its name."""

    def __init__(self, copy: CopyReader, views: Callable[[], Mapping[str, MachineView]], prices: Prices) -> None:
        self._copy, self._views, self._prices = copy, views, prices

    async def answer(self, who: Person, machine: str, request: Request) -> Reply:
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

    async def _answer(self, who: Person, machine: str, request: Request) -> object:
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

    async def _lines(self, who: Person, machine: str, request: Request) -> NumberedLine:
        wanted = wanted_lines(who.name, request, datetime.now(UTC), admin=who.admin)
        return NumberedLine(tuple(await self._copy.ask(lambda c: reader.copied_lines(c, machine, wanted))))

    async def _runs(self, machine: str, request: Request) -> RunLines:
        wanted = wanted_runs(request)
        return run_lines(await self._copy.ask(lambda c: reader.copied_lines(c, machine, wanted)))

    async def _report(self, who: Person, machine: str, request: Request) -> UsageReport:
        query = wanted_report(who.name, request, admin=who.admin)
        if query.until - query.since > LONGEST_REPORT:
            raise UsageError(f"a report over machines covers {LONGEST_REPORT.days} days at most")
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

    async def _signals(self, who: Person, machine: str, request: Request) -> Timeline:
        """Of one's own work; an admin's is all."""
        line = self._line(machine, request.workload)
        if not who.admin and not (line.owner == who.name and line.owner_verified):
            raise UsageError(f"the signals of {line.path} are {NOT_SHOWN}")
        now = datetime.now(UTC)
        since = now - wanted_span(request)
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


SOONEST = 0.5  # seconds between two rounds of changes
AT_LEAST = 10.0  # seconds: so often ages are checked though nothing changed


class FleetWeb(Backend):
    """`realm`: the machine where people log in to it. `same_users`: a name means the same person on all machines;
    otherwise they are known as name@realm, and own nothing there."""

    own_log = "the log of the web server"

    def __init__(
        self,
        state: FleetState,
        copy: CopyReader,
        logins: Logins,
        book: Rulebook,
        requests: FleetRequests,
        log: Log,
        *,
        realm: str,
        settings: WebSettings,
    ) -> None:
        super().__init__(logins, settings, log)
        self._state, self._book, self._requests, self._realm = state, book, requests, realm
        self._queries = FleetQueries(copy, lambda: state.views, book.policy.prices)
        state.on_replied = requests.on_reply

    @property
    def book(self) -> Rulebook:
        return self._book

    def now(self) -> datetime:
        return datetime.now(UTC)

    def name(self, who: Identity) -> str:
        if not who.name or self._book.policy.fleet.same_users:
            return who.name
        return f"{who.name}@{self._realm}"

    async def welcome(self) -> Welcome:
        return msgspec.structs.replace(await self.settings.welcome(self._realm, self._logins), fleet=True)

    async def publish_views(self, send: Send) -> None:
        """A machine that was removed from the fleet stays, marked as old, until this server is started again."""
        state, sent = self._state, dict[str, MachineView]()
        condition: Condition | None = None
        while True:
            state.changed.clear()
            now = Condition(problem=state.problem, silent=tuple(sorted(state.silent.items())))
            if now != condition:
                await send(now)
                condition = now
            for machine, view in sorted(state.present(datetime.now(UTC)).items()):
                before = sent.get(machine)
                if view != before:
                    await send(Change(difference(before, view), whole=before is None))
                    sent[machine] = view
            await asyncio.sleep(SOONEST)
            with suppress(TimeoutError):
                await asyncio.wait_for(state.changed.wait(), AT_LEAST)

    def why_not(self, machine: str) -> Reply | None:
        if machine and machine not in self._state.views:
            return Reply(done=False, words=f'there is no machine "{machine[:60]}" in this fleet', exit_code=2)
        return None

    async def read(self, who: Identity, machine: str, request: Request) -> Reply:
        reader = Person(name=self.name(who) or NOT_NAMED, admin=self.is_admin(who))
        return await self._queries.answer(reader, machine, request)

    async def change(self, who: Identity, machine: str, request: Request) -> Reply:
        """Without a turn: a machine may take long to reply, and FleetRequests limits how many wait for one."""
        await self._changes.pause(who.turn)
        now = datetime.now(UTC)
        if not machine:
            return Reply(done=False, words="name the machine; nothing was done", exit_code=2)
        if self._state.problem:
            words = f"the fleet database cannot be read: {self._state.problem}; nothing was done"
            return Reply(done=False, words=words, exit_code=1)
        if self._state.is_old(machine, now):
            seen = self._state.seen[machine]
            words = f"{machine} was not seen since {seen:%Y-%m-%d %H:%M} UTC, so the request was not sent"
            return Reply(done=False, words=f"{words}; nothing was done", exit_code=1)
        begun = time.monotonic()
        reply = await self._requests.send(who, machine, request)
        verb, spent = request.verb, time.monotonic() - begun
        self._log(f"{verb} on {machine} for {who.name}: {'done' if reply.done else 'not done'} after {spent:.1f} s")
        return reply


CHECK = 5.0  # seconds between two checks of the connection
PROGRAM = "gpukeeper web"  # the name of its connections


class FleetAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How the fleet database is read, and requests are signed. `realm`: the machine where people log in."""

    address: str
    password_file: str | None
    key: str | None
    realm: str


def fleet_access(address: str, password_file: Path | None, key_file: Path | None, policy: Policy) -> FleetAccess:
    """Files that are not given are those of the policy. UsageError: something is not valid."""
    problem = problem_of_address(address)
    if problem is not None:
        raise UsageError(f"--from: this is not the address of a fleet database: {problem}. Nothing was started.")
    load_driver()
    fleet = policy.fleet
    realm = fleet.machine or hostname().lower()
    problem = problem_of_machine(realm)
    if problem is not None:
        raise UsageError(f'the host name "{realm}" cannot be used: {problem}. Set fleet.machine in the policy.')
    password = str(password_file) if password_file is not None else fleet.password_file
    if password is not None:
        read_secret(Path(password))  # now, not at the first connection
    keys = str(key_file) if key_file is not None else fleet.request_key_file
    key = None if keys is None else read_secret(Path(keys))
    if key is not None and len(key) < SHORTEST_KEY:
        raise UsageError(
            f"the key in {keys} is shorter than {SHORTEST_KEY} characters. Nothing was started. "
            "Make one: openssl rand -hex 32"
        )
    return FleetAccess(address=address, password_file=password, key=key, realm=realm)


class LoginResponder:
    """Implements Responder: on this machine people log in; everything else is on the pages."""

    def __init__(self, logins: WebLogins, book: Rulebook) -> None:
        self._logins, self._book = logins, book

    @property
    def admins(self) -> Sequence[str]:
        return self._book.policy.admins

    async def answer(self, who: str, uid: int, request: Request) -> Reply:
        if request.verb in LOGIN_VERBS:
            return await log_in(self._logins, self._book, Identity(name=who, uid=uid), request, datetime.now(UTC))
        words = "this is the web server of a fleet, which makes no passes. Use the dashboard, or the machine itself"
        return Reply(done=False, words=words, exit_code=1)


async def serve_fleet_until_stopped(
    access: FleetAccess, policy: Policy, where: Endpoint, log: Callable[[str], None], *, quiet: bool = False
) -> None:
    """One per state directory, by the lease of a daemon. SIGTERM and SIGINT end it."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    book = Rulebook(policy)
    with ExitStack() as stack:
        _take_lease(stack)
        copy = stack.enter_context(closing(CopyReader(access.address, access.password_file, PROGRAM)))
        async with opened_logins(where, ledger_path()) as logins:
            state = FleetState(loop, log)
            requests = FleetRequests(copy, access.realm, access.key)
            settings = WebSettings(lambda: policy.web, logins.listener.getsockname()[0], log)
            web = FleetWeb(state, copy, logins.logins, book, requests, log, realm=access.realm, settings=settings)
            async with (
                supervised(web, logins, log),
                listening(socket_path(), LoginResponder(logins, book), log),
                _watched(Watcher(access.address, access.password_file, state, log, PROGRAM)),
            ):
                if not quiet:
                    log(f"showing the fleet of {shown(access.address)}; people log in at {access.realm}")
                    if access.key is None:
                        log("no key for requests was given (--key-file): the dashboard shows, and requests nothing")
                notify_systemd("READY=1")
                await stop.wait()
            notify_systemd("STOPPING=1")


def _take_lease(stack: ExitStack) -> None:
    state, path = ledger_path().parent, socket_path()
    hint = "Beside a daemon, give the web server its own GPUKEEPER_STATE and GPUKEEPER_SOCKET."
    make_private(state)
    try:
        stack.callback(take_lease(state / "leases", DAEMON, "serve").release)
    except LeaseHeld as held:
        raise LeaseHeld(f"{held} {hint}") from held
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.connect(str(path))
        raise KeeperError(f"A daemon listens on {path}. Nothing was started. {hint}")


@asynccontextmanager
async def _watched(watcher: Watcher) -> AsyncIterator[None]:
    async def check() -> None:
        while True:
            await asyncio.sleep(CHECK)
            watcher.check_stuck()

    watcher.start()
    checking = asyncio.create_task(check())
    try:
        yield
    finally:
        checking.cancel()
        await asyncio.gather(checking, return_exceptions=True)
        await asyncio.to_thread(watcher.stop)
