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
from gpukeeper.platforms.kubernetes.kinds.apps import DEPLOYMENT, STATEFULSET
from gpukeeper.platforms.kubernetes.kinds.job import JOB
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Lever, Propagation
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from gpukeeper.platforms.kubernetes.kinds.ray import RAYCLUSTER, RAYJOB
from gpukeeper.platforms.kubernetes.kinds.trainjob import TRAINJOB
from gpukeeper.platforms.kubernetes.translate import STOPPED
from gpukeeper.platforms.kubernetes.wire import Meta, Pod, Root

Answer: TypeAlias = Accepted | Changed | Refused | Unknown
Served: TypeAlias = Callable[[Kind], Awaitable[str | Unknown | None]]
LookAgain: TypeAlias = Callable[[], Awaitable[Subject | Gone | Changed | Unknown]]
Send: TypeAlias = Callable[[Mapping[str, str]], Awaitable[bytes]]

QUEUE = "kueue.x-k8s.io/queue-name"
WORDS_OF_ADMISSION = ("admission webhook", "ValidatingAdmissionPolicy")
RETRIES = 3  # after a conflict that changed nothing we decided on
PAUSE = (0.05, 0.25)  # seconds before each of them; by chance, so that two writers do not keep step
CLEAN_RUNNING, CLEAN_ALL = "Running", "All"
_CHANCE = random.SystemRandom()
_NEVER = datetime.min.replace(tzinfo=UTC)


class Acts:
    def __init__(self, cluster: Cluster, served: Served) -> None:
        self._cluster, self._served = cluster, served

    async def remove(self, kind: Kind, fresh: Subject, re_decide: LookAgain) -> Answer:
        """The root, and by its propagation all that it owns. What runs as a bare pod is evicted, never deleted."""
        if fresh.state is State.REMOVING:
            return _under_way()  # a second DELETE can bring a finalizer back and hang it (kubernetes#77081)
        if kind is POD and fresh.state is not State.ENDED:
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
        if kind is POD or isinstance(current_root, Pod):
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
        if kind.lever is Lever.RUN_POLICY:
            return await self._clean_pods(kind, fresh, root, CLEAN_ALL if everything else CLEAN_RUNNING)
        answers: list[Answer] = []
        living = [pod for pod in pods if not _over(pod) and not pod.metadata.deletion_timestamp]
        if living:
            answers.append(await self._quieten(kind, fresh, root, living))
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
        if kind is POD or not isinstance(version, str):
            return
        path = kind.path(version, ref.namespace, ref.name)
        root = await self._get(path, kind, ref.namespace)
        if not isinstance(root, Root) or root.metadata.uid != ref.uid or suspended(kind, root):
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
            return await self._cluster.get(path, Root)
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

    async def _clean_pods(self, kind: Kind, fresh: Subject, root: Root, wish: str) -> Answer:
        """Its operator then removes them, and never the root (facts §5)."""
        now = root.spec.run_policy.clean_pod_policy if root.spec.run_policy else None
        if now in (wish, CLEAN_ALL):
            return Refused(f"its cleanPodPolicy is {now} already and its operator did not act on it: is it at work?")
        version = await self._version(kind)
        if not isinstance(version, str):
            return version
        path = kind.path(version, fresh.ref.namespace, fresh.ref.name)
        body = {"metadata": conditions_of(fresh), "spec": {"runPolicy": {"cleanPodPolicy": wish}}}
        return await self._once(
            lambda: self._cluster.patch(path, body, "merge"), f"patch {resource(kind)}", fresh.ref.namespace
        )

    async def _quieten(self, kind: Kind, fresh: Subject, root: Root, living: Sequence[Pod]) -> Answer:
        if kind is RAYJOB:
            return await self._suspend_its_cluster(fresh, root)
        if kind is TRAINJOB:
            return await self._suspend_its_jobset(fresh)
        if kind is JOBSET:
            return await self._suspend_its_jobs(fresh, living)
        if kind is JOB:
            # Nothing replaces a pod of a Job that is over.
            return _together([await self._evict_pod(pod) for pod in living])
        return Refused(f"nothing but its removal ends what a {kind.kind} left running")

    async def _suspend_its_cluster(self, fresh: Subject, root: Root) -> Answer:
        """The one it made. A cluster that a RayJob only borrows is never touched on its account. The pod that submitted
        it is left to end by itself: it has the log of the run, and no GPU."""
        name = root.status.ray_cluster_name
        if root.spec.cluster_selector or not name:
            return Refused("it has no cluster of its own that could be suspended")
        version = await self._version(RAYCLUSTER)
        if not isinstance(version, str):
            return version
        path = RAYCLUSTER.path(version, fresh.ref.namespace, name)
        return await self._suspend_child(RAYCLUSTER, path, fresh.ref)

    async def _suspend_child(self, kind: Kind, path: str, parent: Ref) -> Answer:
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

    async def _suspend_its_jobset(self, fresh: Subject) -> Answer:
        """First the TrainJob, or v2.1 resumes the JobSet at once; then the JobSet, for v2.3 does not pass on what it is
        told of a finished TrainJob. Both seen on real controllers."""
        version = await self._version(TRAINJOB)
        if not isinstance(version, str):
            return version
        path = TRAINJOB.path(version, fresh.ref.namespace, fresh.ref.name)
        body = suspension(TRAINJOB, conditions_of(fresh), suspend=True)
        answer = await self._once(
            lambda: self._cluster.patch(path, body, "merge"), f"patch {resource(TRAINJOB)}", fresh.ref.namespace
        )
        below = await self._version(JOBSET)
        if not isinstance(answer, Accepted) or not isinstance(below, str):
            return answer if not isinstance(answer, Accepted) or isinstance(below, str) else below
        child = await self._suspend_child(JOBSET, JOBSET.path(below, fresh.ref.namespace, fresh.ref.name), fresh.ref)
        return Accepted() if isinstance(child, Changed) else child

    async def _suspend_its_jobs(self, fresh: Subject, living: Sequence[Pod]) -> Answer:
        """The Jobs of a JobSet that is over, which early releases left running."""
        names = {
            pod.metadata.owner.name for pod in living if pod.metadata.owner and pod.metadata.owner.kind == JOB.kind
        }
        if not names:
            return Refused("what lives below it does not belong to a Job, so nothing but its removal ends it")
        paths = [JOB.path("v1", fresh.ref.namespace, name) for name in sorted(names)]
        return _together([await self._suspend_child(JOB, path, fresh.ref) for path in paths])

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
    lever: dict[str, Any] = {"suspend": suspend}
    spec = {"runPolicy": lever} if kind.lever is Lever.RUN_POLICY else lever
    return {"metadata": {**conditions, "annotations": {STOPPED: written}}, "spec": spec}


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
    """Part of the note: which run we stopped, and the generation that our change makes. A later one is not ours. Of a
    Deployment annotations count as well, so the note itself makes one."""
    writes = 2 if kind is DEPLOYMENT else 1
    return {"incarnation": fresh.seen.incarnation, "generation": root.metadata.generation + writes}


def suspended(kind: Kind, root: Root) -> bool:
    """By its lever, whoever moved it."""
    match kind.lever:
        case Lever.RUN_POLICY:
            return root.spec.run_policy is not None and bool(root.spec.run_policy.suspend)
        case Lever.SCALE:
            return replicas_of(root) == 0
        case _:
            return bool(root.spec.suspend)


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
    if suspended(kind, root):
        return Changed("it is stopped already")
    if QUEUE in (root.metadata.labels or {}):
        return Refused("Kueue owns its suspension; set its Workload's spec.active to false, or remove it")
    retention = root.spec.persistent_volume_claim_retention_policy
    if kind is STATEFULSET and retention is not None and retention.when_scaled == "Delete":
        return Refused(
            "it would lose its volumes: its persistentVolumeClaimRetentionPolicy.whenScaled is Delete; set it to Retain"
        )
    if kind is RAYJOB and root.spec.cluster_selector:
        return Refused("it runs on a cluster of others, where KubeRay suspends nothing; it can only be removed")
    if kind is RAYJOB and not root.spec.shutdown_after_job_finishes:
        return Refused(
            "KubeRay suspends only a RayJob whose cluster goes with it; "
            "set its spec.shutdownAfterJobFinishes to true, or remove it"
        )
    return None


def cannot_remove(kind: Kind, root: Root | Pod) -> Refused | None:
    """A volume is never ours to delete, and the cluster would, together with its set."""
    retention = root.spec.persistent_volume_claim_retention_policy if isinstance(root, Root) else None
    if kind is STATEFULSET and retention is not None and retention.when_deleted == "Delete":
        return Refused(
            "its volumes would go with it: its persistentVolumeClaimRetentionPolicy.whenDeleted is Delete; set it to"
            " Retain, or remove it yourself"
        )
    return None


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
