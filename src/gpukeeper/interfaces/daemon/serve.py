"""`serve` itself: the loop, the socket and the daily rotation, until it is stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, nullcontext
from pathlib import Path

from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.daemon.fleet_copy import FleetCopy
from gpukeeper.interfaces.daemon.metrics import PassHooks
from gpukeeper.interfaces.daemon.requests import DaemonResponder, WebLogins
from gpukeeper.interfaces.daemon.server import listening, notify_systemd
from gpukeeper.interfaces.daemon.web import web_process
from gpukeeper.interfaces.daemon.web_child import listen
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.interfaces.terminal.watching import PolicyReloader, rotate_daily
from gpukeeper.ledger.lease import DAEMON
from gpukeeper.ledger.logins import open_logins
from gpukeeper.ledger.paths import socket_path
from gpukeeper.lifecycle.rules.target import in_scope
from gpukeeper.model.identity import Ref
from gpukeeper.wiring.session import Session


@asynccontextmanager
async def _logins(session: Session, web: Endpoint | None) -> AsyncIterator[WebLogins | None]:
    if web is None:
        yield None
        return
    with listen(web) as listener:
        logins = open_logins(session.ledger.path)
        try:
            yield WebLogins(logins, Endpoint(port=listener.getsockname()[1], address=web.address), listener)
        finally:
            logins.close()


@asynccontextmanager
async def _listening(session: Session, logins: WebLogins | None, log: Callable[[str], None]) -> AsyncIterator[None]:
    with closing(DaemonResponder(session, logins)) as responder:
        async with listening(socket_path(), responder, log):
            yield


async def serve_until_stopped(
    session: Session,
    policy: Path | None,
    hooks: PassHooks,
    log: Callable[[str], None],
    *,
    web: Endpoint | None = None,
    quiet: bool = False,
) -> None:
    """One daemon per machine, by its lease. SIGTERM and SIGINT end it after the step in progress."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def passed(report: PassReport) -> None:
        hooks.passed(report)
        session.passed(report)

    async with (
        session.keeper.ledger.lease(DAEMON, "serve"),
        _logins(session, web) as logins,
        _listening(session, logins, log),
        hooks.opened,
        nullcontext() if logins is None else web_process(session, logins, log, hooks.page),
        session.admins_notified(log),
    ):
        if not quiet:
            log(f"gpukeeper serves {_places(session)}, mode {session.book.policy.mode}, policy {session.loaded.source}")
            log(f"listening on {socket_path()}; press Ctrl-C to stop")
        notify_systemd("READY=1")
        async with asyncio.TaskGroup() as group:
            book = PolicyReloader(session, policy, log)
            made = Watch(session.keeper, book, stop, passed, log, book.refresh, hooks.in_progress)
            made.tick = min(made.tick, session.book.policy.activity.tick)  # of the first measurement
            group.create_task(watch(made))
            group.create_task(rotate_daily(session, stop, log))
            group.create_task(FleetCopy(session, log).run(stop))
        notify_systemd("STOPPING=1")


def _places(session: Session) -> str:
    """Those of the policy's scope; the others were found on this machine, and are only shown."""
    found = [Ref(one.name, one.place, "", "", "") for one in session.keeper.platforms]
    inside = [f"{one.platform}/{one.place}" for one in found if in_scope(session.book.policy, one)]
    return ", ".join(inside) or "no place, because none that was found is in the policy's scope"
