"""Which parts of the checklist a test proves: `python -m tests.docs.checklist`. A table, not a verdict: it exits 0.

`checklist_parts.txt` has one line for each part: `C8.3/once | what is promised | tests`, where the tests are functions
(`tests/unit/x/test_y.py::test_z`) or data cases (`tests/cases/idle/a.json`), separated by blanks. A part that no test
proves has `open: why` in their place. A test may also name an item in its docstring (`C8.3`); that proves nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "checklist.md"
OPEN_PAGE = ROOT / "docs" / "reference" / "checklist-open.md"
PARTS = Path(__file__).resolve().with_name("checklist_parts.txt")
LEVELS = ("must", "should", "later")
OPEN = "open: "
_CHAPTER = re.compile(r"^## (C\d+) (.+)$")
_ITEM = re.compile(r"^\| (C\d+\.\d+) \| (\w+) \| (.+) \|$")
_PART = re.compile(r"^(C\d+\.\d+)/([a-z0-9-]+) \| ([^|]+) \| ([^|]+)$")
_NAMED = re.compile(r"\bC\d+\.\d+\b")
_IN_GENERAL = (Path(__file__).resolve(), Path(__file__).resolve().with_name("test_checklist.py"))
_HEAD = "| part | level | what you get | why it is open |\n|---|---|---|---|"
_OPENING = """\
# Open parts of the checklist

Written by `python -m tests.docs.generate` from `tests/docs/checklist_parts.txt`; do not edit by hand.

Each item of the [checklist](checklist.md) is divided into parts. A part is proven by the tests that the file names, and
open while no test asserts it, even if the code exists.

"""


@dataclass(frozen=True)
class Item:
    id: str
    level: str
    gives: str
    chapter: str


@dataclass(frozen=True)
class Part:
    item: str
    slug: str
    says: str
    tests: tuple[str, ...]
    why_open: str

    @property
    def id(self) -> str:
        return f"{self.item}/{self.slug}"

    @property
    def proven(self) -> bool:
        return bool(self.tests)


def items(page: Path = PAGE) -> list[Item]:
    found: list[Item] = []
    chapter = ""
    for line in page.read_text().splitlines():
        if heading := _CHAPTER.match(line):
            chapter = f"{heading[1]} {heading[2]}"
        elif row := _ITEM.match(line):
            found.append(Item(row[1], row[2], row[3], chapter))
    return found


def parts(text: str | None = None) -> list[Part]:
    """Every part in the order of the file; a line that is none raises ValueError and is quoted."""
    lines = (PARTS.read_text() if text is None else text).splitlines()
    return [_part(line) for line in lines if line and not line.startswith("#")]


def _part(line: str) -> Part:
    if (found := _PART.match(line)) is None:
        raise ValueError(f"not a part of the checklist (ID/slug | what | tests or open: why): {line!r}")
    item, slug, says, proof = found.groups()
    if proof.startswith(OPEN):
        return Part(item, slug, says, (), proof.removeprefix(OPEN))
    return Part(item, slug, says, tuple(proof.split()), "")


def missing(test: str, root: Path = ROOT) -> str:
    """Why this reference points to no test; empty if it does."""
    path, _, function = test.partition("::")
    if not test.startswith("tests/") or not (root / path).is_file():
        return f"{test}: no such file"
    if path.startswith("tests/cases/") and path.endswith(".json"):
        return f"{test}: a case is a file without a function" if function else ""
    return "" if function in _functions(root / path) else f"{test}: no such test function"


@cache
def _functions(path: Path) -> frozenset[str]:
    body = ast.parse(path.read_text()).body
    found = [one.name for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(name for name in found if name.startswith("test_"))


def named_in_tests(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """By id: the files that name it, these two excepted, which speak of ids in general."""
    named: dict[str, list[str]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix in {".py", ".json", ".yaml"} and p.is_file()):
        if path.resolve() in _IN_GENERAL:
            continue
        for item in sorted(set(_NAMED.findall(path.read_text(errors="replace")))):
            named.setdefault(item, []).append(path.relative_to(folder).as_posix())
    return named


def table(all_items: Iterable[Item], all_parts: Sequence[Part]) -> str:
    """By chapter: how many items have all their parts proven, how many parts are, and which are open."""
    wanted = [one for one in all_items if one.level != "later"]
    lines = [f"{'checklist: proven by tests':34} {'must':>9} {'should':>9} {'parts':>9}   open"]
    for chapter, group in groupby(wanted, key=lambda one: one.chapter):
        lines.append(_row(chapter, list(group), all_parts))
    lines.append(_row("together", wanted, all_parts, show=False))
    return "\n".join(lines)


def _row(title: str, group: list[Item], all_parts: Sequence[Part], *, show: bool = True) -> str:
    ids = {one.id for one in group}
    mine = [one for one in all_parts if one.item in ids]
    whole = ids - {one.item for one in mine if not one.proven}
    counts = [_count([one.id in whole for one in group if one.level == level]) for level in LEVELS[:2]]
    left = " ".join(one.id for one in mine if not one.proven) if show else ""
    return f"{title:34} {counts[0]:>9} {counts[1]:>9} {_count([one.proven for one in mine]):>9}   {left}".rstrip()


def _count(proven: list[bool]) -> str:
    return f"{sum(proven)} / {len(proven)}" if proven else "–"


def open_page() -> str:
    """The page of what is open, by chapter, with the level of its item and why."""
    all_parts, levels = parts(), {one.id: one.level for one in items()}
    left = [one for one in all_parts if not one.proven]
    lines = [f"{len(all_parts) - len(left)} of {len(all_parts)} parts are proven, {len(left)} are open.\n"]
    for chapter, group in groupby(items(), key=lambda one: one.chapter):
        ids = {one.id for one in group}
        rows = [f"| {p.id} | {levels[p.item]} | {p.says} | {p.why_open} |" for p in left if p.item in ids]
        if rows:
            lines += [f"## {chapter}\n", _HEAD, *rows, ""]
    return _OPENING + "\n".join(lines)


if __name__ == "__main__":
    print(table(items(), parts()))
