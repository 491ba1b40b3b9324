"""Requests on the socket of a daemon: who each comes from, questions, logins to its dashboard (`login`, `token`,
`logins`, `revoke`, `redeem`), and what changes something.

On the machine the kernel reports who asks. On the web a person presents the secret of a session or token, which
began with a link that `gpukeeper login` printed for them here.
"""

from __future__ import annotations

import pwd
import socket
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple
from zlib import crc32

import msgspec

from gpukeeper.blocking import in_thread, real_span
from gpukeeper.engine.keeper import with_origin
from gpukeeper.engine.requests import DataReply, Reply, Request, fulfil
from gpukeeper.engine.view import refresh
from gpukeeper.interfaces.daemon.queries import NOT_NAMED, VERBS, Queries
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.interfaces.link import NOT_LOGGED_IN, PERSON, UNKNOWN_UID, Credentials
from gpukeeper.ledger.logins import LINK_LASTS, Login, LoginKind, Logins
from gpukeeper.lifecycle.holds import is_admin
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.policy import Web
from gpukeeper.model.words import in_words, plain
from gpukeeper.wiring.session import Session

LOGIN_VERBS = ("whoami", "redeem", "logout", "login", "token", "logins", "revoke")
ON_THE_MACHINE = ("login", "token")  # a stolen session must not make itself last
LOG_IN = Reply(done=False, words="log in first: gpukeeper login", exit_code=NOT_LOGGED_IN)
TOKEN_LASTS, TOKEN_LASTS_MAX = timedelta(days=90), timedelta(days=366)
NAMES = timedelta(seconds=5)
LONGEST_NAME = 60
LONGEST_ADDRESS = 64


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """`name` empty: not logged in. `kind` None: by the kernel, or by a proxy."""

    name: str = ""
    uid: int | None = None
    login: str = ""  # its id
    kind: LoginKind | None = None
    via: str = ""  # for the ledger
    address: str = ""
    peer: int | None = None  # as in Credentials

    @property
    def reader(self) -> str:
        """For questions: a name that is nobody's owner or admin where nobody is logged in."""
        return self.name or NOT_NAMED

    @property
    def turn(self) -> int:
        """Whose turn a request takes: the uid, or a number below 0 for a name or an address without one."""
        if self.uid is not None:
            return self.uid
        return -1 - crc32((self.name or f"@{self.address} {self.peer}").encode())


ANONYMOUS = Identity()


async def identify(logins: Logins, presented: Credentials, now: datetime, *, proxied: bool = False) -> Identity:
    """`proxied`: there is a trusted proxy, so that the web process may report names. It is not trusted otherwise."""
    address = plain(presented.address[:LONGEST_ADDRESS])
    if presented.proxy_user:
        return await _of_proxy(presented, address) if proxied else Identity(address=address)
    peer = presented.uid
    found = await logins.find(presented.secret, now, address, peer) if presented.secret else None
    return Identity(address=address, peer=peer) if found is None else of_login(found, address, peer)


async def _of_proxy(presented: Credentials, address: str) -> Identity:
    """A person without an account here has no uid: they may read, and what their name gives them in the policy."""
    name = presented.proxy_user
    if not PERSON.fullmatch(name):
        return Identity(address=address)
    uid = await in_thread(lambda: _uid(name), NAMES)
    via = f"web, proxy {plain(presented.proxy[:LONGEST_ADDRESS])}, from {address}"
    return Identity(name=name, uid=uid, via=via, address=address)


def of_login(found: Login, address: str, peer: int | None) -> Identity:
    via = f"web, {found.kind} {found.id}, from {address}"
    return Identity(
        name=found.person, uid=found.uid, login=found.id, kind=found.kind, via=via, address=address, peer=peer
    )


async def answer_login(logins: Logins, book: Rulebook, who: Identity, request: Request, now: datetime) -> Reply:
    """Raises UsageError with the reason of a refusal."""
    if request.verb == "whoami":
        return Reply(done=True, words=who.name)
    if request.verb == "redeem":
        return await _redeem(logins, who, request, now, book.policy.web.sessions)
    if not who.name:
        return LOG_IN
    if request.verb in ON_THE_MACHINE and who.via:
        raise UsageError(f"{request.verb} works only on the machine itself: gpukeeper login")
    match request.verb:
        case "login":
            made = await logins.create(LoginKind.LINK, who.name, who.uid, now, LINK_LASTS)
            return Reply(done=True, words=f"valid once, for {in_words(LINK_LASTS)}", token=made.secret)
        case "token":
            return await _token(logins, who, request, now)
        case "logins":
            everybody = is_admin(book, who.name) and request.owner is None
            found = await logins.of(None if everybody else request.owner or who.name, now)
            if not is_admin(book, who.name) and request.owner not in (None, who.name):
                raise UsageError(f"{who.name} may list only their own logins")
            return DataReply(done=True, words="", body=msgspec.Raw(msgspec.json.encode(tuple(found))))
        case "logout":
            await logins.revoke(who.login, who.name)
            return Reply(done=True, words="logged out")
        case _:
            ended = await logins.revoke(request.workload or None, None if is_admin(book, who.name) else who.name)
            if request.workload and not ended:
                raise UsageError(f'no login "{request.workload}" of {who.name}. List them: gpukeeper login --list')
            return Reply(done=True, words=f"{ended} login{'' if ended == 1 else 's'} revoked")


async def _redeem(logins: Logins, who: Identity, request: Request, now: datetime, lasts: timedelta) -> Reply:
    if who.peer == UNKNOWN_UID:
        return Reply(
            done=False,
            words="the kernel does not report which user of this machine the browser belongs to, so that nobody was "
            "logged in. The link was not used. Log in over another connection, for example ssh -L, or use a token: "
            "gpukeeper login --token NAME",
            exit_code=NOT_LOGGED_IN,
        )
    made = await logins.redeem(request.token, now, real_span(lasts), who.address, who.peer)
    if made is None:
        return Reply(
            done=False,
            words="this link is not valid: it works once, and for ten minutes. For a new one: gpukeeper login",
            exit_code=NOT_LOGGED_IN,
        )
    return Reply(done=True, words=made.login.person, token=made.secret)


async def _token(logins: Logins, who: Identity, request: Request, now: datetime) -> Reply:
    lasts = TOKEN_LASTS if request.span is None else request.span
    if not timedelta() < lasts <= TOKEN_LASTS_MAX:
        raise UsageError(
            f"a token must expire after more than 0s and at most {in_words(TOKEN_LASTS_MAX)}; nothing was done"
        )
    name = request.workload.strip()
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise UsageError(f"a token needs a name of 1 to {LONGEST_NAME} printable characters; nothing was done")
    made = await logins.create(LoginKind.TOKEN, who.name, who.uid, now, lasts, name)
    return Reply(done=True, words=f"{made.login.id}, valid until {made.login.expires:%Y-%m-%d}", token=made.secret)


def _uid(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


class WebLogins(NamedTuple):
    """Of a daemon with a dashboard. `where`: with the port that `listener` has."""

    logins: Logins
    where: Endpoint
    listener: socket.socket

    def url(self, web: Web) -> str:
        """As configured, or as the log prints it: a browser sends a cookie to that host only."""
        if web.url is not None:
            return web.url
        scheme = "http" if web.tls.certificate is None else "https"
        address = "localhost" if self.where.address in _ANY else self.where.address
        address = f"[{address}]" if ":" in address else address
        return f"{scheme}://{address}:{self.where.port}"


_ANY = ("0.0.0.0", "::")  # noqa: S104


class DaemonResponder:
    """Implements Responder."""

    def __init__(self, session: Session, logins: WebLogins | None) -> None:
        self._session, self._logins = session, logins
        self._queries = Queries(session)
        session.keeper.request_state.enabled = True

    def close(self) -> None:
        self._queries.close()

    @property
    def admins(self) -> Sequence[str]:
        return self._session.book.policy.admins

    async def answer(self, who: str, uid: int, request: Request) -> Reply:
        if request.verb in VERBS:
            return await self._queries.answer(who, request)
        if request.verb in LOGIN_VERBS:
            if self._logins is None:
                words = "this daemon has no web dashboard. Start it with: gpukeeper serve --web PORT"
                return Reply(done=False, words=words, exit_code=1)
            now = self._session.keeper.clock.now()
            return await log_in(self._logins, self._session.book, Identity(name=who, uid=uid), request, now)
        return await carry_out(self._session, Identity(name=who, uid=uid), request)


async def carry_out(session: Session, who: Identity, request: Request) -> Reply:
    """What changes something, with the rights of that person. Its lines in the ledger tell how it came here."""
    keeper = with_origin(session.keeper, who.name, who.via) if who.via else session.keeper
    reply = await fulfil(keeper, session.book, who.name, request, uid=who.uid)
    await refresh(session.keeper, session.book, request.workload)
    return reply


async def log_in(found: WebLogins, book: Rulebook, who: Identity, request: Request, now: datetime) -> Reply:
    """Requests about logins from a user on this machine."""
    try:
        reply = await answer_login(found.logins, book, who, request, now)
    except KeeperError as problem:
        return Reply(done=False, words=str(problem), exit_code=problem.exit_code)
    if request.verb == "login":
        return msgspec.structs.replace(reply, token=f"{found.url(book.policy.web)}/login/{reply.token}")
    return reply
