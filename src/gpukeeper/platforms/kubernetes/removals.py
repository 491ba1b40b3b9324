"""Removals that are under way, and deletions that a watch reported: what is known to be gone without a question."""

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

REMEMBERED = 500
REPORTED = 50_000  # deletions that watches reported and that are remembered
REPORT_HOLDS = timedelta(minutes=10)  # for which a deletion that a watch reported is believed
WORD_OF_IT = 0.05  # seconds that a watch may take to tell of a removal
WORD_IN_BULK = 2.0  # the same while many are removed: a question would wait for its turn


class Removals:
    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock
        self.watching = False
        self.batched: set[str] = set()  # uids of what is being removed in bulk, whose deletions are watched
        self._following: dict[str, tuple[Subject, tuple[str, ...]]] = {}  # by uid: what was removed, its living pods
        self._gone: dict[str, float] = {}  # by uid: a watch said so
        self._telling: dict[str, asyncio.Event] = {}

    def follows(self, uid: str) -> bool:
        """It was removed, and some of its pods may still be there."""
        return bool(self._following.get(uid, (None, ()))[1])

    def remember(self, fresh: Subject, living: Sequence[Pod]) -> None:
        if len(self._following) >= REMEMBERED:
            self._following.pop(next(iter(self._following)))
        pods = tuple(f"{one.metadata.name} {one.metadata.uid}" for one in living)
        self._following[fresh.ref.uid] = (fresh, pods)
        if self.watching or fresh.ref.uid in self.batched:
            self._telling[fresh.ref.uid] = asyncio.Event()

    async def after(self, ref: Ref) -> Subject | Gone | Unknown:
        """The root is not there. What it had running may need its grace: only when that is gone, all is back."""
        subject, pods = self._following.get(ref.uid, (None, ()))
        if subject is None or not pods:
            return Gone(ref, self._clock.now())
        left = []
        for one in pods:
            name, _, uid = one.partition(" ")
            try:
                found = await self._cluster.get(POD.path("v1", ref.namespace, name), Pod)
            except ApiError as error:
                if error.says_gone:
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

    def heard_gone(self, uid: str) -> None:
        now = time.monotonic()
        self._gone.pop(uid, None)
        self._gone[uid] = now  # the newest last
        oldest = next(iter(self._gone))
        while len(self._gone) > REPORTED or now - self._gone[oldest] > REPORT_HOLDS.total_seconds():
            del self._gone[oldest]
            oldest = next(iter(self._gone))
        told = self._telling.pop(uid, None)
        if told is not None:
            told.set()

    async def was_told(self, ref: Ref) -> bool:
        """A watch said that it is gone. After a removal of ours it says so in a moment, which saves a question."""
        waiting = self._telling.get(ref.uid)
        if waiting is not None:
            try:
                async with asyncio.timeout(WORD_IN_BULK if ref.uid in self.batched else WORD_OF_IT):
                    await waiting.wait()
            except TimeoutError:
                self._telling.pop(ref.uid, None)
        return self.reported_gone(ref.uid)

    def reported_gone(self, uid: str) -> bool:
        """Lately. Not for ever: a cluster that is set back to a backup has it again."""
        heard = self._gone.get(uid)
        return heard is not None and time.monotonic() - heard < REPORT_HOLDS.total_seconds()
