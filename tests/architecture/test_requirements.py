"""The requirements files install with the pip that comes with Python 3.11.

With --require-hashes that pip asks the index for the newest `name[extra]` where only `name` is pinned, and refuses it,
having no hash for it: the file then fails from the day on which a newer version appears.
"""

from __future__ import annotations

from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.pins import read_pins

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-dev.txt"])
def test_an_extra_that_a_package_asks_for_is_in_the_pin(file: str) -> None:
    requirements = [pin.requirement for pin in read_pins(ROOT / file)]
    here = [pin for pin in requirements if pin.marker is None or pin.marker.evaluate()]
    extras = {canonicalize_name(pin.name): pin.extras for pin in here}
    asked = [(pin.name, wanted) for pin in here for wanted in _asked_with_extras(pin)]
    assert ("lightkube", "httpx2") in [(name, wanted.name) for name, wanted in asked]
    assert not [
        f"{name} asks for {wanted}"
        for name, wanted in asked
        if not wanted.extras <= extras[canonicalize_name(wanted.name)]
    ]


def _asked_with_extras(pin: Requirement) -> list[Requirement]:
    """By the metadata of the installed package, with the extras of its pin."""
    names = [{"extra": name} for name in ("", *pin.extras)]
    asked = [Requirement(line) for line in requires(pin.name) or []]
    return [
        wanted
        for wanted in asked
        if wanted.extras and (wanted.marker is None or any(map(wanted.marker.evaluate, names)))
    ]
