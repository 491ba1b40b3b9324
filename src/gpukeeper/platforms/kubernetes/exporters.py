"""DCGM exporters of a cluster, without a Prometheus between them and gpukeeper."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

from gpukeeper.devices import dcgm
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.minutes import LOOK_BACK, NAMES, Trace, trace

SCRAPE = timedelta(seconds=10)
MINUTE = timedelta(minutes=1)

Fetch: TypeAlias = Callable[[str, timedelta], Awaitable[str | Unknown]]


class Exporters:
    """DCGM exporters scraped at every reading; keeps the points that an evaluation needs."""

    def __init__(self, urls: Sequence[str], fetch: Fetch) -> None:
        self._urls, self._fetch = tuple(urls), fetch
        self._points: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}

    async def scrape(self, now: datetime) -> list[Trace]:
        answers = await asyncio.gather(*(self._fetch(url, SCRAPE) for url in self._urls))
        for url, text in zip(self._urls, answers, strict=True):
            if not isinstance(text, Unknown):
                self._store(url, text, now.timestamp())
        oldest = (now - (2 * LOOK_BACK) * MINUTE).timestamp()
        kept = ((series, [one for one in points if one[0] >= oldest]) for series, points in self._points.items())
        self._points = {series: points for series, points in kept if points}
        found = (trace(dict(labels), name, points, url) for (url, name, labels), points in self._points.items())
        return [one for one in found if one is not None]

    def _store(self, url: str, text: str, at: float) -> None:
        try:
            metrics = list(dcgm.parse(text))
        except ValueError:
            return  # a truncated response looks like missing GPUs
        for one in metrics:
            if one.name in NAMES:
                series = (url, one.name, tuple(sorted(one.labels.items())))
                self._points.setdefault(series, []).append((at, one.value))
