"""Writes Events on objects, which `kubectl describe` shows. Best effort; the record is the ledger."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.identity import Ref
from gpukeeper.model.ports import Clock
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.kinds.kind import Kind

US = "gpukeeper"
LONGEST = 1024  # bytes of a message that the API takes
NOT_AGAIN = timedelta(minutes=10)
NAME = 200  # of the object's name in the event's: a suffix must fit into 253


class EventWriter:
    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock
        self._written: dict[tuple[str, str, str], datetime] = {}

    async def write(
        self, kind: Kind, version: str, ref: Ref, reason: str, words: str, *, warning: bool = False
    ) -> bool:
        """True: it is on the object. `reason` in CamelCase, as the API has them. The same words once in a while."""
        now = self._clock.now()
        self._written = {key: at for key, at in self._written.items() if now - at < NOT_AGAIN}
        key = (ref.uid, reason, words)
        if key in self._written:
            return True
        event = self._event(kind, version, ref, reason, words, now, warning)
        try:
            await self._cluster.post(f"/api/v1/namespaces/{ref.namespace}/events", event)
        except PlatformError:
            return False
        self._written[key] = now
        return True

    def _event(
        self, kind: Kind, version: str, ref: Ref, reason: str, words: str, now: datetime, warning: bool
    ) -> dict[str, object]:
        at = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{ref.name[:NAME].rstrip('.-')}.", "namespace": ref.namespace},
            "involvedObject": {
                "apiVersion": f"{kind.group}/{version}" if kind.group else version,
                "kind": kind.kind,
                "namespace": ref.namespace,
                "name": ref.name,
                "uid": ref.uid,
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": shortened(words),
            "source": {"component": US},
            "reportingComponent": US,
            "reportingInstance": US,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }


def shortened(words: str) -> str:
    """To what the API takes, at a whole character."""
    raw = words.encode("utf-8", "replace")
    return words if len(raw) <= LONGEST else raw[: LONGEST - 3].decode("utf-8", "ignore") + "..."
