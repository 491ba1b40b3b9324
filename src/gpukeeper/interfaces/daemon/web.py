"""The web process of `serve --web`, seen from the daemon: started, supervised, sent what changed, and answered.

It never acts. Each of its questions carries what a person presented, and is answered with the rights of that person.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec

from gpukeeper import __version__
from gpukeeper.blocking import real_seconds
from gpukeeper.engine.live import STEP, STEPS
from gpukeeper.engine.origin import with_origin
from gpukeeper.engine.outlook import PolicyHead
from gpukeeper.engine.refresh import refresh
from gpukeeper.engine.requests import DataReply, Reply, fulfil
from gpukeeper.interfaces.daemon import identity
from gpukeeper.interfaces.daemon.identity import ANONYMOUS, NOT_LOGGED_IN, Identity, answer_login, identify
from gpukeeper.interfaces.daemon.limiter import RequestLimiter
from gpukeeper.interfaces.daemon.queries import VERBS, Queries
from gpukeeper.interfaces.daemon.server import WebLogins
from gpukeeper.interfaces.link import (
    LARGEST_QUESTION,
    Answer,
    Change,
    Demo,
    Person,
    Question,
    Welcome,
    frame,
    read_frame,
)
from gpukeeper.interfaces.telemetry.pages import Endpoint
from gpukeeper.ledger.logins import Logins
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.subject import Shape
from gpukeeper.views.live import MachineView, difference, machine_view
from gpukeeper.wiring.session import Session

NEVER_SOONER = 1.0  # seconds between two views
SHARE = 20  # building views takes at most one part in so many of the time
AT_LEAST = 15.0  # seconds: a view is sent that often though nothing changed, so that its age tells something
STUCK = 30.0  # seconds to take a frame; a process that does not is ended
BACKOFF = (1.0, 60.0)
HEALTHY = 60.0  # seconds after which a process that ends is started again at once
Log = Callable[[str], None]


@asynccontextmanager
async def web_process(where: Endpoint, session: Session, found: WebLogins, log: Log) -> AsyncIterator[None]:
    """Runs while the block does."""
    require_web()
    listener = listen(where)
    session.keeper.live.enabled, session.keeper.live.gpus_only = True, False
    web = WebProcess(session, found.logins, listener, log)
    address = f"[{where.address}]" if ":" in where.address else where.address
    log(f"serving the dashboard on http://{address}:{listener.getsockname()[1]}/")
    supervising = asyncio.create_task(web.supervise())
    try:
        yield
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        listener.close()
        web.close()


def require_web() -> None:
    """The packages of the dashboard are an extra."""
    if any(find_spec(name) is None for name in ("starlette", "uvicorn", "jinja2")):
        raise UsageError("The dashboard needs an extra. In a clone of gpukeeper: pip install '.[web]'")


def listen(where: Endpoint) -> socket.socket:
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


def is_loopback(address: str) -> bool:
    return address in {"::1", "localhost"} or address.startswith("127.")


class WebProcess:
    def __init__(self, session: Session, logins: Logins, listener: socket.socket, log: Log) -> None:
        self._session, self._logins, self._listener, self._log = session, logins, listener, log
        self._limiter = RequestLimiter()
        self._queries = Queries(session)
        self._sent: MachineView | None = None
        self.demo: Demo | None = None  # what is shown is simulated
        self._anonymous = is_loopback(listener.getsockname()[0])

    def close(self) -> None:
        self._queries.close()

    async def supervise(self) -> None:
        """Starts it again when it ends, later each time it does so soon."""
        loop, pause = asyncio.get_running_loop(), BACKOFF[0]
        while True:
            begun = loop.time()
            code = await self._run()
            pause = BACKOFF[0] if loop.time() - begun > real_seconds(HEALTHY) else min(pause * 2, BACKOFF[1])
            self._log(f"the web process ended ({_ending(code)}); starting it again in {pause:g} s")
            await asyncio.sleep(real_seconds(pause))

    async def _run(self) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gpukeeper.interfaces.web", str(theirs.fileno()), str(self._listener.fileno())),
                pass_fds=(theirs.fileno(), self._listener.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                env=_environment(),
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            await self._talk(reader, writer)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), real_seconds(1.0))
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            code = await process.wait()
        return code

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._sent = None
        key = await self._logins.key("cookies")
        welcome = Welcome(
            machine=self._session.keeper.host,
            version=__version__,
            key=key,
            anonymous=self._anonymous,
            session_seconds=int(identity.SESSION_LASTS.total_seconds()),
            demo=self.demo,
        )
        try:
            await _send(writer, welcome)
            async with asyncio.TaskGroup() as group:
                publishing = group.create_task(self._publish(writer))
                while (question := await read_frame(reader, Question, LARGEST_QUESTION)) is not None:
                    group.create_task(self._reply(writer, question))
                publishing.cancel()
        except* (ConnectionError, TimeoutError, ValueError) as problems:
            self._log(f"the web process is ended: {problems.exceptions[0]!r}")
        finally:
            writer.close()

    async def _publish(self, writer: asyncio.StreamWriter) -> None:
        live, loop = self._session.keeper.live, asyncio.get_running_loop()
        while True:
            live.changed.clear()
            begun = loop.time()
            view = await self.view()
            before, self._sent = self._sent, view
            await _send(writer, Change(difference(before, view), whole=before is None))
            spent = loop.time() - begun
            await asyncio.sleep(max(real_seconds(NEVER_SOONER), spent * SHARE))
            with suppress(TimeoutError):
                await asyncio.wait_for(live.changed.wait(), real_seconds(AT_LEAST))

    async def view(self) -> MachineView:
        session, keeper = self._session, self._session.keeper
        await self._recall()
        devices = [
            key
            for place in keeper.live.places.values()
            for key, fact in place.facts.items()
            if fact.view.subject.shape is Shape.DEVICE
        ]
        policy = session.book.policy
        return machine_view(
            keeper.live,
            session.book,
            keeper.clock.now(),
            machine=keeper.host,
            version=__version__,
            policy=PolicyHead(session.loaded.source, policy.digest, policy.preset, policy.mode),
            paused=await keeper.ledger.paused(),
            gpus=await keeper.ledger.memories(devices),
        )

    async def _recall(self) -> None:
        """Use that was recorded before this daemon started, or before the workload was first seen."""
        keeper = self._session.keeper
        keys = keeper.live.unknown_history()
        if keys:
            now = keeper.clock.now()
            found = await keeper.signals.series(keys, now - STEPS * STEP, now)
            for key, series in found.items():
                keeper.live.recall(key, series)

    async def _reply(self, writer: asyncio.StreamWriter, question: Question) -> None:
        await _send(writer, await self.answer(question))

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
                Reply(done=False, words="this is a bug in gpukeeper; see the daemon's log", exit_code=1),
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

    async def _answer(self, question: Question) -> tuple[Identity, Reply]:
        session, request = self._session, question.request
        who = await identify(self._logins, question.credentials, session.keeper.clock.now())
        if not who.name and not self._anonymous and request.verb not in ("redeem", "whoami"):
            return who, _LOG_IN
        async with self._limiter.turn(who.turn):
            await asyncio.sleep(self._limiter.wait(who.turn, asyncio.get_running_loop().time()))
            if request.verb in identity.VERBS:
                return who, await answer_login(self._logins, session.book, who, request, session.keeper.clock.now())
            if request.verb in VERBS:
                return who, await self._queries.answer(who.reader, request)
            if not who.name:
                return who, _LOG_IN
            keeper = with_origin(session.keeper, who.name, who.via)
            reply = await fulfil(keeper, session.book, who.name, request, uid=who.uid)
            await refresh(session.keeper, session.book, request.workload)
            return who, reply


_LOG_IN = Reply(done=False, words="log in first: gpukeeper login", exit_code=NOT_LOGGED_IN)


async def _send(writer: asyncio.StreamWriter, message: object) -> None:
    writer.write(frame(message))
    await asyncio.wait_for(writer.drain(), real_seconds(STUCK))


def _environment() -> dict[str, str]:
    """Of ours only what Python needs: no secrets."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LC_", "LANG", "PATH", "TZ"))
    }


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
