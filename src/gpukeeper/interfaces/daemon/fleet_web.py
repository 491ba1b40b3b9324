"""What the web process of a fleet is sent and answered: `gpukeeper serve --web PORT --from postgresql://…`.

The views come from the fleet database. This process identifies people by logins of its own, holds the credentials of
the database and the key that signs requests, and passes neither on. It makes no passes, and decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime

from gpukeeper import __version__
from gpukeeper.engine.requests import DataReply, Reply
from gpukeeper.interfaces.daemon import identity
from gpukeeper.interfaces.daemon.fleet_queries import FleetQueries, FleetReader
from gpukeeper.interfaces.daemon.fleet_requests import FleetRequests
from gpukeeper.interfaces.daemon.fleet_state import FleetState
from gpukeeper.interfaces.daemon.identity import ANONYMOUS, Identity, answer_login, identify
from gpukeeper.interfaces.daemon.limiter import RequestLimiter
from gpukeeper.interfaces.daemon.queries import NOT_NAMED, VERBS
from gpukeeper.interfaces.daemon.web import READS
from gpukeeper.interfaces.daemon.web_child import Log, Send
from gpukeeper.interfaces.daemon.web_settings import WebSettings
from gpukeeper.interfaces.link import BUG, Answer, Change, Condition, Person, Question, Welcome
from gpukeeper.interfaces.revocations import new_revocations
from gpukeeper.ledger.copy.reader import CopyReader
from gpukeeper.ledger.logins import Logins
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError
from gpukeeper.views.live import MachineView, difference

SOONEST = 0.5  # seconds between two rounds of changes
AT_LEAST = 10.0  # seconds: so often ages are checked though nothing changed
LOG_IN = Reply(done=False, words="log in first: gpukeeper login", exit_code=identity.NOT_LOGGED_IN)


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
        setup = await self._settings.setup()
        return Welcome(
            machine=self._realm,
            version=__version__,
            key=await self._logins.key("cookies"),
            anonymous=self._settings.anonymous,
            session_seconds=int(self._settings.sessions.total_seconds()),
            fleet=True,
            site=setup.site,
            account=setup.account,
            tls=setup.tls,
        )

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
        if not who.name and not self._settings.anonymous and request.verb not in ("redeem", "whoami"):
            return LOG_IN
        if request.verb in identity.VERBS:
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
