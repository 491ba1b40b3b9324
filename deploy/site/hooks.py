"""What mkdocs does not know: the order of pages is that of docs/index.md, and pages link to files of the repository
outside docs/, which become part of the site below repository/."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"
OUTSIDE = "repository/"
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_ITEM = re.compile(r"\[([^\]]+)\]\(([^)#\s]+\.md)\)")
_MARK = re.compile(r"(?:[-*]|\d+\.) +(?=\S)")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = _navigation((ROOT / "docs/index.md").read_text())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Every file outside docs/ that a page links to, and those of directories it links to."""
    wanted = [one.src_uri for one in files if one.is_documentation_page()]
    while wanted:
        for linked in sorted(_outside(wanted.pop())):
            for path in (linked, *_within(linked)):
                uri = _uri(path)
                if files.get_file_from_path(uri) is None:
                    files.append(_file(path, config))
                    wanted.append(uri)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are between the pages of the site, and lists as Python-Markdown wants them."""
    return _indented(_rewritten(markdown, page.file.src_uri))


def _file(path: str, config: MkDocsConfig) -> File:
    """A directory without a page of its own gets a list of its files."""
    uri = _uri(path)
    if (ROOT / _path(uri)).is_file():
        return File.generated(config, uri, abs_src_path=str(ROOT / _path(uri)))
    names = [Path(one).name for one in _within(path)]
    return File.generated(
        config, uri, content="\n".join([f"# {path}", "", *(f"- [{one}]({one})" for one in names), ""])
    )


def _navigation(index: str) -> list[Any]:
    sections: list[Any] = [{"gpukeeper": "index.md"}]
    seen = {"index.md"}
    for part in index.split("\n## ")[1:]:
        title, _, rest = part.partition("\n")
        pages = []
        for name, link in _ITEM.findall(rest):
            target = posixpath.normpath(link) if not link.startswith("../") else OUTSIDE + link.removeprefix("../")
            if target not in seen:
                seen.add(target)
                pages.append({name[:1].upper() + name[1:]: target})
        sections.append({title: pages})
    return sections


def _uri(path: str) -> str:
    """Where a path of the repository is in the site."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if (ROOT / path).is_dir():
        return f"{OUTSIDE}{path}/{'README' if (ROOT / path / 'README.md').exists() else 'index'}.md"
    return OUTSIDE + path


def _path(uri: str) -> str:
    """The way back."""
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else DOCS + uri


def _targets(uri: str) -> Iterator[str]:
    file = ROOT / _path(uri)
    text = file.read_text() if file.is_file() and file.suffix == ".md" else ""
    for part in _CODE.split(text)[::2]:
        for _, link, _ in _LINK.findall(part):
            if (target := _target(uri, link)) is not None:
                yield target


def _target(uri: str, link: str) -> str | None:
    """The path in the repository that a link names; None: an address, or a place on the same page."""
    if re.match(r"[a-z]+:|#|/", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(_path(uri)), link.partition("#")[0]))
    return path if (ROOT / path).exists() else None


def _outside(uri: str) -> set[str]:
    return {one for one in _targets(uri) if not one.startswith(DOCS) and one != "docs"}


def _within(path: str) -> list[str]:
    if not (ROOT / path).is_dir():
        return []
    return [f"{path}/{one.name}" for one in sorted((ROOT / path).iterdir()) if one.is_file() and one.suffix != ".pyc"]


def _rewritten(markdown: str, uri: str) -> str:
    def link(found: re.Match[str]) -> str:
        target = _target(uri, found[2])
        if target is None:
            return found[0]
        _, mark, place = found[2].partition("#")
        return found[1] + os.path.relpath(_uri(target), posixpath.dirname(uri) or ".") + mark + place + found[3]

    parts = _CODE.split(markdown)
    return "".join(part if number % 2 else _LINK.sub(link, part) for number, part in enumerate(parts))


def _indented(markdown: str) -> str:
    """What belongs to an item of a list, with four spaces for each level instead of the width of its mark."""
    levels: list[int] = []  # widths, from the outermost
    lines, in_code = [], False
    for line in markdown.splitlines():
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        while text and levels and indent < sum(levels) and not in_code:
            levels.pop()
        lines.append(" " * (4 * len(levels)) + line[sum(levels) :] if text else "")
        in_code ^= text.startswith("```")
        if (mark := _MARK.match(text)) and not in_code:
            levels.append(indent - sum(levels) + len(mark[0]))
    return "\n".join(lines) + "\n"
