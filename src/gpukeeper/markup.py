"""Pages and pictures that need no server: elements of HTML and SVG, their style, and what all pictures share: the frame
with its description, labels, lines, hatching, lines with gaps. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TypeAlias

STYLE = """
:root{color-scheme:light dark;--bg:#faf9f6;--card:#fff;--ink:#23272b;--muted:#5f6870;--line:#e2dfd8;
--PASS:#2a7453;--WARN:#8f5a00;--FAIL:#ab2f28;--INCONCLUSIVE:#5055a3;--SKIPPED:#6b7278;--accent:#2b6586;--soft:#f2f0eb}
@media (prefers-color-scheme:dark){:root{--bg:#15181b;--card:#1c2024;--ink:#e3e5e7;--muted:#9da6ad;--line:#30363c;
--PASS:#72c59f;--WARN:#e3ae58;--FAIL:#f08a81;--INCONCLUSIVE:#abaff2;--SKIPPED:#969da3;--accent:#83bcdf;--soft:#23282d}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 22px 60px}
h1{font-size:1.75rem;line-height:1.2;margin:.1em 0 .5em;font-weight:650;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.4em 0 .8em;font-weight:650}
h3{font-size:1rem;margin:1.6em 0 .5em;font-weight:650}
p{margin:.4em 0}a{color:var(--accent)}
.eyebrow{color:var(--muted);font-size:.85rem;margin:0}
.muted,caption,.small-print{color:var(--muted)}
code,pre{font:13px/1.5 ui-monospace,"DejaVu Sans Mono",monospace}
pre{background:var(--soft);padding:12px 14px;border-radius:8px;overflow-x:auto;margin:.6em 0}
.card,.verdict{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px}
.verdict{border-left:8px solid var(--grade);padding:24px 26px}
.verdict .word{font-size:1.35rem;font-weight:700;color:var(--grade);margin:0 0 .3em}
.verdict .reason{font-size:1.05rem;max-width:78ch}
.PASS{--grade:var(--PASS)}.WARN{--grade:var(--WARN)}.FAIL{--grade:var(--FAIL)}
.INCONCLUSIVE{--grade:var(--INCONCLUSIVE)}.SKIPPED{--grade:var(--SKIPPED)}
.note{border:1px solid var(--line);border-left:4px solid var(--INCONCLUSIVE);border-radius:8px;padding:10px 14px;
margin:14px 0;background:var(--card)}
dl.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:12px 22px;margin:18px 0 14px}
dl.facts div{min-width:0}dt{color:var(--muted);font-size:.82rem}dd{margin:0;font-weight:550;overflow-wrap:anywhere}
nav{margin:18px 0 0;font-size:.9rem;display:flex;flex-wrap:wrap;gap:4px 18px}
.badge{color:var(--grade);font-weight:650;white-space:nowrap}
ul.findings{list-style:none;margin:0;padding:0;display:grid;gap:12px}
ul.findings li{background:var(--card);border:1px solid var(--line);border-left:5px solid var(--grade);
border-radius:10px;padding:13px 17px}
ul.findings h3{margin:0 0 .4em}ul.findings p.told{margin:.7em 0}.map table{width:auto;min-width:min(100%,560px)}
ul.findings .do{font-weight:550}
.where{color:var(--muted)}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:10px;background:var(--card);margin:.6em 0}
.scroll:focus-visible{outline:2px solid var(--accent)}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{caption-side:top;text-align:left;padding:10px 14px 4px;font-size:.85rem}
th,td{text-align:left;vertical-align:top;padding:6px 14px;border-top:1px solid var(--line)}
thead th{color:var(--muted);font-weight:550;white-space:nowrap;border-top:0}
tbody th{font-weight:550;white-space:nowrap}td.num{text-align:right}
.map td{text-align:center;padding:3px}
.map tbody th{white-space:nowrap}
.map .mark{display:block;min-width:44px;padding:4px 6px;border-radius:6px;color:var(--grade);font-weight:650;
background:color-mix(in srgb,var(--grade) 13%,transparent);text-decoration:none}
.map .FAIL.mark{background:var(--grade);color:var(--card)}
.map thead th{writing-mode:vertical-rl;transform:rotate(180deg);text-align:left;padding:8px 6px;border:0}
.map thead th:first-child{writing-mode:horizontal-tb;transform:none}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(430px,100%),1fr));gap:16px}
.plots{align-items:start}.plots.wide{grid-template-columns:1fr}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px 10px;
min-width:0}
figcaption{font-size:.9rem;font-weight:600;margin-bottom:6px}
figcaption span{font-weight:400;color:var(--muted);display:block;font-size:.8rem;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto;font:12px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
svg text{fill:var(--ink);paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
svg .small{font-size:10.5px;fill:var(--muted)}svg .figure{fill:var(--grade);
font-weight:600}
svg .grid{stroke:var(--line)}svg .frame{fill:none;stroke:var(--line)}
svg .sample{fill:var(--grade);fill-opacity:.45}svg .value{fill:var(--grade)}
svg .mark{stroke:var(--muted);stroke-width:1.3}svg .mark.floor,svg .mark.limit{stroke:var(--FAIL);stroke-width:1.6}
svg .mark.median{stroke-dasharray:5 3}svg .mark.reference{stroke:var(--accent);stroke-dasharray:1.5 3}
svg .mark.before{stroke-dasharray:8 3 2 3}
svg .curve{fill:none;stroke:var(--accent);stroke-width:1.6;stroke-linejoin:round}svg .dot{fill:var(--accent)}
svg .dash1{stroke-dasharray:6 3}svg .dash2{stroke-dasharray:2 3}svg .dash3{stroke-dasharray:9 3 2 3}
svg .dash4{stroke-dasharray:12 4}
svg .inside{stroke:none;fill:var(--ink)}svg .heat{fill:var(--FAIL)}svg .cell{fill:var(--accent)}
svg .held.bad{fill:url(#hatch)}svg .held.cap{fill:var(--WARN);fill-opacity:.1}svg .stripe{stroke:var(--FAIL);
stroke-width:3;stroke-opacity:.55}
details{margin:.6em 0}summary{cursor:pointer;color:var(--accent);padding:4px 0}
details.gpu{background:var(--card);border:1px solid var(--line);border-left:5px solid var(--grade);
border-radius:10px;padding:8px 18px;margin:12px 0}
details.gpu>summary{color:var(--ink);font-weight:600}
.small-print{font-size:.85rem}
footer{margin-top:3em;border-top:1px solid var(--line);padding-top:1em;font-size:.85rem;color:var(--muted);
overflow-wrap:anywhere}
@media (max-width:560px){main{padding:14px 12px 40px}.verdict{padding:18px 16px}th,td{padding:6px 9px}
ul.findings li{padding:11px 13px}}
@media print{:root{color-scheme:light;--bg:#fff;--card:#fff;--ink:#000;--muted:#444;--line:#bbb;--PASS:#1d5a3f;
--WARN:#6b4300;--FAIL:#8d1f19;
--INCONCLUSIVE:#3a3e86;--accent:#1b4b66;--soft:#f4f4f4}body{font-size:11px}main{max-width:none;padding:0}
nav{display:none}
figure,li,details.gpu,tr{break-inside:avoid}h2,h3{break-after:avoid}.scroll{overflow:visible}
details::details-content{content-visibility:visible;block-size:auto}*{print-color-adjust:exact;
-webkit-print-color-adjust:exact}}
"""


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


def frame(title: str, words: str, width: float, height: float, *parts: Markup) -> Markup:
    """`words`: the picture for those who do not see it."""
    return element(
        "svg",
        element("title", title),
        element("desc", words),
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=f"{title}: {words}",
    )


def small(class_: str, words: str, width: float, height: float, *parts: Markup, stretched: bool = False) -> Markup:
    """A chart inside of a page, described by `words` alone. `stretched`: fills its place in both directions."""
    ratio = {"preserveAspectRatio": "none"} if stretched else {}
    box = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria_label": words, **ratio}
    return element("svg", *parts, class_=class_, **box)


def label(words: str, x: float, y: float, anchor: str, class_: str = "label") -> Markup:
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str, title: str | None = None) -> Markup:
    return element(
        "line", None if title is None else element("title", title), x1=x1, y1=y1, x2=x2, y2=y2, class_=class_
    )


def hatching(name: str, side: int, class_: str) -> Markup:
    """Stripes to fill with (`url(#name)`), so that colour is not the only sign. Define them once in each picture."""
    stripe = element("line", x1=0, y1=0, x2=0, y2=side, class_=class_)
    turned = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    return element("defs", element("pattern", stripe, id=name, width=side, height=side, **turned))


def broken_line(points: Iterable[tuple[float, float] | None]) -> list[Markup]:
    """A line with a gap at every None. A single point is drawn as a line from it to itself, which has round ends."""
    runs: list[list[str]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(f"{point[0]:.1f},{point[1]:.1f}")
    lines = (" ".join(run if len(run) > 1 else run * 2) for run in runs if run)
    return [Markup(f'<polyline points="{points}"/>') for points in lines]  # numbers only, so nothing to escape
