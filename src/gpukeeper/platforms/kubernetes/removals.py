"""Removals in progress, and deletions that a watch reported: known to be gone without a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec

from gpukeeper.model.identity import Ref
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Gone, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.kinds.pod import OVER_PHASES, POD
from gpukeeper.platforms.kubernetes.wire import Pod

FOLLOWED_MAX = 500
REPORTED_MAX = 50_000  # deletions that watches reported and that are remembered
REPORT_HOLDS = timedelta(minutes=10)  # how long a deletion reported by a watch is used
REPORT_WAIT = 0.05  # seconds to wait for the report of a watch
REPORT_WAIT_IN_BULK = 2.0  # the same in bulk removals: a request would wait for the rate limit


class PendingRemovals:
    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock
        self.watching = False
        self.batched: set[str] = set()  # uids of what is being removed in bulk, whose deletions are watched
        self._following: dict[str, tuple[Subject, tuple[str, ...]]] = {}  # by uid: what was removed, its living pods
        self._gone: dict[str, float] = {}  # by uid: time of the report
        self._awaited: dict[str, asyncio.Event] = {}

    def follows(self, uid: str) -> bool:
        """It was removed, and some of its pods may still be there."""
        return bool(self._following.get(uid, (None, ()))[1])

    def remember(self, fresh: Subject, living: Sequence[Pod]) -> None:
        if len(self._following) >= FOLLOWED_MAX:
            self._following.pop(next(iter(self._following)))
        pods = tuple(f"{one.metadata.name} {one.metadata.uid}" for one in living)
        self._following[fresh.ref.uid] = (fresh, pods)
        if self.watching or fresh.ref.uid in self.batched:
            self._awaited[fresh.ref.uid] = asyncio.Event()

    async def after(self, ref: Ref) -> Subject | Gone | Unknown:
        """The root is gone. Its running pods may need their grace period: it is gone only when they are."""
        subject, pods = self._following.get(ref.uid, (None, ()))
        if subject is None or not pods:
            return Gone(ref, self._clock.now())
        left = []
        for one in pods:
            name, _, uid = one.partition(" ")
            try:
                found = await self._cluster.get(POD.path("v1", ref.namespace, name), Pod)
            except ApiError as error:
                if error.is_not_found:
                    continue
                return Unknown(str(error))
            if not found.metadata.uid:
                return Unknown(f"the response for its pod {name} has no uid, so the pod cannot be identified")
            if found.metadata.uid == uid and found.status.phase not in OVER_PHASES:
                left.append(one)
        if not left:
            self._following.pop(ref.uid, None)
            return Gone(ref, self._clock.now())
        self._following[ref.uid] = (subject, tuple(left))
        seen = msgspec.structs.replace(subject.seen, at=self._clock.now())
        return msgspec.structs.replace(subject, seen=seen, state=State.REMOVING)

    def report_deleted(self, uid: str) -> None:
        now = time.monotonic()
        self._gone.pop(uid, None)
        self._gone[uid] = now  # the newest last
        oldest = next(iter(self._gone))
        while len(self._gone) > REPORTED_MAX or now - self._gone[oldest] > REPORT_HOLDS.total_seconds():
            del self._gone[oldest]
            oldest = next(iter(self._gone))
        awaited = self._awaited.pop(uid, None)
        if awaited is not None:
            awaited.set()

    async def deletion_reported(self, ref: Ref) -> bool:
        """A watch reported its deletion. After a removal it waits for that report, which saves a request."""
        waiting = self._awaited.get(ref.uid)
        if waiting is not None:
            try:
                async with asyncio.timeout(REPORT_WAIT_IN_BULK if ref.uid in self.batched else REPORT_WAIT):
                    await waiting.wait()
            except TimeoutError:
                self._awaited.pop(ref.uid, None)
        return self.reported_gone(ref.uid)

    def reported_gone(self, uid: str) -> bool:
        """Recently. Not for ever: a cluster that is restored from a backup has it again."""
        reported_at = self._gone.get(uid)
        return reported_at is not None and time.monotonic() - reported_at < REPORT_HOLDS.total_seconds()
