"""Removing, stopping, trimming, freeing. Each on exactly the object looked at: uid and resourceVersion go along.

The API server compares them in the transaction of the write, so all of it is ATOMIC. A DELETE always names its
propagation: a bare one leaves a Job's pods behind. Bringing back is in archive.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, Changed, Refused
from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Gone, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.answers import Answer, answer_to, resource, together
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.errors import ApiError, ClusterSilent
from gpukeeper.platforms.kubernetes.kinds.kind import (
    End,
    EvictPod,
    Kind,
    Lever,
    Propagation,
    SuspendItself,
    SuspendPart,
)
from gpukeeper.platforms.kubernetes.kinds.pod import OVER_PHASES, POD
from gpukeeper.platforms.kubernetes.patches import (
    conditions_of,
    delete_options,
    eviction,
    replicas_of,
    stopped_run,
    suspension,
    without_finalizer,
)
from gpukeeper.platforms.kubernetes.preconditions import another, cannot_stop, unchanged, under_way
from gpukeeper.platforms.kubernetes.translate import STOPPED
from gpukeeper.platforms.kubernetes.wire import Meta, Pod, Root

Served: TypeAlias = Callable[[Kind], Awaitable[str | Unknown | None]]
LookAgain: TypeAlias = Callable[[], Awaitable[Subject | Gone | Changed | Unknown]]
Send: TypeAlias = Callable[[Mapping[str, str]], Awaitable[bytes]]

RETRIES = 3  # after a conflict that changed nothing we decided on
PAUSE = (0.05, 0.25)  # seconds before each of them; by chance, so that two writers do not keep step
_CHANCE = random.SystemRandom()


class Acts:
    def __init__(self, cluster: Cluster, served: Served) -> None:
        self._cluster, self._served = cluster, served

    async def remove(self, kind: Kind, fresh: Subject, re_decide: LookAgain) -> Answer:
        """The root, and by its propagation all that it owns. What runs as a bare pod is evicted, never deleted."""
        if fresh.state is State.REMOVING:
            return under_way()  # a second DELETE can bring a finalizer back and hang it (kubernetes#77081)
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
            return under_way()
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
            return Changed("it is no longer finished; only finished work is trimmed")
        cleaning = kind.clean_pods(root.spec, everything=everything)
        if cleaning is not None:
            return cleaning if isinstance(cleaning, Refused) else await self._patch_spec(kind, fresh, cleaning)
        answers: list[Answer] = []
        living = [pod for pod in pods if pod.status.phase not in OVER_PHASES and not pod.metadata.deletion_timestamp]
        if living:
            answers.append(await self._end(kind, fresh, kind.trim(root, living)))
        if everything:
            ended = [pod for pod in pods if pod.status.phase in OVER_PHASES and not pod.metadata.deletion_timestamp]
            answers += [await self._delete_pod(pod) for pod in ended]
        return together(answers) if answers else Changed("no pods are left below it")

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
        return Changed("it changed since it was read")

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
        return Refused(f"this cluster no longer serves {resource(kind)}") if version is None else version

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
                again = unchanged(fresh, await re_decide())
                if not isinstance(again, Subject):
                    return again
                current = again
        return Changed("it changed since it was read")

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
            lambda conditions: self._cluster.post(path, eviction(fresh.ref.name, fresh.ref.namespace, conditions)),
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
        return Changed("it was changed at the same time")

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
        return together(answers)

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
            return Changed(f"{kind.kind} {child.metadata.name} is already suspended")
        conditions = {"uid": child.metadata.uid, "resourceVersion": child.metadata.resource_version}
        body = suspension(kind, conditions, suspend=True)
        return await self._once(
            lambda: self._cluster.patch(path, body, "merge"), f"patch {resource(kind)}", parent.namespace
        )

    async def _evict_pod(self, pod: Pod) -> Answer:
        meta = pod.metadata
        conditions = {"uid": meta.uid, "resourceVersion": meta.resource_version}
        path = POD.path("v1", meta.namespace, meta.name, "eviction")
        body = eviction(meta.name, meta.namespace, conditions)
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
