"""On a real GPU: beside another program no speed fails or warns, and the program is named; alone the GPU passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpukeeper.acceptance.bench.probing import find_python
from gpukeeper.model.unknown import Unknown
from tests.engines import has_gpu, require
from tests.real.gpu import beside_a_neighbour


@pytest.fixture
def python() -> str:
    require("gpu", has_gpu())
    found = find_python()
    if isinstance(found, Unknown):
        pytest.skip(f"nothing can be computed here: {found.why}")
    return found


def test_beside_another_program_it_is_inconclusive_and_the_program_is_named(python: str, tmp_path: Path) -> None:
    beside_a_neighbour.check_beside(tmp_path, python)


def test_alone_it_is_accepted(python: str, tmp_path: Path) -> None:
    beside_a_neighbour.check_alone(tmp_path, python)
