"""The web process of `serve --web`, seen from the daemon: a supervised child with a link and a listening socket;
started again when the section `web` of the policy changes; what it is sent, and how its questions are answered.

It never acts. Each of its questions carries what a person presented, and is answered with the rights of that
person. A Backend answers: that of a daemon, or that of a fleet.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, closing, suppress
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from gpukeeper import __version__
from gpukeeper.blocking import in_thread, real_seconds
from gpukeeper.engine.requests import DataReply, Reply, Request
from gpukeeper.interfaces.daemon.queries import VERBS, Queries
from gpukeeper.interfaces.daemon.requests import (
    ANONYMOUS,
    LOG_IN,
    LOGIN_VERBS,
    Identity,
    WebLogins,
    answer_login,
    carry_out,
    identify,
)
from gpukeeper.interfaces.daemon.server import RateLimits, RequestLimiter
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.interfaces.http_pages import Page as MetricsPage
from gpukeeper.interfaces.link import (
    BUG,
    LARGEST_QUESTION,
    Answer,
    Change,
    Demo,
    Person,
    Question,
    Welcome,
    frame,
    new_revocations,
    read_frame,
)
from gpukeeper.interfaces.web_setup import Setup, is_loopback, read_setup, read_tls, tls_stamp
from gpukeeper.ledger.logins import Logins, open_logins
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.policy import Web
from gpukeeper.processes import DIRECTORY, environment, module_command, running
from gpukeeper.views.live import MachineView
from gpukeeper.wiring.session import Session

CHILD = module_command("gpukeeper.interfaces.web")
OPEN_MAX = 128  # questions that are answered at a time, of LARGEST_QUESTION bytes each at most: 32 MiB
STUCK = 30.0  # seconds to take a frame; a process that does not is ended
BACKOFF = (1.0, 60.0)
HEALTHY = 60.0  # seconds after which a process that ends is started again at once
Log = Callable[[str], None]
Send = Callable[[object], Awaitable[None]]


def require_web() -> None:
    """The packages of the dashboard are an extra."""
    if any(find_spec(name) is None for name in ("starlette", "uvicorn", "jinja2")):
        raise UsageError("The dashboard needs an extra. In a clone of gpukeeper: pip install '.[web]'")


def listen(where: Endpoint) -> socket.socket:
    require_web()
    family = socket.AF_INET6 if ":" in where.address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((where.address, where.port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise KeeperError(
            f"--web: cannot listen on {where.address}:{where.port} ({error.strerror}). Nothing was started. "
            "Choose another port, or end the program that uses it."
        ) from error
    return listener


@asynccontextmanager
async def opened_logins(web: Endpoint, ledger: Path) -> AsyncIterator[WebLogins]:
    """With a listener, while the block runs. `ledger`: the logins are beside it."""
    with listen(web) as listener, closing(open_logins(ledger)) as logins:
        yield WebLogins(logins, Endpoint(port=listener.getsockname()[1], address=web.address), listener)


class WebChild:
    def __init__(self, backend: Backend, listener: socket.socket, log: Log) -> None:
        self._backend, self._listener, self._log = backend, listener, log
        self._replies: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(OPEN_MAX)

    @asynccontextmanager
    async def kept_running(self) -> AsyncIterator[None]:
        """While the block does. Requests in progress are interrupted at its end; the next start inspects open intents
        first."""
        supervising = asyncio.create_task(self._supervise())
        try:
            yield
        finally:
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)
            for task in self._replies:
                task.cancel()
            await asyncio.gather(*self._replies, return_exceptions=True)

    async def _supervise(self) -> None:
        """Starts it again when it ends, later each time it does so soon."""
        loop, pause = asyncio.get_running_loop(), BACKOFF[0]
        while True:
            begun = loop.time()
            try:
                why = _ending(await self._run())
            except Exception as problem:  # passes go on, and it is tried again
                why = repr(problem)
            pause = BACKOFF[0] if loop.time() - begun > real_seconds(HEALTHY) else pause
            self._log(f"the web process ended ({why}); starting it again in {pause:g} s")
            await asyncio.sleep(real_seconds(pause))
            pause = min(pause * 2, BACKOFF[1])

    async def _run(self) -> int:
        ours, theirs = socket.socketpair()
        inherited = (theirs.fileno(), self._listener.fileno(), self._backend.revocations.descriptor)
        command, none = (*CHILD, *map(str, inherited)), asyncio.subprocess.DEVNULL
        with theirs:
            async with running(
                *command, alone=True, pass_fds=inherited, stdin=none, env=environment(), cwd=DIRECTORY
            ) as process:
                theirs.close()
                reader, writer = await asyncio.open_connection(sock=ours)
                await self._talk(reader, writer)
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), real_seconds(1.0))
        return process.returncode or 0

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(message: object) -> None:
            writer.write(frame(message))
            await asyncio.wait_for(writer.drain(), real_seconds(STUCK))

        async def reply(question: Question) -> None:
            answer = await self._backend.answer(question)
            with suppress(ConnectionError, TimeoutError):
                await send(answer)

        try:
            await send(await self._backend.welcome())
            async with asyncio.TaskGroup() as group:
                publishing = group.create_task(self._backend.publish(send))
                publishing.add_done_callback(lambda task: writer.close())
                while (question := await self._question(reader)) is not None:
                    # Outside the group: a stop is not left in the middle because the web process ended.
                    task = asyncio.create_task(reply(question))
                    self._replies.add(task)
                    task.add_done_callback(self._answered)
                publishing.cancel()
        except* (ConnectionError, TimeoutError, ValueError, KeeperError) as problems:
            self._log(f"the web process is ended: {problems.exceptions[0]}")
        finally:
            writer.close()

    async def _question(self, reader: asyncio.StreamReader) -> Question | None:
        """The next one, when there is room for it: what is not read stays with the web process."""
        await self._room.acquire()
        question = None
        try:
            question = await read_frame(reader, Question, LARGEST_QUESTION)
        finally:
            if question is None:
                self._room.release()
        return question

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._replies.discard(task)
        self._room.release()


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


READ_WITHIN = timedelta(seconds=20)  # files and names of users
FOLLOW = 20.0  # seconds between two checks for changes


class WebSettings:
    """`current`: the section in effect. `address`: where the dashboard listens."""

    def __init__(self, current: Callable[[], Web], address: str, log: Callable[[str], None]) -> None:
        self._current, self._address, self._log = current, address, log
        self._problem = ""  # of renewed certificates
        self._setup: Setup | None = None

    @property
    def anonymous(self) -> bool:
        """Reading needs no login."""
        return is_loopback(self._address) and self._current().read_on_loopback

    @property
    def sessions(self) -> timedelta:
        return self._current().sessions

    @property
    def proxy_configured(self) -> bool:
        return self._setup is not None and self._setup.site.proxy is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        """For the health page."""
        lasting = self._setup.warnings if self._setup is not None else ()
        return (*lasting, self._problem) if self._problem else lasting

    async def setup(self) -> Setup:
        """Raises KeeperError with the reason if the dashboard must not be served like this."""
        web, warned = self._current(), self.warnings
        self._setup = await in_thread(lambda: read_setup(web, self._address), READ_WITHIN)
        self._problem = ""
        for words in self._setup.warnings:
            if words not in warned:
                self._log(f"WARNING: {words}")
        return self._setup

    async def welcome(self, machine: str, logins: Logins) -> Welcome:
        setup = await self.setup()
        return Welcome(
            machine=machine,
            version=__version__,
            key=await logins.key("cookies"),
            anonymous=self.anonymous,
            session_seconds=int(self.sessions.total_seconds()),
            site=setup.site,
            account=setup.account,
            tls=setup.tls,
        )

    async def serve(self, publishing: Coroutine[Any, Any, None], send: Send) -> None:
        """Publishes until the web process must be started again."""
        tasks = [asyncio.create_task(one) for one in (publishing, self.follow(send))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            for one in tasks:
                one.cancel()

    async def follow(self, send: Send) -> None:
        """Sends renewed certificates; returns when the web process must be started again."""
        assert self._setup is not None
        web, pair = self._setup.web, self._setup.tls
        stamp = await in_thread(lambda: tls_stamp(web.tls), READ_WITHIN)
        while True:
            await asyncio.sleep(real_seconds(FOLLOW))
            if self._current() != web:
                self._log("the settings of the dashboard have changed")
                return
            if pair is None:
                continue
            try:
                now = await in_thread(lambda: tls_stamp(web.tls), READ_WITHIN)
                if now == stamp:
                    continue
                renewed = await in_thread(lambda: read_tls(web.tls), READ_WITHIN)
            except (KeeperError, TimeoutError) as problem:
                self._complain(str(problem) or "the files of the certificate could not be read in time")
                continue
            stamp, self._problem = now, ""
            if renewed is not None and renewed != pair:
                pair = renewed
                await send(renewed)
                self._log("loaded the renewed certificate of the dashboard")

    def _complain(self, words: str) -> None:
        words = f"the dashboard keeps its previous certificate: {words}"
        if words != self._problem:
            self._problem = words
            self._log(words)


READS = RateLimits(burst=200, pause=0.1)  # a page asks up to three times


class Backend(ABC):
    """What a web process is sent, and how its questions are answered: each with the rights of the person whose
    credentials it carries."""

    verbs: Collection[str] = VERBS  # that only read
    own_log = "the daemon's log"

    def __init__(self, logins: Logins, settings: WebSettings, log: Log) -> None:
        self.settings, self._logins, self._log = settings, logins, log
        self._reads = RequestLimiter(READS)  # of their own: a stop takes its grace, and its person reads meanwhile
        self._changes = RequestLimiter()
        self.revocations = new_revocations()
        logins.on_revoke, logins.on_misuse = self.revocations.increase, log

    def close(self) -> None:
        self._logins.on_revoke = lambda: None
        self.revocations.close()

    @abstractmethod
    async def welcome(self) -> Welcome:
        """Its first frame."""

    @abstractmethod
    async def publish_views(self, send: Send) -> None:
        """For ever: sends what changed; everything first."""

    @property
    @abstractmethod
    def book(self) -> Rulebook: ...

    @abstractmethod
    def now(self) -> datetime: ...

    @abstractmethod
    async def read(self, who: Identity, machine: str, request: Request) -> Reply: ...

    @abstractmethod
    async def change(self, who: Identity, machine: str, request: Request) -> Reply: ...

    def why_not(self, machine: str) -> Reply | None:
        """The refusal of a question about that machine. None: it is answered."""
        return None

    def name(self, who: Identity) -> str:
        """As machines know this person."""
        return who.name

    def is_admin(self, who: Identity) -> bool:
        return bool(who.name) and is_admin(self.book, who.name)

    async def publish(self, send: Send) -> None:
        """The web process is started again if it returns."""
        await self.settings.serve(self.publish_views(send), send)

    async def answer(self, question: Question) -> Answer:
        """Every refusal is a sentence."""
        who = ANONYMOUS
        try:
            proxied = self.settings.proxy_configured
            who = await identify(self._logins, question.credentials, self.now(), proxied=proxied)
            reply = await self._answer(who, question.machine, question.request)
        except KeeperError as problem:
            reply = Reply(done=False, words=str(problem), exit_code=problem.exit_code)
        except Exception as bug:  # of one request: the others go on
            self._log(f"a request from the web failed, which is a bug in gpukeeper: {bug!r}")
            reply = Reply(done=False, words=f"this is a bug in gpukeeper; see {self.own_log}", exit_code=BUG)
        person = Person(name=self.name(who), admin=self.is_admin(who), login=who.login, kind=who.kind)
        return Answer(id=question.id, person=person, **msgspec.structs.asdict(reply))

    async def _answer(self, who: Identity, machine: str, request: Request) -> Reply:
        if not who.name and not self.settings.anonymous and request.verb not in ("whoami", "redeem"):
            return LOG_IN
        if request.verb in LOGIN_VERBS:  # short: others must not be able to delay them
            return await answer_login(self._logins, self.book, who, request, self.now())
        refused = self.why_not(machine)
        if refused is not None:
            return refused
        if request.verb in self.verbs:
            async with self._reads.turn(who.turn):
                await self._reads.pause(who.turn)
                return await self.read(who, machine, request)
        return await self.change(who, machine, request) if who.name else LOG_IN


@asynccontextmanager
async def supervised(backend: Backend, found: WebLogins, log: Log) -> AsyncIterator[None]:
    """The web process runs while the block does. Refuses before anything is served; closes backend and listener."""
    try:
        scheme = "http" if (await backend.settings.setup()).tls is None else "https"
        address = f"[{found.where.address}]" if ":" in found.where.address else found.where.address
        log(f"serving the dashboard on {scheme}://{address}:{found.where.port}/")
        async with WebChild(backend, found.listener, log).kept_running():
            yield
    finally:
        backend.close()
        found.listener.close()


NEVER_SOONER, NEVER_LATER = 0.5, 1.0  # seconds between two changes that are sent, if there are any
SHARE = 4  # pauses are so many times as long as the work before them, within these limits
AT_LEAST = 15.0  # seconds: a view is sent that often though nothing changed, so that its age tells something


class WebProcess(Backend):
    """Of a daemon. `metrics`: None: it has none."""

    verbs = (*VERBS, "metrics")
    no_metrics = "metrics need an extra. In a clone of gpukeeper: pip install '.[metrics]'"

    def __init__(
        self,
        session: Session,
        logins: Logins,
        listener: socket.socket,
        log: Log,
        metrics: MetricsPage | None = None,
    ) -> None:
        super().__init__(logins, WebSettings(lambda: session.book.policy.web, listener.getsockname()[0], log), log)
        self._session, self._metrics = session, metrics
        self._queries = Queries(session, lambda: self.settings.warnings)
        self.demo: Demo | None = None  # what is shown is simulated
        session.keeper.live.enabled, session.keeper.live.gpus_only = True, False

    def close(self) -> None:
        super().close()
        self._queries.close()

    @property
    def book(self) -> Rulebook:
        return self._session.book

    def now(self) -> datetime:
        return self._session.keeper.clock.now()

    async def welcome(self) -> Welcome:
        welcome = await self.settings.welcome(self._session.keeper.host, self._logins)
        return msgspec.structs.replace(welcome, demo=self.demo)

    async def publish_views(self, send: Send) -> None:
        live, present, sent = self._session.keeper.live, self._session.present, 0
        while True:
            live.changed.clear()
            delta, sent, whole = await present.changes(sent)
            await send(Change(delta, whole=whole))
            pause = max(real_seconds(NEVER_SOONER), present.busy * SHARE)
            await asyncio.sleep(min(pause, real_seconds(NEVER_LATER)))
            with suppress(TimeoutError):
                await asyncio.wait_for(live.changed.wait(), real_seconds(AT_LEAST))

    async def view(self) -> MachineView:
        return await self._session.present.view()

    async def read(self, who: Identity, machine: str, request: Request) -> Reply:
        if request.verb == "metrics":
            return await self._read_metrics()
        return await self._queries.answer(who.reader, request)

    async def change(self, who: Identity, machine: str, request: Request) -> Reply:
        async with self._changes.turn(who.turn):
            await self._changes.pause(who.turn)
            return await carry_out(self._session, who, request)

    async def _read_metrics(self) -> Reply:
        """The text, with its content type as the words."""
        if self._metrics is None:
            raise UsageError(self.no_metrics)
        page = await self._metrics()
        return DataReply(done=True, words=page.type, body=msgspec.Raw(msgspec.json.encode(page.body.decode())))
