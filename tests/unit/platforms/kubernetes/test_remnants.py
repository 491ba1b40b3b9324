"""Services of acceptance runs whose pods are gone: reported, and only where that is certain."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gpukeeper.model.decision import Action, Refused
from gpukeeper.model.subject import Gone, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.marks import NamespaceFacts, TranslationSettings
from gpukeeper.platforms.kubernetes.walk import Service, WalkSettings, read_service, service_subject, services_of_runs
from tests.unit.platforms.kubernetes.examples import AT, NOW, ago, meta
from tests.unit.platforms.kubernetes.stored_cluster import StoredCluster, forbidden
from tests.unit.platforms.kubernetes.test_owners import thing
from tests.unit.platforms.kubernetes.test_review import Lab, platform_of, step

Told = dict[str, Any]
DDP = {"app": "gpu-accept-ddp"}
HEADLESS = {"clusterIP": "None", "selector": DDP}
NEEDS = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "x", "uid": "x", "controller": True}


def service(spec: Told | None = None, **parts: Any) -> Told:
    parts = {"name": "ddp", "uid": "s-1", "labels": DDP, "creationTimestamp": ago(days=3), **parts}
    return {"kind": "Service", "metadata": meta(**parts), "spec": HEADLESS if spec is None else spec}


def found(*objects: Told, namespaces: tuple[str, ...] = ("team-a",), refuse: str = "") -> list[Service]:
    cluster = StoredCluster(*objects)
    if refuse:
        cluster.refused[refuse] = forbidden(refuse)

    async def all_() -> list[Service]:
        wanted = WalkSettings(namespaces, {}, TranslationSettings())
        return [one async for one in services_of_runs(cluster.as_cluster, wanted, NOW)]

    return asyncio.run(all_())


@pytest.mark.parametrize("app", ["gpu-accept-ddp", "gpu-acceptance-test"])
def test_a_headless_service_without_its_pods_is_reported_with_the_command_to_delete_it(app: str) -> None:
    (left,) = found(service(labels={"app": app, "owner": "ann"}))
    told = service_subject(left, NamespaceFacts(), AT, TranslationSettings(owner_labels=("owner",)))
    assert (told.shape, told.owner, told.ref.path) == (Shape.REMNANT, "ann", "kubernetes/lab/team-a/service/ddp")
    assert told.findings == (
        f"a headless Service of an acceptance run (app={app}), created 3d ago, owner ann: no pod of the run is left."
        " gpukeeper does not remove Services; delete it with kubectl -n team-a delete service ddp",
    )


def test_nobody_known_owns_one_without_a_label() -> None:
    (left,) = found(service(), namespaces=("team-*",))
    assert "owner unknown" in service_subject(left, NamespaceFacts(), AT, TranslationSettings()).findings[0]


@pytest.mark.parametrize(
    "one",
    [
        service(creationTimestamp=ago(hours=23)),  # its run may just be about to begin
        service(creationTimestamp=None),
        service(labels={"app": "web"}),
        service({"clusterIP": "10.0.0.1", "selector": DDP}),
        service({"clusterIP": "None"}),  # which pods are its, nobody says
        service(ownerReferences=[NEEDS]),  # it goes with its owner
        service(deletionTimestamp=ago(seconds=5)),
        service(annotations={"gpukeeper.io/run-ended": "yesterday"}),
        service(namespace="team-b"),
    ],
)
def test_others_are_not_reported(one: Told) -> None:
    assert found(one) == []
    assert found(one, namespaces=("team-a*",)) == []


def test_the_recorded_end_of_its_run_counts_before_a_day() -> None:
    young = service(creationTimestamp=ago(hours=2), annotations={"gpukeeper.io/run-ended": ago(hours=1)})
    assert len(found(young)) == 1


def test_a_pod_of_its_run_keeps_it_from_being_reported() -> None:
    assert found(service(), thing("Pod", "rank-0", labels=DDP)) == []
    assert len(found(service(), thing("Pod", "other", labels={"app": "web"}))) == 1


@pytest.mark.parametrize("refuse", ["/services", "/pods"])
def test_without_the_rights_nothing_is_reported(refuse: str) -> None:
    assert found(service(), refuse=refuse) == []


def test_one_is_read_by_its_uid() -> None:
    ref = service_subject(found(service())[0], NamespaceFacts(), AT, TranslationSettings()).ref

    def again(*objects: Told) -> object:
        return asyncio.run(read_service(StoredCluster(*objects).as_cluster, ref, NOW))

    assert isinstance(again(service()), Service)
    assert isinstance(again(), Gone)
    assert isinstance(again(service(uid="s-2")), Gone)
    assert isinstance(again(service(), thing("Pod", "rank-0", labels=DDP)), Unknown)


class Observed(Lab):
    async def get(self, path: str, type_: Any, **query: object) -> Any:
        return msgspec.Raw(b"{}") if path == "/version" else await super().get(path, type_, **query)


def test_it_is_shown_by_the_platform_and_offers_no_verb() -> None:
    lab = Observed(service())
    platform = platform_of(lab)

    async def all_() -> list[Subject]:
        scope = platform._policy.scope["kubernetes"]
        return [one async for page in platform.observe(scope) for one in page.subjects]

    (shown,) = asyncio.run(all_())
    assert shown.shape is Shape.REMNANT
    looked = asyncio.run(platform.read(shown.ref))
    assert isinstance(looked, Subject)
    assert looked.findings == shown.findings
    assert isinstance(asyncio.run(platform.act(step(shown, Action.REMOVE), shown)), Refused)
    assert isinstance(asyncio.run(platform.hold(shown, NOW)), Refused)
    assert isinstance(asyncio.run(platform.capture(shown, ("logs",))), Unknown)
    assert lab.sent == []

    lab.refused["/pods"] = forbidden("pods")
    lab.asked.clear()
    assert asyncio.run(all_()) == []
    assert not [path for path in lab.asked if "/services" in path], "which pods are left is unknown"
