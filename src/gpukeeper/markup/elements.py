"""Elements of HTML and SVG, and the parts of a page. What comes from outside is escaped here by construction: only
`Markup` is left as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TypeAlias

from gpukeeper.markup.style import STYLE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
# Elements that have no end tag in HTML.
_VOID = frozenset({"meta", "br", "hr", "link"})


class Markup(str):
    """Made by this module, so already escaped."""

    __slots__ = ()

    def __html__(self) -> str:
        """For templates, which escape what has no such method."""
        return str(self)


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


def document(title: str, body: Markup, *, style: str = "") -> str:
    """A page without scripts, into which nothing is loaded from elsewhere."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", **{"http-equiv": "Content-Security-Policy"}, content=_POLICY),
        element("title", title),
        element("style", Markup(STYLE + style)),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


def section(name: str, title: str, *children: Child) -> Markup:
    return element("section", element("h2", title, id=name), *children, aria_labelledby=name)


def facts(values: Mapping[str, Child]) -> Markup:
    listed = (element("div", element("dt", name), element("dd", value)) for name, value in values.items())
    return element("dl", *listed, class_="facts")


def table(
    head: Iterable[Child],
    lines: Iterable[Iterable[Child]],
    caption: str,
    *,
    numbers: Sequence[bool] = (),
    class_: str = "scroll",
) -> Markup:
    """The first cell of a line names it. `numbers`: columns that are aligned as such. The frame scrolls by itself where
    the page is narrow."""
    kinds = [*("num" if one else None for one in numbers)]
    columns = (element("th", cell, scope="col", class_=_at(kinds, place)) for place, cell in enumerate(head))
    body = (_line(list(line), kinds) for line in lines)
    top = element("thead", element("tr", *columns))
    made = element("table", element("caption", caption), top, element("tbody", *body))
    return element("div", made, tabindex="0", role="region", aria_label=caption, class_=class_)


def _line(cells: list[Child], kinds: Sequence[str | None]) -> Markup:
    first = element("th", cells[0], scope="row")
    rest = (element("td", cell, class_=_at(kinds, place)) for place, cell in enumerate(cells[1:], start=1))
    return element("tr", first, *rest)


def _at(kinds: Sequence[str | None], place: int) -> str | None:
    return kinds[place] if place < len(kinds) else None


def _plain(value: str | float) -> str:
    """Coordinates with a tenth of a point: more is noise and bytes."""
    if isinstance(value, str):
        return value
    return f"{value:.1f}".removesuffix(".0")
