"""`gpukeeper operator`: the loop of `serve` inside Kubernetes, while it is the leader; standby while another is,
until it is stopped. A standby instance lists nothing, so that two cost the API server no more than one. Each has
its own ledger.

Telemetry is imported where it is used: prometheus_client is an extra.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import typer

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.loop import MISSED, Watch, watch
from gpukeeper.engine.ports import place_name
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.http_pages import Endpoint, PageResponse, listening, words
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal.session import opened
from gpukeeper.interfaces.terminal.watching import PassPrinter, PolicyReloader, log, rotate_daily
from gpukeeper.ledger.journal import DAEMON
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.errors import KeeperError, PlatformError
from gpukeeper.model.words import in_words
from gpukeeper.platforms.kubernetes.lease import RETRY, Leadership
from gpukeeper.platforms.kubernetes.settings import settings_of
from gpukeeper.wiring.session import Session

if TYPE_CHECKING:
    from gpukeeper.interfaces.telemetry.machine import MachineReader
    from gpukeeper.interfaces.telemetry.metrics import Metrics


# The lease has its own rate limit: a throttled client or a large list must not cost the lease.
REQUESTS, BURST = 5.0, 10
FRESH = 5.0  # seconds for which the response of /readyz is cached


class Election(NamedTuple):
    namespace: str  # empty: our own
    name: str


class CurrentPolicy(Protocol):
    """The policy of the moment."""

    problem: str | None

    @property
    def last(self) -> Rulebook: ...
    def __call__(self) -> Rulebook: ...
    async def refresh(self) -> None: ...


@dataclass
class Operator:
    keeper: Keeper
    book: CurrentPolicy
    metrics: Metrics
    leadership: Leadership | None
    reach: Callable[[], Awaitable[object]]  # sends the cluster a small request; PlatformError: it cannot be reached
    tell: Callable[[PassReport], None]
    log: Callable[[str], None]
    machine: MachineReader | None = None  # GPUs and acceptance runs, for metrics
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    turned: float | None = None  # steady time at which a pass was last finished; None: on standby
    _ready: tuple[float, PageResponse] | None = None

    async def run(self) -> None:
        """Until `stop`. The lease is released last, when no step is in progress."""
        if self.leadership is None:
            await self._watch(self.stop)
            return
        self.keeper.permission.why_not = self.leadership.why_not
        left = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.leadership.campaign(left))
            group.create_task(self._report_missing(self.leadership, left))
            await self._lead(self.leadership)
            left.set()

    async def _report_missing(self, leadership: Leadership, left: asyncio.Event) -> None:
        """Without the right to write its lease it does nothing, in silence otherwise."""
        known: str | None = None
        while not left.is_set():
            if leadership.missing != known:
                known = leadership.missing
                self.log(f"cannot lead: {known}" if known else f"the lease {leadership.lease} can be written again")
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY.total_seconds()):
                    await left.wait()

    async def _lead(self, leadership: Leadership) -> None:
        """One term after the other."""
        while not self.stop.is_set():
            await _any_of(leadership.won, self.stop)
            if self.stop.is_set():
                return
            self.log(f"leader: {leadership.identity} holds the lease {leadership.lease}")
            over = asyncio.Event()
            ringing = asyncio.create_task(_ring(over, leadership.lost, self.stop))
            try:
                await self._watch(over)
            finally:
                ringing.cancel()
            if not self.stop.is_set():
                self.log(f"standby: {leadership.why_not()}")

    async def _watch(self, over: asyncio.Event) -> None:
        self.turned = asyncio.get_running_loop().time()
        self.metrics.lead(True)
        try:
            made = Watch(
                self.keeper, self.book, over, self._passed, self.log, self.book.refresh, self.metrics.in_progress
            )
            await watch(made)
        finally:
            self.metrics.lead(False)
            self.turned = None

    def _passed(self, report: PassReport) -> None:
        self.turned = asyncio.get_running_loop().time()
        self.metrics.passed(report)
        self.tell(report)

    # HTTP pages.

    async def healthz(self) -> PageResponse:
        """Restarting helps against a loop that is stuck, and against nothing else."""
        return words(await self._why_stuck())

    async def _why_stuck(self) -> str | None:
        if self.turned is None:
            return None
        limit = MISSED * self.book.last.policy.schedule.every
        silent = timedelta(seconds=asyncio.get_running_loop().time() - self.turned)
        if silent <= limit:
            return None
        try:
            last = await self.keeper.ledger.last_line_at()
        except KeeperError as problem:
            return f"no pass finished for {in_words(silent)}, and the ledger could not be read: {problem}"
        if last is not None and self.keeper.clock.now() - last <= limit:
            return None  # a long pass: it still takes steps and writes them down
        return f"no pass finished for {in_words(silent)}"

    async def readyz(self) -> PageResponse:
        now = asyncio.get_running_loop().time()
        if self._ready is None or now - self._ready[0] > FRESH:
            self._ready = (now, words(await self._why_not_ready()))
        return self._ready[1]

    async def _why_not_ready(self) -> str | None:
        if self.turned is None:
            await self.book.refresh()  # on standby no loop reads it
        if self.book.problem is not None:
            return f"the policy is not valid: {self.book.problem}"
        missing = [p.name for p in self.keeper.platforms if p.name not in self.book.last.policy.scope]
        if missing:
            return f"the policy's scope does not include {missing[0]}, so nothing is read"
        try:
            await self.reach()
        except PlatformError as problem:
            return str(problem)
        return None if self.leadership is None else self.leadership.missing

    async def metrics_page(self) -> PageResponse:
        self.metrics.denied = self.leadership is not None and self.leadership.denied
        self.metrics.measured_apart = self.keeper.uptime.measured_apart
        if self.machine is not None and self.metrics.leads:
            self.metrics.machine = await self.machine.read()
        from gpukeeper.interfaces.telemetry.metrics import CONTENT_TYPE

        return PageResponse(200, self.metrics.text(), CONTENT_TYPE)


async def operate_until_stopped(
    session: Session,
    policy: Path | None,
    election: Election | None,
    port: int,
    tell: Callable[[PassReport], None],
    log: Callable[[str], None],
) -> None:
    """SIGTERM and SIGINT end it after the step in progress; then another instance becomes the leader at once."""
    from gpukeeper.interfaces.telemetry.machine import MachineReader
    from gpukeeper.interfaces.telemetry.metrics import CountedEvidence, Metrics

    settings = settings_of(session.book.policy)
    cluster = Cluster.from_environment(os.environ, settings.context, REQUESTS, BURST)
    metrics = Metrics(session.keeper.clock, session.keeper.platforms)
    session.keeper = replace(session.keeper, evidence=CountedEvidence(session.evidence, metrics))
    leadership = _leadership(session, cluster, election)

    async def reach() -> object:
        return await cluster.get("/version", dict[str, Any])

    def passed(report: PassReport) -> None:
        tell(report)
        session.passed(report)

    book = PolicyReloader(session, policy, log)
    one = Operator(session.keeper, book, metrics, leadership, reach, passed, log, MachineReader(session))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, one.stop.set)
    pages = {"/healthz": one.healthz, "/readyz": one.readyz, "/metrics": one.metrics_page}
    async with (
        session.keeper.ledger.lease(DAEMON, "serve"),
        cluster.opened(),
        listening(Endpoint(port), pages),
        session.admins_notified(log),
    ):
        _introduce(session, leadership, port, log)
        async with asyncio.TaskGroup() as group:
            group.create_task(rotate_daily(session, one.stop, log))
            await one.run()


def _leadership(session: Session, cluster: Cluster, election: Election | None) -> Leadership | None:
    if election is None:
        return None
    # New with every start, and readable: the machine is the pod's name.
    identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    namespace = election.namespace or cluster.namespace
    return Leadership(cluster, namespace, election.name, identity, session.keeper.clock)


def _introduce(session: Session, leadership: Leadership | None, port: int, log: Callable[[str], None]) -> None:
    places = ", ".join(place_name(p) for p in session.keeper.platforms)
    mode, source = session.book.policy.mode, session.loaded.source
    log(f"gpukeeper operator for {places}, mode {mode}, policy {source}, health on port {port}")
    if leadership is None:
        log("runs without leader election: a second instance would act, too")
    else:
        log(f"standby as {leadership.identity} until it holds the lease {leadership.lease}")


async def _any_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


async def _ring(bell: asyncio.Event, *events: asyncio.Event) -> None:
    await _any_of(*events)
    bell.set()


LEASE = "gpukeeper"
HEALTH_PORT = 8080


def operator(
    policy: o.PolicyFile = None,
    lease_namespace: Annotated[
        str,
        typer.Option(
            "--lease-namespace", help="Namespace of the Lease. Default: the operator's own namespace.", metavar="NAME"
        ),
    ] = "",
    lease_name: Annotated[
        str,
        typer.Option(
            "--lease-name",
            help="Name of the Lease. Its holder is the leader. Use one name per operator deployment.",
            metavar="NAME",
        ),
    ] = LEASE,
    no_leader_election: Annotated[
        bool, typer.Option("--no-leader-election", help="Act without a Lease. Use only if no second instance can run.")
    ] = False,
    health: Annotated[
        int, typer.Option("--health", help="Port of /healthz, /readyz and /metrics, on all addresses.", metavar="PORT")
    ] = HEALTH_PORT,
    json: o.JsonLines = False,
    quiet: o.Quiet = False,
) -> None:
    """Run the daemon inside a Kubernetes cluster. In mode enforce the leader reclaims; the others are on standby."""

    with opened(policy, write=True, only="kubernetes", quiet=quiet, tell=log) as session:
        session.record_hours(log)
        finished = PassPrinter(log, json=json, quiet=quiet).finished
        held = None if no_leader_election else Election(lease_namespace, lease_name)
        asyncio.run(operate_until_stopped(session, policy, held, health, finished, log))
