"""Ways in which the wrong thing of a cluster could be touched: found by reading the code as somebody who wants that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import ApiError, ClusterUnavailable
from gpukeeper.clients.kubernetes.wire import Meta, Root
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Accepted, Action, Changed, Decision, Refused, Step, View
from gpukeeper.model.policy import AtFinish, ClassSettings, PlaceScope, Policy
from gpukeeper.model.subject import Gone, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.adapter import KubernetesPlatform
from gpukeeper.platforms.kubernetes.discovery import ApiDiscovery
from gpukeeper.platforms.kubernetes.gpus import PodTotals
from gpukeeper.platforms.kubernetes.kinds.builtin import DAEMONSET, DEPLOYMENT, JOB, STATEFULSET
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB
from gpukeeper.platforms.kubernetes.kinds.ray import RAYCLUSTER
from gpukeeper.platforms.kubernetes.marks import NamespaceFacts, TranslationSettings, unreadable_namespace
from gpukeeper.platforms.kubernetes.owners import descendants
from gpukeeper.platforms.kubernetes.translate import STOPPED, incarnation_of, root_subject
from gpukeeper.platforms.kubernetes.walk import ClusterWalk, WalkSettings
from tests.unit.clients.kubernetes.scripted_api import Reply, Time, ask, refused
from tests.unit.platforms.kubernetes.examples import AT, NOW, ago, gpu_container, pod, root, totals
from tests.unit.platforms.kubernetes.stored_cluster import StoredCluster
from tests.unit.platforms.kubernetes.test_discovery import PYTORCH, a_cluster, groups
from tests.unit.platforms.kubernetes.test_owners import Told, thing

DAY = timedelta(days=1)
CLASSES = {"cluster": ClassSettings(idle=None, never_started=timedelta(minutes=30))}
BOOK = Rulebook(Policy(scope={"kubernetes": PlaceScope(namespaces=("*",))}, classes=CLASSES))
PENDING = pod("Pending", node="", name="run-7-0")


def subject_of(kind: Kind, found: Root, below: PodTotals, namespace: NamespaceFacts | None = None) -> Subject:
    return root_subject(kind, found, below, namespace or NamespaceFacts(), AT, TranslationSettings())


def decided(subject: Subject, book: Rulebook = BOOK) -> Decision:
    return decide(View(subject), book, NOW)


# Never started


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (JOBSET, {"restarts": 1}),
        (JOBSET, {"replicatedJobsStatus": [{"name": "node", "failed": 1}]}),
        (JOBSET, {"replicatedJobsStatus": [{"name": "data", "succeeded": 1}]}),
        (TRAINJOB, {"jobsStatus": [{"name": "node", "ready": 1}]}),
    ],
)
def test_what_ran_and_waits_for_nodes_again_was_not_never_started(kind: Kind, status: dict[str, Any]) -> None:
    """A ledger that is new (another replica leads) knows of no start; the object itself does."""
    found = subject_of(kind, root(status=status), totals(PENDING))
    assert found.state is State.RUNNING
    assert decided(found).action is Action.KEEP


def test_what_really_never_started_is_distinguished() -> None:
    waits = {"restarts": 0, "replicatedJobsStatus": [{"name": "node", "active": 1, "ready": 0}]}
    found = subject_of(JOBSET, root(status=waits), totals(PENDING))
    assert (found.state, decided(found).action) == (State.CREATED, Action.REMOVE)


def walked(cluster: Lab) -> dict[str, Subject]:
    async def walk() -> dict[str, Subject]:
        found = ClusterWalk(
            cluster.as_cluster,
            ApiDiscovery(cluster.as_cluster),
            WalkSettings(("team-a",), {}, TranslationSettings()),
            AT,
        )
        return {one.ref.name: one async for subjects, _ in found.pages() for one in subjects}

    return asyncio.run(walk())


def chain(failed: int) -> tuple[Told, ...]:
    train = thing("TrainJob", "run-7")
    jobs = thing("JobSet", "run-7", train)
    job = thing("Job", "run-7-node-0", jobs, labels={"jobset.sigs.k8s.io/jobset-name": "run-7"})
    job["status"] = {"failed": failed}
    waits = thing("Pod", "w", job, labels={"batch.kubernetes.io/controller-uid": "job-run-7-node-0"})
    waits["spec"].pop("nodeName")
    waits["status"] = {"phase": "Pending"}
    return train, jobs, job, waits


@pytest.mark.parametrize(("failed", "state"), [(1, State.RUNNING), (0, State.CREATED)])
def test_a_child_that_lost_a_pod_reports_that_its_root_ran(failed: int, state: State) -> None:
    """A drained node takes the pod away; what is left of it is a count of its Job."""
    assert walked(Lab(*chain(failed)))["run-7"].state is state


# What is below a Job


def job_with(selector: dict[str, str]) -> Told:
    made = thing("Job", "old")
    made["spec"] = {"selector": {"matchLabels": selector}, "manualSelector": True}
    return made


@pytest.mark.parametrize("selector", [{"controller-uid": "job-old"}, {"run": "mine"}], ids=["before 1.27", "manually"])
def test_pods_of_a_job_that_does_not_label_them_so_are_found_all_the_same(selector: dict[str, str]) -> None:
    """Else their logs would go without evidence, and what lives would be taken for over."""
    job = job_with(selector)
    cluster = StoredCluster(job, thing("Pod", "old-x", job, labels=selector))
    seen = msgspec.json.decode(msgspec.json.encode(job), type=Root)
    looking = descendants(cluster.as_cluster, cluster.served, JOB, seen.metadata, narrow=True, seen=seen)
    assert [one.metadata.name for one in asyncio.run(looking).pods()] == ["old-x"]


# Whose stop it was


def stopped(kind: Kind, generation: int, *, now: bool, incarnation: str = "1", noted: int = 3, start: str = "") -> str:
    lever = {"replicas": 0 if now else 1} if kind is DEPLOYMENT else {"suspend": now}
    note = json.dumps({"suspend": False, "incarnation": incarnation, "generation": noted})
    status = {"startTime": start} if start else {}
    return incarnation_of(kind, root(spec=lever, status=status, generation=generation, annotations={STOPPED: note}))


@pytest.mark.parametrize("kind", [JOBSET, TRAINJOB, RAYCLUSTER, DEPLOYMENT], ids=lambda kind: kind.name)
def test_a_run_that_a_user_resumed_is_not_the_one_that_we_stopped(kind: Kind) -> None:
    """These kinds write no start. Else a run that its owner resumed and let finish would go at once when it ended."""
    assert stopped(kind, 3, now=True) == "1"
    again = stopped(kind, 4, now=False)
    assert again != "1"
    assert stopped(kind, 5, now=True) not in ("1", again)
    assert stopped(kind, 6, now=True, incarnation=again, noted=6) == again, "we stopped that one, too"
    assert stopped(kind, 7, now=False, incarnation=again, noted=6) not in ("1", again)


@pytest.mark.parametrize("kind", [JOBSET, DEPLOYMENT], ids=lambda kind: kind.name)
def test_a_note_whose_stop_came_no_further_changes_nothing(kind: Kind) -> None:
    assert stopped(kind, 2, now=False) == "1"


def test_a_start_that_is_written_again_is_the_incarnation() -> None:
    assert stopped(JOB, 4, now=False, incarnation=ago(hours=5), start=ago(hours=1)) == ago(hours=1)


# Sets that only a label calls over


@pytest.mark.parametrize("kind", [DAEMONSET, DEPLOYMENT], ids=lambda kind: kind.name)
@pytest.mark.parametrize("at_finish", [*AtFinish])
def test_a_running_set_without_gpus_is_not_removed_without_a_word(kind: Kind, at_finish: AtFinish) -> None:
    """Anybody may write `app: gpu-cluster-test` on a service of his."""
    serves = pod(name="api-1", containers=[{"name": "api"}])
    found = root(labels={"app": "gpu-cluster-test"}, creationTimestamp=ago(days=40))
    subject = root_subject(kind, found, totals(serves), NamespaceFacts(), AT, TranslationSettings())
    policy = msgspec.structs.replace(BOOK.policy, at_finish=at_finish)
    decision = decided(subject, Rulebook(policy))
    assert (decision.action, decision.then) == (Action.WARN, Action.REMOVE), decision.reason


# A namespace that cannot be read


def test_a_namespace_that_cannot_be_read_may_hold_what_runs_in_it() -> None:
    hidden = unreadable_namespace("team-a", "403")
    running = subject_of(RAYCLUSTER, root(), totals(pod(name="head")), hidden)
    assert running.marks.hold_until is not None
    assert any("could not be read" in line for line in running.evidence)
    over = {"conditions": [{"type": "Completed", "status": "True", "lastTransitionTime": ago(hours=1)}]}
    assert subject_of(JOBSET, root(status=over), totals(), hidden).marks.hold_until is None


# The adapter, on a small cluster that can change


class Lab(StoredCluster):
    """With writes: a delete and a patch obey their conditions, and somebody may come first."""

    place, skew = "lab", timedelta()

    def __init__(self, *objects: Told) -> None:
        namespace = {"kind": "Namespace", "metadata": {"name": "team-a"}}
        super().__init__(*objects)
        self.namespace, self.first, self.sent = namespace, [], list[Any]()  # type: ignore[var-annotated]

    def opened(self) -> Any:
        return asyncio.timeout(None)

    async def get(self, path: str, type_: Any, **query: object) -> Any:
        told = self.namespace if path == "/api/v1/namespaces/team-a" else _served_at(path)
        if told is not None:
            return msgspec.json.decode(msgspec.json.encode(told), type=type_)
        return await super().get(path, type_, **query)

    async def delete(self, path: str, body: dict[str, Any], **_: object) -> bytes:
        return self._write(body["preconditions"], body)

    async def patch(self, path: str, body: Any, how: str, **_: object) -> bytes:
        return self._write(body["metadata"], body)

    async def post(self, path: str, body: Any, **_: object) -> bytes:
        return b"{}"

    def _write(self, conditions: dict[str, str], body: Any) -> bytes:
        if self.first:
            self.first.pop(0)()
        meta = self.objects[0]["metadata"]
        self.sent.append(body)
        if any(conditions.get(key, meta[key]) != meta[key] for key in ("uid", "resourceVersion")):
            raise ApiError(409, "Conflict", "the object has been modified", name=meta["name"])
        return b"{}"


def _served_at(path: str) -> Told | None:
    """Every kind that we know is there."""
    _, api, *place = path.split("/")
    if len(place) > (2 if api == "apis" else 1):
        return None
    group, version = (place[0], "/".join(place)) if api == "apis" else ("", place[0])
    kinds = [one for one in KINDS if one.group == group]
    if len(place) == 1 and group:
        return {"kind": "APIGroup", "name": group, "versions": [{"version": kinds[0].versions[0]}]}
    resources = [{"name": one.plural, "kind": one.kind} for one in kinds]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


class Now:
    def now(self) -> Any:
        return NOW


def platform_of(lab: Lab) -> KubernetesPlatform:
    return KubernetesPlatform(lab.as_cluster, Now(), BOOK.policy)


def step(subject: Subject, action: Action) -> Step:
    return Step("1.1", msgspec.structs.replace(decided(subject), action=action))


def ray() -> Told:
    made = thing("RayCluster", "run-7")
    made["metadata"]["resourceVersion"] = "10"
    made["spec"] = {"headGroupSpec": {"template": {"spec": {"containers": [gpu_container()]}}}}
    return made


def head(of: Told) -> Told:
    return thing("Pod", "run-7-head", of, labels={"ray.io/cluster": "run-7"})


def changed_by_its_owner(made: Told) -> None:
    """A new wish that no pod shows yet."""
    made["metadata"] |= {"resourceVersion": "11", "generation": made["metadata"]["generation"] + 1}


def touched_by_its_controller(made: Told) -> None:
    made["metadata"]["resourceVersion"] = "11"


@pytest.mark.parametrize(
    ("somebody", "answer"),
    [
        (changed_by_its_owner, Changed("its spec changed since it was read")),
        (touched_by_its_controller, Accepted()),
    ],
)
def test_a_wish_that_changed_in_the_last_moment_is_not_overruled(somebody: Any, answer: object) -> None:
    made = ray()
    lab = Lab(made, head(made))
    lab.first.append(lambda: somebody(made))

    async def story() -> object:
        platform = platform_of(lab)
        fresh = await platform.read(AT.ref(RAYCLUSTER, meta_of(made)))
        assert isinstance(fresh, Subject), fresh
        return await platform.act(step(fresh, Action.STOP), fresh)

    assert asyncio.run(story()) == answer


@pytest.mark.parametrize(("policy", "sent"), [("Delete", 0), ("Retain", 1)])
def test_a_set_whose_volumes_would_go_with_it_is_not_removed(policy: str, sent: int) -> None:
    """After an idle stop, too: it may be brought back, its data not."""
    made = thing("StatefulSet", "run-7")
    retention = {"whenScaled": "Retain", "whenDeleted": policy}
    made["spec"] = {"replicas": 0, "persistentVolumeClaimRetentionPolicy": retention}
    lab = Lab(made)

    async def story() -> object:
        platform = platform_of(lab)
        fresh = await platform.read(AT.ref(STATEFULSET, meta_of(made)))
        assert isinstance(fresh, Subject), fresh
        return await platform.act(step(fresh, Action.REMOVE), fresh)

    answer = asyncio.run(story())
    assert isinstance(answer, Accepted if sent else Refused)
    assert len(lab.sent) == sent


def test_a_cluster_that_was_set_back_to_a_backup_has_it_again() -> None:
    """A watch told that it went, once. That is believed for a while, not for ever."""
    made = ray()

    async def story() -> Sequence[object]:
        platform = platform_of(Lab(made, head(made)))
        ref = AT.ref(RAYCLUSTER, meta_of(made))
        platform._removals.report_deleted(ref.uid)
        first = await platform.read(ref)
        platform._removals._gone[ref.uid] -= 600
        return first, await platform.read(ref)

    first, later = asyncio.run(story())
    assert isinstance(first, Gone)
    assert isinstance(later, Subject)


def test_a_servers_clock_that_is_behind_starts_nobodys_time_too_early() -> None:
    made = ray()
    lab = Lab(made, head(made))
    lab.skew = -timedelta(minutes=4)  # type: ignore[misc]
    found = asyncio.run(platform_of(lab).read(AT.ref(RAYCLUSTER, meta_of(made))))
    assert isinstance(found, Subject)
    assert found.created == NOW - timedelta(hours=6) + timedelta(minutes=4)


def meta_of(made: Told) -> Meta:
    return msgspec.json.decode(msgspec.json.encode(made["metadata"]), type=Meta)


# Answers that prove nothing


class Garbled(Lab):
    """Something before the cluster answers 200 to everything about one object, and says nothing."""

    about = "/run-7"

    async def get(self, path: str, type_: Any, **query: object) -> Any:
        if path.endswith(self.about):
            return msgspec.json.decode(b"{}", type=type_)
        return await super().get(path, type_, **query)

    async def raw(self, path: str, **query: object) -> bytes:
        return b"{}"


def test_an_answer_without_a_uid_is_not_taken_for_gone() -> None:
    found = asyncio.run(platform_of(Garbled(ray())).read(AT.ref(RAYCLUSTER, meta_of(ray()))))
    assert isinstance(found, Unknown), found


def test_a_pod_that_is_answered_without_a_uid_is_not_taken_for_gone() -> None:
    """After its root went: only when its pods went too, the GPUs are back."""
    made = ray()
    lab = Garbled(made, head(made))
    lab.about = "/run-7-head"

    async def story() -> object:
        platform = platform_of(lab)
        ref = AT.ref(RAYCLUSTER, meta_of(made))
        fresh = await platform.read(ref)
        assert isinstance(fresh, Subject), fresh
        assert await platform.act(step(fresh, Action.REMOVE), fresh) == Accepted()
        lab.objects.remove(made)
        return await platform.read(ref)

    assert isinstance(asyncio.run(story()), Unknown)


def test_a_description_without_a_uid_is_no_reason_to_go_on_without_evidence() -> None:
    made = ray()

    async def story() -> object:
        lab = Garbled(made, head(made))
        lab.about = "/nothing"
        platform = platform_of(lab)
        found = await platform.read(AT.ref(RAYCLUSTER, meta_of(made)))
        assert isinstance(found, Subject)
        return await platform.capture(found, ("manifest",))

    assert isinstance(asyncio.run(story()), Unknown)


def test_a_kind_that_was_there_is_not_gone_because_one_answer_lacks_it(tmp_path: Path) -> None:
    """A server that just began lists its own groups first. Else all work of the kind would be `verified: gone`."""
    api, time = a_cluster(), Time()

    async def story(cluster: Cluster) -> list[object]:
        discovery = ApiDiscovery(cluster, time.clock)
        said: list[object] = [await discovery.served(PYTORCH)]
        api.says("GET /apis", groups("apps", "batch"))
        api.says("GET /apis/kubeflow.org", Reply(refused(404, "NotFound"), 404))
        for seconds in (600, 30, 31):
            time.now += seconds
            said.append(await discovery.served(PYTORCH))
        return said

    here, first, second, third = ask(api, story, tmp_path)
    assert here == "v1"
    assert isinstance(first, Unknown)
    assert isinstance(second, Unknown)
    assert third is None, "it was uninstalled"


def test_what_left_the_version_that_was_read_is_not_acted_on() -> None:
    """A subject of an earlier look: its finalizer, its children and its wish may be others by now."""
    made = ray()
    lab = Lab(made, head(made))

    async def story() -> object:
        platform = platform_of(lab)
        fresh = await platform.read(AT.ref(RAYCLUSTER, meta_of(made)))
        assert isinstance(fresh, Subject), fresh
        touched_by_its_controller(made)
        await platform.read(fresh.ref)  # somebody else's look in between
        return await platform.act(step(fresh, Action.STOP), fresh)

    assert asyncio.run(story()) == Changed("it changed since it was read")
    assert lab.sent == []


def test_a_cluster_that_falls_silent_while_a_removal_is_followed_is_not_known_about() -> None:
    made = ray()
    lab = Lab(made, head(made))

    async def story() -> object:
        platform = platform_of(lab)
        fresh = await platform.read(AT.ref(RAYCLUSTER, meta_of(made)))
        assert isinstance(fresh, Subject), fresh
        await platform.act(step(fresh, Action.REMOVE), fresh)
        lab.objects = [one for one in lab.objects if one["kind"] == "Pod"]
        lab.refused["pods/run-7-head"] = ClusterUnavailable("no answer")
        return await platform.read(fresh.ref)

    assert asyncio.run(story()) == Unknown("no answer")
