"""Requests on the socket of a daemon: questions, logins to its dashboard, and what changes something."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from gpukeeper.engine.refresh import refresh
from gpukeeper.engine.requests import Reply, Request, fulfil
from gpukeeper.interfaces.daemon import identity
from gpukeeper.interfaces.daemon.identity import Identity
from gpukeeper.interfaces.daemon.queries import VERBS, Queries
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.ledger.logins import Logins
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.policy import Web
from gpukeeper.wiring.session import Session


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
        if request.verb in identity.VERBS:
            if self._logins is None:
                words = "this daemon has no web dashboard. Start it with: gpukeeper serve --web PORT"
                return Reply(done=False, words=words, exit_code=1)
            now = self._session.keeper.clock.now()
            return await log_in(self._logins, self._session.book, Identity(name=who, uid=uid), request, now)
        reply = await fulfil(self._session.keeper, self._session.book, who, request, uid=uid)
        await refresh(self._session.keeper, self._session.book, request.workload)
        return reply


async def log_in(found: WebLogins, book: Rulebook, who: Identity, request: Request, now: datetime) -> Reply:
    """Requests about logins from a user on this machine."""
    try:
        reply = await identity.answer_login(found.logins, book, who, request, now)
    except KeeperError as problem:
        return Reply(done=False, words=str(problem), exit_code=problem.exit_code)
    if request.verb == "login":
        return msgspec.structs.replace(reply, token=f"{found.url(book.policy.web)}/login/{reply.token}")
    return reply
