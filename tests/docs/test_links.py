"""Every page can be reached, and every link leads somewhere."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from tests.architecture.tree import refuse
from tests.docs import markdown
from tests.docs.markdown import ROOT

DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))


def test_relative_links_resolve() -> None:
    links = ((page, line, link) for page in markdown.files() for line, link in markdown.links(page))
    broken = ((page, line, link) for page, line, link in links if not _resolves(page, link))
    refuse(broken, "no such file or heading: correct the link")


def test_every_page_is_linked_from_the_index() -> None:
    linked = {(DOCS / link.partition("#")[0]).resolve() for _, link in markdown.links(INDEX)}
    pages = [
        sorted((DOCS / name).glob("*.md")) for name in ("how-to", "tutorial", "reference", "explanation", "decisions")
    ]
    assert all(pages)
    missing = ((page, 1, "not in docs/index.md") for folder in pages for page in folder if page.resolve() not in linked)
    refuse(missing, "link it there")


def test_decisions_are_numbered_without_gap_or_double() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))


def test_the_index_lists_each_decision_once_with_its_title() -> None:
    titles = [page.read_text().splitlines()[0].removeprefix("# ") for page in DECISIONS]
    listed = INDEX.read_text().partition("## Decisions\n\n")[2].partition("\n\n")[2].splitlines()  # after a paragraph
    entries = zip(titles, DECISIONS, strict=True)
    assert listed == [f"{title.replace('. ', '. [', 1)}](decisions/{page.name})" for title, page in entries]


def test_every_decision_has_its_parts() -> None:
    parts = [(page, part) for page in DECISIONS for part in ("## Options", "## Choice", "## Consequences")]
    without = ((page, 1, part) for page, part in parts if part not in page.read_text())
    refuse(without, "the section is missing: write it")


def _resolves(page: Path, link: str) -> bool:
    target, _, anchor = unquote(link).partition("#")
    if "://" in target or target.startswith("mailto:"):
        return True
    path = (page.parent / target).resolve() if target else page
    if not path.exists():
        return False
    return not anchor or path.suffix != ".md" or anchor in markdown.anchors(path)
