"""The control plane as fixtures: one for each worker, controllers when first needed, a new namespace for each test.

`tests/real/conftest.py` alone imports them. Imported by a second conftest, a session fixture is registered once more,
and a worker would start a second control plane.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator

import pytest

from tests.engines import has_kube, has_kubelet, require
from tests.real.kube.api import Api
from tests.real.kube.control_plane import Cluster, ControlPlane, control_plane, given_cluster
from tests.real.kube.real_node import RealNode

_LINES, _WIDTH = 5, 240
_planes: list[ControlPlane] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure come the last lines of every program's log, and which of them no longer runs."""
    report = yield
    if report.failed:
        for name, program in (pair for plane in _planes for pair in plane.programs.items()):
            title = f"{name}{'' if program.runs else ' (does not run)'}"
            report.sections.append((title, "\n".join(line[:_WIDTH] for line in program.log.splitlines()[-_LINES:])))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Our own, or that of GPUKEEPER_TEST_KUBECONFIG: for tests that need no nodes and controllers of ours."""
    if given := os.environ.get("GPUKEEPER_TEST_KUBECONFIG"):
        with given_cluster(given) as cluster:
            yield cluster
        return
    require("kubernetes", has_kube())
    with control_plane() as plane:
        _planes.append(plane)
        yield plane
        _planes.remove(plane)


@pytest.fixture(scope="session")
def the_plane(cluster: Cluster) -> ControlPlane:
    if not isinstance(cluster, ControlPlane):
        pytest.skip("needs a control plane of its own: unset GPUKEEPER_TEST_KUBECONFIG")
    return cluster


@pytest.fixture
def plane(the_plane: ControlPlane) -> Iterator[ControlPlane]:
    """What a test stops is started again after it."""
    yield the_plane
    the_plane.healthy()


@pytest.fixture
def api(cluster: Cluster) -> Api:
    """The administrator's."""
    return cluster.api


@pytest.fixture
def new_namespace(cluster: Cluster) -> Iterator[Callable[[], str]]:
    """One more each time; they go after the test, without waiting."""
    made: list[str] = []

    def make(stem: str = "t") -> str:
        made.append(cluster.new_namespace(stem))
        return made[-1]

    yield make
    if isinstance(cluster, ControlPlane):
        cluster.healthy()
    for name in made:
        cluster.drop_namespace(name)


@pytest.fixture
def namespace(new_namespace: Callable[[], str]) -> str:
    return new_namespace()


@pytest.fixture
def kwok_node(plane: ControlPlane, namespace: str) -> Iterator[str]:
    """A node with eight GPUs, of this test alone; it goes after the test."""
    name = f"node-{namespace}"
    try:
        plane.gpu_node(name)
        yield name
    finally:  # one that became ready too late, too: it would take the pods of later tests
        plane.healthy()
        plane.remove_node(name)


@pytest.fixture
def jobset(plane: ControlPlane) -> ControlPlane:
    plane.need("jobset")
    return plane


@pytest.fixture
def trainer_v21(plane: ControlPlane) -> ControlPlane:
    plane.need("trainer-v2.1.0")
    return plane


@pytest.fixture
def trainer_v23(plane: ControlPlane) -> ControlPlane:
    plane.need("trainer-v2.3.0")
    return plane


@pytest.fixture
def training_operator(plane: ControlPlane) -> ControlPlane:
    plane.need("training-operator")
    return plane


@pytest.fixture
def kuberay(plane: ControlPlane) -> ControlPlane:
    plane.need("kuberay")
    return plane


@pytest.fixture
def real_node(plane: ControlPlane) -> RealNode:
    """Where pods are processes; started once for each worker."""
    require("kubelet", has_kubelet())
    return plane.real_node()
