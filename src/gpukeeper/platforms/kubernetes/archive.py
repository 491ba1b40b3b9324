"""What is kept of an object before it goes, and how it comes back. What is made again stands still until it is told.

What was stopped gets its lever back as the note on it says. What was removed is made anew from its capture: suspended,
without replicas or behind a scheduling gate, with a note, so that a second restore sets it going.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, Changed, Evidence, Refused
from gpukeeper.model.identity import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.acts import RETRIES, Acts, Served, a_moment
from gpukeeper.platforms.kubernetes.answers import Answer, answer_to, resource
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.errors import CONFLICT, INVALID, NOT_FOUND, ApiError, ClusterSilent
from gpukeeper.platforms.kubernetes.kinds.kind import QUEUE, Json, Kind, Lever
from gpukeeper.platforms.kubernetes.kinds.pod import GATE, POD
from gpukeeper.platforms.kubernetes.patches import suspension
from gpukeeper.platforms.kubernetes.translate import STOPPED
from gpukeeper.platforms.kubernetes.wire import Meta, Root

MANIFEST, TREE, EVENTS = "manifest.json", "tree.json", "events.json"
RESTORED_FROM, WAS_OWNED = "gpukeeper.io/restored-from", "gpukeeper.io/was-owned-by"
KEPT_OF_METADATA = ("name", "namespace", "labels", "annotations")  # all else the cluster gives, or it ties to the dead
OF_ITS_CONTROLLER = ("deployment.kubernetes.io/revision", "batch.kubernetes.io/job-tracking")

Back: TypeAlias = Accepted | Refused | Unknown


class _Gate(msgspec.Struct):
    name: str = ""


class _GatedSpec(msgspec.Struct, rename="camel"):
    scheduling_gates: list[_Gate] = []


class _Gated(msgspec.Struct):
    metadata: Meta = Meta()
    spec: _GatedSpec = msgspec.field(default_factory=_GatedSpec)


class Recipe(msgspec.Struct, frozen=True):
    """How to make it again."""

    path: str
    body: Json


class Archive:
    def __init__(self, cluster: Cluster, served: Served) -> None:
        self._cluster, self._served = cluster, served
        self._acts = Acts(cluster, served)

    async def bring_back(self, kind: Kind, ref: Ref, evidence: Evidence | None) -> Back:
        """Is it there? Then it was stopped, or made again before. Otherwise it was removed."""
        version = await self._served(kind)
        if isinstance(version, Unknown):
            return version
        if version is None:
            return Refused(f"this cluster no longer serves {resource(kind)}")
        path = kind.path(version, ref.namespace, ref.name)
        for left in range(RETRIES, -1, -1):
            answer = await self._try_to_bring_back(kind, path, ref, evidence)
            if not isinstance(answer, Changed):
                return answer
            if left:
                await a_moment()  # its controller writes to what was just stopped
        return Refused("it keeps changing; try again later")

    async def _try_to_bring_back(self, kind: Kind, path: str, ref: Ref, evidence: Evidence | None) -> Answer:
        try:
            found = await self._cluster.get(path, kind.root)
        except ApiError as error:
            if error.says_gone:
                return await self.restore_removed(kind, ref, evidence)
            return Refused(str(error)) if error.says_refused else Unknown(str(error))
        except ClusterSilent as silent:
            return Unknown(str(silent))
        if found.metadata.uid == ref.uid or _made_from(found) == ref.uid:
            answer = await self.restore_stopped(kind, path, found, evidence)
            return Accepted(resumed=True) if isinstance(answer, Accepted) else answer
        return Refused(f"an object with that name exists: {kind.name} {ref.name}; remove or rename it, then try again")

    async def restore_stopped(self, kind: Kind, path: str, root: Root, evidence: Evidence | None) -> Answer:
        """The lever as the note on it says, else as it was captured. Changed: somebody wrote to it meanwhile."""
        if root.metadata.deletion_timestamp:
            return Refused("it is being removed")
        if kind.evicted:
            return await self._ungate(path)
        if not kind.is_off(root.spec):
            return Refused("it is not stopped: it was already restored")
        note = before(kind, root, evidence)
        if isinstance(note, Unknown):
            return Refused(note.why)
        if kind.lever is Lever.SCALE:
            return await self._scale_back(kind, path, root, note)
        conditions = {"uid": root.metadata.uid, "resourceVersion": root.metadata.resource_version}
        body = resumption(kind, conditions, note)
        if body is None:
            return Refused("it was suspended before gpukeeper stopped it, so it stays suspended")
        return await self._patch(kind, path, body, root.metadata.namespace)

    async def restore_removed(self, kind: Kind, ref: Ref, evidence: Evidence | None) -> Back:
        if evidence is None:
            return Refused("it no longer exists and no evidence of it was captured")
        made = recipe(kind, evidence)
        if not isinstance(made, Recipe):
            return made if isinstance(made, Refused) else Refused(made.why)
        try:
            await self._cluster.post(made.path, made.body)
        except ApiError as error:
            return _not_made(error, kind, ref)
        except ClusterSilent as silent:
            return Unknown(str(silent))
        return Accepted()

    async def _scale_back(self, kind: Kind, path: str, root: Root, note: Mapping[str, Any]) -> Answer:
        replicas = note.get("replicas")
        if not isinstance(replicas, int) or replicas < 1:
            return Refused("its former number of replicas is not recorded; scale it up manually")
        version = path.removeprefix("/apis/").split("/")[1]
        answer = await self._acts.scale(kind, version, root, replicas)
        if isinstance(answer, Accepted):
            await self._acts.forget(path, root.metadata)
        return answer

    async def _ungate(self, path: str) -> Answer:
        """A gate may be taken off a pod at any time, never put on."""
        try:
            pod = await self._cluster.get(path, _Gated)
        except ApiError as error:
            return answer_to(error, "get pods", "")
        except ClusterSilent as silent:
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
    ) -> Answer:
        try:
            await self._cluster.patch(path, body, how)
        except ApiError as error:
            return answer_to(error, f"patch {resource(kind)}", namespace)
        except ClusterSilent as silent:
            return Unknown(str(silent))
        return Accepted()


# Below here: pure.


def before(kind: Kind, root: Root, evidence: Evidence | None) -> Mapping[str, Any] | Unknown:
    """What its lever said before we moved it."""
    written = (root.metadata.annotations or {}).get(STOPPED)
    if written is not None:
        try:
            return reading.decode(written, type=dict[str, Any])
        except msgspec.DecodeError:
            if evidence is None:
                return Unknown(f"its annotation {STOPPED} cannot be read; restore it manually")
    if evidence is not None:
        told = _manifest(evidence)
        if not isinstance(told, Unknown) and told["metadata"].get("uid") == root.metadata.uid:
            spec = told.get("spec") or {}
            if kind.lever is Lever.SCALE:
                return {"replicas": spec.get("replicas", 1)}
            return {"suspend": bool(kind.settings_of(dict(spec)).get("suspend"))}
    return Unknown("it is not recorded that gpukeeper stopped it, or its setting before; restore it manually")


def resumption(kind: Kind, conditions: Mapping[str, str], note: Mapping[str, Any]) -> Json | None:
    """The patch that sets it going; None: it did not go before. Kueue lets go of what it is given back by itself."""
    body = suspension(kind, conditions, suspend=False)
    if "queue" in note:
        return {"metadata": {**body["metadata"], "labels": {QUEUE: str(note["queue"])}}}
    if note.get("suspend") is not False:
        return None
    return {**body, "spec": {**body["spec"], **kind.resumed(note)}}


def recipe(kind: Kind, evidence: Evidence) -> Recipe | Refused | Unknown:
    """Its description as a new object that stands still."""
    told = _manifest(evidence)
    if isinstance(told, Unknown):
        return told
    meta, spec = told["metadata"], told.get("spec")
    version = str(told.get("apiVersion", "")).rpartition("/")[2]
    if not isinstance(spec, dict) or told.get("kind") != kind.kind or not version or not meta.get("name"):
        return Unknown("its captured manifest is not of this kind")
    metadata = {name: meta[name] for name in KEPT_OF_METADATA if meta.get(name)}
    labels = dict(metadata.get("labels") or {})
    notes = {k: v for k, v in (metadata.get("annotations") or {}).items() if k not in OF_ITS_CONTROLLER}
    notes[RESTORED_FROM] = str(meta.get("uid", ""))
    if meta.get("ownerReferences"):
        notes[WAS_OWNED] = ", ".join(f"{one.get('kind')}/{one.get('name')}" for one in meta["ownerReferences"])
    kind.untie(spec, labels)
    still = _stand_still(kind, spec, labels, notes)
    if still is not None:
        return still
    body = {
        "apiVersion": told["apiVersion"],
        "kind": kind.kind,
        "metadata": {**metadata, "labels": labels, "annotations": notes},
        "spec": spec,
    }
    return Recipe(kind.path(version, str(meta.get("namespace", "")) or None), body)


def _stand_still(kind: Kind, spec: Json, labels: dict[str, str], notes: dict[str, str]) -> Refused | None:
    """Nothing that was removed runs again by itself. A note from our own stop before the removal stays as it is."""
    note = kind.stand_still(spec, labels)
    if isinstance(note, Refused):
        return Refused(f"{note.why}; recreate it from {MANIFEST} of its evidence")
    if QUEUE in labels:
        note = {"queue": labels.pop(QUEUE)}  # or Kueue would set it going
    if note and (STOPPED not in notes or "queue" in note):
        notes[STOPPED] = msgspec.json.encode(note).decode()
    return None


def _manifest(evidence: Evidence) -> Json | Unknown:
    try:
        told = reading.decode(evidence.files[MANIFEST], type=dict[str, Any])
        told["metadata"] = dict(told["metadata"])
    except (KeyError, TypeError, ValueError) as error:
        return Unknown(f"its captured manifest cannot be read: {error}")
    return told


def _made_from(found: Root) -> str | None:
    return (found.metadata.annotations or {}).get(RESTORED_FROM)


def _not_made(error: ApiError, kind: Kind, ref: Ref) -> Refused | Unknown:
    if error.status == CONFLICT:
        return Refused(f"an object with that name exists: {kind.name} {ref.name}; remove or rename it, then try again")
    if error.status == NOT_FOUND and error.name == ref.namespace:
        return Refused(f"its namespace {ref.namespace} does not exist; create it, then try again")
    if error.status == NOT_FOUND:
        return Refused(f"this cluster does not serve the captured version: {error.words}")
    if error.status == INVALID:
        return Refused(f"the cluster rejects the captured manifest: {error.words}")
    answer = answer_to(error, f"create {resource(kind)}", ref.namespace)
    return Refused(answer.why) if isinstance(answer, Changed) else answer
