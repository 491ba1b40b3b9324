"""Elements of HTML and SVG. What comes from outside is escaped here by construction: only `Markup` is left as it is."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

# Elements that have no end tag in HTML.
_VOID = frozenset({"meta", "br", "hr", "link"})


class Markup(str):
    """Made by this module, so already escaped."""

    __slots__ = ()


Child: TypeAlias = "str | Markup | None"


def element(name: str, /, *children: Child, **attributes: str | float | None) -> Markup:
    """Attributes: `class_`, `aria_label`; None leaves one out."""
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{rendered}>")
    return Markup(f"<{name}{rendered}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    return Markup("".join(one if isinstance(one, Markup) else text(one) for one in children if one is not None))


def text(words: str) -> Markup:
    """Marks that turn the writing direction or ring a bell are not shown: a GPU's name may hold anything."""
    seen = "".join(ch if ch.isprintable() or ch == "\n" else " " for ch in words)
    return Markup(escape(seen, quote=True))


def table(head: Iterable[Child], lines: Iterable[Iterable[Child]], caption: str, **attributes: str) -> Markup:
    """The first cell of a line names it. The frame scrolls by itself where the page is narrow."""
    columns = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = [_line(list(line)) for line in lines]
    made = element("table", element("caption", caption), element("thead", columns), element("tbody", *body))
    return element("div", made, tabindex="0", role="region", aria_label=caption, **{"class_": "scroll", **attributes})


def _line(cells: list[Child]) -> Markup:
    first = element("th", cells[0], scope="row")
    return element("tr", first, *(element("td", cell) for cell in cells[1:]))


def _plain(value: str | float) -> str:
    """Coordinates with a tenth of a point: more is noise and bytes."""
    if isinstance(value, str):
        return value
    return f"{value:.1f}".removesuffix(".0")
