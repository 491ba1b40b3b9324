"""Prometheus metrics of the daemon, if enabled: the same series as the operator's, on a separate port.

Telemetry is imported where it is used: prometheus_client is an extra."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gpukeeper.engine.failures import bug_words
from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.terminal.watching import PassPrinter
from gpukeeper.platforms.kubernetes.node_use import PodUseReader
from gpukeeper.wiring.session import Session

if TYPE_CHECKING:
    from gpukeeper.interfaces.http_pages import Endpoint
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
