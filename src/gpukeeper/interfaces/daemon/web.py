"""The web process of `serve --web`, seen from the daemon: what it is sent, and how its questions are answered.

It never acts. Each of its questions carries what a person presented, and is answered with the rights of that person.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from gpukeeper import __version__
from gpukeeper.blocking import real_seconds
from gpukeeper.engine.origin import with_origin
from gpukeeper.engine.refresh import refresh
from gpukeeper.engine.requests import DataReply, Reply, Request, fulfil
from gpukeeper.interfaces.daemon import identity
from gpukeeper.interfaces.daemon.identity import ANONYMOUS, NOT_LOGGED_IN, Identity, answer_login, identify
from gpukeeper.interfaces.daemon.limiter import RateLimits, RequestLimiter
from gpukeeper.interfaces.daemon.present import PresentView
from gpukeeper.interfaces.daemon.queries import VERBS, Queries
from gpukeeper.interfaces.daemon.requests import WebLogins
from gpukeeper.interfaces.daemon.web_child import Log, Send, supervised
from gpukeeper.interfaces.daemon.web_settings import WebSettings
from gpukeeper.interfaces.http_pages import Page as MetricsPage
from gpukeeper.interfaces.link import BUG, Answer, Change, Demo, Person, Question, Welcome
from gpukeeper.interfaces.revocations import new_revocations
from gpukeeper.ledger.logins import Logins
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.views.live import MachineView
from gpukeeper.wiring.session import Session

NEVER_SOONER, NEVER_LATER = 0.5, 1.0  # seconds between two changes that are sent, if there are any
SHARE = 4  # pauses are so many times as long as the work before them, within these limits
AT_LEAST = 15.0  # seconds: a view is sent that often though nothing changed, so that its age tells something


@asynccontextmanager
async def web_process(
    session: Session, found: WebLogins, log: Log, metrics: MetricsPage | None = None
) -> AsyncIterator[None]:
    """Runs while the block does."""
    session.keeper.live.enabled, session.keeper.live.gpus_only = True, False
    web = WebProcess(session, found.logins, found.listener, log, metrics)
    setup = await web.settings.setup()  # refuses before anything is served
    try:
        async with supervised(web, found.where, found.listener, log, "http" if setup.tls is None else "https"):
            yield
    finally:
        web.close()


class WebProcess:
    """What the web process of a daemon is sent and answered. Implements Backend."""

    no_metrics = "metrics need an extra. In a clone of gpukeeper: pip install '.[metrics]'"

    def __init__(
        self,
        session: Session,
        logins: Logins,
        listener: socket.socket,
        log: Log,
        metrics: MetricsPage | None = None,
    ) -> None:
        self._session, self._logins, self._log, self._metrics = session, logins, log, metrics
        self._limiter = RequestLimiter()
        self._reads = RequestLimiter(READS)  # of their own: a stop takes its grace, and its person reads meanwhile
        self.settings = WebSettings(lambda: session.book.policy.web, listener.getsockname()[0], log)
        self._queries = Queries(session, lambda: self.settings.warnings)
        self.demo: Demo | None = None  # what is shown is simulated
        self._present = PresentView(session)
        self.revocations = new_revocations()
        logins.on_revoke, logins.on_misuse = self.revocations.increase, log

    def close(self) -> None:
        self._logins.on_revoke = lambda: None
        self.revocations.close()
        self._queries.close()

    async def welcome(self) -> Welcome:
        setup = await self.settings.setup()
        return Welcome(
            machine=self._session.keeper.host,
            version=__version__,
            key=await self._logins.key("cookies"),
            anonymous=self.settings.anonymous,
            session_seconds=int(self.settings.sessions.total_seconds()),
            site=setup.site,
            account=setup.account,
            tls=setup.tls,
            demo=self.demo,
        )

    async def publish(self, send: Send) -> None:
        await self.settings.serve(self._publish_views(send), send)

    async def _publish_views(self, send: Send) -> None:
        live, sent = self._session.keeper.live, 0
        while True:
            live.changed.clear()
            delta, sent, whole = await self._present.changes(sent)
            await send(Change(delta, whole=whole))
            pause = max(real_seconds(NEVER_SOONER), self._present.busy * SHARE)
            await asyncio.sleep(min(pause, real_seconds(NEVER_LATER)))
            with suppress(TimeoutError):
                await asyncio.wait_for(live.changed.wait(), real_seconds(AT_LEAST))

    async def view(self) -> MachineView:
        return await self._present.view()

    async def answer(self, question: Question) -> Answer:
        """With the rights of the person whose credentials it carries. Every refusal is a sentence."""
        try:
            who, reply = await self._answer(question)
        except KeeperError as problem:
            who, reply = ANONYMOUS, Reply(done=False, words=str(problem), exit_code=problem.exit_code)
        except Exception as bug:  # of one request: the daemon goes on
            self._log(f"a request from the web failed, which is a bug in gpukeeper: {bug!r}")
            who, reply = (
                ANONYMOUS,
                Reply(done=False, words="this is a bug in gpukeeper; see the daemon's log", exit_code=BUG),
            )
        body = bytes(reply.body) if isinstance(reply, DataReply) else b"null"
        return Answer(
            id=question.id,
            person=Person(
                name=who.name,
                admin=bool(who.name) and is_admin(self._session.book, who.name),
                login=who.login,
                kind=who.kind,
            ),
            done=reply.done,
            words=reply.words,
            exit_code=reply.exit_code,
            token=reply.token,
            body=body,
        )

    @asynccontextmanager
    async def _turn(self, limiter: RequestLimiter, who: Identity) -> AsyncIterator[None]:
        async with limiter.turn(who.turn):
            await asyncio.sleep(limiter.wait(who.turn, asyncio.get_running_loop().time()))
            yield

    async def _answer(self, question: Question) -> tuple[Identity, Reply]:
        session, request = self._session, question.request
        now, proxied = session.keeper.clock.now(), self.settings.proxy_configured
        who = await identify(self._logins, question.credentials, now, proxied=proxied)
        if request.verb in ("whoami", "redeem"):  # short, and before a login: others must not be able to delay them
            return who, await self._answer_login(who, request)
        if not who.name and not self.settings.anonymous:
            return who, _LOG_IN
        if request.verb in identity.VERBS:
            return who, await self._answer_login(who, request)
        if request.verb == "metrics":
            async with self._turn(self._reads, who):
                return who, await self._read_metrics()
        if request.verb in VERBS:
            async with self._turn(self._reads, who):
                return who, await self._queries.answer(who.reader, request)
        if not who.name:
            return who, _LOG_IN
        async with self._turn(self._limiter, who):
            keeper = with_origin(session.keeper, who.name, who.via)
            reply = await fulfil(keeper, session.book, who.name, request, uid=who.uid)
            await refresh(session.keeper, session.book, request.workload)
            return who, reply

    async def _answer_login(self, who: Identity, request: Request) -> Reply:
        session = self._session
        return await answer_login(self._logins, session.book, who, request, session.keeper.clock.now())

    async def _read_metrics(self) -> Reply:
        """The text, with its content type as the words."""
        if self._metrics is None:
            raise UsageError(self.no_metrics)
        page = await self._metrics()
        return DataReply(done=True, words=page.type, body=msgspec.Raw(msgspec.json.encode(page.body.decode())))


READS = RateLimits(burst=200, pause=0.1)  # a page asks up to three times
_LOG_IN = Reply(done=False, words="log in first: gpukeeper login", exit_code=NOT_LOGGED_IN)
