"""Rate limits of the daemon: connections and concurrent requests, by uid.

One user cannot block others: each has a few connections and one request at work at a time, users take turns, and a
share is reserved for admins, so that `pause` always gets through.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class RateLimits:
    connections: int = 96  # of ordinary users together
    each: int = 8  # of one of them
    reserved: int = 32  # of admins, beside all others
    at_work: int = 8  # requests of ordinary users that are worked on at once; one of each
    admins_at_work: int = 4
    burst: int = 20  # requests of one ordinary user without a pause
    pause: float = 2.0  # seconds between two of them after that: each may write to the ledger

    def within(self, descriptors: int) -> RateLimits:
        """Where few descriptors are allowed, most are for the passes."""
        most = max(descriptors // 4, 8)
        if self.connections + self.reserved <= most:
            return self
        return replace(self, connections=most * 3 // 4, each=min(self.each, most // 4), reserved=most // 4)


@dataclass
class RequestLimiter:
    limits: RateLimits = field(default_factory=RateLimits)
    admins: Collection[int] = frozenset({0})  # uids
    inside: Counter[int] = field(default_factory=Counter)  # by uid: open connections
    working: Counter[int] = field(default_factory=Counter)  # by uid: requests that are worked on
    asked: dict[int, float] = field(default_factory=dict)  # by uid: when its burst is whole again, steady time
    waiting: dict[int, deque[asyncio.Future[None]]] = field(default_factory=dict)  # by uid, whose turn is first first

    def why_not(self, uid: int) -> str | None:
        """Why one more connection of that user is refused; None: it is allowed."""
        if uid in self.admins:
            full = sum(self.inside[one] for one in self.inside if one in self.admins) >= self.limits.reserved
            return "too many concurrent requests of admins" if full else None
        if self.inside[uid] >= self.limits.each:
            return f"too many concurrent requests of uid {uid}"
        others = sum(count for one, count in self.inside.items() if one not in self.admins)
        return "too many concurrent requests" if others >= self.limits.connections else None

    def enter(self, uid: int) -> None:
        self.inside[uid] += 1

    def leave(self, uid: int) -> None:
        self.inside[uid] -= 1
        if not self.inside[uid]:
            del self.inside[uid]

    def wait(self, uid: int, now: float) -> float:
        """Seconds until the next request of that user is worked on; counts it."""
        if uid in self.admins:
            return 0.0
        self.asked = {one: whole for one, whole in self.asked.items() if whole > now}
        whole = max(self.asked.get(uid, now), now) + self.limits.pause
        self.asked[uid] = whole
        return max(whole - now - self.limits.burst * self.limits.pause, 0.0)

    @asynccontextmanager
    async def turn(self, uid: int) -> AsyncIterator[None]:
        """Waits until this user's request may be worked on."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(uid, deque()).append(turn)
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._done(uid)
            elif turn in self.waiting.get(uid, ()):
                self.waiting[uid].remove(turn)
            raise
        try:
            yield
        finally:
            self._done(uid)

    def _done(self, uid: int) -> None:
        self.working[uid] -= 1
        if not self.working[uid]:
            del self.working[uid]
        self._next()

    def _next(self) -> None:
        """Starts what may start. A user who was served goes to the end of the queue."""
        for uid in list(self.waiting):
            queue = self.waiting[uid]
            while queue and queue[0].done():
                queue.popleft()  # cancelled
            if not queue:
                del self.waiting[uid]
            elif self._may_work(uid):
                del self.waiting[uid]
                self.working[uid] += 1
                queue.popleft().set_result(None)
                if queue:
                    self.waiting[uid] = queue

    def _may_work(self, uid: int) -> bool:
        if uid in self.admins:
            at_work = sum(count for one, count in self.working.items() if one in self.admins)
            return at_work < self.limits.admins_at_work
        others = sum(count for one, count in self.working.items() if one not in self.admins)
        return not self.working[uid] and others < self.limits.at_work
