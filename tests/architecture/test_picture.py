"""ARCHITECTURE.md draws the tree that is there."""

from __future__ import annotations

import re

from tests.architecture.tree import ROOT, SOURCE

PAGE = ROOT / "ARCHITECTURE.md"


def test_the_tree_names_only_what_exists() -> None:
    missing = [path for path in _drawn() if not (ROOT / path).exists()]
    assert not missing, f"ARCHITECTURE.md names what is not there: {missing}"


def test_every_package_is_in_the_tree() -> None:
    packages = {p.parent.relative_to(ROOT).as_posix() for p in SOURCE.glob("*/__init__.py")}
    packages |= {p.parent.relative_to(ROOT).as_posix() for p in (SOURCE / "platforms").glob("*/__init__.py")}
    missing = sorted(packages - {path.rstrip("/") for path in _drawn()})
    assert not missing, f"ARCHITECTURE.md's tree lacks: {missing}"


def _drawn() -> list[str]:
    """Paths of the tree: two spaces of indent per level, a folder ends with a slash."""
    block = re.search(r"## The tree\n.*?```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block, "ARCHITECTURE.md has no tree"
    paths: list[str] = []
    stack: list[str] = []
    for line in block[1].splitlines():
        found = re.match(r"( *)(\S+)", line)
        if not found:
            continue
        depth = len(found[1]) // 2
        if len(found[1]) > 12:
            continue  # a second line of description
        stack[depth:] = [found[2].rstrip("/")]
        paths.append("/".join(stack))
    return paths
