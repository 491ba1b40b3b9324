"""What the adapter promises the engine: a look and a list say the same, what vanished is proven, hints come and come
again after every gap, and what changed is looked at without everything else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.reclaim import PassReport, reclaim
from gpukeeper.model.event import Vanished
from gpukeeper.model.policy import AtFinish
from gpukeeper.model.subject import Gone, Ref, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.finalizers import JOB_TRACKING
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS as KINDS_OF_GPUKEEPER
from gpukeeper.platforms.kubernetes.watch import RECONNECT
from tests.real.kube import objects
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.endings import ended_pod, ending, unplaced
from tests.real.kube.harness import Harness
from tests.real.kube.proxy import Asked, Cut, Fault, Jumble, Proxy, Say, proxy

KINDS = {
    *("pod/runs", "pod/ended", "pod/waits", "job/runs", "job/ended", "job/failed", "job/suspended"),
    *("deployment/runs", "statefulset/runs", "jobset/runs", "jobset/ended", "trainjob/runs"),
    *("pytorchjob/runs", "pytorchjob/zombie", "raycluster/runs", "rayjob/runs"),
}


# What vanished


def test_what_others_removed_has_vanished_and_nothing_else(plane: ControlPlane, namespace: str) -> None:
    for name in ("goes", "stays", "comes-back"):
        ended_pod(plane.api, namespace, name)
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    assert harness.again().survey.counts.seen == 3
    for name in ("goes", "comes-back"):
        plane.api.delete("pods", namespace, name, grace=0)
    ended_pod(plane.api, namespace, "comes-back")
    report = harness.again()
    gone = [line.ref for line in harness.ledger.lines if isinstance(line, Vanished) and line.ref is not None]
    assert sorted(ref.name for ref in gone) == ["comes-back", "goes"], "the one before; its namesake is new"
    present = harness.run(harness.ledger.present("kubernetes", harness.platform.place))
    assert sorted(ref.name for ref in present.values()) == ["comes-back", "stays"]
    assert len({ref.uid for ref in gone} & {ref.uid for ref in present.values()}) == 0
    assert report.survey.counts.vanished == 0, "they had ended: clusters tidy that up themselves"


def test_after_400_pods_ended_the_next_pass_is_whole_again(plane: ControlPlane, namespace: str) -> None:
    """They ran when they were last seen, so the pass that misses them opens the breaker; no later one does."""
    names = [f"run-{n}" for n in range(400)]
    running = {"status": {"phase": "Running"}}

    def start(name: str) -> None:
        plane.api.create(unplaced(name), namespace)
        plane.api.patch("pods", namespace, name, running, subresource="status")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(start, [*names, "stays"]))
    breaker = {"running": "50%", "vanished": "50%", "floor": 5}
    harness = Harness(plane.keeper_kubeconfig(), namespace, breaker=breaker)
    assert harness.again().survey.counts.running == 401
    everything = f"/api/v1/namespaces/{namespace}/pods"
    grace = {"gracePeriodSeconds": 0, "fieldSelector": "metadata.name!=stays"}
    plane.api.call("DELETE", everything, query=grace)
    plane.until(lambda: len(plane.api.list("pods", namespace)) == 1, "400 pods are gone")
    assert "400 of 401 objects" in str(harness.again().plan.breaker)
    present = harness.run(harness.ledger.present("kubernetes", harness.platform.place))
    assert [ref.name for ref in present.values()] == ["stays"], "what is remembered is what exists"
    before = sum(harness.cluster.asked.values())
    report = harness.again()
    assert (report.plan.breaker, report.survey.counts.vanished) == (None, 0)
    assert sum(harness.cluster.asked.values()) - before < 60, "nothing is asked about what is forgotten"


def test_a_read_by_uid_tells_a_namesake_from_the_one_before(plane: ControlPlane, namespace: str) -> None:
    ended_pod(plane.api, namespace, "run")
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    before = harness.subjects()["pod/run"].ref
    plane.api.delete("pods", namespace, "run", grace=0)
    ended_pod(plane.api, namespace, "run")
    assert isinstance(harness.run(harness.platform.read(before)), Gone)
    assert isinstance(harness.run(harness.platform.read(harness.subjects()["pod/run"].ref)), Subject)


def test_an_api_server_that_is_away_proves_nothing(plane: ControlPlane, namespace: str) -> None:
    ended_pod(plane.api, namespace, "run")
    harness = Harness(plane.keeper_kubeconfig(), namespace)
    harness.again()
    ref = harness.subjects()["pod/run"].ref
    plane.stop_apiserver()
    assert isinstance(harness.run(harness.platform.read(ref)), Unknown)
    report = harness.again()
    assert report.survey.unseen
    assert report.survey.missing == []
    plane.start_apiserver()
    assert harness.again().survey.unseen == []
    assert not [line for line in harness.ledger.lines if isinstance(line, Vanished)]


def test_a_pod_that_its_gone_job_never_counted_is_seen_and_released(plane: ControlPlane, namespace: str) -> None:
    """`batch.kubernetes.io/job-tracking` on an ended pod whose Job is gone (k/k#109429): stuck for good, and with the
    policy's leave the one finalizer that may be taken off it."""
    made, gone = unplaced("part"), "00000000-0000-0000-0000-000000000001"
    made["metadata"]["finalizers"] = [JOB_TRACKING]
    made["metadata"]["ownerReferences"] = [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "gone", "uid": gone, "controller": True}
    ]
    manager = plane.programs["kube-controller-manager"]
    manager.pause()  # it would take the finalizer off itself; of old releases it did not always
    try:
        plane.api.create(made, namespace)
        plane.api.patch("pods", namespace, "part", {"status": ending()}, subresource="status")
        plane.api.delete("pods", namespace, "part")
        harness = Harness(plane.keeper_kubeconfig(), namespace, kubernetes={"release": [JOB_TRACKING]})
        harness.later(minutes=30)
        assert "pod/part" in harness.subjects()
        assert len(harness.again().reclaimed) == 1
        assert plane.api.get("pods", namespace, "part") is None
    finally:
        manager.resume()


# Hints


class Ears:
    """Hears what the adapter hints at."""

    def __init__(self, harness: Harness) -> None:
        self._bench = harness
        self.heard: list[Ref | None] = []
        self.watched: list[str] = []  # the paths of watches that began, from a version that is known by then
        cluster: Any = harness.platform._cluster
        watch = cluster.watch

        def noted(path: str, *rest: Any, **options: Any) -> Any:
            self.watched.append(path)
            return watch(path, *rest, **options)

        cluster.watch = noted

    async def watches(self, *kinds: str) -> None:
        """Until these kinds are watched: what happens from now on to their objects is reported."""

        await come_true(lambda: all(map(self.count, kinds)), 120, f"watches of {', '.join(kinds)} begin")

    def count(self, kind: str) -> int:
        """Watches of it that began."""
        return sum(path.endswith(f"/{kind}") for path in list(self.watched))

    async def listen(self) -> None:
        async for hint in self._bench.platform.wake():
            self.heard.append(hint)

    def named(self, name: str) -> Ref | None:
        """A hint that names it."""
        return next((one for one in self.heard if one is not None and f"{one.kind}/{one.name}" == name), None)

    async def until(self, name: str, seconds: float = 120) -> Ref:
        ends = time.monotonic() + seconds
        while True:
            if (found := self.named(name)) is not None:
                return found
            assert time.monotonic() < ends, f"no hint of {name} within {seconds:.0f} s; heard: {self.heard}"
            await asyncio.sleep(0.05)


def listening(harness: Harness, story: Callable[[Ears], Awaitable[None]]) -> None:
    async def tell() -> None:
        ears = Ears(harness)
        task = asyncio.create_task(ears.listen())
        try:
            await ears.watches("pods", "jobs")
            assert not task.done(), task.result()
            await story(ears)
            assert not task.done(), task.result()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(tell())


@pytest.mark.usefixtures("kwok_node")
@pytest.mark.smoke
def test_hints_of_ends_and_marks(plane: ControlPlane, namespace: str) -> None:
    plane.api.create(objects.job("train"), namespace)
    (part,) = plane.api.wait_pods(namespace, 1)
    plane.api.create(unplaced("bare"), namespace)
    harness = Harness(plane.keeper_kubeconfig(), namespace)

    async def story(ears: Ears) -> None:
        ears.heard.clear()
        await asyncio.to_thread(plane.finish_pod, namespace, part["metadata"]["name"])
        job = await ears.until("job/train")
        assert (job.namespace, job.place) == (namespace, harness.platform.place)
        patch = {"status": ending()}
        await asyncio.to_thread(plane.api.patch, "pods", namespace, "bare", patch, subresource="status")
        bare = await ears.until("pod/bare")
        looked = await harness.platform.read(bare)
        assert isinstance(looked, Subject)
        assert looked.state is State.ENDED
        assert f"pod/{part['metadata']['name']}" not in {f"{one.kind}/{one.name}" for one in ears.heard if one}
        ears.heard.clear()
        mark = {"metadata": {"annotations": {"gpukeeper.io/ttl": "1m"}}}
        await asyncio.to_thread(plane.api.patch, "jobs", namespace, "train", mark)
        await ears.until("job/train")
        ears.heard.clear()
        await asyncio.to_thread(plane.api.delete, "pods", namespace, "bare", grace=0)
        await ears.until("pod/bare")

    listening(harness, story)


def test_deletions_that_a_watch_reports_open_no_breaker(plane: ControlPlane, namespace: str) -> None:
    """A daemon believes only after a quarter of an hour that so much is gone; what it saw go it believes at once."""
    names = [f"run-{n}" for n in range(20)]
    for name in names:
        plane.api.create(unplaced(name), namespace)
        plane.api.patch("pods", namespace, name, {"status": {"phase": "Running"}}, subresource="status")
    harness = Harness(plane.keeper_kubeconfig(), namespace, breaker={"running": "50%", "vanished": "50%", "floor": 5})
    harness.keeper.absences.patience = timedelta(hours=1)
    reports = []

    def touched(name: str) -> str:
        plane.api.patch("pods", namespace, name, {"metadata": {"labels": {"touched": str(time.time_ns())}}})
        return name

    async def story(ears: Ears) -> None:
        reports.append(await reclaim(harness.keeper, harness.platform, harness.book))
        await come_true(lambda: touched("run-0") in {one.name for one in ears.heard if one}, 120, "pods are watched")
        path, grace = f"/api/v1/namespaces/{namespace}/pods", {"gracePeriodSeconds": 0}
        await asyncio.to_thread(plane.api.call, "DELETE", path, query=grace)
        await come_true(lambda: len(harness.platform._removals._gone) == len(names), 120, "every deletion was reported")
        reports.append(await reclaim(harness.keeper, harness.platform, harness.book))

    listening(harness, story)
    before, after = reports
    assert before.survey.counts.running == len(names)
    assert (after.plan.breaker, after.survey.counts.vanished) == (None, 0)
    assert harness.run(harness.ledger.present("kubernetes", harness.platform.place)) == {}


def test_hints_come_again_after_the_api_server_was_away(plane: ControlPlane, namespace: str) -> None:
    harness = Harness(plane.keeper_kubeconfig(), namespace)

    async def story(ears: Ears) -> None:
        plane.restart_apiserver()  # from this thread: it ends with the one that started it
        before = ears.count("pods")
        made: list[str] = []

        def hinted() -> bool:
            """A watch that begins hints at what ends from then on; one that fails at once does not, and another one
            begins."""
            if ears.count("pods") - before > len(made):
                made.append(f"late-{len(made)}")
                ended_pod(plane.api, namespace, made[-1])
            return any(ears.named(f"pod/{name}") for name in made)

        await come_true(hinted, 120, "hints come again")

    listening(harness, story)


@pytest.mark.parametrize(
    "fault", [Say(410), Cut(1), Jumble(twice=True), Jumble(swapped=True)], ids=["410", "cut", "twice", "swapped"]
)
def test_hints_come_through_watches_that_break(plane: ControlPlane, namespace: str, fault: Fault) -> None:
    """The first watch of pods breaks; what happened in the gap is hinted at as "look at everything"."""
    broken: list[Asked] = []

    def rule(asked: Asked) -> Fault | None:
        if asked.is_watch and asked.path.endswith("/pods") and not broken:
            broken.append(asked)
            return fault
        return None

    with proxy(plane, rule) as one:
        harness = Harness(plane.kubeconfig(server=one.address), namespace)

        async def story(ears: Ears) -> None:
            for name in ("one", "two"):
                await asyncio.to_thread(ended_pod, plane.api, namespace, name)
            if isinstance(fault, Jumble):
                await ears.until("pod/one")
            else:
                await come_true(lambda: None in ears.heard, 120, "a hint to look at everything")
                await come_true(lambda: ears.count("pods") > 1, 120, "the next watch begins")
            await asyncio.to_thread(ended_pod, plane.api, namespace, "three")
            await asyncio.to_thread(ended_pod, plane.api, namespace, "four")
            await ears.until("pod/three")

        listening(harness, story)
        assert broken


@pytest.mark.parametrize("says", [410, 200], ids=["410", "closed properly"])
def test_a_watch_that_ends_at_once_is_begun_again_after_a_pause(plane: ControlPlane, namespace: str, says: int) -> None:
    """The next, longer pauses: tests/unit/platforms/kubernetes/test_watch.py."""
    with proxy(plane, lambda asked: Say(says) if asked.is_watch else None) as one:
        harness = Harness(plane.kubeconfig(server=one.address), namespace)

        def watches() -> list[Asked]:
            return [asked for asked in list(one.asked) if asked.is_watch and asked.path.endswith("/pods")]

        async def story(ears: Ears) -> None:
            await come_true(lambda: len(watches()) > 1, 120, "it is begun again")

        listening(harness, story)
        first, second, *_ = watches()
        assert second.at - first.at >= RECONNECT[0]


# Only what changed


def serve(harness: Harness, story: Callable[[list[PassReport]], Awaitable[None]]) -> None:
    """The daemon's loop, beside what happens in the cluster."""

    async def tell() -> None:
        stop, reports = asyncio.Event(), list[PassReport]()
        task = asyncio.create_task(watch(Watch(harness.keeper, lambda: harness.book, stop, on_report=reports.append)))
        try:
            await story(reports)
            assert not task.done(), task.result()
        finally:
            stop.set()
            await task

    asyncio.run(tell())


async def come_true(read: Callable[[], object], seconds: float, words: str) -> float:
    """How long it took."""
    began = time.monotonic()
    while not await asyncio.to_thread(read):
        assert time.monotonic() - began < seconds, f"not within {seconds:.0f} s: {words}"
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def watched_kinds(harness: Harness, namespace: str) -> set[str]:
    """The paths of all that the API server serves and gpukeeper watches."""
    discovery = harness.platform._discovery
    async with harness.cluster.opened():
        served = [(kind, await discovery.served(kind)) for kind in KINDS_OF_GPUKEEPER if kind.watched]
    return {kind.path(version, namespace) for kind, version in served if isinstance(version, str)}


def watched(one: Proxy) -> set[str]:
    return {asked.path for asked in list(one.asked) if asked.is_watch}


def whole_looks(one: Proxy) -> int:
    """Only a look at everything lists Deployments."""
    return sum(asked.path.endswith("/deployments") for asked in one.lists())


@pytest.mark.usefixtures("kwok_node")
def test_what_finishes_goes_after_its_ttl_without_a_read_of_everything(plane: ControlPlane, namespace: str) -> None:
    for name in ("one", "two"):
        made = objects.job(name)
        made["metadata"]["annotations"] = {"gpukeeper.io/ttl": "3s"}
        plane.api.create(made, namespace)
    plane.api.create(objects.pod("bare", annotations={"gpukeeper.io/ttl": "3s"}), namespace)
    pods = {pod["metadata"]["name"] for pod in plane.api.wait_pods(namespace, 3)}
    with proxy(plane) as between:
        harness = Harness(plane.kubeconfig(server=between.address), namespace, schedule={"every": "10m"})

        async def story(reports: list[PassReport]) -> None:
            wanted = await watched_kinds(harness, namespace)
            await come_true(lambda: len(reports) > 0, 120, "a first pass")
            await come_true(lambda: wanted <= watched(between), 120, "everything is watched")
            between.forget()
            reports.clear()
            for name in pods - {"bare"}:
                await asyncio.to_thread(plane.finish_pod, namespace, name)
            await asyncio.to_thread(plane.finish_pod, namespace, "bare")
            left = lambda: not plane.api.list("jobs", namespace) and not plane.api.list("pods", namespace)  # noqa: E731
            seconds = await come_true(left, 120, "all of them are gone")
            assert seconds + 1 >= 3, "not before its time"
            await come_true(lambda: sum(len(one.reclaimed) for one in reports) == 3, 120, "all three are told of")
            assert (whole_looks(between), all(not one.survey.whole for one in reports)) == (0, True)

        serve(harness, story)
    everything = [asked for asked in between.lists() if "labelSelector" not in asked.query]
    assert {asked.path.rpartition("/")[2] for asked in everything} <= {"events"}, [one.path for one in everything]


def test_after_a_gap_everything_is_read_again(plane: ControlPlane, namespace: str) -> None:
    """What ended while nobody could hear of it goes at once when the API server is back."""
    ended_pod(plane.api, namespace, "stays")
    harness = Harness(plane.keeper_kubeconfig(), namespace, schedule={"every": "10m"})

    ears = Ears(harness)

    async def story(reports: list[PassReport]) -> None:
        await come_true(lambda: len(reports) > 0, 120, "a first pass")
        await ears.watches("pods")
        plane.restart_apiserver()  # from this thread: it ends with the one that started it
        await asyncio.to_thread(ended_pod, plane.api, namespace, "goes", annotations={"gpukeeper.io/ttl": "0s"})
        await come_true(lambda: plane.api.names("pods", namespace) == {"stays"}, 120, "what is due goes")

    serve(harness, story)
    assert timedelta(minutes=10) == harness.book.policy.schedule.every


# A look and a list. Last: a server with many kinds takes long to start again.


def one_of_each(plane: ControlPlane, namespace: str) -> None:
    """Running, ended, waiting; with children, without, and with children that outlived it."""
    done, failed = {"test/exit-code": "0"}, {"test/exit-code": "1"}
    stateful = objects.deployment("runs", gpus=2)
    stateful["kind"] = "StatefulSet"
    stateful["spec"] |= {"serviceName": "runs"}
    stateful["spec"]["selector"]["matchLabels"] = stateful["spec"]["template"]["metadata"]["labels"] = {"app": "set"}
    suspended = objects.job("suspended")
    suspended["spec"]["suspend"] = True
    ray_job = {
        "kind": "RayJob",
        "metadata": {"name": "runs"},
        "spec": {"entrypoint": "python train.py", "rayClusterSpec": objects.ray_cluster("unused")["spec"]},
    }
    for made in (
        objects.pod("runs", gpus=2, annotations={"gpukeeper.io/owner": "ann"}, labels={"team": "a"}),
        objects.pod("ended", annotations={**done, "gpukeeper.io/ttl": "3h"}),
        objects.pod("waits", annotations={"test/starts": "never"}),
        objects.job("runs", parallelism=2),
        objects.job("ended", annotations=done, ttl=3600),
        objects.job("failed", annotations=failed),
        suspended,
        objects.deployment("runs", replicas=2),
        stateful,
        objects.jobset("runs", replicas=2),
        objects.jobset("ended", annotations=done),
        objects.training_runtime("torch"),
        objects.train_job("runs", "torch", nodes=2),
        objects.pytorch_job("runs"),
        objects.pytorch_job("zombie"),
        objects.ray_cluster("runs"),
        ray_job,
    ):
        plane.api.create(made, namespace)
    api = plane.api
    api.wait_condition("jobs", namespace, "ended", "Complete")
    api.wait_condition("jobs", namespace, "failed", "Failed")
    api.wait_condition("jobsets", namespace, "ended", "Completed")
    api.wait_for("pods", namespace, "zombie-master-0", lambda pod: pod and pod["status"].get("podIP"))
    plane.finish_pod(namespace, "zombie-master-0")
    api.wait_condition("pytorchjobs", namespace, "zombie", "Succeeded")
    api.wait_for("rayjobs", namespace, "runs", lambda job: job and job.get("status", {}).get("rayClusterName"))


def differences(harness: Harness) -> dict[str, dict[str, Any]]:
    """By name: each field that a list and a look tell differently, but for the time of looking. What a list does not
    count, to stay small, is unknown there: that is no contradiction."""

    async def story() -> dict[str, dict[str, Any]]:
        listed = [
            one
            async for page in harness.platform.observe(harness.book.policy.scope["kubernetes"])
            for one in page.subjects
        ]
        found: dict[str, dict[str, Any]] = {f"{one.ref.kind}/{one.ref.name}": {} for one in listed}
        for one in listed:
            looked = await harness.platform.read(one.ref)
            assert isinstance(looked, Subject), looked
            looked = msgspec.structs.replace(looked, seen=msgspec.structs.replace(looked.seen, at=one.seen.at))
            for name in one.__struct_fields__:
                if name == "dead_children" and isinstance(one.dead_children, Unknown):
                    assert harness.book.policy.at_finish is not AtFinish.ALL, one.dead_children
                    continue
                if getattr(one, name) != getattr(looked, name):
                    where = found[f"{one.ref.kind}/{one.ref.name}"]
                    where[name] = f"listed {getattr(one, name)!r}, looked at {getattr(looked, name)!r}"
        return found

    return harness.run(story())


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("training_operator", "kuberay")
def test_a_list_and_a_read_say_the_same(trainer_v23: ControlPlane, namespace: str) -> None:
    plane = trainer_v23
    node = f"node-{namespace}"
    plane.gpu_node(node, gpus=64)
    try:
        one_of_each(plane, namespace)
        for at_finish in ("All", "Running"):
            harness = Harness(plane.keeper_kubeconfig(), namespace, at_finish=at_finish)
            ends, found = time.monotonic() + 120, differences(harness)
            while any(found.values()) and time.monotonic() < ends:  # controllers write while we look
                time.sleep(0.2)
                found = differences(harness)
            assert found.keys() >= KINDS, KINDS - found.keys()
            assert {name: fields for name, fields in found.items() if fields} == {}, at_finish
    finally:
        plane.remove_node(node)
