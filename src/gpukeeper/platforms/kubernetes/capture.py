"""What is saved of a root before its removal (its manifest, what is below it, events, logs of its pods), and how a
stopped or removed object is restored. A log that may exist and cannot be read is Unknown, and the root is kept; one
that provably does not exist leaves a note. The limits below always apply. A stopped object gets the setting that
its note records. A removed one is recreated from its manifest: suspended, without replicas or behind a scheduling
gate, with a note, so that a second restore starts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from gpukeeper.clients.kubernetes.connect import SLOW, Cluster
from gpukeeper.clients.kubernetes.exchange import (
    CONFLICT,
    INVALID,
    NOT_FOUND,
    ApiError,
    ClusterUnavailable,
    ResponseTooLarge,
)
from gpukeeper.clients.kubernetes.wire import ContainerStatus, Meta, Owner, Pod, Root
from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, ActResult, Changed, Evidence, NothingToCapture, Refused
from gpukeeper.model.subject import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.acts import RETRIES, ClusterActions, pause_before_retry
from gpukeeper.platforms.kubernetes.kinds.catalog import known_owner
from gpukeeper.platforms.kubernetes.kinds.kind import QUEUE, Json, Kind, Lever, Served
from gpukeeper.platforms.kubernetes.kinds.pod import GATE, POD
from gpukeeper.platforms.kubernetes.objects import ListedObject
from gpukeeper.platforms.kubernetes.translate import STOPPED
from gpukeeper.platforms.kubernetes.writes import resource, result_of_error, suspension

MANIFEST, TREE, EVENTS = "manifest.json", "tree.json", "events.json"
RESTORED_FROM, WAS_OWNED = "gpukeeper.io/restored-from", "gpukeeper.io/was-owned-by"
KEPT_OF_METADATA = (
    "name",
    "namespace",
    "labels",
    "annotations",
)  # the cluster sets the rest
OF_ITS_CONTROLLER = ("deployment.kubernetes.io/revision", "batch.kubernetes.io/job-tracking")

RestoreResult: TypeAlias = Accepted | Refused | Unknown


class _Gate(msgspec.Struct):
    name: str = ""


class _GatedSpec(msgspec.Struct, rename="camel"):
    scheduling_gates: list[_Gate] = []


class _Gated(msgspec.Struct):
    metadata: Meta = Meta()
    spec: _GatedSpec = msgspec.field(default_factory=_GatedSpec)


class ObjectCreation(msgspec.Struct, frozen=True):
    """The request that recreates it."""

    path: str
    body: Json


class Archive:
    def __init__(self, cluster: Cluster, served: Served) -> None:
        self._cluster, self._served = cluster, served
        self._actions = ClusterActions(cluster, served)

    async def restore_object(self, kind: Kind, ref: Ref, evidence: Evidence | None) -> RestoreResult:
        """If it exists, it was stopped, or recreated before. Otherwise it was removed."""
        version = await self._served(kind)
        if isinstance(version, Unknown):
            return version
        if version is None:
            return Refused(f"this cluster no longer serves {resource(kind)}")
        path = kind.path(version, ref.namespace, ref.name)
        for left in range(RETRIES, -1, -1):
            answer = await self._try_to_restore(kind, path, ref, evidence)
            if not isinstance(answer, Changed):
                return answer
            if left:
                await pause_before_retry()  # its controller updates it after a stop
        return Refused("it keeps changing; try again later")

    async def _try_to_restore(self, kind: Kind, path: str, ref: Ref, evidence: Evidence | None) -> ActResult:
        try:
            found = await self._cluster.get(path, kind.root)
        except ApiError as error:
            if error.is_not_found:
                return await self.restore_removed(kind, ref, evidence)
            return Refused(str(error)) if error.is_denied else Unknown(str(error))
        except ClusterUnavailable as silent:
            return Unknown(str(silent))
        if found.metadata.uid == ref.uid or _restored_from(found) == ref.uid:
            answer = await self.restore_stopped(kind, path, found, evidence)
            return Accepted(resumed=True) if isinstance(answer, Accepted) else answer
        return Refused(f"an object with that name exists: {kind.name} {ref.name}; remove or rename it, then try again")

    async def restore_stopped(self, kind: Kind, path: str, root: Root, evidence: Evidence | None) -> ActResult:
        """The setting of the note, else the captured one. Changed: it was modified meanwhile."""
        if root.metadata.deletion_timestamp:
            return Refused("it is being removed")
        if kind.evicted:
            return await self._ungate(path)
        if not kind.is_off(root.spec):
            return Refused("it is not stopped: it was already restored")
        note = setting_before_stop(kind, root, evidence)
        if isinstance(note, Unknown):
            return Refused(note.why)
        if kind.lever is Lever.SCALE:
            return await self._scale_back(kind, path, root, note)
        conditions = {"uid": root.metadata.uid, "resourceVersion": root.metadata.resource_version}
        body = resumption(kind, conditions, note)
        if body is None:
            return Refused("it was suspended before gpukeeper stopped it, so it stays suspended")
        return await self._patch(kind, path, body, root.metadata.namespace)

    async def restore_removed(self, kind: Kind, ref: Ref, evidence: Evidence | None) -> RestoreResult:
        if evidence is None:
            return Refused("it no longer exists and no evidence of it was captured")
        made = object_creation(kind, evidence)
        if not isinstance(made, ObjectCreation):
            return made if isinstance(made, Refused) else Refused(made.why)
        try:
            await self._cluster.post(made.path, made.body)
        except ApiError as error:
            return _create_error(error, kind, ref)
        except ClusterUnavailable as silent:
            return Unknown(str(silent))
        return Accepted(resumed=False)

    async def _scale_back(self, kind: Kind, path: str, root: Root, note: Mapping[str, Any]) -> ActResult:
        replicas = note.get("replicas")
        if not isinstance(replicas, int) or replicas < 1:
            return Refused("its former number of replicas is not recorded; scale it up manually")
        version = path.removeprefix("/apis/").split("/")[1]
        answer = await self._actions.scale(kind, version, root, replicas)
        if isinstance(answer, Accepted):
            await self._actions.forget(path, root.metadata)
        return answer

    async def _ungate(self, path: str) -> ActResult:
        """A gate can be removed from a pod at any time, but not added."""
        try:
            pod = await self._cluster.get(path, _Gated)
        except ApiError as error:
            return result_of_error(error, "get pods", "")
        except ClusterUnavailable as silent:
            return Unknown(str(silent))
        names = [gate.name for gate in pod.spec.scheduling_gates]
        if GATE not in names:
            return Refused("it is not stopped: its scheduling gate was already removed")
        place = f"/spec/schedulingGates/{names.index(GATE)}"
        steps = [
            {"op": "test", "path": "/metadata/uid", "value": pod.metadata.uid},
            {"op": "test", "path": "/metadata/resourceVersion", "value": pod.metadata.resource_version},
            {"op": "remove", "path": place},
        ]
        return await self._patch(POD, path, steps, pod.metadata.namespace, "json")

    async def _patch(
        self, kind: Kind, path: str, body: Any, namespace: str, how: Literal["merge", "json"] = "merge"
    ) -> ActResult:
        try:
            await self._cluster.patch(path, body, how)
        except ApiError as error:
            return result_of_error(error, f"patch {resource(kind)}", namespace)
        except ClusterUnavailable as silent:
            return Unknown(str(silent))
        return Accepted()


# Pure functions


def setting_before_stop(kind: Kind, root: Root, evidence: Evidence | None) -> Mapping[str, Any] | Unknown:
    """The setting of its lever before the stop."""
    written = (root.metadata.annotations or {}).get(STOPPED)
    if written is not None:
        try:
            return reading.decode(written, type=dict[str, Any])
        except msgspec.DecodeError:
            if evidence is None:
                return Unknown(f"its annotation {STOPPED} cannot be read; restore it manually")
    if evidence is not None:
        manifest = _manifest(evidence)
        if not isinstance(manifest, Unknown) and manifest["metadata"].get("uid") == root.metadata.uid:
            spec = manifest.get("spec") or {}
            if kind.lever is Lever.SCALE:
                return {"replicas": spec.get("replicas", 1)}
            return {"suspend": bool(kind.settings_of(dict(spec)).get("suspend"))}
    return Unknown("it is not recorded that gpukeeper stopped it, or its setting before; restore it manually")


def resumption(kind: Kind, conditions: Mapping[str, str], note: Mapping[str, Any]) -> Json | None:
    """The patch that starts it; None: it did not run before. Kueue starts what is returned to its queue."""
    body = suspension(kind, conditions, suspend=False)
    if "queue" in note:
        return {"metadata": {**body["metadata"], "labels": {QUEUE: str(note["queue"])}}}
    if note.get("suspend") is not False:
        return None
    return {**body, "spec": {**body["spec"], **kind.resumed(note)}}


def object_creation(kind: Kind, evidence: Evidence) -> ObjectCreation | Refused | Unknown:
    """Its manifest as a new object that does not start."""
    manifest = _manifest(evidence)
    if isinstance(manifest, Unknown):
        return manifest
    meta, spec = manifest["metadata"], manifest.get("spec")
    version = str(manifest.get("apiVersion", "")).rpartition("/")[2]
    if not isinstance(spec, dict) or manifest.get("kind") != kind.kind or not version or not meta.get("name"):
        return Unknown("its captured manifest is not of this kind")
    metadata = {name: meta[name] for name in KEPT_OF_METADATA if meta.get(name)}
    labels = dict(metadata.get("labels") or {})
    notes = {k: v for k, v in (metadata.get("annotations") or {}).items() if k not in OF_ITS_CONTROLLER}
    notes[RESTORED_FROM] = str(meta.get("uid", ""))
    if meta.get("ownerReferences"):
        notes[WAS_OWNED] = ", ".join(f"{one.get('kind')}/{one.get('name')}" for one in meta["ownerReferences"])
    kind.detach(spec, labels)
    still = _suspend_manifest(kind, spec, labels, notes)
    if still is not None:
        return still
    body = {
        "apiVersion": manifest["apiVersion"],
        "kind": kind.kind,
        "metadata": {**metadata, "labels": labels, "annotations": notes},
        "spec": spec,
    }
    return ObjectCreation(kind.path(version, str(meta.get("namespace", "")) or None), body)


def _suspend_manifest(kind: Kind, spec: Json, labels: dict[str, str], notes: dict[str, str]) -> Refused | None:
    """Nothing that was removed starts by itself. A note of a stop before the removal is kept."""
    note = kind.suspend_manifest(spec, labels)
    if isinstance(note, Refused):
        return Refused(f"{note.why}; recreate it from {MANIFEST} of its evidence")
    if QUEUE in labels:
        note = {"queue": labels.pop(QUEUE)}  # or Kueue would start it
    if note and (STOPPED not in notes or "queue" in note):
        notes[STOPPED] = msgspec.json.encode(note).decode()
    return None


def _manifest(evidence: Evidence) -> Json | Unknown:
    try:
        manifest = reading.decode(evidence.files[MANIFEST], type=dict[str, Any])
        manifest["metadata"] = dict(manifest["metadata"])
    except (KeyError, TypeError, ValueError) as error:
        return Unknown(f"its captured manifest cannot be read: {error}")
    return manifest


def _restored_from(found: Root) -> str | None:
    return (found.metadata.annotations or {}).get(RESTORED_FROM)


def _create_error(error: ApiError, kind: Kind, ref: Ref) -> Refused | Unknown:
    if error.status == CONFLICT:
        return Refused(f"an object with that name exists: {kind.name} {ref.name}; remove or rename it, then try again")
    if error.status == NOT_FOUND and error.name == ref.namespace:
        return Refused(f"its namespace {ref.namespace} does not exist; create it, then try again")
    if error.status == NOT_FOUND:
        return Refused(f"this cluster does not serve the captured version: {error.words}")
    if error.status == INVALID:
        return Refused(f"the cluster rejects the captured manifest: {error.words}")
    answer = result_of_error(error, f"create {resource(kind)}", ref.namespace)
    return Refused(answer.why) if isinstance(answer, Changed) else answer


LOG_LINES, LOG_BYTES = (100_000, 10_000, 1_000, 100), 10 * 1024 * 1024  # of one container
ALL_BYTES = 50 * 1024 * 1024  # of everything
OBJECT_BYTES, EVENT_BYTES = 4 * 1024 * 1024, 1024 * 1024
PODS = 100  # whose manifest and log are captured, failed ones first
ASKED_FOR_EVENTS = 20
CUT = b"[gpukeeper: log truncated; earlier lines were not captured]\n"
CUT_BELOW = b"\n[gpukeeper: its lines are too long; later lines were not captured]\n"
ROOM_FOR_NOTES = 64 * 1024

JsonObject: TypeAlias = dict[str, Any]


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

    async def _described(self, path: str) -> JsonObject:
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

    async def _between(self, ref: Ref, pods: Sequence[Pod]) -> dict[str, JsonObject]:
        """The objects between root and pods, by uid: climbed from the pods, so that no namespace has to be listed."""
        found: dict[str, JsonObject] = {}
        waiting = [pod.metadata.owner for pod in pods]
        while waiting:
            owner = waiting.pop()
            if owner is None or owner.uid == ref.uid or owner.uid in found or len(found) >= PODS:
                continue
            line, above = await self._owner(ref.namespace, owner)
            found[owner.uid] = line
            waiting.append(above)
        return found

    async def _owner(self, namespace: str, owner: Owner) -> tuple[JsonObject, Owner | None]:
        line: JsonObject = {"kind": owner.kind, "name": owner.name, "uid": owner.uid}
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


def _without_managers(body: JsonObject) -> JsonObject:
    """Without managedFields."""
    if isinstance(body.get("metadata"), dict):
        body["metadata"].pop("managedFields", None)
    return body


def _uid(body: JsonObject) -> object:
    meta = body.get("metadata")
    return meta.get("uid") if isinstance(meta, dict) else None


def _worst_first(pods: Sequence[Pod]) -> list[Pod]:
    """Where not everything fits, the logs of those that failed matter most; then of those that ran."""
    rank = {"Failed": 0, "Running": 1, "Unknown": 1, "Succeeded": 2}
    return sorted(pods, key=lambda pod: (rank.get(pod.status.phase, 3), pod.metadata.name))


def _line(pod: Pod) -> JsonObject:
    owner = pod.metadata.owner
    ended = {one.name: one.terminated.exit_code for one in _statuses(pod) if one.terminated is not None}
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


def _event(body: Mapping[str, Any]) -> JsonObject:
    """What people read of an event."""
    wanted = ("type", "reason", "message", "count", "firstTimestamp", "lastTimestamp", "eventTime", "involvedObject")
    return {name: body[name] for name in wanted if body.get(name) is not None}


def _lines_in(stream: bytes) -> int:
    return stream.count(b"\n") + (not stream.endswith(b"\n") and bool(stream))


def _encoded(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
