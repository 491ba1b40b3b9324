"""Every page can be reached, and every link leads somewhere."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs import markdown
from tests.docs.markdown import ROOT

INDEX = ROOT / "docs" / "index.md"
_PAGES = markdown.files()


@pytest.mark.parametrize("page", _PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page: Path) -> None:
    broken = [link for link in markdown.links(page) if not _resolves(page, link)]
    assert not broken, f"{page.relative_to(ROOT)}: {broken}"


@pytest.mark.parametrize("folder", ["how-to", "tutorial", "reference", "explanation", "decisions"])
def test_every_page_is_linked_from_the_index(folder: str) -> None:
    linked = {(INDEX.parent / link.partition("#")[0]).resolve() for link in markdown.links(INDEX)}
    pages = sorted((ROOT / "docs" / folder).glob("*.md"))
    missing = [page.name for page in pages if page.resolve() not in linked]
    assert pages
    assert not missing, f"docs/index.md does not link {missing}"


def test_decisions_are_numbered_without_gap_or_double() -> None:
    numbers = sorted(int(page.name[:4]) for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_index_lists_each_decision_once_with_its_title() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    titles = [page.read_text().splitlines()[0].removeprefix("# ") for page in decisions]
    listed = INDEX.read_text().partition("## Decisions\n\n")[2].partition("\n\n")[2].splitlines()  # after a paragraph
    entries = zip(titles, decisions, strict=True)
    assert listed == [f"{title.replace('. ', '. [', 1)}](decisions/{page.name})" for title, page in entries]


@pytest.mark.parametrize("part", ["## Options", "## Choice", "## Consequences"])
def test_every_decision_has_its_parts(part: str) -> None:
    without = [page.name for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md") if part not in page.read_text()]
    assert not without


def _resolves(page: Path, link: str) -> bool:
    target, _, anchor = unquote(link).partition("#")
    if "://" in target or target.startswith("mailto:"):
        return True
    path = (page.parent / target).resolve() if target else page
    if not path.exists():
        return False
    return not anchor or path.suffix != ".md" or anchor in markdown.anchors(path)
