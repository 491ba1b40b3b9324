"""The beds as fixtures: one engine for each worker, emptied after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines import has_docker, has_podman, require
from tests.real.docker.bed import Bed, DockerBed, PodmanBed, docker_bed, podman_bed


@pytest.fixture(scope="session")
def the_docker() -> Iterator[DockerBed]:
    require("docker", has_docker())
    with docker_bed() as bed:
        yield bed


@pytest.fixture(scope="session")
def the_podman() -> Iterator[PodmanBed]:
    require("podman", has_podman())
    with podman_bed() as bed:
        yield bed


@pytest.fixture
def docker(the_docker: DockerBed) -> Iterator[DockerBed]:
    yield the_docker
    the_docker.clear()


@pytest.fixture
def podman(the_podman: PodmanBed) -> Iterator[PodmanBed]:
    yield the_podman
    the_podman.clear()


@pytest.fixture(params=["docker", "podman"])
def bed(request: pytest.FixtureRequest) -> Bed:
    """For what must hold on both."""
    found: Bed = request.getfixturevalue(request.param)
    return found
