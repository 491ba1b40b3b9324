"""Nodes of KWOK for acceptance runs, on the control plane that all tests of a worker share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.real.kube.control_plane import ControlPlane
from tests.real.launch.beds import Bed, make_nodes


@pytest.fixture
def bed(plane: ControlPlane, namespace: str) -> Iterator[Callable[[int], Bed]]:
    """So many nodes with eight GPUs, of this test alone."""
    made: list[str] = []

    def make(count: int) -> Bed:
        made.extend(make_nodes(plane, namespace, count))
        return Bed(plane, namespace, tuple(made))

    yield make
    plane.healthy()
    for name in made:
        plane.remove_node(name)
