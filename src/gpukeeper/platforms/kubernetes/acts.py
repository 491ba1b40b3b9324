"""Remove, stop, trim, release: each on exactly the object that was read, with its uid and resourceVersion; and the
annotations and Events of gpukeeper on an object. Restoring is in capture.py.

The API server compares them in the transaction of the write, so every action is ATOMIC. A DELETE always names its
propagation: without one, the pods of a Job are left behind. Events are best effort; the record is the ledger.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import msgspec

from gpukeeper.clients.kubernetes.api import delete_options
from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import ApiError, ClusterUnavailable
from gpukeeper.clients.kubernetes.wire import Meta, PartialMetadata, Pod, Root
from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, ActResult, Changed, Refused
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Gone, Ref, State, Subject, Warned
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import (
    End,
    EvictPod,
    Kind,
    Lever,
    Propagation,
    Served,
    SuspendItself,
    SuspendPart,
)
from gpukeeper.platforms.kubernetes.kinds.pod import OVER_PHASES, POD
from gpukeeper.platforms.kubernetes.marks import HOLD_UNTIL, WARNED, AnnouncedWarnings, moment
from gpukeeper.platforms.kubernetes.translate import STOPPED
from gpukeeper.platforms.kubernetes.writes import (
    another,
    cannot_stop,
    combined,
    conditions_of,
    eviction,
    removal_in_progress,
    replicas_of,
    resource,
    result_of_error,
    stopped_run,
    suspension,
    unchanged,
    without_finalizer,
)

ReadAgain: TypeAlias = Callable[[], Awaitable[Subject | Gone | Changed | Unknown]]
Send: TypeAlias = Callable[[Mapping[str, str]], Awaitable[bytes]]

RETRIES = 3  # after a conflict that changed nothing relevant to the decision
PAUSE = (0.05, 0.25)  # seconds before each of them; random, so that two writers do not stay in step
_CHANCE = random.SystemRandom()


class ClusterActions:
    def __init__(self, cluster: Cluster, served: Served) -> None:
        self._cluster, self._served = cluster, served

    async def remove(self, kind: Kind, fresh: Subject, re_decide: ReadAgain) -> ActResult:
        """The root, and by its propagation everything that it owns. A running pod without a controller is evicted."""
        if fresh.state is State.REMOVING:
            return removal_in_progress()  # a second DELETE can bring a finalizer back and hang it (kubernetes#77081)
        if kind.evicted and fresh.state is not State.ENDED:
            return await self._evict(fresh, re_decide)
        version = await self._version(kind)
        if not isinstance(version, str):
            return version
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        return await self._send_with_retries(
            lambda conditions: self._cluster.delete(path, delete_options(conditions, kind.propagation)),
            fresh,
            re_decide,
            f"delete {resource(kind)}",
        )

    async def stop(
        self, kind: Kind, fresh: Subject, current_root: Root | Pod, re_decide: ReadAgain | None = None
    ) -> ActResult:
        """By the lever of the kind, with the old setting in an annotation. A pod without a controller is evicted."""
        if fresh.state is State.REMOVING:
            return removal_in_progress()
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
        return await self._send_with_retries(
            lambda conditions: self._cluster.patch(
                path, suspension(kind, conditions, suspend=True, note=note), "merge"
            ),
            fresh,
            re_decide,
            f"patch {resource(kind)}",
        )

    async def trim(
        self, kind: Kind, fresh: Subject, root: Root, pods: Sequence[Pod], *, everything: bool = False
    ) -> ActResult:
        """End what still runs below a finished root, by the gentlest means of its kind, and keep the root.
        `everything`: also delete the pods that ended, with their logs."""
        problem = another(fresh, root.metadata)
        if problem is not None:
            return problem
        if fresh.state is not State.ENDED:
            return Changed("it is no longer finished; only finished work is trimmed")
        cleaning = kind.clean_pods(root.spec, everything=everything)
        if cleaning is not None:
            return cleaning if isinstance(cleaning, Refused) else await self._patch_spec(kind, fresh, cleaning)
        answers: list[ActResult] = []
        living = [pod for pod in pods if pod.status.phase not in OVER_PHASES and not pod.metadata.deletion_timestamp]
        if living:
            answers.append(await self._end(kind, fresh, kind.trim(root, living)))
        if everything:
            ended = [pod for pod in pods if pod.status.phase in OVER_PHASES and not pod.metadata.deletion_timestamp]
            answers += [await self._delete_pod(pod) for pod in ended]
        return combined(answers) if answers else Changed("no pods are left below it")

    async def release(self, kind: Kind, fresh: Subject, root: Root | Pod, finalizer: str) -> ActResult:
        """Remove one finalizer from an object whose removal is stuck: this one, at its place in the list, or nothing. A
        controller that loops writes to it all the time, so the object is read again after a conflict."""
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
                if not error.is_conflict or not left:
                    return result_of_error(error, right, fresh.ref.namespace)
            except ClusterUnavailable as silent:
                return Unknown(str(silent))
            else:
                return Accepted()
            now = await self._get(path, kind, fresh.ref.namespace)
            if not isinstance(now, Root):
                return now
            meta = now.metadata
        return Changed("it changed since it was read")

    async def revert_stop(self, kind: Kind, ref: Ref) -> None:
        """A stop was interrupted after its note and before its lever: remove the note; the work continues to run."""
        version = await self._version(kind)
        if kind.evicted or not isinstance(version, str):
            return
        path = kind.path(version, ref.namespace, ref.name)
        root = await self._get(path, kind, ref.namespace)
        if not isinstance(root, Root) or root.metadata.uid != ref.uid or kind.is_off(root.spec):
            return
        if STOPPED in (root.metadata.annotations or {}):
            await self.forget(path, root.metadata)

    # Helpers

    async def _version(self, kind: Kind) -> str | Refused | Unknown:
        version = await self._served(kind)
        return Refused(f"this cluster no longer serves {resource(kind)}") if version is None else version

    async def _send_with_retries(
        self, send: Send, fresh: Subject, re_decide: ReadAgain | None, right: str
    ) -> ActResult:
        """With preconditions. After a conflict: read again, and retry only if nothing relevant to the decision changed.
        So that unrelated updates cannot keep finished work for ever, the last retry for it requires only the uid."""
        current = fresh
        for left in range(RETRIES if re_decide else 0, -1, -1):
            uid_only = left == 0 and current is not fresh and fresh.state is State.ENDED
            try:
                await send(conditions_of(current, uid_only=uid_only))
            except ApiError as error:
                if not error.is_conflict:
                    return result_of_error(error, right, fresh.ref.namespace)
            except ClusterUnavailable as silent:
                return Unknown(str(silent))
            else:
                return Accepted()
            if left and re_decide is not None:
                await pause_before_retry()
                again = unchanged(fresh, await re_decide())
                if not isinstance(again, Subject):
                    return again
                current = again
        return Changed("it changed since it was read")

    async def _get(self, path: str, kind: Kind, namespace: str) -> Root | Changed | Refused | Unknown:
        try:
            return await self._cluster.get(path, kind.root)
        except ApiError as error:
            return result_of_error(error, f"get {resource(kind)}", namespace)
        except ClusterUnavailable as silent:
            return Unknown(str(silent))

    async def _send_once(self, send: Callable[[], Awaitable[bytes]], right: str, namespace: str) -> ActResult:
        try:
            await send()
        except ApiError as error:
            return result_of_error(error, right, namespace)
        except ClusterUnavailable as silent:
            return Unknown(str(silent))
        return Accepted()

    async def _evict(self, fresh: Subject, re_decide: ReadAgain | None) -> ActResult:
        """The API server checks the disruption budgets first; the pod has its own grace period."""
        path = POD.path("v1", fresh.ref.namespace, fresh.ref.name, "eviction")
        return await self._send_with_retries(
            lambda conditions: self._cluster.post(path, eviction(fresh.ref.name, fresh.ref.namespace, conditions)),
            fresh,
            re_decide,
            "create pods/eviction",
        )

    async def _to_zero(
        self, kind: Kind, version: str, fresh: Subject, root: Root, re_decide: ReadAgain | None
    ) -> ActResult:
        """The old count is recorded first: a crash in between leaves an extra note, never a lost count."""
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        note = msgspec.json.encode({"replicas": replicas_of(root), **stopped_run(kind, fresh, root)}).decode()
        noted: list[Root] = []

        async def write(conditions: Mapping[str, str]) -> bytes:
            body = {"metadata": {**conditions, "annotations": {STOPPED: note}}}
            answer = await self._cluster.patch(path, body, "merge")
            noted.append(reading.decode(answer, type=Root))
            return answer

        answer = await self._send_with_retries(write, fresh, re_decide, f"patch {resource(kind)}")
        if not isinstance(answer, Accepted):
            return answer
        answer = await self.scale(kind, version, noted[-1], 0)
        if isinstance(answer, Changed | Refused):
            await self.forget(path, noted[-1].metadata)
        return answer

    async def scale(self, kind: Kind, version: str, root: Root, replicas: int) -> ActResult:
        """Through the subresource, which compares uid and resourceVersion with the object it belongs to. Its
        controller may update it at the same time; the spec is unchanged as long as the generation is the same."""
        meta, generation = root.metadata, root.metadata.generation
        path = kind.path(version, meta.namespace, meta.name)
        for left in range(RETRIES, -1, -1):
            conditions = {"uid": meta.uid, "resourceVersion": meta.resource_version}
            try:
                await self._cluster.patch(
                    f"{path}/scale", {"metadata": conditions, "spec": {"replicas": replicas}}, "merge"
                )
            except ApiError as error:
                if not error.is_conflict or not left:
                    return result_of_error(error, f"patch {resource(kind, 'scale')}", meta.namespace)
            except ClusterUnavailable as silent:
                return Unknown(str(silent))
            else:
                return Accepted()
            await pause_before_retry()
            now = await self._get(path, kind, meta.namespace)
            if not isinstance(now, Root):
                return now
            if (now.metadata.uid, now.metadata.generation) != (meta.uid, generation) or now.metadata.deletion_timestamp:
                break
            meta = now.metadata
        return Changed("it was changed at the same time")

    async def forget(self, path: str, meta: Meta) -> None:
        """Only the note of gpukeeper, so the uid is a sufficient condition."""
        body = {"metadata": {"uid": meta.uid, "annotations": {STOPPED: None}}}
        await self._send_once(lambda: self._cluster.patch(path, body, "merge"), "patch", meta.namespace)

    async def _patch_spec(self, kind: Kind, fresh: Subject, spec: Mapping[str, Any]) -> ActResult:
        version = await self._version(kind)
        if not isinstance(version, str):
            return version
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        body = {"metadata": conditions_of(fresh), "spec": spec}
        return await self._send_once(
            lambda: self._cluster.patch(path, body, "merge"), f"patch {resource(kind)}", fresh.ref.namespace
        )

    async def _end(self, kind: Kind, fresh: Subject, ends: Sequence[End] | Refused) -> ActResult:
        if isinstance(ends, Refused):
            return ends
        answers: list[ActResult] = []
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
        return combined(answers)

    async def _suspend_itself(self, kind: Kind, fresh: Subject) -> ActResult:
        version = await self._version(kind)
        if not isinstance(version, str):
            return version
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        body = suspension(kind, conditions_of(fresh), suspend=True)
        return await self._send_once(
            lambda: self._cluster.patch(path, body, "merge"), f"patch {resource(kind)}", fresh.ref.namespace
        )

    async def _suspend_child(self, kind: Kind, name: str, parent: Ref) -> ActResult:
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
        return await self._send_once(
            lambda: self._cluster.patch(path, body, "merge"), f"patch {resource(kind)}", parent.namespace
        )

    async def _evict_pod(self, pod: Pod) -> ActResult:
        meta = pod.metadata
        conditions = {"uid": meta.uid, "resourceVersion": meta.resource_version}
        path = POD.path("v1", meta.namespace, meta.name, "eviction")
        body = eviction(meta.name, meta.namespace, conditions)
        return await self._send_once(lambda: self._cluster.post(path, body), "create pods/eviction", meta.namespace)

    async def _delete_pod(self, pod: Pod) -> ActResult:
        meta = pod.metadata
        conditions = {"uid": meta.uid, "resourceVersion": meta.resource_version}
        body = delete_options(conditions, Propagation.BACKGROUND)
        path = POD.path("v1", meta.namespace, meta.name)
        return await self._send_once(lambda: self._cluster.delete(path, body), "delete pods", meta.namespace)


async def pause_before_retry() -> None:
    """Random, so that two writers do not conflict again."""
    await asyncio.sleep(_CHANCE.uniform(*PAUSE))


MOST_ANNOUNCED = 8  # announcements on one object, newest last


class Annotations:
    def __init__(self, cluster: Cluster, served: Served) -> None:
        self._cluster, self._served = cluster, served

    async def warn(self, ref: Ref, before: tuple[Warned, ...], warned: Warned) -> None:
        """Without the permission, only the Event and the ledger remain; a new leader then warns again."""
        note = AnnouncedWarnings(ref.uid, (*before, warned)[-MOST_ANNOUNCED:])
        await self._write(ref, {WARNED: msgspec.json.encode(note).decode()})

    async def hold(self, ref: Ref, until: datetime | None) -> Accepted | Refused | Unknown:
        """An existing hold that lasts longer is kept."""
        value = None if until is None else until.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        answer = await self._write(ref, {HOLD_UNTIL: value}, until)
        return Refused(answer.why) if isinstance(answer, Changed) else answer

    async def _write(self, ref: Ref, annotations: Mapping[str, str | None], until: datetime | None = None) -> ActResult:
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
        given = (await self._cluster.get(path, PartialMetadata)).metadata.annotations or {}
        held = moment(HOLD_UNTIL, given[HOLD_UNTIL]) if HOLD_UNTIL in given else None
        return isinstance(held, datetime) and held >= until


EVENT_SOURCE = "gpukeeper"
LONGEST_MESSAGE = 1024  # bytes of a message that the API takes
EVENT_NOT_AGAIN = timedelta(minutes=10)
EVENT_NAME_MAX = 200  # of the object's name in the event's: a suffix must fit into 253


class EventWriter:
    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock
        self._written: dict[tuple[str, str, str], datetime] = {}

    async def write(
        self, kind: Kind, version: str, ref: Ref, reason: str, words: str, *, warning: bool = False
    ) -> bool:
        """True: it is on the object. `reason` in CamelCase, as the API has them. The same words once in a while."""
        now = self._clock.now()
        self._written = {key: at for key, at in self._written.items() if now - at < EVENT_NOT_AGAIN}
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
            "metadata": {"generateName": f"{ref.name[:EVENT_NAME_MAX].rstrip('.-')}.", "namespace": ref.namespace},
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
            "source": {"component": EVENT_SOURCE},
            "reportingComponent": EVENT_SOURCE,
            "reportingInstance": EVENT_SOURCE,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }


def shortened(words: str) -> str:
    """To what the API takes, at a whole character."""
    raw = words.encode("utf-8", "replace")
    return words if len(raw) <= LONGEST_MESSAGE else raw[: LONGEST_MESSAGE - 3].decode("utf-8", "ignore") + "..."
