"""Which items of the checklist a test names: `python -m tests.docs.checklist`. A table, not a verdict: it exits 0."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "checklist.md"
LEVELS = ("must", "should", "later")
_CHAPTER = re.compile(r"^## (C\d+) (.+)$")
_ITEM = re.compile(r"^\| (C\d+\.\d+) \| (\w+) \| (.+) \|$")
_NAMED = re.compile(r"\bC\d+\.\d+\b")
_IN_GENERAL = (Path(__file__).resolve(), Path(__file__).resolve().with_name("test_checklist.py"))


@dataclass(frozen=True)
class Item:
    id: str
    level: str
    gives: str
    chapter: str


def items(page: Path = PAGE) -> list[Item]:
    found: list[Item] = []
    chapter = ""
    for line in page.read_text().splitlines():
        if heading := _CHAPTER.match(line):
            chapter = f"{heading[1]} {heading[2]}"
        elif row := _ITEM.match(line):
            found.append(Item(row[1], row[2], row[3], chapter))
    return found


def named_in_tests(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """By id: the files that name it, these two excepted, which speak of ids in general."""
    named: dict[str, list[str]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix in {".py", ".json", ".yaml"} and p.is_file()):
        if path.resolve() in _IN_GENERAL:
            continue
        for item in sorted(set(_NAMED.findall(path.read_text(errors="replace")))):
            named.setdefault(item, []).append(path.relative_to(folder).as_posix())
    return named


def table(all_items: Iterable[Item], named: Iterable[str]) -> str:
    known, wanted = set(named), [one for one in all_items if one.level != "later"]
    lines = [f"{'checklist: named by a test':34} {'must':>9} {'should':>9}   not named yet"]
    for chapter, group in groupby(wanted, key=lambda one: one.chapter):
        lines.append(_row(chapter, list(group), known))
    lines.append(_row("together", wanted, known, show=False))
    return "\n".join(lines)


def _row(title: str, group: list[Item], known: set[str], *, show: bool = True) -> str:
    counts = [_count([one for one in group if one.level == level], known) for level in LEVELS[:2]]
    missing = " ".join(one.id for one in group if one.id not in known) if show else ""
    return f"{title:34} {counts[0]:>9} {counts[1]:>9}   {missing}".rstrip()


def _count(group: list[Item], known: set[str]) -> str:
    return f"{sum(one.id in known for one in group)} / {len(group)}" if group else "–"


if __name__ == "__main__":
    print(table(items(), named_in_tests()))
