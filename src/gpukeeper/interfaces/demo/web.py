"""`gpukeeper demo --web`: the dashboard of a simulated fleet, with the same daemon parts and the same web process as
`serve --web`. Time is compressed: a minute passes there in each second. Everything is in a temporary directory.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from gpukeeper.interfaces.daemon.metrics import LOOPBACK
from gpukeeper.interfaces.daemon.web import WebProcess
from gpukeeper.interfaces.daemon.web_child import WebChild, listen
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.interfaces.link import Answer, Demo, Question
from gpukeeper.ledger.logins import LoginKind, Logins, open_logins
from gpukeeper.platforms.simulated.clock import PacedLoop, run_virtually
from gpukeeper.wiring.demo_web import ADMIN, OWNER, PACE, FleetDemo
from gpukeeper.wiring.session import Session

LINK = timedelta(days=1)  # it is redeemed at once


def serve_demo(port: int, seed: int, log: Callable[[str], None]) -> None:
    """Until SIGINT or SIGTERM."""
    with ExitStack() as stack:
        listener = stack.enter_context(listen(Endpoint(port, LOOPBACK, "--web")))
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="gpukeeper-demo-")))
        loop = PacedLoop()
        fleet = FleetDemo(directory, seed, datetime.now(UTC), loop)
        run_virtually(_serve(fleet, listener, log), loop)


async def _serve(fleet: FleetDemo, listener: socket.socket, log: Callable[[str], None]) -> None:
    log("Simulating the last hours of the fleet, a few seconds …")
    await fleet.prepare()
    stop, session = asyncio.Event(), fleet.session
    for number in (signal.SIGTERM, signal.SIGINT):
        fleet.loop.add_signal_handler(number, stop.set)
    session.keeper.live.enabled, session.keeper.request_state.enabled = True, True
    logins = open_logins(session.ledger.path)
    web = DemoWeb(session, logins, listener, log)
    child = WebChild(web, listener, log)
    serving = asyncio.create_task(child.supervise())
    try:
        _print_links(web, f"http://localhost:{listener.getsockname()[1]}", log)
        await fleet.play(stop)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await child.end_replies()
        web.close()
        logins.close()
        session.close()


def _print_links(web: DemoWeb, url: str, log: Callable[[str], None]) -> None:
    log(f"The dashboard on {url}/ shows a simulated fleet. One minute passes there in each second.")
    for who, path in web.links:
        log(f"  log in as {who}: {url}{path}")
    log("Nothing on this machine is changed. Press Ctrl-C to stop.")


class DemoWeb(WebProcess):
    """Visitors log in as one of two people of the simulation, as often as they want."""

    no_metrics = (
        "the demo has no metrics. On a machine they are here, and with `serve --metrics` on a port of their own"
    )

    def __init__(self, session: Session, logins: Logins, listener: socket.socket, log: Callable[[str], None]) -> None:
        super().__init__(session, logins, listener, log)
        self._people = {secrets.token_urlsafe(16): person for person in (OWNER, ADMIN)}
        self.demo = Demo(began=session.keeper.clock.now(), real=datetime.now(UTC), pace=PACE, logins=tuple(self.links))

    @property
    def links(self) -> list[tuple[str, str]]:
        what = {OWNER: "a user", ADMIN: "an admin"}
        return [(f"{person}, {what[person]}", f"/login/{secret}") for secret, person in self._people.items()]

    async def answer(self, question: Question) -> Answer:
        person = self._people.get(question.request.token)
        if question.request.verb == "redeem" and person is not None:
            now = self._session.keeper.clock.now()
            made = await self._logins.create(LoginKind.LINK, person, None, now, LINK)
            request = msgspec.structs.replace(question.request, token=made.secret)
            question = msgspec.structs.replace(question, request=request)
        return await super().answer(question)
