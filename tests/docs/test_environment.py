"""The page of environment variables names every variable that gpukeeper reads, and no other."""

from __future__ import annotations

import re

import pytest

from tests.docs.markdown import ROOT
from tests.docs.variables import read_in_source

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "reference" / "environment.md"
LIBRARIES = "## Read by libraries and the shell"


def test_every_variable_that_is_read_is_on_the_page_and_no_other() -> None:
    own, _, libraries = PAGE.read_text().partition(LIBRARIES)
    assert libraries, f"the last section is {LIBRARIES}"
    documented = _named(own)
    assert len(documented) == len(set(documented)), "each once"
    read = read_in_source()
    missing = {name: sorted(where) for name, where in read.items() if name not in documented}
    assert not missing, f"not on the page: {missing}"
    assert not set(documented) - set(read), "on the page and not read"
    assert not set(_named(libraries)) & set(read)


def test_the_search_finds_each_way_of_reading_a_variable() -> None:
    """By name, by constant, in a loop over constants, through a helper, by its beginning."""
    found = read_in_source()
    for name in ("GPUKEEPER_POLICY", "GPUKEEPER_FLEET", "RAY_TMPDIR", "EPOCHS", "PET_*", "NCCL_*", "LOCAL_RANK"):
        assert name in found


def _named(text: str) -> list[str]:
    """The first cells of its tables; one cell may name several."""
    cells = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([A-Za-z0-9_*]+)`", cell)]
