"""The picture in the README shows what the commands print now."""

from __future__ import annotations

from tests.docs.markdown import ROOT
from tests.docs.picture import PICTURE, picture


def test_the_picture_is_current() -> None:
    advice = "docs/images/plan.svg is stale. Regenerate it: python -m tests.docs.generate"
    assert PICTURE.read_text() == picture(), advice


def test_the_readme_shows_it_and_it_loads_nothing_from_the_network() -> None:
    assert f"]({PICTURE.relative_to(ROOT).as_posix()})" in (ROOT / "README.md").read_text()
    svg = PICTURE.read_text()
    assert "url(http" not in svg
    assert "<script" not in svg
