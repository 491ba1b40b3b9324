"""The launcher over a cluster in memory: start, find again, read, remove."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpukeeper.acceptance.fleet.launcher import Launcher, Phase
from gpukeeper.acceptance.launchers.kubernetes import objects
from gpukeeper.acceptance.launchers.kubernetes.launcher import read_log
from gpukeeper.clients.kubernetes.api import JOBS, SERVICES, Resource
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.kubernetes.clusters import add_pod, cluster, ended, launcher, run, spec
from tests.unit.clients.kubernetes.memory_api import MemoryApi

FORMS_TOGETHER = ("indexed-job", "statefulset", "pytorchjob", "trainjob", "jobset")


def started(api: MemoryApi, **changes: Any) -> Launcher:
    made, wanted = launcher(api), spec(**changes)
    run(made.start(wanted, run(made.targets(wanted))))
    return made


def test_start_creates_one_job_for_each_node_and_again_creates_nothing() -> None:
    api = cluster("a", "b", "c")
    started(api)
    made = {one["metadata"]["annotations"][objects.NODE_ANNOTATION]: one["metadata"]["uid"] for one in api.of(JOBS)}
    assert sorted(made) == ["a", "b", "c"]
    api.remove(JOBS, objects.name_of("r1", "b"))
    started(api)
    again = {one["metadata"]["annotations"][objects.NODE_ANNOTATION]: one["metadata"]["uid"] for one in api.of(JOBS)}
    assert again["a"] == made["a"]
    assert sorted(again) == ["a", "b", "c"]


def test_512_jobs_are_created_with_a_bounded_number_of_requests_at_once() -> None:
    api = cluster(*(f"gpu-{number:03}" for number in range(512)))
    now, most = 0, 0
    create = api.create

    async def slow(*args: Any, **how: Any) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return await create(*args, **how)

    api.create = slow  # type: ignore[method-assign]
    started(api)
    assert len(api.of(JOBS)) == 512
    assert 1 < most <= 32
    assert api.asked["create"] == 512
    assert api.requests < 512 + 8


def test_requests_for_a_status_do_not_grow_with_the_nodes() -> None:
    counts = []
    for size in (4, 64):
        api = cluster(*(f"gpu-{number:03}" for number in range(size)))
        made = started(api)
        for job in api.of(JOBS):
            add_pod(api, job, f"{job['metadata']['name']}-x", phase="Pending", node="")
        api.asked.clear()
        summary = run(made.run("r1"))
        assert summary is not None
        assert len(summary.nodes) == size
        counts.append(api.requests)
    assert counts[0] == counts[1]
    assert counts[0] <= 12


def test_a_run_is_found_from_another_machine_with_all_its_nodes() -> None:
    api = cluster("a", "b", "c", "d", "e")
    started(api, nodes=("a", "b", "c", "d", "e"), arguments=("--within", "5m"))
    api.remove(JOBS, objects.name_of("r1", "a"))  # one with all names is gone
    (summary,) = run(launcher(api).runs())
    assert summary.spec == spec(nodes=("a", "b", "c", "d", "e"), arguments=("--within", "5m"), form="job")
    assert [(one.node, one.phase, one.code) for one in summary.nodes][:2] == [
        ("a", Phase.GONE, "vanished"),
        ("b", Phase.WAITING, "never-created"),
    ]
    assert len(summary.objects) == 4


def test_only_the_namespace_of_the_launcher_is_read() -> None:
    api = cluster("a")
    started(api)
    api.forbidden = lambda verb, resource, namespace: not namespace
    (summary,) = run(launcher(api).runs())
    assert summary.spec.run == "r1"
    assert run(launcher(api, namespace="lab").runs()) == ()
    assert run(launcher(api, namespace="lab").run("r1")) is None
    api.forbidden = lambda verb, resource, namespace: True
    assert isinstance(run(launcher(api).runs()), Unknown)
    with pytest.raises(PlatformError):
        run(launcher(api).run("r1"))


@pytest.mark.parametrize("form", FORMS_TOGETHER)
def test_every_object_goes_and_nothing_else(form: str) -> None:
    api = cluster("a", "b")
    other = spec(run="r2")
    run(launcher(api).start(other, run(launcher(api).targets(other))))
    foreign = api.add(SERVICES, {"metadata": {"name": "web", "labels": {"app": "gpu-accept-ddp"}}})
    labelled = api.add(
        JOBS, {"metadata": {"name": "copied", "labels": {objects.ACCEPTANCE_LABEL: "run", objects.RUN_LABEL: "r1"}}}
    )
    before = len(api.objects)
    made = started(api, form=form)
    assert len(api.objects) > before
    removal = run(made.remove("r1"))
    assert len(api.objects) == before
    assert foreign in api.of(SERVICES)
    assert labelled in api.of(JOBS)
    assert removal.removed
    assert [name for name, _ in removal.left] == ["job/copied"]
    again = run(made.remove("r1"))
    assert not again.removed


def test_what_stays_is_reported_and_not_called_removed() -> None:
    api = cluster("a", "b")
    made = started(api)
    stuck = objects.name_of("r1", "b")

    def fail(verb: str, resource: Resource, name: str) -> Exception | None:
        return ApiError(403, "", "an admission webhook denied it") if verb == "delete" and name == stuck else None

    api.fail = fail
    removal = run(made.remove("r1"))
    assert removal.removed == (f"job/{objects.name_of('r1', 'a')}",)
    assert removal.left == ((f"job/{stuck}", "the cluster answered 403: an admission webhook denied it"),)


def test_pods_that_end_slowly_are_waited_for_and_then_named() -> None:
    api = cluster("a")
    made = started(api)
    (job,) = api.of(JOBS)
    add_pod(api, job, "slow", node="a")
    api.slow = {"slow"}
    removal = run(made.remove("r1"))
    assert removal.left == (("pod/slow", "it is still being removed"),)


def test_the_service_is_owned_by_the_first_root_from_its_first_moment() -> None:
    api = cluster("a", "b")
    owners: dict[str, int] = {}
    api.created = lambda resource, one: owners.update({resource.kind: len(one["metadata"].get("ownerReferences", ()))})
    started(api, together=True)
    assert owners == {"Job": 0, "Service": 1}
    assert api.asked["patch"] == 0
    (service,) = api.of(SERVICES)
    first = api.objects[(JOBS.words, "default", objects.name_of("r1", "a"))]
    assert [one["uid"] for one in service["metadata"]["ownerReferences"]] == [first["metadata"]["uid"]]
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_a_service_that_was_applied_before_its_root_gets_its_owner() -> None:
    api = cluster("a", "b")
    made, wanted = launcher(api), spec(form="statefulset")
    for one in YAML(typ="safe").load_all(made.render(wanted, run(made.targets(wanted)))):
        if one["kind"] == "Service":
            api.add(SERVICES, one)
    started(api, form="statefulset")
    (service,) = api.of(SERVICES)
    assert len(service["metadata"]["ownerReferences"]) == 1


def test_the_log_is_read_to_its_end_in_parts_and_with_the_container_before() -> None:
    api = cluster("a")
    made = started(api)
    (job,) = api.of(JOBS)
    add_pod(api, job, "p", node="a", phase="Running", state={"running": {}}, restarts=1)
    text = b"".join(b"line %d of a log\n" % number for number in range(200))
    api.logs[("default", "p", False)] = text
    api.logs[("default", "p", True)] = b"before\n"
    assert run(made.output(spec(), "a")) == b"before\n" + text
    assert run(read_log(api, "p", "default", "accept", part=500)) == text
    assert isinstance(run(made.output(spec(), "z")), Unknown)


def test_the_log_of_every_attempt_is_read() -> None:
    api = cluster("a")
    made = started(api)
    (job,) = api.of(JOBS)
    for number in (1, 2):
        add_pod(api, job, f"p{number}", node="a", phase="Failed", state=ended(137))
        api.logs[("default", f"p{number}", False)] = b"attempt %d\n" % number
    assert run(made.output(spec(), "a")) == b"attempt 1\nattempt 2\n"
    del api.logs[("default", "p2", False)]
    assert run(made.output(spec(), "a")) == b"attempt 1\n"


def test_a_kind_that_is_not_installed_is_a_usage_error_and_creates_nothing() -> None:
    api = cluster("a")
    api.missing = {"pytorchjobs.kubeflow.org"}
    before = dict(api.objects)
    with pytest.raises(UsageError, match="training operator, or use --as job"):
        started(api, form="pytorchjob")
    assert api.objects == before
    assert run(launcher(api).runs()) == ()


def test_a_refused_first_object_ends_the_start_and_a_later_one_names_how_many() -> None:
    api = cluster("a", "b", "c")
    api.forbidden = lambda verb, resource, namespace: verb == "create"
    with pytest.raises(ApiError):
        started(api)
    assert api.asked["create"] == 1
    api.forbidden = lambda verb, resource, namespace: False
    api.fail = lambda verb, resource, name: PlatformError("down") if name.endswith("-c") else None
    with pytest.raises(PlatformError, match=r"1 of 3 objects .* down\. The others run"):
        started(api)
    assert len(api.of(JOBS)) == 2


def test_an_object_of_that_name_that_is_not_ours_is_not_taken_for_it() -> None:
    api = cluster("a")
    api.add(JOBS, {"metadata": {"name": objects.name_of("r1", "a")}})
    with pytest.raises(PlatformError, match="is not one of run r1"):
        started(api)


def test_rendered_is_what_start_creates() -> None:
    api = cluster("a", "b")
    made, wanted = launcher(api), spec(form="statefulset")
    targets = run(made.targets(wanted))
    rendered = list(YAML(typ="safe").load_all(made.render(wanted, targets)))
    run(made.start(wanted, targets))
    stored = [one for key, one in api.objects.items() if key[0] != "nodes"]
    for one in stored:
        for name in ("uid", "resourceVersion", "creationTimestamp", "ownerReferences"):
            one["metadata"].pop(name, None)
    assert sorted(stored, key=str) == sorted(rendered, key=str)
