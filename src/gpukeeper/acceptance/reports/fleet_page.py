"""The fleet as one page: which nodes are accepted, which are not, and outliers among all GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpukeeper.acceptance.reports import plots
from gpukeeper.acceptance.reports.html import badge, verdict_box
from gpukeeper.acceptance.reports.merge import FleetFigure, FleetReport, by_verdict, why_missing
from gpukeeper.acceptance.reports.wording import figure, less_is_better, moment, percent
from gpukeeper.markup.elements import Markup, document, element, section, table
from gpukeeper.model.grade import Grade

_MOST_NAMES = 16  # the table below has all of them
_MOST_ROWS = 24  # a picture with more of them is less readable


def page(fleet: FleetReport, about: Mapping[str, str] | None = None, pages: Mapping[str, str] | None = None) -> str:
    """`about`: facts of the run (engine, owner, …). `pages`: of nodes, relative to this page."""
    grouped, total = by_verdict(fleet), len(fleet.nodes) + len(fleet.missing)
    facts = {**(about or {})} | {str(grade): f"{len(names)} of {total}" for grade, names in grouped.items()}
    act = "none" if fleet.verdict is Grade.PASS else "see the reports of the nodes, failing ones first"
    sections = (
        verdict_box("GPU acceptance of a fleet", f"{total} nodes", fleet.verdict, fleet.reason, act, facts),
        *(element("p", words, class_="note") for words in _notes(fleet)),
        _nodes(fleet, pages or {}),
        _outliers(fleet),
        _figures(fleet),
        element("footer", f"{fleet.schema} · merged from {len(fleet.nodes)} reports"),
    )
    return document(f"Acceptance of {total} nodes: {fleet.verdict}", element("main", *sections))


def _notes(fleet: FleetReport) -> Iterable[str]:
    if fleet.missing:
        some = ", ".join(fleet.missing[:_MOST_NAMES]) + (", …" if len(fleet.missing) > _MOST_NAMES else "")
        yield f"Missing reports: {some}. A node without a report is not accepted."
    if fleet.unexpected:
        yield f"Unexpected nodes: {', '.join(fleet.unexpected)}."
    yield from fleet.replaced
    yield from fleet.doubles


def _nodes(fleet: FleetReport, pages: Mapping[str, str]) -> Markup:
    head = ("node", "verdict", "GPUs", "tested", "reason", "codes")
    lines = [
        [
            element("a", one.node, href=pages[one.node]) if one.node in pages else one.node,
            badge(one.verdict),
            "unknown" if one.gpus is None else str(one.gpus),
            moment(one.ended),
            one.reason,
            ", ".join(one.worst) or "–",
        ]
        for one in fleet.nodes
    ]
    lines += [
        [name, badge(Grade.INCONCLUSIVE), "unknown", "never", why_missing(fleet, name), "–"] for name in fleet.missing
    ]
    return section("nodes", "Nodes", table(head, lines, "Failing nodes first"))


def _outliers(fleet: FleetReport) -> Markup:
    found = [(one, out) for one in fleet.figures for out in one.outliers]
    if not found:
        return section("outliers", "Outliers", element("p", "None."))
    lines = [
        [
            f"{out.node} GPU {out.index}",
            badge(out.verdict),
            f"{one.check}.{one.metric}",
            figure(out.value, one.unit),
            figure(one.median, one.unit),
            percent(out.drop),
            out.gpu,
        ]
        for one, out in sorted(found, key=lambda pair: -pair[1].drop)
    ]
    head = ("where", "verdict", "metric", "measured", "median of the fleet", "worse by", "identity")
    return section("outliers", "Outliers", table(head, lines, "Compared with all GPUs of the same model"))


def _figures(fleet: FleetReport) -> Markup | None:
    if not fleet.figures:
        return None
    return section("figures", "Measurements", element("div", *(_plot(one) for one in fleet.figures), class_="plots"))


def _plot(one: FleetFigure) -> Markup:
    """The lowest and highest of all, when they are too many to show each."""
    out = {f"{found.node}/{found.index}": found.verdict for found in one.outliers}
    ordered = sorted(one.values, key=lambda pair: -pair[1] if less_is_better(one.unit) else pair[1])
    shown = ordered if len(ordered) <= _MOST_ROWS else [*ordered[: _MOST_ROWS - 4], *ordered[-4:]]
    lines = [plots.PlotRow(_short(name), (), value, out.get(name, Grade.PASS)) for name, value in shown]
    marks = {"median of the fleet": one.median} | ({"reference": one.reference} if one.reference is not None else {})
    left_out = f"; {len(ordered) - len(shown)} in between not drawn" if len(shown) < len(ordered) else ""
    words = f"{one.model}; {one.n} GPUs; {one.unit}; method {one.method}{left_out}"
    name = f"{one.check}.{one.metric}"
    caption = element("figcaption", name, element("span", words))
    return element("figure", caption, plots.strips(name, one.unit, lines, marks))


def _short(name: str) -> str:
    return name if len(name) <= 13 else f"…{name[-12:]}"
