"""The unix socket of `serve`. One JSON request a connection; the kernel says who asks (SO_PEERCRED).

Everybody may connect, so nothing here may be used up by one user: each has a few connections and one request at
work at a time, users take turns, and a share is reserved for admins, so that `pause` always gets through. Requests
must arrive and replies must be taken soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import resource
import socket
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.devices.holders import user_name
from gpukeeper.engine.requests import Reply, Request
from gpukeeper.interfaces.daemon.requests import NAMES
from gpukeeper.ledger.files import LONGEST_SOCKET_PATH, ROOT_SOCKET, why_untrusted
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError


@dataclass(frozen=True)
class RateLimits:
    connections: int = 96  # of ordinary users together
    each: int = 8  # of one of them
    reserved: int = 32  # of admins, beside all others
    at_work: int = 8  # requests of ordinary users that are worked on at once; one of each
    admins_at_work: int = 4
    burst: int = 20  # requests of one ordinary user without a pause
    pause: float = 2.0  # seconds between two of them after that: each may write to the ledger

    def within(self, descriptors: int) -> RateLimits:
        """Where few descriptors are allowed, most are for the passes."""
        most = max(descriptors // 4, 8)
        if self.connections + self.reserved <= most:
            return self
        return replace(self, connections=most * 3 // 4, each=min(self.each, most // 4), reserved=most // 4)


@dataclass
class RequestLimiter:
    limits: RateLimits = field(default_factory=RateLimits)
    admins: Collection[int] = frozenset({0})  # uids
    inside: Counter[int] = field(default_factory=Counter)  # by uid: open connections
    working: Counter[int] = field(default_factory=Counter)  # by uid: requests that are worked on
    asked: dict[int, float] = field(default_factory=dict)  # by uid: when its burst is whole again, steady time
    waiting: dict[int, deque[asyncio.Future[None]]] = field(default_factory=dict)  # by uid, whose turn is first first

    def why_not(self, uid: int) -> str | None:
        """Why one more connection of that user is refused; None: it is allowed."""
        if uid in self.admins:
            full = sum(self.inside[one] for one in self.inside if one in self.admins) >= self.limits.reserved
            return "too many concurrent requests of admins" if full else None
        if self.inside[uid] >= self.limits.each:
            return f"too many concurrent requests of uid {uid}"
        others = sum(count for one, count in self.inside.items() if one not in self.admins)
        return "too many concurrent requests" if others >= self.limits.connections else None

    def enter(self, uid: int) -> None:
        self.inside[uid] += 1

    def leave(self, uid: int) -> None:
        self.inside[uid] -= 1
        if not self.inside[uid]:
            del self.inside[uid]

    def wait(self, uid: int, now: float) -> float:
        """Seconds until the next request of that user is worked on; counts it."""
        if uid in self.admins:
            return 0.0
        self.asked = {one: whole for one, whole in self.asked.items() if whole > now}
        whole = max(self.asked.get(uid, now), now) + self.limits.pause
        self.asked[uid] = whole
        return max(whole - now - self.limits.burst * self.limits.pause, 0.0)

    async def pause(self, uid: int) -> None:
        """So long as the next request of that user has to wait; counts it."""
        await asyncio.sleep(self.wait(uid, asyncio.get_running_loop().time()))

    @asynccontextmanager
    async def turn(self, uid: int) -> AsyncIterator[None]:
        """Waits until this user's request may be worked on."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(uid, deque()).append(turn)
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._done(uid)
            elif turn in self.waiting.get(uid, ()):
                self.waiting[uid].remove(turn)
            raise
        try:
            yield
        finally:
            self._done(uid)

    def _done(self, uid: int) -> None:
        self.working[uid] -= 1
        if not self.working[uid]:
            del self.working[uid]
        self._next()

    def _next(self) -> None:
        """Starts what may start. A user who was served goes to the end of the queue."""
        for uid in list(self.waiting):
            queue = self.waiting[uid]
            while queue and queue[0].done():
                queue.popleft()  # cancelled
            if not queue:
                del self.waiting[uid]
            elif self._may_work(uid):
                del self.waiting[uid]
                self.working[uid] += 1
                queue.popleft().set_result(None)
                if queue:
                    self.waiting[uid] = queue

    def _may_work(self, uid: int) -> bool:
        if uid in self.admins:
            at_work = sum(count for one, count in self.working.items() if one in self.admins)
            return at_work < self.limits.admins_at_work
        others = sum(count for one, count in self.working.items() if one not in self.admins)
        return not self.working[uid] and others < self.limits.at_work


LARGEST = 64 * 1024
PATIENCE = 5.0  # seconds for a request to arrive, and for its reply to be taken
BACKLOG = 128
BREATH = 0.001  # seconds after a refusal: a storm of connections must not keep the loop busy
AGAIN = 1.0  # seconds until the next try after accepting failed
QUIET = 60.0  # seconds between two complaints about that
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
Log = Callable[[str], None]


class Responder(Protocol):
    """What answers the requests of users on this machine."""

    @property
    def admins(self) -> Sequence[str]:
        """Names; a share of the connections is reserved for them."""
        ...

    async def answer(self, who: str, uid: int, request: Request) -> Reply:
        """Every refusal is a sentence."""
        ...


@asynccontextmanager
async def listening(path: Path, responder: Responder, log: Log = lambda words: None) -> AsyncIterator[None]:
    """Listens while the block runs. All users may connect; permissions are checked per request."""
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise KeeperError(f"{path} is too long for a unix socket. Set GPUKEEPER_SOCKET to a shorter path.")
    is_new = not path.parent.exists()
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    why = why_untrusted(path.parent, holds_entry=True)
    if why is not None:
        raise KeeperError(f"Other users could replace the socket {path}: {why}. The daemon was not started.")
    if is_new or path == ROOT_SOCKET:  # users go through it, whatever the umask is; older units made root's with 0700
        path.parent.chmod(0o755)
    _forget(path)  # of a daemon that died; a living one holds the serve lease, which we have
    server = Server(responder, RequestLimiter(RateLimits().within(raise_descriptors())), log)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        listener.bind(str(path))
        _open_to_everyone(path)
        listener.listen(BACKLOG)
        accepting = asyncio.create_task(server.accept(listener))
        try:
            yield
        finally:
            _forget(path)
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            await server.close()


class Server:
    def __init__(self, responder: Responder, limiter: RequestLimiter, log: Log) -> None:
        self._responder, self._limiter, self._log = responder, limiter, log
        self._tasks: set[asyncio.Task[None]] = set()
        self._admins: Sequence[str] = ()
        self._complained = float("-inf")

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._know_admins()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                words = f"cannot accept connections on the socket ({error.strerror}); retrying"
                self._complain(words)
                await asyncio.sleep(AGAIN)
                continue
            connection.setblocking(False)
            uid = _peer_uid(connection)
            why = self._limiter.why_not(uid)
            if why is not None:
                _refuse(connection, why)
                await asyncio.sleep(BREATH)
                continue
            self._limiter.enter(uid)
            task = asyncio.create_task(self._serve(connection, uid))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Requests in progress are interrupted; the next start inspects open intents first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, connection: socket.socket, uid: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            reply = await self._answer(connection, uid)
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(loop.sock_sendall(connection, msgspec.json.encode(reply)), PATIENCE)
        finally:
            connection.close()
            self._limiter.leave(uid)

    async def _answer(self, connection: socket.socket, uid: int) -> Reply:
        try:
            line = await asyncio.wait_for(_line(connection), PATIENCE)
            request = reading.decode(line, type=Request)
        except (TimeoutError, ValueError, OSError) as problem:
            why = str(problem) or f"no request received within {PATIENCE:g} s"
            return Reply(done=False, words=f"invalid request: {why}", exit_code=2)
        async with self._limiter.turn(uid):
            await self._limiter.pause(uid)
            try:
                who = await in_thread(lambda: user_name(uid), NAMES)
            except TimeoutError:
                return Reply(done=False, words=f"uid {uid} could not be resolved in time; try again", exit_code=1)
            try:
                return await self._responder.answer(who, uid, request)
            except Exception as bug:  # of one request: passes continue, and a repeated request does not fill the log
                self._complain(f"a request of {who} failed, which is a bug in gpukeeper: {bug!r}")
                return Reply(done=False, words=f"this is a bug in gpukeeper: {bug!r}", exit_code=1)

    async def _know_admins(self) -> None:
        """The uids of the admins in the policy; resolved again when the names change."""
        names = self._responder.admins
        if names == self._admins:
            return
        self._admins = names
        found = {0, os.geteuid()}
        with contextlib.suppress(TimeoutError):  # then only root has the reserved share
            found |= await in_thread(lambda: _uids(names), NAMES)
        self._limiter.admins = frozenset(found)

    def _complain(self, words: str) -> None:
        """At most once a minute: the cause may occur a thousand times a second."""
        now = asyncio.get_running_loop().time()
        if now - self._complained >= QUIET:
            self._complained = now
            self._log(words)


async def _line(connection: socket.socket) -> bytes:
    """Up to a line break or the end."""
    loop, words = asyncio.get_running_loop(), b""
    while b"\n" not in words and (part := await loop.sock_recv(connection, LARGEST)):
        words += part
        if len(words) > LARGEST:
            raise ValueError(f"longer than {LARGEST:,} bytes")
    return words.partition(b"\n")[0]


def _refuse(connection: socket.socket, why: str) -> None:
    """One line, if it can be sent at once."""
    reply = Reply(done=False, words=f"{why}; nothing was done. Try again in a few seconds", exit_code=1)
    with connection, contextlib.suppress(OSError):
        connection.send(msgspec.json.encode(reply))


def raise_descriptors() -> int:
    """As many as are allowed; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft if soft != resource.RLIM_INFINITY else 2**20


def _uids(names: Sequence[str]) -> set[int]:
    found = set()
    for name in names:
        with contextlib.suppress(KeyError):
            found.add(pwd.getpwnam(name).pw_uid)
    return found


def _forget(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _open_to_everyone(path: Path) -> None:
    """All users may connect; permissions depend on the peer's uid."""
    path.chmod(0o666)


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def notify_systemd(words: str) -> None:
    """READY=1, STOPPING=1: only if systemd set NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, contextlib.suppress(OSError):
            notify.connect("\0" + address[1:] if address.startswith("@") else address)
            notify.send(words.encode())
