"""Every page can be reached, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from tests.architecture.tree import refuse
from tests.docs import markdown
from tests.docs.markdown import ROOT

DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
DECISION_LIST = DOCS / "decisions" / "README.md"
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))


def test_relative_links_resolve() -> None:
    links = ((page, line, link) for page in markdown.files() for line, link in markdown.links(page))
    broken = ((page, line, link) for page, line, link in links if not _resolves(page, link))
    refuse(broken, "no such file or heading: correct the link")


def test_pages_that_the_code_names_exist() -> None:
    named = re.compile(r"docs/[a-z]+(?:-[a-z]+)*/[a-z0-9-]+\.md")
    files = (path for folder in ("src", "tests") for path in sorted((ROOT / folder).rglob("*.py")))
    broken = (
        (path, number, page)
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for page in named.findall(line)
        if not (ROOT / page).is_file()
    )
    refuse(broken, "no such page: name the one that has its text now")


def test_every_page_is_linked_from_the_index() -> None:
    linked = _linked(INDEX)
    pages = [sorted((DOCS / name).glob("*.md")) for name in ("how-to", "tutorial", "reference", "explanation")]
    assert all(pages)
    missing = ((page, 1, "not in docs/index.md") for folder in pages for page in folder if page.resolve() not in linked)
    refuse(missing, "link it there")


def test_the_index_has_at_most_seven_guides_for_each_person() -> None:
    parts = INDEX.read_text().split("\n## ")[1:]
    guides = {part.partition("\n")[0]: re.findall(r"^\d+\. \[", part, re.MULTILINE) for part in parts}
    people = {name: len(found) for name, found in guides.items() if found}
    assert len(people) == 5
    assert [name for name, count in people.items() if count > 7] == []


def test_each_number_of_a_decision_is_a_file_or_names_the_one_it_was_merged_into() -> None:
    merged = re.findall(r"^\| (\d+) \| \[(\d+)\]\((\d{4})-", DECISION_LIST.read_text(), re.MULTILINE)
    numbers = [int(page.name[:4]) for page in DECISIONS]
    assert [(old, new) for old, new, file in merged if int(new) != int(file) or int(new) > int(old)] == []
    assert sorted([*numbers, *(int(old) for old, *_ in merged)]) == list(range(1, max(numbers) + 1))


def test_decisions_are_listed_once_with_their_titles() -> None:
    titles = [page.read_text().splitlines()[0].removeprefix("# ") for page in DECISIONS]
    listed = DECISION_LIST.read_text().partition("## List\n\n")[2].splitlines()
    entries = zip(titles, DECISIONS, strict=True)
    assert listed == [f"{title.replace('. ', '. [', 1)}]({page.name})" for title, page in entries]


def test_every_decision_has_its_parts() -> None:
    parts = [(page, part) for page in DECISIONS for part in ("## Options", "## Choice", "## Consequences")]
    without = ((page, 1, part) for page, part in parts if part not in page.read_text())
    refuse(without, "the section is missing: write it")


def _linked(page: Path) -> set[Path]:
    return {(page.parent / link.partition("#")[0]).resolve() for _, link in markdown.links(page)}


def _resolves(page: Path, link: str) -> bool:
    target, _, anchor = unquote(link).partition("#")
    if "://" in target or target.startswith("mailto:"):
        return True
    path = (page.parent / target).resolve() if target else page
    if not path.exists():
        return False
    return not anchor or path.suffix != ".md" or anchor in markdown.anchors(path)
