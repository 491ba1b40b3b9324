"""Annotations of gpukeeper on an object: announced times, which bind the next leader, and holds. Bound to its uid."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from gpukeeper.model.decision import Accepted, Changed, Refused
from gpukeeper.model.identity import Ref
from gpukeeper.model.memory import Warned
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.act_results import resource, result_of_error
from gpukeeper.platforms.kubernetes.acts import Served
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.errors import ApiError, ClusterUnavailable
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.marks import HOLD_UNTIL, WARNED, AnnouncedWarnings, moment
from gpukeeper.platforms.kubernetes.walk import Namespace

KEPT = 8  # announcements on one object, newest last


class Annotations:
    def __init__(self, cluster: Cluster, served: Served) -> None:
        self._cluster, self._served = cluster, served

    async def warn(self, ref: Ref, before: tuple[Warned, ...], warned: Warned) -> None:
        """Without the permission, only the Event and the ledger remain; a new leader then warns again."""
        note = AnnouncedWarnings(ref.uid, (*before, warned)[-KEPT:])
        await self._write(ref, {WARNED: msgspec.json.encode(note).decode()})

    async def hold(self, ref: Ref, until: datetime | None) -> Accepted | Refused | Unknown:
        """An existing hold that lasts longer is kept."""
        value = None if until is None else until.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        answer = await self._write(ref, {HOLD_UNTIL: value}, until)
        return Refused(answer.why) if isinstance(answer, Changed) else answer

    async def _write(
        self, ref: Ref, annotations: Mapping[str, str | None], until: datetime | None = None
    ) -> Accepted | Changed | Refused | Unknown:
        kind = BY_NAME[ref.kind]
        version = await self._served(kind)
        if isinstance(version, Unknown):
            return version
        if version is None:
            return Refused(f"this cluster no longer serves {resource(kind)}")
        path, body = kind.path(version, ref.namespace, ref.name), {"uid": ref.uid, "annotations": annotations}
        try:
            if until is None or not await self._lasts(path, until):
                await self._cluster.patch(path, {"metadata": body}, "merge")
        except ApiError as error:
            return result_of_error(error, f"patch {resource(kind)}", ref.namespace)
        except ClusterUnavailable as silent:
            return Unknown(str(silent))
        return Accepted()

    async def _lasts(self, path: str, until: datetime) -> bool:
        given = (await self._cluster.get(path, Namespace)).metadata.annotations or {}
        held = moment(HOLD_UNTIL, given[HOLD_UNTIL]) if HOLD_UNTIL in given else None
        return isinstance(held, datetime) and held >= until
