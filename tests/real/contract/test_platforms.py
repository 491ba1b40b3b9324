"""The contract of `tests/contract`, kept by the adapters that need an engine: the same tests, on real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from gpukeeper.clients.docker import Engine
from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.model.policy import PlaceScope, Policy
from gpukeeper.platforms.docker.adapter import DockerPlatform
from gpukeeper.platforms.kubernetes.adapter import KubernetesPlatform
from tests.contract.test_platforms import *  # noqa: F403
from tests.contract.test_platforms import Made, Now
from tests.real.docker.private_engine import PrivateEngine
from tests.real.kube import objects
from tests.real.kube.control_plane import ControlPlane

pytestmark = pytest.mark.smoke


def containers(engine: PrivateEngine) -> Made:
    """Containers that ended, owned by somebody whom every machine knows. No GPUs."""

    async def no_gpus() -> tuple[GpuFacts, ...]:
        return ()

    def over(name: str) -> None:
        engine.until(lambda: engine.state(name) == "exited", f"{name} ended")

    def add(name: str) -> None:
        engine.run(name, cmd=["sh", "-c", "echo here; exit 0"], labels={"owner": "nobody"})
        over(name)

    def replace(name: str) -> None:
        engine.remove_container(name)
        add(name)

    def change(name: str) -> None:
        before = engine.inspect(name)
        engine.start_container(name)
        engine.until(lambda: engine.inspect(name) != before, f"{name} ran again")
        over(name)

    add("one"), add("two")
    platform = DockerPlatform(Engine(engine.host, {}), "here", Now(), no_gpus, Policy(owner_labels=("owner",)))
    return Made(platform, asyncio.run, replace, change, ("one", "two"), engine.clear)


def cluster(plane: ControlPlane) -> Made:
    """Jobs that ended, in a namespace of their own."""
    namespace = plane.new_namespace("c")
    node = f"node-{namespace}"
    plane.gpu_node(node)

    def add(name: str) -> None:
        job = objects.job(name)
        job["metadata"]["labels"] = {"owner": "nobody"}
        plane.api.create(job, namespace)
        (pod,) = plane.api.wait_pods(namespace, 1, timeout=40)
        plane.finish_pod(namespace, pod["metadata"]["name"])
        plane.api.wait_condition("jobs", namespace, name, "Complete")

    def replace(name: str) -> None:
        plane.api.delete("jobs", namespace, name, propagation="Background")
        plane.api.wait_gone("jobs", namespace, name)
        add(name)

    def change(name: str) -> None:
        plane.api.patch("jobs", namespace, name, {"metadata": {"annotations": {"gpukeeper.io/ttl": "30d"}}})

    def close() -> None:
        plane.drop_namespace(namespace)
        plane.remove_node(node)

    names = (f"one-{namespace}", f"two-{namespace}")  # other namespaces may still be on their way out
    add(names[0]), add(names[1])
    scope = {"kubernetes": PlaceScope(namespaces=(namespace,))}
    client = Cluster.from_environment({"KUBECONFIG": str(plane.kubeconfig())}, None, 1000, 1000)
    platform = KubernetesPlatform(client, Now(), Policy(scope=scope, owner_labels=("owner",)))
    return Made(platform, asyncio.run, replace, change, names, close)


@pytest.fixture(params=["docker", "kubernetes", "podman"])
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    if request.param == "kubernetes":
        made = cluster(request.getfixturevalue("plane"))
    else:
        made = containers(request.getfixturevalue(request.param))
    yield made
    made.close()
