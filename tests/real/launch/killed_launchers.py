"""A launcher for Kubernetes that kills itself at a named point of its requests, and logs with reports for its nodes.

Nodes are KWOK's: their pods end by themselves, and all of them have one log. It has the frames of every run and node of
the test; a reader takes those of its own run and node.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gpukeeper.acceptance.fleet.collect import encode_frames
from gpukeeper.acceptance.fleet.launcher import RunSpec
from gpukeeper.acceptance.launchers.kubernetes.launcher import KubernetesLauncher
from gpukeeper.clients.kubernetes.api import Api, Listing, Manifest, Resource
from gpukeeper.clients.kubernetes.connect import Cluster
from tests.real.kube.nodes import DEFAULT_LOG
from tests.real.kube.runs import SUCCEEDS
from tests.real.launch.beds import Bed
from tests.real.launch.passes import Moment, Point, launch

T = TypeVar("T")
NOWHERE = Point("none", Moment.BEFORE, 0)


class KilledApi(Api):
    """Operations are named as in "create services" and "log"."""

    def __init__(self, cluster: Cluster, point: Point) -> None:
        super().__init__(cluster)
        self._point = point

    async def list(
        self, resource: Resource, type_: type[T], *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> Listing[T]:
        given = {"namespace": namespace, "labels": labels, "fields": fields}
        return await self._point.around(f"list {resource.plural}", lambda: Api.list(self, resource, type_, **given))

    async def create(
        self, resource: Resource, manifest: Manifest, type_: type[T], *, namespace: str = "", dry_run: bool = False
    ) -> T:
        return await self._point.around(
            f"create {resource.plural}",
            lambda: Api.create(self, resource, _ends(manifest), type_, namespace=namespace, dry_run=dry_run),
        )

    async def delete(self, resource: Resource, name: str, uid: str, **more: Any) -> bool:
        return await self._point.around(
            f"delete {resource.plural}", lambda: Api.delete(self, resource, name, uid, **more)
        )

    async def log(self, name: str, **more: Any) -> bytes:
        return await self._point.around("log", lambda: Api.log(self, name, **more))


def _ends(manifest: Manifest) -> dict[str, Any]:
    """Its pods end by themselves, and well."""
    made: dict[str, Any] = copy.deepcopy(dict(manifest))
    template = made.get("spec", {}).get("template")
    if template is not None:
        template["metadata"]["annotations"] |= SUCCEEDS
    return made


def killed_launcher(bed: Bed, point: Point, **options: str) -> KubernetesLauncher:
    environ = {"KUBECONFIG": str(bed.plane.kubeconfig("admin", namespace=bed.namespace))}
    return KubernetesLauncher(KilledApi(Cluster.from_environment(environ, None, 1000, 1000), point), options)


def until_killed(bed: Bed, spec: RunSpec, point: Point, into: Path, **options: str) -> None:
    """To be called in a process of its own."""
    asyncio.run(launch(killed_launcher(bed, point, **options), spec, into, bed.nodes))


def report_of(run: str, node: str) -> bytes:
    return (
        f'{{"run": "{run}", "node": "{node}", "padding": "{random.Random(run + node).randbytes(60).hex()}"}}'.encode()
    )


@contextmanager
def reporting(bed: Bed, runs: Sequence[str]) -> Iterator[None]:
    """While this lasts, the log of every pod has the reports of these runs."""
    file = bed.plane.folder / "pod-default.log"
    before = file.read_text()
    pairs = [(run, node) for run in runs for node in bed.nodes]
    sent = [line for run, node in pairs for line in encode_frames(report_of(run, node), run, node)]
    text = [*DEFAULT_LOG.splitlines(), *sent]
    file.write_text("".join(f"2026-01-01T00:00:00Z stdout F {line}\n" for line in text))
    try:
        yield
    finally:
        file.write_text(before)
