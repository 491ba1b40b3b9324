"""Prometheus metrics of the daemon, if enabled: the same series as the operator's, on a separate port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpukeeper.engine.reclaim import PassReport
from gpukeeper.interfaces.terminal.watching import Lines
from gpukeeper.wiring import Session

if TYPE_CHECKING:
    from gpukeeper.interfaces.telemetry.metrics import Metrics
    from gpukeeper.interfaces.telemetry.pages import Where

FLAG, LOOPBACK = "--metrics", "127.0.0.1"


@dataclass(frozen=True)
class Telling:
    """Callbacks for passes, and what must be open while the daemon runs."""

    passed: Callable[[PassReport], None]
    under_way: Callable[[PassReport], None]
    opened: AbstractAsyncContextManager[None]


def told(words: str | None, session: Session, lines: Lines, say: Callable[[str], None]) -> Telling:
    if words is None:
        return Telling(lines.tell, lines.under_way, nullcontext())
    from gpukeeper.interfaces.telemetry.metrics import CountedEvidence, Metrics
    from gpukeeper.interfaces.telemetry.pages import read_where

    where = read_where(words, FLAG, LOOPBACK)
    metrics = Metrics(session.keeper.clock, session.keeper.platforms, elects=False)
    session.keeper = replace(session.keeper, evidence=CountedEvidence(session.evidence, metrics))

    def passed(report: PassReport) -> None:
        metrics.passed(report)
        lines.tell(report)

    def under_way(report: PassReport) -> None:
        metrics.under_way(report)
        lines.under_way(report)

    return Telling(passed, under_way, _page(where, metrics, say))


@asynccontextmanager
async def _page(where: Where, metrics: Metrics, say: Callable[[str], None]) -> AsyncIterator[None]:
    from gpukeeper.interfaces.telemetry.metrics import CONTENT_TYPE
    from gpukeeper.interfaces.telemetry.pages import Answer, listening

    async def page() -> Answer:
        return Answer(200, metrics.text(), CONTENT_TYPE)

    async with listening(where, {"/metrics": page}) as port:
        address = f"[{where.address}]" if ":" in where.address else where.address
        say(f"serving metrics on http://{address}:{port}/metrics")
        yield
