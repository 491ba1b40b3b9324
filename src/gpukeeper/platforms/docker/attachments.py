"""Volumes and networks. Each is removed by its name or id, only while no container refers to it; never all at once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gpukeeper.model.decision import Accepted, Changed, Evidence, NothingToCapture, Refused, Unseen
from gpukeeper.model.identity import Ref
from gpukeeper.model.policy import Policy
from gpukeeper.model.subject import Gone, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.archive import MANIFEST
from gpukeeper.platforms.docker.connect import SLOW, Engine, part
from gpukeeper.platforms.docker.errors import CONFLICT, FORBIDDEN, NOT_FOUND, EngineError, EngineSilent
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import (
    BUILT_IN,
    NETWORK,
    VOLUME,
    PlaceAndTime,
    network_subject,
    volume_subject,
)
from gpukeeper.platforms.docker.wire import ContainerSummary, Network, VolumeList

SHORT_ID = 12
# It does not refuse to remove a network that a container uses, either.
NO_EVENTS = "Podman does not report when containers use it, so it is only reported"


class Attachments:
    def __init__(self, records: Records, engine: Engine, at: Callable[[], PlaceAndTime], policy: Policy) -> None:
        self._records, self._engine, self._at, self._policy = records, engine, at, policy

    def follow(self, policy: Policy) -> None:
        self._policy = policy

    async def observe(self) -> tuple[tuple[Subject, ...], tuple[Unseen, ...]]:
        """Nothing while a container could not be read: the list is incomplete then, and says so. What is only reported
        must not make a list incomplete: a proxy may allow neither.
        """
        used = self._records.attached()
        if isinstance(used, Unknown):
            return (), ()
        subjects: list[Subject] = []
        unseen: list[Unseen] = []
        policy = self._policy
        for kind, limit in ((VOLUME, policy.volumes.anonymous_unused), (NETWORK, policy.networks.unused)):
            try:
                subjects += await self._list(kind, used)
            except (EngineError, EngineSilent) as problem:
                unseen += [] if limit is None else [Unseen(f"{kind}s", str(problem))]
        return tuple(subjects), tuple(unseen)

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        try:
            found = await self._list(ref.kind, set())
            subject = next((one for one in found if one.ref.uid == ref.uid), None)
            if subject is None:
                return Gone(ref, self._at().now)
            asked = [subject.labels["name"], *([ref.uid, ref.uid[:SHORT_ID]] if ref.kind == NETWORK else [])]
            filters = msgspec.json.encode({ref.kind: asked}).decode()
            using = await self._engine.get(
                "/containers/json", list[ContainerSummary], all=1, filters=filters, deadline=SLOW
            )
        except (EngineError, EngineSilent) as problem:
            return Unknown(str(problem))
        return msgspec.structs.replace(subject, state=State.RUNNING, in_use=True) if using else subject

    async def capture(self, subject: Subject) -> Evidence | NothingToCapture | Unknown:
        try:
            return Evidence({MANIFEST: await self._engine.raw(_path(subject.ref))})
        except (EngineError, EngineSilent) as problem:
            return Unknown(str(problem))

    async def remove(self, fresh: Subject) -> Accepted | Changed | Refused | Unknown:
        """Unforced: the engine refuses a volume that any container refers to, and a network that a running one uses. A
        stopped container with that network was searched for by the read immediately before.
        """
        policy = self._policy
        limit = policy.volumes.anonymous_unused if fresh.shape is Shape.VOLUME else policy.networks.unused
        if limit is None or fresh.kept is not None:
            return Refused(fresh.kept or f"the policy only reports unused {fresh.shape}s")
        if fresh.in_use is not False:
            return Changed("a workload refers to it")
        try:
            await self._engine.delete(_path(fresh.ref), force=False)
        except EngineError as error:
            changed = error.status in (CONFLICT, FORBIDDEN, NOT_FOUND)
            return Changed(error.words) if changed else Refused(error.words)
        except EngineSilent as silent:
            return Unknown(str(silent))
        return Accepted(bytes_back=0 if fresh.shape is Shape.NETWORK else Unknown("volumes are not measured"))

    async def _list(self, kind: str, used: set[str]) -> list[Subject]:
        at, used_at, kept = self._at(), self._records.used_at, NO_EVENTS if self._engine.is_podman else None
        if kind == VOLUME:
            volumes = (await self._engine.get("/volumes", VolumeList, deadline=SLOW)).volumes or ()
            uids = [f"{VOLUME} {one.name}" for one in volumes]
            return [
                volume_subject(one, uid in used, used_at(uid), at, kept) for one, uid in zip(volumes, uids, strict=True)
            ]
        networks = await self._engine.get("/networks", list[Network], deadline=SLOW)
        return [
            network_subject(one, bool(used & {one.id, one.name, one.id[:SHORT_ID]}), used_at(one.id), at, kept)
            for one in networks
            if one.name not in BUILT_IN and one.scope in ("", "local") and not (one.ingress or one.config_only)
        ]


def _path(ref: Ref) -> str:
    return f"/{ref.kind}s/{part(ref.uid.removeprefix(f'{VOLUME} '))}"
