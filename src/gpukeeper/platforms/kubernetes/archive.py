"""How a stopped or removed object is restored.

A stopped object gets the setting that its note records. A removed object is recreated from its captured manifest:
suspended, without replicas or behind a scheduling gate, with a note, so that a second restore starts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, Changed, Evidence, Refused
from gpukeeper.model.identity import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.act_results import ActResult, resource, result_of_error
from gpukeeper.platforms.kubernetes.acts import RETRIES, ClusterActions, Served, pause_before_retry
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.errors import CONFLICT, INVALID, NOT_FOUND, ApiError, ClusterUnavailable
from gpukeeper.platforms.kubernetes.kinds.kind import QUEUE, Json, Kind, Lever
from gpukeeper.platforms.kubernetes.kinds.pod import GATE, POD
from gpukeeper.platforms.kubernetes.patches import suspension
from gpukeeper.platforms.kubernetes.translate import STOPPED
from gpukeeper.platforms.kubernetes.wire import Meta, Root

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
