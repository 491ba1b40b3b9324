"""The project's markdown files, their links, and their text without code."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

from tests.docs.commands import in_shell

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)
_NOT_OURS = {".venv", ".git", "node_modules", ".pytest_cache", ".hypothesis", "build", "dist"}


@cache
def files() -> list[Path]:
    found = (path for path in ROOT.rglob("*.md") if not _NOT_OURS.intersection(path.relative_to(ROOT).parts))
    return sorted(found)


def links(path: Path) -> list[tuple[int, str]]:
    """Each with the number of its line."""
    return [(line_of(prose(path), one), one[1] or one[2]) for one in _LINK.finditer(prose(path))]


@cache
def prose(path: Path) -> str:
    """Without code blocks, whose lines are empty, and without `code`."""
    return _CODE.sub("", _FENCE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text()))


def line_of(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


def commands(path: Path) -> list[list[str]]:
    """Of gpukeeper, in blocks of shell text: the words of each."""
    blocks = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", path.read_text(), re.MULTILINE | re.DOTALL)
    shell = "".join(text for language, text in blocks if language in ("", "sh"))
    lines = [line.lstrip(" $#") for line in shell.replace("\\\n", " ").splitlines()]
    return [words for line in lines if _is_shell(line) for words in in_shell(line)]


def _is_shell(line: str) -> bool:
    """Not a line of output with an apostrophe."""
    try:
        shlex.split(line)
    except ValueError:
        return False
    return True


def named_commands(path: Path) -> list[list[str]]:
    """Of gpukeeper, as `code` in a sentence; without those that stand for any, such as `gpukeeper COMMAND [OPTION]`."""
    said = re.findall(r"`(gpukeeper (?!COMMAND)[^`…[\n]+)`", _FENCE.sub("", path.read_text()))
    return [words for one in said for words in in_shell(one)]


@cache
def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = _HEADING.findall(_FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-") for heading in headings}
