"""Nodes of KWOK and a launcher for them. What the pods do is decided by the test, as their node would report it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from gpukeeper.acceptance.fleet.launcher import NodeStatus, Phase, RunSpec
from gpukeeper.acceptance.launchers.kubernetes import objects
from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher
from gpukeeper.clients.kubernetes.api import Api
from gpukeeper.clients.kubernetes.connect import Cluster
from tests.real.kube.api import Object, Objects, condition
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.nodes import GPU

T = TypeVar("T")
KINDS = ("jobs", "daemonsets", "statefulsets", "services", "pods")
OPTIONAL = {
    "jobset": ("jobsets",),
    "trainjob": ("jobsets", "trainjobs", "trainingruntimes"),
    "pytorchjob": ("pytorchjobs",),
}
WORKERS = 8


def make_nodes(plane: ControlPlane, stem: str, count: int) -> list[str]:
    """All at once, and then ready."""
    plane.need("kwok")
    names = [f"{stem}-{number:03}" for number in range(count)]
    room = {"cpu": "64", "memory": "512Gi", "pods": "110", GPU: "8"}

    def make(name: str) -> None:
        labels = {"type": "kwok", "kubernetes.io/hostname": name, "test/bed": stem}
        plane.api.create({"kind": "Node", "metadata": {"name": name, "labels": labels}})
        plane.api.patch("nodes", None, name, {"status": {"capacity": room, "allocatable": room}}, subresource="status")

    at_once(make, names)

    def ready() -> bool:
        plane.need("kwok")  # see gpu_node
        found = plane.api.list("nodes", labels=f"test/bed={stem}")
        good = [one for one in found if condition(one, "Ready") == "True" and not one["spec"].get("taints")]
        return len(good) == count

    plane.until(ready, f"{count} nodes are ready")
    return names


def at_once(what: Callable[[Any], object], items: Any) -> None:
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(what, items))


@dataclass(frozen=True)
class Bed:
    plane: ControlPlane
    namespace: str
    nodes: tuple[str, ...]

    def spec(self, run: str = "r1", **changes: Any) -> RunSpec:
        given = {"run": run, "owner": "ann", "created": datetime.now(UTC), "engine": "kubernetes"}
        more = {"image": "local/busybox:1", "selector": f"test/bed={self.namespace}"}
        return RunSpec(**{**given, **more, **changes})

    def tell(self, story: Callable[[KubernetesLauncher], Awaitable[T]], user: str = "admin", **options: str) -> T:
        """With a launcher of its own, as another command would have."""

        async def whole() -> T:
            environ = {"KUBECONFIG": str(self.plane.kubeconfig(user, namespace=self.namespace))}
            api = Api(Cluster.from_environment(environ, None, 1000, 1000))
            launcher = KubernetesLauncher(api, options)
            try:
                return await story(launcher)
            finally:
                await launcher.close()

        return asyncio.run(whole())

    def start(self, spec: RunSpec, **options: str) -> None:
        async def story(launcher: KubernetesLauncher) -> None:
            await launcher.start(spec, await launcher.targets(spec))

        self.tell(story, **options)

    def states(self, run: str = "r1") -> dict[str, NodeStatus]:
        summary = self.tell(lambda launcher: launcher.run(run))
        return {one.node: one for one in summary.nodes} if summary else {}

    def until_all(self, phase: Phase, run: str = "r1", count: int | None = None) -> dict[str, NodeStatus]:
        wanted = len(self.nodes) if count is None else count

        def read() -> dict[str, NodeStatus]:
            found = self.states(run)
            return found if sum(one.phase is phase for one in found.values()) >= wanted else {}

        return self.plane.until(read, f"{wanted} nodes are {phase}")

    def pods(self, run: str = "r1") -> Objects:
        return self.plane.api.list("pods", self.namespace, labels=f"{objects.RUN_LABEL}={run}")

    def finish(self, pod: Object, code: int = 0) -> None:
        """The node lets its program end."""
        told = {"metadata": {"annotations": {"test/exit-code": str(code)}}}
        self.plane.api.patch("pods", self.namespace, pod["metadata"]["name"], told)

    def left(self, form: str = "") -> list[str]:
        """Everything in the namespace that a run of this form could have made."""
        kinds = (*KINDS, *OPTIONAL.get(form, ()))
        return [f"{kind}/{name}" for kind in kinds for name in self.plane.api.names(kind, self.namespace)]
