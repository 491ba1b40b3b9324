"""What is saved of a root before its removal: its manifest, what is below it, events, and the logs of its pods.

Logs cannot be recovered, so a log that may exist and cannot be read is Unknown, and the root is kept. A log that
provably does not exist (its pod, container or node is gone) leaves a note. The limits below always apply.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.decision import Evidence, NothingToCapture
from gpukeeper.model.identity import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.archive import EVENTS, MANIFEST, TREE
from gpukeeper.platforms.kubernetes.bulk import ListedObject
from gpukeeper.platforms.kubernetes.connect import SLOW, Cluster
from gpukeeper.platforms.kubernetes.errors import ApiError, ClusterUnavailable, ResponseTooLarge
from gpukeeper.platforms.kubernetes.kinds.catalog import known_owner
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.wire import ContainerStatus, Owner, Pod, Root

LOG_LINES, LOG_BYTES = (100_000, 10_000, 1_000, 100), 10 * 1024 * 1024  # of one container
ALL_BYTES = 50 * 1024 * 1024  # of everything
OBJECT_BYTES, EVENT_BYTES = 4 * 1024 * 1024, 1024 * 1024
PODS = 100  # whose manifest and log are captured, failed ones first
ASKED_FOR_EVENTS = 20
CUT = b"[gpukeeper: log truncated; earlier lines were not captured]\n"
CUT_BELOW = b"\n[gpukeeper: its lines are too long; later lines were not captured]\n"
ROOM_FOR_NOTES = 64 * 1024

Json: TypeAlias = dict[str, Any]
Served: TypeAlias = Callable[[Kind], Awaitable[str | Unknown | None]]


class _Full(Exception):
    """The limit is reached."""


class _Files:
    """Collected up to the limit."""

    def __init__(self, most: int) -> None:
        self.files: dict[str, bytes] = {}
        self.left = most - ROOM_FOR_NOTES

    def add(self, name: str, content: bytes) -> None:
        if len(content) > self.left:
            raise _Full
        self.files[name] = content
        self.left -= len(content)

    def note(self, name: str, words: str) -> None:
        """Short, and there is room for it always."""
        self.files[name] = words.encode()[:1000] + b"\n"


class EvidenceCapture:
    def __init__(self, cluster: Cluster, served: Served) -> None:
        self._cluster, self._served = cluster, served

    async def capture(
        self, kind: Kind, ref: Ref, what: Sequence[str], pods: Sequence[Pod], read: ListedObject | None = None
    ) -> Evidence | NothingToCapture | Unknown:
        """`pods`: all below it (of a pod: itself). The description always: without it nothing comes back. `read`: what
        was listed of it a moment ago, so that only logs are requested."""
        version = await self._served(kind)
        if version is None:
            return Unknown(f"this cluster no longer serves {kind.plural}")
        if isinstance(version, Unknown):
            return version
        files = _Files(ALL_BYTES)
        try:
            body = _without_managers(read.description) if read is not None else None
            body = body or await self._described(kind.path(version, ref.namespace, ref.name))
            uid = _uid(body)
            if not uid:
                return Unknown("the response has no uid, so the object cannot be identified")
            if uid != ref.uid:
                return NothingToCapture("it no longer exists; another object has its name")
            files.add(MANIFEST, _encoded(body))
            if set(what) - {"manifest"}:
                await self._around(kind, ref, what, _worst_first(pods), files, read)
        except ApiError as error:
            gone = error.is_not_found and not files.files
            return NothingToCapture("it no longer exists") if gone else Unknown(str(error))
        except (ClusterUnavailable, msgspec.DecodeError) as problem:
            return Unknown(str(problem))
        except _Full:
            return Unknown(f"its manifest and events alone exceed {ALL_BYTES} bytes")
        return Evidence(files.files)

    async def _around(
        self, kind: Kind, ref: Ref, what: Sequence[str], pods: Sequence[Pod], files: _Files, read: ListedObject | None
    ) -> None:
        nodes: dict[str, bool] = {}
        taken = 0
        between = await self._between(ref, pods) if kind.children else {}
        files.add(
            TREE, _encoded({"root": ref.uid, "between": list(between.values()), "pods": [_line(p) for p in pods]})
        )
        if "events" in what:
            uids = [ref.uid, *between, *(pod.metadata.uid for pod in pods)]
            listed = read.events if read is not None else None
            files.add(EVENTS, await self._events(ref.namespace, list(dict.fromkeys(uids)), listed or {}))
        try:
            for pod in pods[:PODS]:
                if kind.children:
                    await self._describe_pod(pod, files, read)
                if "logs" in what:
                    await self._logs(pod, files, nodes)
                taken += 1
        except _Full:
            pass
        if taken < len(pods):
            left = len(pods) - taken
            files.note(
                "left-out.txt", f"{left} of {len(pods)} pods were not captured completely: the limit was reached."
            )

    async def _described(self, path: str) -> Json:
        """As served."""
        return _without_managers(reading.decode(await self._cluster.raw(path, most=OBJECT_BYTES), type=dict[str, Any]))

    async def _describe_pod(self, pod: Pod, files: _Files, read: ListedObject | None) -> None:
        meta = pod.metadata
        listed = read.pod(meta.uid) if read is not None else None
        if listed is not None:
            files.add(f"pods/{meta.name}.json", _encoded(_without_managers(listed)))
            return
        try:
            body = await self._described(POD.path("v1", meta.namespace, meta.name))
        except ApiError as error:
            if not error.is_not_found:
                raise
            files.note(f"pods/{meta.name}.txt", "It was deleted while its root was captured.")
            return
        if _uid(body) == meta.uid:
            files.add(f"pods/{meta.name}.json", _encoded(body))
        else:
            files.note(
                f"pods/{meta.name}.txt", "It was deleted while its root was captured; another pod has its name now."
            )

    async def _between(self, ref: Ref, pods: Sequence[Pod]) -> dict[str, Json]:
        """The objects between root and pods, by uid: climbed from the pods, so that no namespace has to be listed."""
        found: dict[str, Json] = {}
        waiting = [pod.metadata.owner for pod in pods]
        while waiting:
            owner = waiting.pop()
            if owner is None or owner.uid == ref.uid or owner.uid in found or len(found) >= PODS:
                continue
            line, above = await self._owner(ref.namespace, owner)
            found[owner.uid] = line
            waiting.append(above)
        return found

    async def _owner(self, namespace: str, owner: Owner) -> tuple[Json, Owner | None]:
        line: Json = {"kind": owner.kind, "name": owner.name, "uid": owner.uid}
        kind = known_owner(owner.api_version, owner.kind)
        version = await self._served(kind) if kind is not None else None
        if kind is None or not isinstance(version, str):
            return line, None
        try:
            body = await self._cluster.get(kind.path(version, namespace, owner.name), kind.root)
        except ApiError as error:
            return {**line, "not read": error.words}, None
        if body.metadata.uid != owner.uid:
            return {**line, "not read": "it no longer exists; another object has its name"}, None
        conditions = [msgspec.to_builtins(one) for one in body.status.conditions or ()]
        above = body.metadata.owner
        owned = {"owner": above.uid} if above is not None else {}
        return {**line, **owned, "conditions": conditions}, above

    async def _events(self, namespace: str, uids: Sequence[str], listed: Mapping[str, Sequence[bytes]]) -> bytes:
        """What the cluster still remembers. It forgets after an hour, so little is no failure, and none neither.
        `listed`: of those that need not be requested."""
        items: list[Any] = []
        notes: list[str] = []
        for uid in uids[:ASKED_FOR_EVENTS]:
            if uid in listed:
                items += [_event(reading.decode(one, type=dict[str, Any])) for one in listed[uid]]
                continue
            try:
                body = await self._cluster.raw(
                    f"/api/v1/namespaces/{namespace}/events",
                    most=EVENT_BYTES,
                    limit=200,
                    fieldSelector=f"involvedObject.uid={uid}",
                )
            except (ApiError, ResponseTooLarge) as problem:
                notes.append(str(problem))
                break
            items += [_event(one) for one in reading.decode(body, type=dict[str, Any]).get("items") or ()]
        if len(uids) > ASKED_FOR_EVENTS:
            notes.append(f"events of {ASKED_FOR_EVENTS} of {len(uids)} objects were read")
        return _encoded({"items": items, "notes": notes})

    async def _logs(self, pod: Pod, files: _Files, nodes: dict[str, bool]) -> None:
        name = pod.metadata.name
        if not pod.spec.node_name:
            files.note(f"logs/{name}/none.txt", "It was never scheduled to a node, so it has no log.")
            return
        restarts = {one.name: one.restart_count for one in _statuses(pod)}
        for container in (*(pod.spec.init_containers or ()), *pod.spec.containers):
            await self._log(pod, container.name, files, nodes, previous=False)
            if restarts.get(container.name):
                await self._log(pod, container.name, files, nodes, previous=True)

    async def _log(self, pod: Pod, container: str, files: _Files, nodes: dict[str, bool], *, previous: bool) -> None:
        stem = f"logs/{pod.metadata.name}/{container}" + (".previous" if previous else "")
        try:
            files.add(f"{stem}.log", await self._end_of_log(pod, container, min(LOG_BYTES, files.left), previous))
        except ApiError as error:
            why = await self._no_log(pod, error, nodes)
            if why is None:
                raise
            files.note(f"{stem}.txt", why)

    async def _end_of_log(self, pod: Pod, container: str, most: int, previous: bool) -> bytes:
        """Fewer lines until they fit: of a log that is too long the end matters."""
        path = POD.path("v1", pod.metadata.namespace, pod.metadata.name, "log")
        room = most - len(CUT) - len(CUT_BELOW)
        if room <= 0:
            raise _Full
        stream = b""
        for lines in LOG_LINES:
            stream = await self._cluster.raw(
                path,
                most=room + 1,
                tail_ok=True,
                deadline=SLOW,
                container=container,
                previous=previous or None,
                timestamps=True,
                tailLines=lines,
                limitBytes=room + 1,
            )
            if len(stream) <= room:
                return CUT + stream if _lines_in(stream) >= lines else stream
        return CUT + stream[:room] + CUT_BELOW

    async def _no_log(self, pod: Pod, error: ApiError, nodes: dict[str, bool]) -> str | None:
        """Why there is provably no log; None: there may be one."""
        node = pod.spec.node_name
        if error.is_not_found and error.name == node:  # the server checks that the node exists first
            return f"Its node {node} no longer exists, so its log is lost."
        if error.is_not_found:
            return f"Its log was deleted with its pod or container: {error.words}"
        if error.status == 400 and error.reason == "BadRequest":
            return f"It has no log: {error.words}"  # a container that never started, or never ran before
        if error.status >= 500 and await self._node_is_gone(node, nodes):
            return f"Its node {node} no longer exists, so its log is lost."
        return None

    async def _node_is_gone(self, name: str, nodes: dict[str, bool]) -> bool:
        if name not in nodes:
            try:
                await self._cluster.get(f"/api/v1/nodes/{name}", Root)
                nodes[name] = False
            except ApiError as error:
                nodes[name] = error.is_not_found
        return nodes[name]


def _without_managers(body: Json) -> Json:
    """Without managedFields."""
    if isinstance(body.get("metadata"), dict):
        body["metadata"].pop("managedFields", None)
    return body


def _uid(body: Json) -> object:
    meta = body.get("metadata")
    return meta.get("uid") if isinstance(meta, dict) else None


def _worst_first(pods: Sequence[Pod]) -> list[Pod]:
    """Where not everything fits, the logs of those that failed matter most; then of those that ran."""
    rank = {"Failed": 0, "Running": 1, "Unknown": 1, "Succeeded": 2}
    return sorted(pods, key=lambda pod: (rank.get(pod.status.phase, 3), pod.metadata.name))


def _line(pod: Pod) -> Json:
    owner = pod.metadata.owner
    ended = {
        one.name: one.state.terminated.exit_code
        for one in _statuses(pod)
        if one.state is not None and one.state.terminated is not None
    }
    return {
        "kind": "Pod",
        "name": pod.metadata.name,
        "uid": pod.metadata.uid,
        "owner": owner.uid if owner is not None else None,
        "phase": pod.status.phase,
        "reason": pod.status.reason,
        "node": pod.spec.node_name,
        "exit codes": ended,
    }


def _statuses(pod: Pod) -> tuple[ContainerStatus, ...]:
    return (*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ()))


def _event(body: Mapping[str, Any]) -> Json:
    """What people read of an event."""
    wanted = ("type", "reason", "message", "count", "firstTimestamp", "lastTimestamp", "eventTime", "involvedObject")
    return {name: body[name] for name in wanted if body.get(name) is not None}


def _lines_in(stream: bytes) -> int:
    return stream.count(b"\n") + (not stream.endswith(b"\n") and bool(stream))


def _encoded(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
