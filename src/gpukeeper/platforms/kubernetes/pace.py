"""How fast a cluster is asked: one pace for all callers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

from gpukeeper.model.durations import in_words
from gpukeeper.platforms.kubernetes.errors import ClusterSilent

LONGEST_PAUSE = 300.0  # seconds that a Retry-After may hold us up


class Pace:
    """One token bucket for all callers, and the pause that a server asks for."""

    def __init__(
        self, rate: float, burst: int, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        assert rate > 0, "This is a bug in gpukeeper: a pace of no requests."
        self._rate, self._burst, self._clock, self._sleep = rate, max(1, burst), clock, sleep
        self._tokens, self._at, self._until = float(self._burst), clock(), clock()

    async def turn(self, patience: float) -> None:
        """Waits for our turn, in the order of asking. Who would wait longer than this for a pause to end is told."""
        await self._pause_over(patience)
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1
        if self._tokens < 0:
            await self._sleep(-self._tokens / self._rate)
            await self._pause_over(patience)

    def pause(self, seconds: float) -> None:
        self._until = max(self._until, self._clock() + min(seconds, LONGEST_PAUSE))

    def paused(self) -> float:
        """Seconds that it lasts."""
        return max(0.0, self._until - self._clock())

    async def _pause_over(self, patience: float) -> None:
        while (left := self.paused()) > 0:
            if left > patience:
                words = in_words(timedelta(seconds=round(left) or 1))
                raise ClusterSilent(
                    f"the cluster asked for a pause of another {words} (Retry-After); no request was sent"
                )
            await self._sleep(left)
