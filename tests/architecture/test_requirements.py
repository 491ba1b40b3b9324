"""The requirements files install with the pip that comes with Python 3.11.

With --require-hashes that pip asks the index for the newest `name[extra]` where only `name` is pinned, and refuses it,
having no hash for it: the file then fails from the day on which a newer version appears.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-dev.txt"])
def test_an_extra_that_a_package_asks_for_is_in_the_pin(file: str) -> None:
    pins = _pins(ROOT / file)
    missing = [
        f"{pin.name} asks for {asked}; pinned is {pins[canonicalize_name(asked.name)]}"
        for pin in pins.values()
        for asked in _asked(pin)
        if not asked.extras <= pins[canonicalize_name(asked.name)].extras
    ]
    assert not missing


def test_pins_with_extras_are_recognised() -> None:
    assert _pins(ROOT / "requirements.txt")["httpx2"].extras >= {"http2"}, "lightkube asks for it"


def _pins(file: Path) -> dict[str, Requirement]:
    lines = [line.removesuffix("\\").strip() for line in file.read_text().splitlines() if line[:1].isalnum()]
    pins = [Requirement(line) for line in lines]
    return {canonicalize_name(pin.name): pin for pin in pins}


def _asked(pin: Requirement) -> list[Requirement]:
    """What the installed package asks for with extras, here and with the extras of its pin."""
    try:
        asked = [Requirement(line) for line in requires(pin.name) or []]
    except PackageNotFoundError:
        return []  # for another platform
    wanted = [{"extra": extra} for extra in ("", *pin.extras)]
    return [one for one in asked if one.extras and (one.marker is None or any(map(one.marker.evaluate, wanted)))]
