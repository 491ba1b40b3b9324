"""The page of the HTTP API names exactly the routes that there are."""

from __future__ import annotations

import re

from gpukeeper.interfaces.web.api import API
from gpukeeper.interfaces.web.api_table import PREFIX
from tests.docs.markdown import ROOT


def test_the_page_names_every_route_with_its_summary() -> None:
    page = (ROOT / "docs" / "reference" / "http-api.md").read_text()
    listed = re.findall(r"^\| `(\w+) (/\S+)` \| (.*) \|$", page, re.MULTILINE)
    assert listed == [(one.method, f"{PREFIX}{one.path}", one.summary) for one in API]
