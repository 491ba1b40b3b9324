"""Removing, stopping, trimming, freeing. Each on exactly the object looked at: uid and resourceVersion go along.

The API server compares them in the transaction of the write, so all of it is ATOMIC. A DELETE always names its
propagation: a bare one leaves a Job's pods behind. Bringing back is in archive.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, Changed, Refused
from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Gone, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.errors import ApiError, ClusterSilent
from gpukeeper.platforms.kubernetes.kinds.kind import (
    QUEUE,
    End,
    EvictPod,
    Kind,
    Lever,
    Propagation,
    SuspendItself,
    SuspendPart,
)
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.translate import STOPPED
from gpukeeper.platforms.kubernetes.wire import Meta, Pod, Root

Answer: TypeAlias = Accepted | Changed | Refused | Unknown
Served: TypeAlias = Callable[[Kind], Awaitable[str | Unknown | None]]
LookAgain: TypeAlias = Callable[[], Awaitable[Subject | Gone | Changed | Unknown]]
Send: TypeAlias = Callable[[Mapping[str, str]], Awaitable[bytes]]

WORDS_OF_ADMISSION = ("admission webhook", "ValidatingAdmissionPolicy")
RETRIES = 3  # after a conflict that changed nothing we decided on
PAUSE = (0.05, 0.25)  # seconds before each of them; by chance, so that two writers do not keep step
_CHANCE = random.SystemRandom()
_NEVER = datetime.min.replace(tzinfo=UTC)


class Acts:
    def __init__(self, cluster: Cluster, served: Served) -> None:
        self._cluster, self._served = cluster, served

    async def remove(self, kind: Kind, fresh: Subject, re_decide: LookAgain) -> Answer:
        """The root, and by its propagation all that it owns. What runs as a bare pod is evicted, never deleted."""
        if fresh.state is State.REMOVING:
            return _under_way()  # a second DELETE can bring a finalizer back and hang it (kubernetes#77081)
        if kind.evicted and fresh.state is not State.ENDED:
            return await self._evict(fresh, re_decide)
        version = await self._version(kind)
        if not isinstance(version, str):
            return version
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        return await self._insist(
            lambda conditions: self._cluster.delete(path, delete_options(conditions, kind.propagation)),
            fresh,
            re_decide,
            f"delete {resource(kind)}",
        )

    async def stop(
        self, kind: Kind, fresh: Subject, current_root: Root | Pod, re_decide: LookAgain | None = None
    ) -> Answer:
        """By the kind's own lever, with the old setting in an annotation. A bare pod has none: it is evicted."""
        if fresh.state is State.REMOVING:
            return _under_way()
        if kind.evicted or isinstance(current_root, Pod):
            return await self._evict(fresh, re_decide)
        problem = another(fresh, current_root.metadata) or cannot_stop(kind, current_root)
        if problem is not None:
            return problem
        version = await self._version(kind)
        if not isinstance(version, str):
            return version
        if kind.lever is Lever.SCALE:
            return await self._to_zero(kind, version, fresh, current_root, re_decide)
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        note = {"suspend": False, **stopped_run(kind, fresh, current_root)}
        return await self._insist(
            lambda conditions: self._cluster.patch(
                path, suspension(kind, conditions, suspend=True, note=note), "merge"
            ),
            fresh,
            re_decide,
            f"patch {resource(kind)}",
        )

    async def trim(
        self, kind: Kind, fresh: Subject, root: Root, pods: Sequence[Pod], *, everything: bool = False
    ) -> Answer:
        """End what still lives below a finished root, by the gentlest lever of its kind, and keep the root.
        `everything`: the pods that ended go too, logs and all."""
        problem = another(fresh, root.metadata)
        if problem is not None:
            return problem
        if fresh.state is not State.ENDED:
            return Changed("it is not over any more, and nothing is picked off work that goes on")
        cleaning = kind.clean_pods(root.spec, everything=everything)
        if cleaning is not None:
            return cleaning if isinstance(cleaning, Refused) else await self._patch_spec(kind, fresh, cleaning)
        answers: list[Answer] = []
        living = [pod for pod in pods if not _over(pod) and not pod.metadata.deletion_timestamp]
        if living:
            answers.append(await self._end(kind, fresh, kind.trim(root, living)))
        if everything:
            ended = [pod for pod in pods if _over(pod) and not pod.metadata.deletion_timestamp]
            answers += [await self._delete_pod(pod) for pod in ended]
        return _together(answers) if answers else Changed("nothing is left below it")

    async def release(self, kind: Kind, fresh: Subject, root: Root | Pod, finalizer: str) -> Answer:
        """Take one finalizer off a thing whose removal is stuck: that one, at its place in the list, or nothing. A
        controller that goes in circles writes to it every moment, so a conflict is followed by a look of our own."""
        version = await self._version(kind)
        if not isinstance(version, str):
            return version
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        meta, right = root.metadata, f"patch {resource(kind)}"
        for left in range(RETRIES, -1, -1):
            steps = without_finalizer(meta, finalizer, fresh.ref.uid, root.metadata.generation)
            if not isinstance(steps, list):
                return steps
            try:
                await self._cluster.patch(path, steps, "json")
            except ApiError as error:
                if not error.says_changed or not left:
                    return answer_to(error, right, fresh.ref.namespace)
            except ClusterSilent as silent:
                return Unknown(str(silent))
            else:
                return Accepted()
            now = await self._get(path, kind, fresh.ref.namespace)
            if not isinstance(now, Root):
                return now
            meta = now.metadata
        return Changed("it changed since it was looked at")

    async def take_back(self, kind: Kind, ref: Ref) -> None:
        """A stop was interrupted after its note and before its lever: the note goes, the work runs on as it was."""
        version = await self._version(kind)
        if kind.evicted or not isinstance(version, str):
            return
        path = kind.path(version, ref.namespace, ref.name)
        root = await self._get(path, kind, ref.namespace)
        if not isinstance(root, Root) or root.metadata.uid != ref.uid or kind.is_off(root.spec):
            return
        if STOPPED in (root.metadata.annotations or {}):
            await self.forget(path, root.metadata)

    # Below here: how.

    async def _version(self, kind: Kind) -> str | Refused | Unknown:
        version = await self._served(kind)
        return Refused(f"this cluster serves no {resource(kind)} any more") if version is None else version

    async def _insist(self, send: Send, fresh: Subject, re_decide: LookAgain | None, right: str) -> Answer:
        """Under conditions. After a conflict: look again, and go on only if nothing differs that was decided on. So
        that unrelated updates cannot keep finished work for ever, the last try for it asks for the same uid only."""
        current = fresh
        for left in range(RETRIES if re_decide else 0, -1, -1):
            uid_only = left == 0 and current is not fresh and fresh.state is State.ENDED
            try:
                await send(conditions_of(current, uid_only=uid_only))
            except ApiError as error:
                if not error.says_changed:
                    return answer_to(error, right, fresh.ref.namespace)
            except ClusterSilent as silent:
                return Unknown(str(silent))
            else:
                return Accepted()
            if left and re_decide is not None:
                await a_moment()
                again = _unchanged(fresh, await re_decide())
                if not isinstance(again, Subject):
                    return again
                current = again
        return Changed("it changed since it was looked at")

    async def _get(self, path: str, kind: Kind, namespace: str) -> Root | Changed | Refused | Unknown:
        try:
            return await self._cluster.get(path, kind.root)
        except ApiError as error:
            return answer_to(error, f"get {resource(kind)}", namespace)
        except ClusterSilent as silent:
            return Unknown(str(silent))

    async def _once(self, send: Callable[[], Awaitable[bytes]], right: str, namespace: str) -> Answer:
        try:
            await send()
        except ApiError as error:
            return answer_to(error, right, namespace)
        except ClusterSilent as silent:
            return Unknown(str(silent))
        return Accepted()

    async def _evict(self, fresh: Subject, re_decide: LookAgain | None) -> Answer:
        """The API server asks the disruption budgets first; the pod gets its own grace."""
        path = POD.path("v1", fresh.ref.namespace, fresh.ref.name, "eviction")
        return await self._insist(
            lambda conditions: self._cluster.post(path, _eviction(fresh.ref.name, fresh.ref.namespace, conditions)),
            fresh,
            re_decide,
            "create pods/eviction",
        )

    async def _to_zero(
        self, kind: Kind, version: str, fresh: Subject, root: Root, re_decide: LookAgain | None
    ) -> Answer:
        """The old count is written down first: a crash in between leaves a note too many, never a count forgotten."""
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        note = msgspec.json.encode({"replicas": replicas_of(root), **stopped_run(kind, fresh, root)}).decode()
        noted: list[Root] = []

        async def write(conditions: Mapping[str, str]) -> bytes:
            body = {"metadata": {**conditions, "annotations": {STOPPED: note}}}
            answer = await self._cluster.patch(path, body, "merge")
            noted.append(reading.decode(answer, type=Root))
            return answer

        answer = await self._insist(write, fresh, re_decide, f"patch {resource(kind)}")
        if not isinstance(answer, Accepted):
            return answer
        answer = await self.scale(kind, version, noted[-1], 0)
        if isinstance(answer, Changed | Refused):
            await self.forget(path, noted[-1].metadata)
        return answer

    async def scale(self, kind: Kind, version: str, root: Root, replicas: int) -> Answer:
        """Through the subresource, which compares uid and resourceVersion with the object it belongs to. Its
        controller may write to it in the same moment; that is no other wish as long as the generation is the same."""
        meta, generation = root.metadata, root.metadata.generation
        path = kind.path(version, meta.namespace, meta.name)
        for left in range(RETRIES, -1, -1):
            conditions = {"uid": meta.uid, "resourceVersion": meta.resource_version}
            try:
                await self._cluster.patch(
                    f"{path}/scale", {"metadata": conditions, "spec": {"replicas": replicas}}, "merge"
                )
            except ApiError as error:
                if not error.says_changed or not left:
                    return answer_to(error, f"patch {resource(kind, 'scale')}", meta.namespace)
            except ClusterSilent as silent:
                return Unknown(str(silent))
            else:
                return Accepted()
            await a_moment()
            now = await self._get(path, kind, meta.namespace)
            if not isinstance(now, Root):
                return now
            if (now.metadata.uid, now.metadata.generation) != (meta.uid, generation) or now.metadata.deletion_timestamp:
                break
            meta = now.metadata
        return Changed("somebody changed it in the same moment")

    async def forget(self, path: str, meta: Meta) -> None:
        """Our note only, so the uid is condition enough."""
        body = {"metadata": {"uid": meta.uid, "annotations": {STOPPED: None}}}
        await self._once(lambda: self._cluster.patch(path, body, "merge"), "patch", meta.namespace)

    async def _patch_spec(self, kind: Kind, fresh: Subject, spec: Mapping[str, Any]) -> Answer:
        version = await self._version(kind)
        if not isinstance(version, str):
            return version
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        body = {"metadata": conditions_of(fresh), "spec": spec}
        return await self._once(
            lambda: self._cluster.patch(path, body, "merge"), f"patch {resource(kind)}", fresh.ref.namespace
        )

    async def _end(self, kind: Kind, fresh: Subject, ends: Sequence[End] | Refused) -> Answer:
        if isinstance(ends, Refused):
            return ends
        answers: list[Answer] = []
        for one in ends:
            match one:
                case SuspendItself():
                    answer = await self._suspend_itself(kind, fresh)
                    if not isinstance(answer, Accepted):
                        return answer
                case SuspendPart(part, name):
                    answer = await self._suspend_child(part, name, fresh.ref)
                case EvictPod(pod):
                    answer = await self._evict_pod(pod)
            answers.append(answer)
        return _together(answers)

    async def _suspend_itself(self, kind: Kind, fresh: Subject) -> Answer:
        version = await self._version(kind)
        if not isinstance(version, str):
            return version
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        body = suspension(kind, conditions_of(fresh), suspend=True)
        return await self._once(
            lambda: self._cluster.patch(path, body, "merge"), f"patch {resource(kind)}", fresh.ref.namespace
        )

    async def _suspend_child(self, kind: Kind, name: str, parent: Ref) -> Answer:
        version = await self._version(kind)
        if not isinstance(version, str):
            return version
        path = kind.path(version, parent.namespace, name)
        child = await self._get(path, kind, parent.namespace)
        if not isinstance(child, Root):
            return child
        controller = child.metadata.owner
        if controller is None or controller.uid != parent.uid:
            return Refused(f"{kind.kind} {child.metadata.name} is not controlled by it")
        if child.spec.suspend:
            return Changed(f"{kind.kind} {child.metadata.name} is suspended already")
        conditions = {"uid": child.metadata.uid, "resourceVersion": child.metadata.resource_version}
        body = suspension(kind, conditions, suspend=True)
        return await self._once(
            lambda: self._cluster.patch(path, body, "merge"), f"patch {resource(kind)}", parent.namespace
        )

    async def _evict_pod(self, pod: Pod) -> Answer:
        meta = pod.metadata
        conditions = {"uid": meta.uid, "resourceVersion": meta.resource_version}
        path = POD.path("v1", meta.namespace, meta.name, "eviction")
        body = _eviction(meta.name, meta.namespace, conditions)
        return await self._once(lambda: self._cluster.post(path, body), "create pods/eviction", meta.namespace)

    async def _delete_pod(self, pod: Pod) -> Answer:
        meta = pod.metadata
        conditions = {"uid": meta.uid, "resourceVersion": meta.resource_version}
        body = delete_options(conditions, Propagation.BACKGROUND)
        path = POD.path("v1", meta.namespace, meta.name)
        return await self._once(lambda: self._cluster.delete(path, body), "delete pods", meta.namespace)


async def a_moment() -> None:
    """Before another try."""
    await asyncio.sleep(_CHANCE.uniform(*PAUSE))


# Below here: what is sent, and what an answer means. Pure.


def conditions_of(subject: Subject, *, uid_only: bool = False) -> dict[str, str]:
    return {"uid": subject.ref.uid} | ({} if uid_only else {"resourceVersion": subject.seen.version})


def delete_options(conditions: Mapping[str, str], policy: Propagation) -> dict[str, Any]:
    """Without a grace: the object's own counts."""
    return {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": dict(conditions),
        "propagationPolicy": policy.value,
    }


def suspension(
    kind: Kind, conditions: Mapping[str, str], *, suspend: bool, note: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A merge patch that moves the lever and leaves (or takes off) the note of what it said before."""
    written = msgspec.json.encode(note or {"suspend": False}).decode() if suspend else None
    return {
        "metadata": {**conditions, "annotations": {STOPPED: written}},
        "spec": kind.suspension(suspend=suspend),
    }


def without_finalizer(
    meta: Meta, finalizer: str, uid: str, generation: int
) -> list[dict[str, str]] | Changed | Refused:
    """A JSON patch that changes nothing unless all its tests hold."""
    if meta.uid != uid:
        return Changed("another object has its name now")
    if not meta.deletion_timestamp:
        return Refused(f"nobody asked for its removal, so {finalizer} stays on it")
    if meta.generation != generation:
        return Changed("somebody changed what it wishes for")
    if finalizer not in (meta.finalizers or ()):
        return Changed(f"{finalizer} is not on it any more")
    place = f"/metadata/finalizers/{(meta.finalizers or ()).index(finalizer)}"
    return [
        {"op": "test", "path": "/metadata/uid", "value": meta.uid},
        {"op": "test", "path": "/metadata/resourceVersion", "value": meta.resource_version},
        {"op": "test", "path": place, "value": finalizer},
        {"op": "remove", "path": place},
    ]


def stopped_run(kind: Kind, fresh: Subject, root: Root) -> dict[str, Any]:
    """Part of the note: which run we stopped, and the generation that our change makes. A later one is not ours. Where
    annotations count as well, the note itself makes one."""
    writes = 2 if kind.counts_annotations else 1
    return {"incarnation": fresh.seen.incarnation, "generation": root.metadata.generation + writes}


def replicas_of(root: Root) -> int:
    return 1 if root.spec.replicas is None else root.spec.replicas


def another(fresh: Subject, meta: Meta) -> Changed | None:
    """Is this root the one, and the wish, that was decided on?"""
    if meta.uid != fresh.ref.uid:
        return Changed("another object has its name now")
    if meta.deletion_timestamp:
        return _under_way()
    return None


def cannot_stop(kind: Kind, root: Root) -> Changed | Refused | None:
    """Why its lever must not be moved."""
    if kind.lever is Lever.NONE:
        return Refused(f"a {kind.kind} cannot be stopped so that it comes back; it can only be removed")
    if kind.is_off(root.spec):
        return Changed("it is stopped already")
    if QUEUE in (root.metadata.labels or {}):
        return Refused("Kueue owns its suspension; set its Workload's spec.active to false, or remove it")
    why = kind.why_not_stopped(root)
    return None if why is None else Refused(why)


def cannot_remove(kind: Kind, root: Root | Pod) -> Refused | None:
    why = kind.why_not_removed(root) if isinstance(root, Root) else None
    return None if why is None else Refused(why)


def resource(kind: Kind, sub: str = "") -> str:
    """As a role names it."""
    return kind.plural + (f"/{sub}" if sub else "") + (f".{kind.group}" if kind.group else "")


def answer_to(error: ApiError, right: str, namespace: str) -> Changed | Refused | Unknown:
    """What a refusal of the API server means. `right`: verb and resource, as a role names them."""
    if error.says_gone:
        return Changed("it is gone already")
    if error.says_changed:
        return Changed("it changed since it was looked at")
    if any(words in error.words for words in WORDS_OF_ADMISSION):
        return Refused(f"a rule of the cluster's own refuses it: {error.words}")
    match error.status:
        case 401:
            return Refused(f"the cluster does not accept our credentials: {error.words}")
        case 403:
            return Refused(
                f"gpukeeper may not {right} in the namespace {namespace}; its role lacks that ({error.words})"
            )
        case 429 if error.says_budget:
            return Refused(f"not now: {error.words}")
        case 429:
            return Refused(f"the API server is busy and did nothing; try again later ({error.words})")
        case 500 if "PodDisruptionBudget" in error.words:
            return Refused(f"more than one disruption budget covers it, so it cannot be evicted: {error.words}")
        case 400 | 422:
            return Refused(f"This is a bug in gpukeeper: the API server could not take what it was sent: {error.words}")
        case 404 | 410:
            return Unknown(f"this answer proves nothing: {error}")
        case status if status < 500:
            return Refused(error.words)
    return Unknown(str(error))


def _unchanged(fresh: Subject, again: Subject | Gone | Changed | Unknown) -> Subject | Answer:
    """The new look, when everything that was decided on is as it was."""
    if isinstance(again, Unknown | Changed):
        return again
    if isinstance(again, Gone):
        return Changed("it is gone already")
    if again.ref.uid != fresh.ref.uid:
        return Changed("another object has its name now")
    if again.state is State.REMOVING:
        return _under_way()
    before, now = _facts(fresh), _facts(again)
    differ = [name for name in before.__struct_fields__ if getattr(before, name) != getattr(now, name)]
    return Changed(f"its {', '.join(differ)} changed since it was looked at") if differ else again


def _facts(subject: Subject) -> Subject:
    return msgspec.structs.replace(subject, seen=msgspec.structs.replace(subject.seen, version="", at=_NEVER))


def _under_way() -> Changed:
    return Changed("its removal is under way already")


def _over(pod: Pod) -> bool:
    return pod.status.phase in {"Succeeded", "Failed"}


def _eviction(name: str, namespace: str, conditions: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": dict(conditions)},
    }


def _together(answers: Sequence[Answer]) -> Answer:
    """Of several: what went wrong first of all; then whether anything was asked for at all."""
    for kind_of in (Refused, Unknown, Accepted):
        for answer in answers:
            if isinstance(answer, kind_of):
                return answer
    return answers[0]
