"""Clusters as fixtures: one of each release for tests that leave it as they found it, fresh ones for the others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.engines import has_ray, require
from tests.real.docker.private_engine import DockerEngine
from tests.real.ray.clusters import NEWEST, VERSIONS, Cluster, ray_cluster

_LINES, _WIDTH = 8, 240
_clusters: list[Cluster] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure come the last lines of every log that may explain it."""
    report = yield
    if report.failed:
        for name, log in (pair for cluster in _clusters for pair in cluster.logs().items()):
            report.sections.append((name, "\n".join(line[:_WIDTH] for line in log.splitlines()[-_LINES:])))
    return report


@pytest.fixture
def fresh_cluster() -> Iterator[Callable[..., Cluster]]:
    """One that may be broken: `fresh_cluster(version, nodes=2, env=…)`."""
    with ExitStack() as stack:

        def make(version: str = NEWEST, nodes: int = 1, env: dict[str, str] | None = None) -> Cluster:
            require("ray", has_ray(version))
            return stack.enter_context(_cluster(version, nodes, env))

        yield make


@pytest.fixture(scope="session", params=VERSIONS)
def any_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes of each release. What a test starts there ends with its driver. For one release:
    `@pytest.mark.parametrize("any_cluster", [NEWEST], indirect=True)`.
    """
    require("ray", has_ray(request.param))
    with _cluster(request.param, 2, None) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _drivers_end() -> Iterator[None]:
    yield
    for driver in (driver for cluster in _clusters for driver in cluster.drivers):
        driver.clear()


@pytest.fixture
def engine(docker: DockerEngine) -> DockerEngine:
    """Docker alone: nodes in containers of Podman are not supported."""
    return docker


@contextmanager
def _cluster(version: str, nodes: int, env: dict[str, str] | None) -> Iterator[Cluster]:
    with ray_cluster(version, nodes, env) as cluster:
        _clusters.append(cluster)
        yield cluster
        _clusters.remove(cluster)
