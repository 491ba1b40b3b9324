"""The project's markdown files, their links, and their text without code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)
_NOT_OURS = {".venv", ".git", "node_modules", ".pytest_cache", ".hypothesis", "build", "dist"}


def files() -> list[Path]:
    found = (path for path in ROOT.rglob("*.md") if not _NOT_OURS.intersection(path.relative_to(ROOT).parts))
    return sorted(found)


def links(path: Path) -> list[str]:
    text = _CODE.sub("", _FENCE.sub("", path.read_text()))
    return [inline or reference for inline, reference in _LINK.findall(text)]


def prose(path: Path) -> str:
    """Without code blocks and without `code`."""
    return _CODE.sub("", _FENCE.sub("", path.read_text()))


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = _HEADING.findall(_FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-") for heading in headings}
