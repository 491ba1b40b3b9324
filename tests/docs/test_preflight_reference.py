"""The page of checks before a run has every code that the rules use, and no other."""

from __future__ import annotations

import re

from gpukeeper.acceptance.fleet.preflight.facts import CODES
from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "reference" / "preflight.md"
PACKAGES = [
    ROOT / "src" / "gpukeeper" / name for name in ("acceptance/fleet/preflight", "acceptance/launchers", "wiring")
]


def test_the_page_has_every_code_once() -> None:
    documented = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(CODES)


def test_every_code_is_reported_by_a_rule() -> None:
    text = "".join(path.read_text() for package in PACKAGES for path in package.rglob("*.py"))
    used = re.findall(r'(?:passed|warning|failed|unchecked)\(\s*"([a-z-]+)"', text)
    unused = set(CODES) - set(used)
    assert not unused, f"remove the code, or report it: {sorted(unused)}"
