"""The clock of a cluster: its times are compared with its own clock, and converted to the clock of this machine."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Subject
from gpukeeper.platforms.kubernetes import translate
from gpukeeper.platforms.kubernetes.connect import Cluster

WRONG_CLOCK = timedelta(minutes=5)  # beyond this, times cannot be trusted
SLIGHT = timedelta(seconds=2)  # the server's clock is known to the second


class ServerClock:
    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock

    def now(self) -> datetime:
        """By our clock."""
        return self._clock.now()

    def at(self) -> translate.Observation:
        """By the server's clock, which wrote the times that are compared with it."""
        return translate.Observation(self._cluster.place, self._clock.now() + (self._cluster.skew or timedelta()))

    def check(self) -> None:
        skew = self._cluster.skew
        if skew is not None and abs(skew) > WRONG_CLOCK:
            ahead = "ahead of" if skew > timedelta() else "behind"
            raise PlatformError(
                f"the cluster's clock is {in_words(abs(skew))} {ahead} that of this machine, so its times cannot be"
                " trusted. Nothing was changed. Fix the wrong clock"
            )

    def by_ours(self, subject: Subject) -> Subject:
        """The rules compare with our clock. Where the two differ, whatever keeps longer."""
        skew = self._cluster.skew or timedelta()
        seen = msgspec.structs.replace(subject.seen, at=self._clock.now())
        late = max(-skew, timedelta()) if abs(skew) > SLIGHT else timedelta()
        ended, created = subject.ended, subject.created
        if late and isinstance(ended, datetime):
            ended += late
        if late and isinstance(created, datetime):
            created += late
        return msgspec.structs.replace(subject, seen=seen, ended=ended, created=created)
