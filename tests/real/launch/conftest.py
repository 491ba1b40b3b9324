"""The control plane of tests/real/kube, for acceptance runs: nodes of KWOK, and a launcher over the real API server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.real.kube.conftest import (  # noqa: F401
    api,
    cluster,
    jobset,
    kuberay,
    namespace,
    new_namespace,
    plane,
    real_node,
    the_plane,
    trainer_v23,
    training_operator,
)
from tests.real.kube.control_plane import ControlPlane
from tests.real.launch.beds import Bed, make_nodes


@pytest.fixture
def bed(plane: ControlPlane, namespace: str) -> Iterator[Callable[[int], Bed]]:  # noqa: F811
    """So many nodes with eight GPUs, of this test alone."""
    made: list[str] = []

    def make(count: int) -> Bed:
        made.extend(make_nodes(plane, namespace, count))
        return Bed(plane, namespace, tuple(made))

    yield make
    plane.healthy()
    for name in made:
        plane.remove_node(name)
