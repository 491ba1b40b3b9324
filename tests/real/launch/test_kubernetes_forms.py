"""Every form with its real controller: created, scheduled, ended, read, removed; nothing is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpukeeper.acceptance.fleet.launcher import Phase
from tests.real.kube.control_plane import ControlPlane
from tests.real.launch.beds import Bed
from tests.smoke import smoke

CONTROLLERS = {
    "job": (),
    "daemonset": (),
    "indexed-job": (),
    "statefulset": (),
    "jobset": ("jobset",),
    "pytorchjob": ("training-operator",),
    "trainjob": ("jobset", "trainer-v2.3.0"),
}


@pytest.mark.parametrize("form", smoke(CONTROLLERS, "indexed-job".__eq__))
def test_a_run_over_two_nodes_from_start_to_nothing(plane: ControlPlane, bed: Callable[[int], Bed], form: str) -> None:
    for one in CONTROLLERS[form]:
        plane.need(one)
    made = bed(2)
    made.start(made.spec(form=form, together=form != "daemonset"))
    plane.until(lambda: len([one for one in made.pods() if one["spec"].get("nodeName")]) == 2, "two pods have a node")
    assert {one["spec"]["nodeName"] for one in made.pods()} == set(made.nodes)
    if form not in {"daemonset", "statefulset"}:
        made.until_all(Phase.RUNNING)
        for pod in made.pods():
            made.finish(pod)
    states = made.until_all(Phase.ENDED)
    assert {one.code for one in states.values()} == {""}
    node = made.nodes[0]
    output = made.tell(lambda launcher: launcher.output(made.spec(form=form), node))
    assert isinstance(output, bytes)
    assert b"step 3 loss" in output
    (summary,) = made.tell(lambda launcher: launcher.runs())
    assert (summary.spec.run, summary.spec.form) == ("r1", form)
    removal = made.tell(lambda launcher: launcher.remove("r1"))
    assert set(removal.removed) == set(summary.objects)
    assert not removal.left
    plane.until(lambda: not made.left(form), "nothing is left")
    assert made.tell(lambda launcher: launcher.run("r1")) is None


def test_a_runtime_for_tensorflow_gets_its_variables_from_the_manifest(
    plane: ControlPlane, bed: Callable[[int], Bed]
) -> None:
    for one in CONTROLLERS["trainjob"]:
        plane.need(one)
    made = bed(2)
    made.start(made.spec(form="trainjob", port=2222, together=True), framework="tensorflow")
    made.until_all(Phase.RUNNING)
    for pod in made.pods():
        (container,) = pod["spec"]["containers"]
        given = {one["name"]: one.get("value") for one in container["env"]}
        assert not [name for name in given if name.startswith("PET_")]
        assert (given["MASTER_PORT"], given["GPUKEEPER_GROUP_SIZE"]) == ("2222", "2")
        host, _, service = str(given["MASTER_ADDR"]).partition(".")
        assert host in {f"{one['spec']['hostname']}" for one in made.pods()}
        assert {one["spec"]["subdomain"] for one in made.pods()} == {service}
    assert not made.tell(lambda launcher: launcher.remove("r1")).left


def test_starting_again_creates_nothing_and_a_foreign_object_stays(bed: Callable[[int], Bed]) -> None:
    made = bed(3)
    api, namespace = made.plane.api, made.namespace
    foreign = {"kind": "Service", "metadata": {"name": "web", "labels": {"app": "gpu-accept-ddp"}}}
    api.create({**foreign, "spec": {"clusterIP": "None", "selector": {"app": "web"}}}, namespace)
    spec = made.spec(together=True)
    made.start(spec)
    uids = {one["metadata"]["uid"] for one in api.list("jobs", namespace)}
    made.start(spec)
    assert {one["metadata"]["uid"] for one in api.list("jobs", namespace)} == uids
    service = next(one for one in api.list("services", namespace) if one["metadata"]["name"] != "web")
    assert [one["kind"] for one in service["metadata"]["ownerReferences"]] == ["Job"]
    made.start(made.spec("r2"), busy="wait")  # its pods wait for the GPUs of r1
    made.tell(lambda launcher: launcher.remove("r1"))
    assert api.names("services", namespace) == {"web"}
    assert len(api.names("jobs", namespace)) == 3
    made.tell(lambda launcher: launcher.remove("r2"))
