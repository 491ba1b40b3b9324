"""The request rate to a cluster: one limit for all callers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

from gpukeeper.model.durations import in_words
from gpukeeper.platforms.kubernetes.errors import ClusterUnavailable

LONGEST_PAUSE = 300.0  # seconds; the maximum for a Retry-After


class RateLimiter:
    """One token bucket for all callers, and the pause that the server requests."""

    def __init__(
        self, rate: float, burst: int, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        assert rate > 0, "This is a bug in gpukeeper: a rate limit of 0."
        self._rate, self._burst, self._clock, self._sleep = rate, max(1, burst), clock, sleep
        self._tokens, self._at, self._until = float(self._burst), clock(), clock()

    async def acquire(self, patience: float) -> None:
        """Waits for a token, in order of arrival. Raises if a pause lasts longer than `patience` seconds."""
        await self._wait_for_pause(patience)
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1
        if self._tokens < 0:
            await self._sleep(-self._tokens / self._rate)
            await self._wait_for_pause(patience)

    def pause(self, seconds: float) -> None:
        self._until = max(self._until, self._clock() + min(seconds, LONGEST_PAUSE))

    def remaining_pause(self) -> float:
        """Seconds until the pause ends."""
        return max(0.0, self._until - self._clock())

    async def _wait_for_pause(self, patience: float) -> None:
        while (left := self.remaining_pause()) > 0:
            if left > patience:
                words = in_words(timedelta(seconds=round(left) or 1))
                raise ClusterUnavailable(
                    f"the cluster asked for a pause of another {words} (Retry-After); no request was sent"
                )
            await self._sleep(left)
