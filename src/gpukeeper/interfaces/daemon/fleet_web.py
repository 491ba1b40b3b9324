"""What the web process of a fleet is sent and answered: `gpukeeper serve --web PORT --from postgresql://…`.

The views come from the fleet database. This process identifies people by logins of its own, holds the credentials of
the database and the key that signs requests, and passes neither on. It makes no passes, and decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec

from gpukeeper import __version__
from gpukeeper.engine.requests import DataReply, Reply
from gpukeeper.interfaces.daemon import identity
from gpukeeper.interfaces.daemon.fleet_queries import FleetQueries, FleetReader
from gpukeeper.interfaces.daemon.fleet_requests import FleetRequests
from gpukeeper.interfaces.daemon.identity import ANONYMOUS, Identity, answer_login, identify
from gpukeeper.interfaces.daemon.limiter import RequestLimiter
from gpukeeper.interfaces.daemon.queries import NOT_NAMED, VERBS
from gpukeeper.interfaces.daemon.web_child import Log, Send
from gpukeeper.interfaces.link import Answer, Change, Condition, Person, Question, Welcome
from gpukeeper.interfaces.revocations import new_revocations
from gpukeeper.ledger.copy.reader import CopyReader
from gpukeeper.ledger.copy.watcher import MachineHead
from gpukeeper.ledger.logins import Logins
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError
from gpukeeper.views.fleet_copy import aged, read_view
from gpukeeper.views.live import MachineView, difference

SOONEST = 0.5  # seconds between two rounds of changes
AT_LEAST = 10.0  # seconds: so often ages are checked though nothing changed
LONGEST = 100 * 365 * 86400.0  # seconds of an age
JITTER = timedelta(seconds=2)
OLD = timedelta(minutes=2)  # a view that its machine did not confirm for longer is not shown as present
LOG_IN = Reply(done=False, words="log in first: gpukeeper login", exit_code=identity.NOT_LOGGED_IN)


class FleetState:
    """What is known of every machine. Implements Observer: the watcher's thread calls it, the event loop reads it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Log) -> None:
        self._loop, self._log = loop, log
        self.views: dict[str, MachineView] = {}  # as last read
        self.seen: dict[str, datetime] = {}  # when each of them was last confirmed, by our clock
        self.silent: dict[str, str] = {}  # machines without a view, and why
        self.problem = "it was not read yet"
        self.changed = asyncio.Event()
        self.requests: FleetRequests | None = None
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
        if self.requests is not None:
            self._later(partial(self.requests.on_reply, request))

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
                self._confirm(one.machine, now - timedelta(seconds=min(one.view_ago, LONGEST)))
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
        anonymous: bool,
    ) -> None:
        self._state, self._logins, self._book, self._log = state, logins, book, log
        self._requests, self._realm, self._anonymous = requests, realm, anonymous
        self._queries = FleetQueries(copy, self._views, book.policy.prices)
        self._limiter = RequestLimiter()
        self.revocations = new_revocations()
        logins.on_revoke = self.revocations.increase
        state.requests = requests

    def close(self) -> None:
        self._logins.on_revoke = lambda: None
        self.revocations.close()

    def _views(self) -> Mapping[str, MachineView]:
        return self._state.views

    async def welcome(self) -> Welcome:
        return Welcome(
            machine=self._realm,
            version=__version__,
            key=await self._logins.key("cookies"),
            anonymous=self._anonymous,
            session_seconds=int(identity.SESSION_LASTS.total_seconds()),
            fleet=True,
        )

    async def publish(self, send: Send) -> None:
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
            who = await identify(self._logins, question.credentials, datetime.now(UTC))
            reply = await self._answer(who, question)
        except KeeperError as problem:
            reply = Reply(done=False, words=str(problem), exit_code=problem.exit_code)
        except Exception as bug:  # of one request: the others go on
            self._log(f"a request from the web failed, which is a bug in gpukeeper: {bug!r}")
            reply = Reply(done=False, words="this is a bug in gpukeeper; see the log of the web server", exit_code=1)
        body = bytes(reply.body) if isinstance(reply, DataReply) else b"null"
        return Answer(
            id=question.id,
            person=Person(name=self._name(who), admin=self._is_admin(who), login=who.login, kind=who.kind),
            done=reply.done,
            words=reply.words,
            exit_code=reply.exit_code,
            token=reply.token,
            body=body,
        )

    async def _answer(self, who: Identity, question: Question) -> Reply:
        request, machine = question.request, question.machine
        if not who.name and not self._anonymous and request.verb not in ("redeem", "whoami"):
            return LOG_IN
        if request.verb in identity.VERBS:
            return await answer_login(self._logins, self._book, who, request, datetime.now(UTC))
        if machine and machine not in self._state.views:
            return Reply(done=False, words=f'there is no machine "{machine[:60]}" in this fleet', exit_code=2)
        if request.verb in VERBS:
            async with self._limiter.turn(who.turn):
                await self._pause(who)
                reader = FleetReader(name=self._name(who) or NOT_NAMED, admin=self._is_admin(who))
                return await self._queries.answer(reader, machine, request)
        if not who.name:
            return LOG_IN
        await self._pause(who)
        return await self._send(who, question)

    async def _pause(self, who: Identity) -> None:
        await asyncio.sleep(self._limiter.wait(who.turn, asyncio.get_running_loop().time()))

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
