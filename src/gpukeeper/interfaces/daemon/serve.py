"""`gpukeeper serve`: the daemon. Watches, measures, reclaims (mode enforce), answers on its socket, rotates daily,
until it is stopped. If enabled, Prometheus metrics on a separate port: the same series as the operator's.

Telemetry is imported where it is used: prometheus_client is an extra.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.ports import bug_words
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.daemon.fleet_copy import FleetCopy
from gpukeeper.interfaces.daemon.fleet_web import fleet_access, serve_fleet_until_stopped
from gpukeeper.interfaces.daemon.requests import DaemonResponder, WebLogins
from gpukeeper.interfaces.daemon.server import listening, notify_systemd
from gpukeeper.interfaces.daemon.web import WebProcess, opened_logins, supervised
from gpukeeper.interfaces.http_pages import Endpoint, read_endpoint
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal.session import opened
from gpukeeper.interfaces.terminal.watching import PassPrinter, PolicyReloader, log, rotate_daily
from gpukeeper.ledger.files import socket_path
from gpukeeper.ledger.journal import DAEMON
from gpukeeper.lifecycle.rules.target import in_scope
from gpukeeper.model.errors import UsageError
from gpukeeper.model.subject import Ref
from gpukeeper.platforms.kubernetes.node_use import PodUseReader
from gpukeeper.wiring.session import Session, read_policy

if TYPE_CHECKING:
    from gpukeeper.interfaces.http_pages import Page as MetricsPage


FLAG, LOOPBACK = "--metrics", "127.0.0.1"
AGAIN_S = 60.0


@dataclass(frozen=True)
class PassHooks:
    """Callbacks for passes, what must be open while the daemon runs, and the page of metrics if there is one."""

    passed: Callable[[PassReport], None]
    in_progress: Callable[[PassReport], None]
    opened: AbstractAsyncContextManager[None]
    page: MetricsPage | None = None


def pass_hooks(
    words: str | None,
    session: Session,
    lines: PassPrinter,
    log: Callable[[str], None],
    *,
    web: bool = False,
    node_use: bool = False,
) -> PassHooks:
    """`web`: the dashboard has the page, too, if prometheus_client is installed. `node_use`: with GPU use of pods."""
    reader = PodUseReader(session.gpu_meter) if node_use and session.gpu_meter is not None else None
    if words is None and not (web and find_spec("prometheus_client")):
        return PassHooks(lines.finished, lines.in_progress, nullcontext())
    from gpukeeper.interfaces.http_pages import PageResponse, read_endpoint
    from gpukeeper.interfaces.telemetry.machine import MachineReader
    from gpukeeper.interfaces.telemetry.metrics import CONTENT_TYPE, CountedEvidence, Metrics

    where = None if words is None else read_endpoint(words, FLAG, LOOPBACK)
    metrics = Metrics(session.keeper.clock, session.keeper.platforms, elects=False)
    session.keeper = replace(session.keeper, evidence=CountedEvidence(session.evidence, metrics))

    def passed(report: PassReport) -> None:
        metrics.passed(report)
        lines.finished(report)

    def in_progress(report: PassReport) -> None:
        metrics.in_progress(report)
        lines.in_progress(report)

    machine = MachineReader(session)

    async def page() -> PageResponse:
        metrics.machine = await machine.read()
        metrics.measured_apart = session.keeper.uptime.measured_apart
        metrics.node_use = None if reader is None else reader.latest(session.keeper.clock.now())
        return PageResponse(200, metrics.text(), CONTENT_TYPE)

    opened = nullcontext() if where is None else _serving(where, page, log, reader)
    return PassHooks(passed, in_progress, opened, page)


@asynccontextmanager
async def _serving(
    where: Endpoint, page: MetricsPage, log: Callable[[str], None], reader: PodUseReader | None
) -> AsyncIterator[None]:
    from gpukeeper.interfaces.http_pages import listening

    async with listening(where, {"/metrics": page}) as port:
        address = f"[{where.address}]" if ":" in where.address else where.address
        log(f"serving metrics on http://{address}:{port}/metrics")
        measuring = None if reader is None else asyncio.create_task(_measure(reader, log))
        try:
            yield
        finally:
            if measuring is not None:
                measuring.cancel()
                await asyncio.gather(measuring, return_exceptions=True)


async def _measure(reader: PodUseReader, log: Callable[[str], None]) -> None:
    """Until it is cancelled. A bug stops neither the daemon nor the next reading; meanwhile the series are absent."""
    while True:
        try:
            await reader.run(log)
        except Exception as bug:
            log(f"the GPU use of pods was not measured: {bug_words(bug)}")
        await asyncio.sleep(AGAIN_S)


def _dashboard(
    session: Session, found: WebLogins, log: Callable[[str], None], metrics: MetricsPage | None
) -> AbstractAsyncContextManager[None]:
    return supervised(WebProcess(session, found.logins, found.listener, log, metrics), found, log)


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
        nullcontext() if web is None else opened_logins(web, session.ledger.path) as logins,
        _listening(session, logins, log),
        hooks.opened,
        nullcontext() if logins is None else _dashboard(session, logins, log, hooks.page),
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


def serve(
    policy: o.PolicyFile = None,
    platform: o.OnPlatform = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            help="Serve Prometheus metrics at /metrics on this port (default: off; default address: 127.0.0.1).",
            metavar="[ADDRESS:]PORT",
        ),
    ] = None,
    node_use: Annotated[
        bool,
        typer.Option("--pods", help="With --metrics: GPU use of the pods of this Kubernetes node, as a DCGM exporter."),
    ] = False,
    web: Annotated[
        str | None,
        typer.Option(
            "--web",
            help="Serve the web dashboard on this port (default: off; default address: 127.0.0.1).",
            metavar="[ADDRESS:]PORT",
        ),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="With --web: show all machines of this fleet database. No passes are made.",
            metavar="POSTGRESQL_ADDRESS",
        ),
    ] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(
            "--password-file", help="With --from: file with the database password (default: as in the policy)."
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file", help="With --from: file with the key that signs requests (default: as in the policy)."
        ),
    ] = None,
    json: o.JsonLines = False,
    quiet: o.Quiet = False,
) -> None:
    """Run the daemon: watch, measure and, in mode enforce, reclaim. Prints one line for every outcome and warning."""
    if node_use and metrics is None:
        raise UsageError("--pods needs --metrics. Nothing was started.")
    if from_ is not None:
        if web is None or platform is not None or metrics is not None or json:
            raise UsageError("--from needs --web, and excludes --platform, --metrics and --json. Nothing was started.")
        _serve_fleet(policy, from_, password_file, key_file, web, quiet=quiet)
        return
    if password_file is not None or key_file is not None:
        raise UsageError("--password-file and --key-file need --from. Nothing was started.")
    with opened(policy, write=True, only=platform, quiet=quiet, tell=log) as session:
        session.record_hours(log)
        printer = PassPrinter(log, json=json, quiet=quiet)
        tell = (lambda words: None) if quiet else log
        hooks = pass_hooks(metrics, session, printer, tell, web=web is not None, node_use=node_use)
        where = None if web is None else read_endpoint(web, "--web", LOOPBACK)
        asyncio.run(serve_until_stopped(session, policy, hooks, log, web=where, quiet=quiet))


def _serve_fleet(
    policy: Path | None, address: str, password_file: Path | None, key_file: Path | None, web: str, *, quiet: bool
) -> None:
    loaded = read_policy(policy, needs_scope=False).loaded  # it makes no passes
    for warning in loaded.warnings:
        log(f"policy: {warning}")
    access = fleet_access(address, password_file, key_file, loaded.policy)
    where = read_endpoint(web, "--web", LOOPBACK)
    asyncio.run(serve_fleet_until_stopped(access, loaded.policy, where, log, quiet=quiet))
