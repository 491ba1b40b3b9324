"""The beds as fixtures: one engine for each worker, emptied after every test. `tests/real/conftest.py` alone imports
them: see `tests/real/kube/fixtures.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines import has_docker, has_podman, require
from tests.real.docker.private_engine import DockerEngine, PodmanEngine, PrivateEngine, docker_engine, podman_engine


@pytest.fixture(scope="session")
def the_docker() -> Iterator[DockerEngine]:
    require("docker", has_docker())
    with docker_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def the_podman() -> Iterator[PodmanEngine]:
    require("podman", has_podman())
    with podman_engine() as engine:
        yield engine


@pytest.fixture
def docker(the_docker: DockerEngine) -> Iterator[DockerEngine]:
    yield the_docker
    the_docker.clear()


@pytest.fixture
def podman(the_podman: PodmanEngine) -> Iterator[PodmanEngine]:
    yield the_podman
    the_podman.clear()


@pytest.fixture(params=["docker", "podman"])
def engine(request: pytest.FixtureRequest) -> PrivateEngine:
    """For what must hold on both."""
    found: PrivateEngine = request.getfixturevalue(request.param)
    return found
