"""`serve --web PORT --from postgresql://…`: the dashboard of a fleet, until it is stopped: what its web process is
sent and answered. No passes, no platforms; it decides nothing.

The views come from the fleet database. This process identifies people by logins of its own, holds the credentials
of the database and the key that signs requests, and passes neither on.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gpukeeper.engine.requests import Reply, Request
from gpukeeper.interfaces.daemon.fleet_queries import FleetQueries, FleetReader, FleetRequests, FleetState
from gpukeeper.interfaces.daemon.queries import NOT_NAMED, VERBS
from gpukeeper.interfaces.daemon.requests import (
    ANONYMOUS,
    LOG_IN,
    LOGIN_VERBS,
    Identity,
    WebLogins,
    answer_login,
    identify,
    log_in,
)
from gpukeeper.interfaces.daemon.server import RequestLimiter, listening, notify_systemd
from gpukeeper.interfaces.daemon.web import READS, Log, Send, WebSettings, answer_of, listen, supervised
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.interfaces.link import BUG, Answer, Change, Condition, Person, Question, Welcome, new_revocations
from gpukeeper.ledger.copy.connect import load_driver, problem_of_address, problem_of_machine, shown
from gpukeeper.ledger.copy.inbox import SHORTEST_KEY
from gpukeeper.ledger.copy.reader import CopyReader, Watcher
from gpukeeper.ledger.files import ledger_path, make_private, read_secret, socket_path
from gpukeeper.ledger.journal import DAEMON, take_lease
from gpukeeper.ledger.logins import Logins, open_logins
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError, LeaseHeld, UsageError
from gpukeeper.model.policy import Policy
from gpukeeper.platforms.host.connect import hostname
from gpukeeper.views.live import MachineView, difference

SOONEST = 0.5  # seconds between two rounds of changes
AT_LEAST = 10.0  # seconds: so often ages are checked though nothing changed


class FleetWeb:
    """Implements Backend. `realm`: the machine where people log in to it. `same_users`: a name means the same person on
    all machines; otherwise they are known as name@realm, and own nothing there."""

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
        self._state, self._logins, self._book, self._log = state, logins, book, log
        self._requests, self._realm, self._settings = requests, realm, settings
        self._queries = FleetQueries(copy, self._views, book.policy.prices)
        self._reads, self._changes = RequestLimiter(READS), RequestLimiter()
        self.revocations = new_revocations()
        logins.on_revoke, logins.on_misuse = self.revocations.increase, log
        state.on_replied = requests.on_reply

    def close(self) -> None:
        self._logins.on_revoke = lambda: None
        self.revocations.close()

    def _views(self) -> Mapping[str, MachineView]:
        return self._state.views

    async def welcome(self) -> Welcome:
        return msgspec.structs.replace(await self._settings.welcome(self._realm, self._logins), fleet=True)

    async def publish(self, send: Send) -> None:
        await self._settings.serve(self._publish_views(send), send)

    async def _publish_views(self, send: Send) -> None:
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

    async def answer(self, question: Question) -> Answer:
        """With the rights of the person whose credentials it carries. Every refusal is a sentence."""
        who = ANONYMOUS
        try:
            proxied = self._settings.proxy_configured
            who = await identify(self._logins, question.credentials, datetime.now(UTC), proxied=proxied)
            reply = await self._answer(who, question)
        except KeeperError as problem:
            reply = Reply(done=False, words=str(problem), exit_code=problem.exit_code)
        except Exception as bug:  # of one request: the others go on
            self._log(f"a request from the web failed, which is a bug in gpukeeper: {bug!r}")
            reply = Reply(done=False, words="this is a bug in gpukeeper; see the log of the web server", exit_code=BUG)
        person = Person(name=self._name(who), admin=self._is_admin(who), login=who.login, kind=who.kind)
        return answer_of(question, person, reply)

    async def _answer(self, who: Identity, question: Question) -> Reply:
        request, machine = question.request, question.machine
        if not who.name and not self._settings.anonymous and request.verb not in ("redeem", "whoami"):
            return LOG_IN
        if request.verb in LOGIN_VERBS:
            return await answer_login(self._logins, self._book, who, request, datetime.now(UTC))
        if machine and machine not in self._state.views:
            return Reply(done=False, words=f'there is no machine "{machine[:60]}" in this fleet', exit_code=2)
        if request.verb in VERBS:
            async with self._reads.turn(who.turn):
                await _pause(self._reads, who)
                reader = FleetReader(name=self._name(who) or NOT_NAMED, admin=self._is_admin(who))
                return await self._queries.answer(reader, machine, request)
        if not who.name:
            return LOG_IN
        await _pause(self._changes, who)
        return await self._send(who, question)

    async def _send(self, who: Identity, question: Question) -> Reply:
        machine, now = question.machine, datetime.now(UTC)
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
        reply = await self._requests.send(who, machine, question.request)
        verb, spent = question.request.verb, time.monotonic() - begun
        self._log(f"{verb} on {machine} for {who.name}: {'done' if reply.done else 'not done'} after {spent:.1f} s")
        return reply

    def _name(self, who: Identity) -> str:
        """As machines know this person."""
        if not who.name or self._book.policy.fleet.same_users:
            return who.name
        return f"{who.name}@{self._realm}"

    def _is_admin(self, who: Identity) -> bool:
        return bool(who.name) and is_admin(self._book, who.name)


async def _pause(limiter: RequestLimiter, who: Identity) -> None:
    await asyncio.sleep(limiter.wait(who.turn, asyncio.get_running_loop().time()))


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
        listener = stack.enter_context(listen(where))
        where = Endpoint(port=listener.getsockname()[1], address=where.address)
        logins = WebLogins(stack.enter_context(closing(open_logins(ledger_path()))), where, listener)
        copy = stack.enter_context(closing(CopyReader(access.address, access.password_file, PROGRAM)))
        state = FleetState(loop, log)
        requests = FleetRequests(copy, access.realm, access.key)
        settings = WebSettings(lambda: policy.web, listener.getsockname()[0], log)
        setup = await settings.setup()  # refuses before anything is served
        web = FleetWeb(state, copy, logins.logins, book, requests, log, realm=access.realm, settings=settings)
        stack.callback(web.close)
        async with (
            listening(socket_path(), LoginResponder(logins, book), log),
            supervised(web, where, listener, log, "http" if setup.tls is None else "https"),
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
