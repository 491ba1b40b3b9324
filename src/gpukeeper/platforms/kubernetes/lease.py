"""Leader election: a Lease of coordination.k8s.io, held by renewing it.

This is no fence. A suspended leader may wake after another took over, and its requests arrive. Therefore `why_not` is
called before each step, and every act carries preconditions that the API server checks.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.ports import Clock
from gpukeeper.model.words import in_words

DURATION, RENEW_DEADLINE, RETRY = timedelta(seconds=15), timedelta(seconds=10), timedelta(seconds=2)
_PATH = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"


def steady_time() -> float:
    """Seconds that also pass while the machine sleeps: a leader that was suspended must notice the expired lease."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership:
    """`identity` must be new with every start: an instance that restarts after a crash does not hold the lease."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        identity: str,
        clock: Clock,
        duration: timedelta = DURATION,
        renew_deadline: timedelta = RENEW_DEADLINE,
        retry: timedelta = RETRY,
        steady: Callable[[], float] = steady_time,
    ) -> None:
        assert retry < renew_deadline < duration, "This is a bug in gpukeeper: a lease must outlive its renewals."
        self.identity = identity
        self.lease = f"{namespace}/{name}"
        self._cluster, self._clock, self._steady = cluster, clock, steady
        self._collection, self._name = _PATH.format(namespace), name
        self._path = f"{self._collection}/{name}"
        self._duration, self._renew_deadline, self._retry = duration, renew_deadline, retry
        self._ours: dict[str, Any] | None = None  # the lease as we wrote it last; None: we do not hold it
        self._renewed = 0.0  # steady time just before we requested that
        self._version, self._changed = "", 0.0  # of another's lease: as last seen, and since when it is so
        self._holder, self._problem = "", ""
        self.denied = False  # the last attempt was: without other rights, no further one succeeds
        self.won, self.lost = asyncio.Event(), asyncio.Event()
        self.lost.set()

    def why_not(self) -> str | None:
        """Why this instance may not act, checked before each step; None: it may."""
        trouble = f" ({self._problem})" if self._problem else ""
        if self._ours is None:
            others = f"{self._holder} holds it" if self._holder else "its holder is unknown"
            return f"this instance does not hold the lease {self.lease}; {others}{trouble}"
        silent = timedelta(seconds=self._steady() - self._renewed)
        if silent > self._renew_deadline:
            age = in_words(silent)
            return f"the lease {self.lease} was not renewed for {age}; another instance may hold it now{trouble}"
        return None

    @property
    def missing(self) -> str | None:
        """Which right is missing, so that it can neither take nor renew the lease; None: none that is known."""
        return f"the lease {self.lease} cannot be written: {self._problem}" if self.denied else None

    async def campaign(self, stop: asyncio.Event) -> None:
        """Take the lease, renew it, take it again after a loss; until `stop`. Then it is given back, so that the next
        one need not wait. The caller sets `stop` only when no step is in progress."""
        while not stop.is_set():
            await self.attempt()
            # Not all at the same moment, unless it is ours to keep.
            pause = self._retry if self._ours is not None else self._retry * random.uniform(0.8, 1.2)  # noqa: S311
            with suppress(TimeoutError):
                async with asyncio.timeout(pause.total_seconds()):
                    await stop.wait()
        await self._give_back()

    async def attempt(self) -> None:
        """One try to take or renew. A lease that cannot be reached stays as it was; its time runs out."""
        try:
            async with asyncio.timeout((self._renew_deadline / 2).total_seconds()):
                await self._take_or_renew()
            self._problem, self.denied = "", False
        except TimeoutError:
            self._problem = "timeout: the cluster did not answer"
        except PlatformError as problem:
            self._problem = _advised(problem)
            self.denied = isinstance(problem, ApiError) and problem.is_denied
        self._log_change()

    async def _take_or_renew(self) -> None:
        if self._ours is not None and await self._put(self._ours):
            return
        found = await self._find()
        if found is None:
            await self._create()
        elif found["spec"].get("holderIdentity") == self.identity:
            await self._put(found)  # held by this instance: a response was lost, or it was edited
        elif self._is_free(found):
            await self._put(found)

    async def _find(self) -> dict[str, Any] | None:
        try:
            return _checked(await self._cluster.get(self._path, dict))
        except ApiError as problem:
            if not problem.is_not_found:
                raise
            return None

    def _is_free(self, found: dict[str, Any]) -> bool:
        """Given back, or not renewed for as long as its holder requested. Counted from when we saw it change: the times
        in it are those of another clock."""
        self._holder = str(found["spec"].get("holderIdentity") or "")
        version = found["metadata"]["resourceVersion"]
        if version != self._version:
            self._version, self._changed = version, self._steady()
        theirs = _number(found["spec"].get("leaseDurationSeconds"))
        over = self._steady() - self._changed > max(theirs, self._duration.total_seconds())
        return not self._holder or over

    async def _create(self) -> None:
        whole = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "labels": {"app.kubernetes.io/name": "gpukeeper"}},
            "spec": self._spec({}),
        }
        began = self._steady()
        try:
            self._holds(await self._cluster.post(self._collection, whole), began)
        except ApiError as problem:
            if problem.status != 409:  # another instance was faster
                raise

    async def _put(self, found: dict[str, Any]) -> bool:
        """The whole object with its resourceVersion: the server refuses when it changed since. False: it did."""
        began = self._steady()
        try:
            self._holds(await self._cluster.put(self._path, {**found, "spec": self._spec(found["spec"])}), began)
        except ApiError as problem:
            if problem.status != 409 and not problem.is_not_found:
                raise
            self._ours = None
        return self._ours is not None

    def _spec(self, before: dict[str, Any]) -> dict[str, Any]:
        now = _micro(self._clock.now())
        spec = {**before, "holderIdentity": self.identity, "renewTime": now}
        spec["leaseDurationSeconds"] = int(self._duration.total_seconds())
        if before.get("holderIdentity") != self.identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(_number(before.get("leaseTransitions"))) + 1 if before else 0
        return spec

    def _holds(self, answer: bytes, began: float) -> None:
        try:
            self._ours = _checked(reading.decode(answer))
        except msgspec.DecodeError as error:
            raise PlatformError("the response of the cluster is not a Lease") from error
        self._renewed, self._holder = began, self.identity

    async def _give_back(self) -> None:
        """Without a holder the next one takes it at once. Not ours any more, or no answer: it runs out by itself."""
        ours, self._ours, self._holder = self._ours, None, ""
        self._log_change()
        if ours is None:
            return
        # One second: instances that read the duration and not the holder need not wait, either.
        spec = {**ours["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro(self._clock.now())}
        with suppress(TimeoutError, PlatformError):
            async with asyncio.timeout((self._renew_deadline / 2).total_seconds()):
                await self._cluster.put(self._path, {**ours, "spec": spec})

    def _log_change(self) -> None:
        leads = self.why_not() is None
        gained, gone = (self.won, self.lost) if leads else (self.lost, self.won)
        gained.set()
        gone.clear()


def _checked(found: Any) -> dict[str, Any]:
    """A lease as the API server writes it; whatever else answered proves nothing."""
    match found:
        case {"metadata": {"resourceVersion": str()}, "spec": dict()}:
            return dict(found)
    raise PlatformError("the response of the cluster is not a Lease")


def _number(found: object) -> float:
    return float(found) if isinstance(found, int | float) else 0.0


def _micro(at: datetime) -> str:
    """The API's MicroTime."""
    return f"{at:%Y-%m-%dT%H:%M:%S.%f}Z"


def _advised(problem: PlatformError) -> str:
    if isinstance(problem, ApiError) and problem.is_denied:
        return f"{problem}. gpukeeper needs get, create and update on leases in that namespace"
    return str(problem)
