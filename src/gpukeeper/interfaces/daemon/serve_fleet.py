"""`serve --web PORT --from postgresql://…`: the dashboard of a fleet, until it is stopped. No passes, no platforms."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gpukeeper.engine.requests import Reply, Request
from gpukeeper.interfaces.daemon import identity
from gpukeeper.interfaces.daemon.fleet_requests import FleetRequests
from gpukeeper.interfaces.daemon.fleet_state import FleetState
from gpukeeper.interfaces.daemon.fleet_web import FleetWeb
from gpukeeper.interfaces.daemon.identity import Identity
from gpukeeper.interfaces.daemon.requests import WebLogins, log_in
from gpukeeper.interfaces.daemon.server import listening, notify_systemd
from gpukeeper.interfaces.daemon.web_child import listen, supervised
from gpukeeper.interfaces.daemon.web_settings import WebSettings
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.ledger.copy.connect import load_driver, problem_of_address, problem_of_machine, shown
from gpukeeper.ledger.copy.reader import CopyReader
from gpukeeper.ledger.copy.signing import SHORTEST_KEY
from gpukeeper.ledger.copy.watcher import Watcher
from gpukeeper.ledger.lease import DAEMON, take_lease
from gpukeeper.ledger.logins import open_logins
from gpukeeper.ledger.paths import ledger_path, socket_path
from gpukeeper.ledger.secret_file import read_secret
from gpukeeper.ledger.trust import make_private
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError, LeaseHeld, UsageError
from gpukeeper.model.policy import Policy
from gpukeeper.platforms.host.connect import hostname

CHECK = 5.0  # seconds between two checks of the connection
PROGRAM = "gpukeeper web"  # the name of its connections


class FleetAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How the fleet database is read, and requests are signed. `realm`: the machine where people log in."""

    address: str
    password_file: str | None
    key: str | None
    realm: str


def fleet_access(address: str, password_file: Path | None, key_file: Path | None, policy: Policy) -> FleetAccess:
    """Files that are not given are those of the policy. UsageError: something is not valid."""
    problem = problem_of_address(address)
    if problem is not None:
        raise UsageError(f"--from: this is not the address of a fleet database: {problem}. Nothing was started.")
    load_driver()
    fleet = policy.fleet
    realm = fleet.machine or hostname().lower()
    problem = problem_of_machine(realm)
    if problem is not None:
        raise UsageError(f'the host name "{realm}" cannot be used: {problem}. Set fleet.machine in the policy.')
    password = str(password_file) if password_file is not None else fleet.password_file
    if password is not None:
        read_secret(Path(password))  # now, not at the first connection
    keys = str(key_file) if key_file is not None else fleet.request_key_file
    key = None if keys is None else read_secret(Path(keys))
    if key is not None and len(key) < SHORTEST_KEY:
        raise UsageError(
            f"the key in {keys} is shorter than {SHORTEST_KEY} characters. Nothing was started. "
            "Make one: openssl rand -hex 32"
        )
    return FleetAccess(address=address, password_file=password, key=key, realm=realm)


class LoginResponder:
    """Implements Responder: on this machine people log in; everything else is on the pages."""

    def __init__(self, logins: WebLogins, book: Rulebook) -> None:
        self._logins, self._book = logins, book

    @property
    def admins(self) -> Sequence[str]:
        return self._book.policy.admins

    async def answer(self, who: str, uid: int, request: Request) -> Reply:
        if request.verb in identity.VERBS:
            return await log_in(self._logins, self._book, Identity(name=who, uid=uid), request, datetime.now(UTC))
        words = "this is the web server of a fleet, which makes no passes. Use the dashboard, or the machine itself"
        return Reply(done=False, words=words, exit_code=1)


async def serve_fleet_until_stopped(
    access: FleetAccess, policy: Policy, where: Endpoint, log: Callable[[str], None], *, quiet: bool = False
) -> None:
    """One per state directory, by the lease of a daemon. SIGTERM and SIGINT end it."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    book = Rulebook(policy)
    with ExitStack() as stack:
        _take_lease(stack)
        listener = stack.enter_context(listen(where))
        where = Endpoint(port=listener.getsockname()[1], address=where.address)
        logins = WebLogins(stack.enter_context(closing(open_logins(ledger_path()))), where, listener)
        copy = stack.enter_context(closing(CopyReader(access.address, access.password_file, PROGRAM)))
        state = FleetState(loop, log)
        requests = FleetRequests(copy, access.realm, access.key)
        settings = WebSettings(lambda: policy.web, listener.getsockname()[0], log)
        setup = await settings.setup()  # refuses before anything is served
        web = FleetWeb(state, copy, logins.logins, book, requests, log, realm=access.realm, settings=settings)
        stack.callback(web.close)
        async with (
            listening(socket_path(), LoginResponder(logins, book), log),
            supervised(web, where, listener, log, "http" if setup.tls is None else "https"),
            _watched(Watcher(access.address, access.password_file, state, log, PROGRAM)),
        ):
            if not quiet:
                log(f"showing the fleet of {shown(access.address)}; people log in at {access.realm}")
                if access.key is None:
                    log("no key for requests was given (--key-file): the dashboard shows, and requests nothing")
            notify_systemd("READY=1")
            await stop.wait()
        notify_systemd("STOPPING=1")


def _take_lease(stack: ExitStack) -> None:
    state, path = ledger_path().parent, socket_path()
    hint = "Beside a daemon, give the web server its own GPUKEEPER_STATE and GPUKEEPER_SOCKET."
    make_private(state)
    try:
        stack.callback(take_lease(state / "leases", DAEMON, "serve").release)
    except LeaseHeld as held:
        raise LeaseHeld(f"{held} {hint}") from held
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.connect(str(path))
        raise KeeperError(f"A daemon listens on {path}. Nothing was started. {hint}")


@asynccontextmanager
async def _watched(watcher: Watcher) -> AsyncIterator[None]:
    async def check() -> None:
        while True:
            await asyncio.sleep(CHECK)
            watcher.check_stuck()

    watcher.start()
    checking = asyncio.create_task(check())
    try:
        yield
    finally:
        checking.cancel()
        await asyncio.gather(checking, return_exceptions=True)
        await asyncio.to_thread(watcher.stop)
