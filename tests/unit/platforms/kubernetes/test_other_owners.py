"""An owner that does not control keeps what it owns while it exists; one that could not be checked may exist."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gpukeeper.clients.kubernetes.exchange import ApiError, ClusterUnavailable
from gpukeeper.clients.kubernetes.wire import Meta
from gpukeeper.lifecycle.decide import decide, still_holds
from gpukeeper.model.decision import Accepted, Action, Decision, Refused, Step, Verdict, View
from gpukeeper.model.subject import Subject
from gpukeeper.platforms.kubernetes import owners
from gpukeeper.platforms.kubernetes.acts import ClusterActions
from gpukeeper.platforms.kubernetes.adapter import KubernetesPlatform
from gpukeeper.platforms.kubernetes.kinds.builtin import JOB
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB
from gpukeeper.platforms.kubernetes.kinds.pod import POD
from tests.unit.platforms.kubernetes.examples import AT, NOW, ago, condition, pod_json
from tests.unit.platforms.kubernetes.stored_cluster import forbidden, silent
from tests.unit.platforms.kubernetes.test_owners import Told, read, reference, thing
from tests.unit.platforms.kubernetes.test_review import BOOK, Lab, Now

OTHERS = {
    "/api/v1": [("configmaps", "ConfigMap", True), ("nodes", "Node", False)],
    "/apis/argoproj.io/v1alpha1": [("workflows", "Workflow", True), ("workflows/status", "Workflow", True)],
}


class Wider(Lab):
    """Serves kinds that gpukeeper does not know, too."""

    def __init__(self, *objects: Told) -> None:
        super().__init__(*objects)
        self.posted: list[str] = []

    async def post(self, path: str, body: Any, **_: object) -> bytes:
        if not path.endswith("/events"):
            self.posted.append(path)
        return b"{}"

    async def get(self, path: str, type_: Any, **query: object) -> Any:
        if path == "/version":
            return msgspec.Raw(b"{}")
        if path in OTHERS:
            self._ask(path)
            listed = [{"name": n, "kind": k, "namespaced": where} for n, k, where in OTHERS[path]]
            if path == "/api/v1":
                listed.append({"name": "pods", "kind": "Pod", "namespaced": True})
            place = path.removeprefix("/apis/").removeprefix("/api/")
            told = {"kind": "APIResourceList", "groupVersion": place, "resources": listed}
            return msgspec.json.decode(msgspec.json.encode(told), type=type_)
        return await super().get(path, type_, **query)


def other(kind: str = "ConfigMap", name: str = "settings", api_version: str = "v1") -> Told:
    metadata = {"name": name, "namespace": "team-a", "uid": f"{kind.lower()}-{name}"}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


CONFIG, WORKFLOW, TRAIN = other(), other("Workflow", "nightly", "argoproj.io/v1alpha1"), thing("TrainJob", "run-9")


def finished(name: str = "run-7", *owners: Told, kind: str = "Job") -> Told:
    """Ended 300 days ago; its owners do not control it."""
    made = thing(kind, name)
    made["metadata"] |= {"resourceVersion": "10", "creationTimestamp": ago(days=301)}
    if owners:
        made["metadata"]["ownerReferences"] = [reference(one, controller=False) for one in owners]
    if kind == "Pod":
        ended = {"terminated": {"exitCode": 0, "finishedAt": ago(days=300)}}
        status = {"phase": "Succeeded", "containerStatuses": [{"name": "main", "state": ended}]}
        return {**pod_json(status=status), "metadata": made["metadata"]}
    made["status"] = {
        "startTime": ago(days=301),
        "completionTime": ago(days=300),
        "conditions": [condition("Complete", ago(days=300))],
    }
    return made


def listed(platform: KubernetesPlatform) -> dict[str, Subject]:
    async def walk() -> dict[str, Subject]:
        pages = platform.observe(BOOK.policy.scope["kubernetes"])
        return {one.ref.name: one async for page in pages for one in page.subjects}

    return asyncio.run(walk())


def looked(platform: KubernetesPlatform, kind: Kind, one: Told) -> Subject:
    found = asyncio.run(platform.read(AT.ref(kind, read(one))))
    assert isinstance(found, Subject), found
    return found


def decided(subject: Subject) -> Decision:
    return decide(View(subject), BOOK, NOW)


def both(lab: Lab, one: Told) -> list[Decision]:
    """By a look at everything, and by the look just before acting."""
    platform = KubernetesPlatform(lab.as_cluster, Now(), BOOK.policy)
    kind = POD if one["kind"] == "Pod" else JOB
    return [decided(listed(platform)[one["metadata"]["name"]]), decided(looked(platform, kind, one))]


@pytest.mark.parametrize("kind", ["Job", "Pod"])
@pytest.mark.parametrize("owner", [CONFIG, WORKFLOW, TRAIN], ids=lambda one: one["kind"])
def test_an_owner_that_does_not_control_keeps_while_it_exists(kind: str, owner: Told) -> None:
    one = finished("run-7", owner, kind=kind)
    for decision in both(Wider(one, owner), one):
        assert (decision.action, decision.rule, decision.verdict) == (Action.KEEP, "target", Verdict.PROTECT)
        assert f"its owner {owner['kind']} {owner['metadata']['name']}" in decision.reason
        assert "delete" in decision.reason, "and says what can be done"


def test_one_of_several_is_enough() -> None:
    one = finished("run-7", other(name="gone"), CONFIG)
    assert {d.action for d in both(Wider(one, CONFIG), one)} == {Action.KEEP}


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "another of its name"])
def test_an_owner_that_is_gone_keeps_nothing(again: bool) -> None:
    one = finished("run-7", CONFIG)
    namesake = {**CONFIG, "metadata": {**CONFIG["metadata"], "uid": "configmap-second"}}
    assert {d.action for d in both(Wider(one, *([namesake] if again else [])), one)} == {Action.REMOVE}


@pytest.mark.parametrize(
    "error",
    [
        forbidden("configmaps"),
        silent(),
        ApiError(404, "", "404 page not found"),  # a proxy's
        ApiError(500, "InternalError", "etcdserver: request timed out"),
    ],
)
def test_an_owner_that_could_not_be_checked_may_exist(error: ApiError | ClusterUnavailable) -> None:
    one = finished("run-7", CONFIG)
    lab = Wider(one)
    lab.refused["/configmaps/settings"] = error
    for decision in both(lab, one):
        assert (decision.action, decision.rule, decision.verdict) == (Action.KEEP, "target", Verdict.UNKNOWN)
        assert "whether its owner ConfigMap settings (v1) still exists is unknown" in decision.reason


def test_a_missing_right_is_named() -> None:
    one = finished("run-7", WORKFLOW)
    lab = Wider(one, WORKFLOW)
    lab.refused["/workflows/nightly"] = forbidden("workflows")
    assert all("needs `get` on workflows.argoproj.io" in d.reason for d in both(lab, one))


@pytest.mark.parametrize(
    "owner",
    [
        other("Secret", "token"),  # of a kind that is not served
        other("Experiment", "e", "kubeflow.org/v7"),  # of a version that is not served
        other("Thing", "t", "nobody.example/v1"),  # of a group that is not served
        other("ConfigMap", "", "v1"),
        other("ConfigMap", "../../../secrets/x", "v1"),
    ],
    ids=["kind", "version", "group", "no name", "a path"],
)
def test_an_owner_of_an_unknown_kind_may_exist(owner: Told) -> None:
    one = finished("run-7", owner)
    for decision in both(_NotServed(one), one):
        assert (decision.action, decision.verdict) == (Action.KEEP, Verdict.UNKNOWN), decision.reason


class _NotServed(Wider):
    async def get(self, path: str, type_: Any, **query: object) -> Any:
        if path in ("/apis/nobody.example/v1", "/apis/kubeflow.org/v7"):
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        if ".." in path:
            raise ClusterUnavailable(f"{path!r} is not a valid API path")
        return await super().get(path, type_, **query)


def test_a_job_made_by_hand_from_a_cronjob_is_a_run_like_any_other() -> None:
    """`kubectl create job --from=cronjob/nightly` names the CronJob without `controller: true`."""
    one = finished("run-7", other("CronJob", "nightly", "batch/v1"))
    assert {d.action for d in both(Wider(one), one)} == {Action.REMOVE}


def test_an_owner_that_comes_after_the_plan_keeps() -> None:
    one = finished()
    lab = Wider(one, CONFIG)
    platform = KubernetesPlatform(lab.as_cluster, Now(), BOOK.policy)
    planned = decided(listed(platform)["run-7"])
    assert planned.action is Action.REMOVE
    one["metadata"] |= {"ownerReferences": [reference(CONFIG, controller=False)], "resourceVersion": "11"}
    fresh = looked(platform, JOB, one)
    assert "ConfigMap settings" in str(still_holds(Step("1.1", planned), View(fresh), BOOK, NOW))


def test_an_owner_that_is_made_after_it_was_found_gone_is_seen_just_before_acting() -> None:
    """A look just before acting never answers from memory."""
    one = finished("run-7", CONFIG)
    lab = Wider(one)
    platform = KubernetesPlatform(lab.as_cluster, Now(), BOOK.policy)
    assert decided(listed(platform)["run-7"]).action is Action.REMOVE
    lab.objects.append(CONFIG)  # as after a restore of the cluster from a backup
    assert decided(looked(platform, JOB, one)).action is Action.KEEP


def test_many_owners_of_one_kind_are_listed_and_remembered() -> None:
    there = [other(name=f"c-{n}") for n in range(40)]
    jobs = [finished(f"run-{n}", other(name=f"c-{n}")) for n in range(60)]
    lab = Wider(*jobs, *there)
    lab._page = 500
    platform = KubernetesPlatform(lab.as_cluster, Now(), BOOK.policy)
    found = listed(platform)
    kept = {name for name, one in found.items() if decided(one).action is Action.KEEP}
    assert kept == {f"run-{n}" for n in range(40)}
    asked = [path for path in lab.asked if "/configmaps" in path]
    assert len(asked) == 1
    lab.asked.clear()
    listed(platform)
    assert not [path for path in lab.asked if "/configmaps" in path]


def test_owners_beyond_the_allowance_of_a_pass_may_exist_until_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "MOST_CALLS", 3)
    jobs = [finished(f"run-{n}", other(name=f"c-{n}")) for n in range(5)]
    lab = Wider(*jobs)
    platform = KubernetesPlatform(lab.as_cluster, Now(), BOOK.policy)
    first = [decided(one).action for one in listed(platform).values()]
    assert sorted(first) == [Action.KEEP] * 2 + [Action.REMOVE] * 3
    assert {decided(one).action for one in listed(platform).values()} == {Action.REMOVE}


def test_a_controller_is_not_counted_twice() -> None:
    assert owners.other_owners(Meta()) == ()
    controlled = read(thing("Job", "a", TRAIN))
    assert owners.other_owners(controlled) == ()


# The other way round: what the garbage collector would delete together with it


@pytest.mark.parametrize("kind", ["Pod", "RayCluster"])
def test_what_lives_and_names_it_as_an_owner_keeps_it(kind: str) -> None:
    """Deleting its owner would delete it, though its owner does not control it."""
    one = finished()
    living = thing(kind, "still-here")
    living["metadata"]["ownerReferences"] = [reference(one, controller=False)]
    lab = Wider(one, living)
    platform = KubernetesPlatform(lab.as_cluster, Now(), BOOK.policy)
    listed(platform)  # a look at everything precedes every act
    decision = decided(looked(platform, JOB, one))
    assert (decision.action, decision.rule) == (Action.KEEP, "target")
    assert f"{kind} still-here has not ended and names it as an owner" in decision.reason


def test_what_is_over_and_names_it_as_an_owner_goes_with_it() -> None:
    one = finished()
    assert {d.action for d in both(Wider(one, finished("beside", one, kind="Pod")), one)} == {Action.REMOVE}


def trimmed(*pods: Told) -> tuple[object, Wider]:
    """A finished Job of which parts still run, with the policy's trim."""
    lab = Wider(JOB_OVER, *pods, CONFIG)

    async def story() -> object:
        platform = KubernetesPlatform(lab.as_cluster, Now(), BOOK.policy)
        fresh = await platform.read(AT.ref(JOB, read(JOB_OVER)))
        assert isinstance(fresh, Subject), fresh
        planned = msgspec.structs.replace(decided(fresh), action=Action.TRIM)
        return await platform.act(Step("1.1", planned), fresh)

    return asyncio.run(story()), lab


JOB_OVER = finished()
OF_IT = {"batch.kubernetes.io/controller-uid": "job-run-7"}


def test_a_pod_that_only_names_a_job_is_not_ended_with_it() -> None:
    named = thing("Pod", "named", JOB_OVER, labels=OF_IT)
    named["metadata"]["ownerReferences"][0]["controller"] = False
    answer, lab = trimmed(thing("Pod", "part", JOB_OVER, labels=OF_IT), named)
    assert isinstance(answer, Refused)
    assert "pod named" in answer.why
    assert not lab.posted


def test_a_pod_that_another_owner_keeps_is_not_ended() -> None:
    shared = thing("Pod", "part", JOB_OVER, labels=OF_IT)
    shared["metadata"]["ownerReferences"].append(reference(CONFIG, controller=False))
    answer, lab = trimmed(shared)
    assert isinstance(answer, Refused)
    assert "ConfigMap settings" in answer.why
    assert not lab.posted


def test_a_part_of_its_own_is_ended() -> None:
    answer, lab = trimmed(thing("Pod", "part", JOB_OVER, labels=OF_IT))
    assert answer == Accepted()
    assert lab.posted == ["/api/v1/namespaces/team-a/pods/part/eviction"]


def test_a_jobset_that_only_names_a_finished_trainjob_is_not_suspended() -> None:
    train, jobs = thing("TrainJob", "run-7"), thing("JobSet", "run-7")
    jobs["metadata"]["ownerReferences"] = [reference(train, controller=False)]
    lab = Wider(jobs)
    acts = ClusterActions(lab.as_cluster, lab.served)
    answer = asyncio.run(acts._suspend_child(JOBSET, "run-7", AT.ref(TRAINJOB, read(train))))
    assert isinstance(answer, Refused)
    assert not lab.sent
