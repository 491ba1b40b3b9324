"""A report of usage and savings: read from the files of a ledger, for the command and for the daemon that answers
it; its tables, as rows of words, as CSV and as Markdown; its pictures as inline SVG; and the whole as one HTML file,
into which nothing is loaded from elsewhere. Each table fits into 60 columns as long as names are short. Every picture
has a title and a description in words; each state has a pattern or a number, not only a colour.
"""

from __future__ import annotations

import csv
import io
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gpukeeper import markup
from gpukeeper.engine.schedule import LocalZone
from gpukeeper.ledger.archive import covered_from, outcome_lines
from gpukeeper.markup import Child, Markup, document, element, facts, section, table
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Prices
from gpukeeper.model.words import in_words, plain, size_in_words
from gpukeeper.views.usage import GpuHours, HeatRow, UsageRow, UsageSums
from gpukeeper.views.usage_report import (
    SOON,
    ReportQuery,
    SavingsRow,
    SavingsSums,
    UsageReport,
    not_covered,
    usage_report,
)

if TYPE_CHECKING:
    from gpukeeper.ledger.journal import SqliteLedger
    from gpukeeper.ledger.usage import SqliteUsage, UsageReader


def zone_named(name: str) -> tzinfo:
    """Empty: the zone of this machine."""
    if not name:
        return LocalZone()
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise UsageError(f'"{name[:60]}" is not a known time zone. Write it like Europe/Berlin.') from None


async def read_report(
    ledger: SqliteLedger, usage: SqliteUsage, query: ReportQuery, prices: Prices, now: datetime
) -> UsageReport:
    zone = zone_named(query.zone)
    sums = UsageSums(query.since, query.until, zone)
    notes: list[str] = []

    def read_usage(reader: UsageReader) -> tuple[dict[str, set[str]], int | None]:
        for one in reader.hours(query.since, query.until, now):
            sums.add(one)
        return reader.models(query.since, query.until), reader.oldest()

    models, oldest = await usage.read(read_usage)
    savings = SavingsSums(query.since, query.until, zone, prices, models)

    def read_lines(c: sqlite3.Connection) -> None:
        notes.extend(not_covered(query, covered_from(c, ledger.path)))
        for line in outcome_lines(c, ledger.path, query.since, query.until + SOON, notes.append):
            savings.add(line)

    await ledger.read(read_lines)
    return usage_report(query, zone, sums, savings, prices, recorded_from=oldest, notes=notes)


STATES = (("active", "in use"), ("idle", "held but idle"), ("free", "free"), ("unknown", "not measured"))
TITLES = {
    "owner": "By owner",
    "class": "By class",
    "group": "By group",
    "model": "By GPU model",
    "day": "By day",
    "rule": "Given back, by rule",
}
WASTE = "GPU-hours at zero use; reported only, no action follows"
FAILURES = "steps that ended no work; open: not ended by a later step"
GPUKEEPER = "gpukeeper"
CSV_HEAD = ("day", "owner", "class", "group", "model", "held", *(name for name, _ in STATES))


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    about: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _table(
    name: str, title: str, about: str, head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1
) -> Table:
    """With all but the first columns (`words` of them) aligned to the right."""
    lines = [[cell.strip() for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (head, *lines)) for i in range(len(head))]
    made = [tuple(cell if i < words else cell.rjust(widths[i]) for i, cell in enumerate(row)) for row in (head, *lines)]
    return Table(name, title, about, made[0], tuple(made[1:]))


def headline(report: UsageReport) -> str:
    whose = f" of {report.owner}" if report.owner else ""
    return f"GPU usage{whose}, {report.since:%Y-%m-%d %H:%M} to {report.until:%Y-%m-%d %H:%M}"


def total_rows(hours: GpuHours) -> Iterator[tuple[str, str, str]]:
    for name, words in STATES:
        value = getattr(hours, name)
        yield words, _hours(value), f"{value / hours.all:4.0%}" if hours.all else "-"
    yield "all", _hours(hours.all), ""


def tables(report: UsageReport, by: str | None = None) -> list[Table]:
    """Only that one, or those of a monthly report."""
    if by == "rule":
        return [_savings("rule", report.savings.rules)]
    if by is not None:
        return [_usage(report, by)]
    found = [_usage(report, name) for name in ("owner", "class", "model")]
    if any(row.name != "none" for row in report.groups):
        found.insert(2, _usage(report, "group"))
    back = report.savings
    found += [_waste(report), _savings("rule", back.rules), _savings("owner", back.owners)]
    if any(row.name != GPUKEEPER for row in back.causes):
        found.append(_savings("cause", back.causes))
    return [*found, _failures(report)] if back.failures else found


def _failures(report: UsageReport) -> Table:
    rows = (
        (one.owner, one.rule, one.result, str(one.attempts), str(one.objects), str(one.open))
        for one in report.savings.failures
    )
    head = ("owner", "rule", "result", "steps", "objects", "open")
    return _table("failed", "Refused and failed", FAILURES, head, rows, words=3)


def _usage(report: UsageReport, by: str) -> Table:
    held = by in ("owner", "class", "group")
    head = (by, "in use", "idle", *(() if held else ("free",)), "not measured")
    priced = report.money is not None
    rows = tuple(_usage_row(row, held=held, priced=priced) for row in report.by(by))
    cost = (f"idle {report.currency}".strip() if report.currency else "idle cost",) if priced else ()
    return _table(by, TITLES[by], "in GPU-hours", (*head, *cost), rows)


def _usage_row(row: UsageRow, *, held: bool, priced: bool) -> tuple[str, ...]:
    hours = row.hours
    cells = (_hours(hours.active), _hours(hours.idle), *(() if held else (_hours(hours.free),)), _hours(hours.unknown))
    return (row.name, *cells, *((_money(row.money.idle if row.money else None),) if priced else ()))


def _waste(report: UsageReport) -> Table:
    rows = tuple(
        (one.owner, one.class_, _hours(one.idle), f"{one.idle / one.held:4.0%}")
        + (() if report.money is None else (_money(one.cost),))
        for one in report.waste
    )
    head = ("owner", "class", "GPU-hours", "of held", *(() if report.money is None else (report.currency or "cost",)))
    return _table("waste", "Held without use", WASTE, head, rows, words=2)


def _savings(name: str, found: tuple[SavingsRow, ...]) -> Table:
    rows = tuple(
        (row.name, f"{row.savings.steps:5}", _hours(row.savings.gpu_hours), size_in_words(row.savings.bytes).rjust(9))
        for row in found
    )
    title = TITLES["rule"] if name == "rule" else f"Given back, by {name}"
    return _table(f"back-{name}", title, "verified outcomes", (name, "steps", "GPU-hours", "size"), rows)


def savings_tables(report: UsageReport) -> list[Table]:
    """What came back, by day, owner, rule and platform."""
    found = report.savings
    parts = {"day": found.days, "owner": found.owners, "rule": found.rules, "platform": found.platforms}
    return [_priced(_savings(name, rows), rows, report) for name, rows in parts.items()]


def _priced(table: Table, rows: tuple[SavingsRow, ...], report: UsageReport) -> Table:
    if report.money is None:
        return table
    cells = (_money(row.savings.money) for row in rows)
    made = tuple((*row, cell) for row, cell in zip(table.rows, cells, strict=True))
    return replace(table, head=(*table.head, report.currency or "cost"), rows=made)


def savings_line(report: UsageReport) -> str:
    back = report.savings.total
    if not back.steps:
        return "Nothing was given back in this time."
    words = f"{back.steps} step{'s' if back.steps != 1 else ''} gave back {back.gpu_hours:,.1f} GPU-hours and "
    words += size_in_words(back.bytes)
    if back.unmeasured:
        words += f"; {back.unmeasured} figure{'s' if back.unmeasured != 1 else ''} could not be measured"
    return f"{words}."


def regret_line(report: UsageReport) -> str:
    """Steps that ended work, and how many of them were undone."""
    found = report.savings
    if not found.ended:
        return "No work was stopped or removed."
    words = f"{found.ended} step{'s' if found.ended != 1 else ''} stopped or removed work"
    return f"{words}; {found.regretted} of them {'was' if found.regretted == 1 else 'were'} undone within a day."


def failed_line(report: UsageReport) -> str:
    failed = report.savings.failed
    if not failed:
        return "No step was refused or failed."
    return f"{failed} step{'s were' if failed != 1 else ' was'} refused or failed."


def money_line(report: UsageReport) -> str | None:
    if report.money is None:
        return None
    money, back = report.money, report.savings.total
    unit = f" {report.currency}" if report.currency else ""
    words = (
        f"Cost: in use {money.active:,.2f}{unit}, held but idle {money.idle:,.2f}{unit}, free {money.free:,.2f}{unit}"
    )
    words += f"; given back {back.money:,.2f}{unit}."
    if money.unpriced > 0.05:
        words += f" {money.unpriced:,.1f} GPU-hours have no price."
    if back.unpriced > 0.05:
        words += f" {back.unpriced:,.1f} GPU-hours that were given back have no single price."
    return words


def csv_text(report: UsageReport) -> str:
    """One line for each day, owner, class, group and model. A name that a spreadsheet would compute is quoted."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow([f"{name}_gpu_hours" if name in dict(STATES) else name for name in CSV_HEAD])
    for one in report.cells:
        names = (one.owner, one.class_, one.group, one.model)
        hours = (f"{getattr(one.hours, name):.4f}" for name, _ in STATES)
        writer.writerow([one.day.isoformat(), *map(_harmless, names), "yes" if one.held else "no", *hours])
    return made.getvalue()


def waste_csv(report: UsageReport) -> str:
    """One line for each owner and class: GPU-hours held, and of those at zero use."""
    rows = (
        (_harmless(one.owner), _harmless(one.class_), f"{one.held:.4f}", f"{one.idle:.4f}", _plain_money(one.cost))
        for one in report.waste
    )
    return _csv(("owner", "class", "held_gpu_hours", "idle_gpu_hours", "idle_cost"), rows)


def savings_csv(report: UsageReport) -> str:
    """What came back: one line for each day, owner, rule and platform; each way of splitting has the same sum."""
    found = report.savings
    parts = {"day": found.days, "owner": found.owners, "rule": found.rules, "platform": found.platforms}
    rows = (
        (
            *(by, _harmless(row.name), str(row.savings.steps), str(row.savings.gpus)),
            *(f"{row.savings.gpu_hours:.4f}", str(row.savings.bytes)),
            _plain_money(row.savings.money if report.money is not None else None),
        )
        for by, listed in parts.items()
        for row in listed
    )
    return _csv(("by", "name", "steps", "gpus", "gpu_hours", "bytes", "money"), rows)


def _csv(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerows((head, *rows))
    return made.getvalue()


def _plain_money(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _harmless(name: str) -> str:
    return f"'{name}" if name[:1] in ("=", "+", "-", "@", "\t", "\r") else name


def _hours(value: float) -> str:
    return f"{value:8,.1f}"


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:9,.2f}"


WIDTH, LEFT, TOP, HEIGHT = 1000.0, 64.0, 10.0, 220.0
_CELL, _ROW = 38.0, 26.0
UNMEASURED = ("unmeasured", 5, "hatching")  # what is hatched in every picture of use
CHART_STYLE = """
:root{--active:#2a7453;--idle:#b86b00;--free:#8fb7cf;--unknown:#8b9299}
@media (prefers-color-scheme:dark){:root{--active:#5fb98f;--idle:#e3a04a;--free:#3f6f8c;--unknown:#7d868d}}
svg .active,.key.active{fill:var(--active);background:var(--active)}svg .idle,.key.idle{fill:var(--idle);
background:var(--idle)}svg .free,.key.free{fill:var(--free);background:var(--free)}
svg .unknown{fill:url(#unmeasured)}.key.unknown{background:repeating-linear-gradient(45deg,var(--unknown) 0 2px,
transparent 2px 5px)}svg .hatching{stroke:var(--unknown);stroke-width:2}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:.85rem;margin:0 0 8px;padding:0;list-style:none}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;border:1px solid var(--muted)}
.wide{overflow-x:auto}.wide svg{min-width:720px}
svg text.ink{fill:var(--ink);stroke:none}figure+figure{margin-top:14px}
td,tbody th{overflow-wrap:anywhere}td.num,th.num{text-align:right;white-space:nowrap}
"""


def legend() -> Markup:
    keys = (element("li", element("span", class_=f"key {name}"), words) for name, words in STATES)
    return element("ul", *keys, class_="legend")


def bars(days: Sequence[UsageRow]) -> Markup:
    """A bar for each day, split by state."""
    highest = max((row.hours.all for row in days), default=0.0) or 1.0
    bottom, wide = TOP + HEIGHT, (WIDTH - LEFT - 10) / max(len(days), 1)
    parts = [markup.hatching(*UNMEASURED), *_axis(highest, bottom)]
    every = max(1, round(52 / wide + 0.5))
    for number, row in enumerate(days):
        left, at = LEFT + wide * number, bottom
        for name, words in STATES:
            hours = getattr(row.hours, name)
            size = HEIGHT * hours / highest
            at -= size
            if size > 0:
                title = element("title", f"{row.name}: {hours:.1f} GPU-hours {words}")
                box = {"x": left + wide * 0.1, "y": at, "width": max(wide * 0.8, 1.0), "height": size}
                parts.append(element("rect", title, class_=name, **box))
        if number % every == 0:
            parts.append(markup.label(row.name[5:], left + wide / 2, bottom + 16, "middle", "small"))
    words = "; ".join(f"{row.name} {_in_words(row.hours)}" for row in days)
    return markup.frame("GPU-hours by day", words or "no data", WIDTH, bottom + 24, *parts)


def heat(rows: Sequence[HeatRow], state: str, title: str) -> Markup:
    """The share of the measured time in that state, in percent, by day of the week and hour of the day."""
    highest = max((share for row in rows for one in row.hours if (share := _share(one, state)) is not None), default=0)
    parts = [markup.hatching(*UNMEASURED)]
    parts += [markup.label(f"{hour:02}", LEFT + 20 + _CELL * (hour + 0.5), 14, "middle", "small") for hour in range(24)]
    for y, row in enumerate(rows):
        parts.append(markup.label(row.day[:3], LEFT + 10, 22 + _ROW * y + 17, "end", "small"))
        for x, hours in enumerate(row.hours):
            parts += _heat_cell(hours, state, highest, LEFT + 20 + _CELL * x, 22 + _ROW * y, f"{row.day} {x:02}")
    return markup.frame(title, _heat_words(rows, state), WIDTH, 22 + _ROW * len(rows) + 6, *parts)


def _heat_cell(hours: GpuHours, state: str, highest: float, x: float, y: float, when: str) -> Iterator[Markup]:
    share = _share(hours, state)
    box = {"x": x + 1, "y": y + 1, "width": _CELL - 2, "height": _ROW - 2, "rx": 3}
    if share is None:
        yield element("rect", element("title", f"{when}: not measured"), class_="unknown", **box)
        return
    full = share / highest if highest else 0.0
    title = element("title", f"{when}: {share:.0%} of {hours.all - hours.unknown:.1f} measured GPU-hours")
    yield element("rect", title, class_=state, fill_opacity=f"{0.05 + 0.5 * full:.2f}", **box)
    yield markup.label(f"{share * 100:.0f}", x + _CELL / 2, y + 17, "middle", "small ink")


def _share(hours: GpuHours, state: str) -> float | None:
    measured = hours.all - hours.unknown
    return float(getattr(hours, state)) / measured if measured > 1e-9 else None


def _heat_words(rows: Sequence[HeatRow], state: str) -> str:
    found = []
    for row in rows:
        shares = [(share, hour) for hour, one in enumerate(row.hours) if (share := _share(one, state)) is not None]
        if shares:
            most, hour = max(shares)
            found.append(f"{row.day} up to {most:.0%} at {hour:02}")
    return "; ".join(found) or "not measured"


def _in_words(hours: GpuHours) -> str:
    return ", ".join(f"{getattr(hours, name):.1f} {words}" for name, words in STATES if getattr(hours, name) >= 0.05)


def _axis(highest: float, bottom: float) -> Iterator[Markup]:
    for share in (0.0, 0.5, 1.0):
        y = bottom - HEIGHT * share
        yield markup.line(LEFT, y, WIDTH - 10, y, "grid")
        yield markup.label(
            f"{highest * share:.0f} h" if highest >= 10 else f"{highest * share:.1f} h", LEFT - 8, y + 4, "end", "small"
        )


_MARKDOWN = re.compile(r"[\\`*_\[\]<>|#&!~]")
TOTAL = ("state", "GPU-hours", "share")


def markdown_text(report: UsageReport) -> str:
    return "\n".join(_markdown_lines(report))


def _markdown_lines(report: UsageReport) -> Iterator[str]:
    yield f"# {_escaped(headline(report))} ({_escaped(report.zone)})"
    for note in report.notes:
        yield f"\n> {_escaped(note)}"
    yield ""
    sentences = (savings_line(report), regret_line(report), failed_line(report), money_line(report))
    yield from (f"- {_escaped(one)}" for one in sentences if one is not None)
    if report.unweighed > 0:
        yield f"- {report.unweighed:,.1f} hours of slices of unknown size are in no sum."
    yield from _markdown_table(Table("total", "Total", "in GPU-hours", TOTAL, tuple(total_rows(report.total))), words=1)
    for one in tables(report):
        yield from _markdown_table(one, words={"waste": 2, "failed": 3}.get(one.name, 1))


def _markdown_table(table: Table, words: int) -> Iterator[str]:
    """All but the first columns (`words` of them) are numbers."""
    yield f"\n## {_escaped(table.title)} ({_escaped(table.about)})\n"
    if not table.rows:
        yield "none"
        return
    yield _markdown_row(table.head)
    yield "|" + "|".join("---" if i < words else "---:" for i in range(len(table.head))) + "|"
    yield from map(_markdown_row, table.rows)


def _markdown_row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_escaped(cell.strip()) for cell in cells) + " |"


def _escaped(words: str) -> str:
    """Names of owners and classes come from elsewhere: none is markup, and none begins a new line."""
    return _MARKDOWN.sub(lambda found: f"\\{found.group()}", " ".join(plain(words).split()))


def usage_page(report: UsageReport) -> str:
    return usage_document(headline(report), "", _sections(report))


def usage_document(title: str, style: str, sections: Iterable[Markup]) -> str:
    return document(title, element("main", *sections), style=CHART_STYLE + style)


def _sections(report: UsageReport) -> Iterable[Markup]:
    yield _header(report)
    yield from (element("p", words, class_="note") for words in report.notes)
    yield section("days", "GPU-hours by day", _figure(legend(), _wide(bars(report.days))))
    if report.heat:
        yield section(
            "week",
            "Hours of the week",
            element(
                "p", "Percent of the measured time, mean over the whole span. Hatched: not measured.", class_="muted"
            ),
            _figure(element("figcaption", "In use"), _wide(heat(report.heat, "active", "In use, by hour of the week"))),
            _figure(
                element("figcaption", "Held but idle"),
                _wide(heat(report.heat, "idle", "Held but idle, by hour of the week")),
            ),
        )
    for one in tables(report):
        yield section(one.name, one.title, *_described(one))
    yield section("regret", "Undone within a day", element("p", regret_line(report)), *_regrets(report))
    yield element("footer", "gpukeeper report · times in ", report.zone)


def _header(report: UsageReport) -> Markup:
    hours, shown = report.total, dict[str, str]()
    for name, words in STATES:
        share = getattr(hours, name) / hours.all if hours.all else 0.0
        shown[words] = f"{getattr(hours, name):,.1f} GPU-hours ({share:.0%})"
    shown["given back"] = f"{report.savings.total.gpu_hours:,.1f} GPU-hours in {report.savings.total.steps} steps"
    cost = money_line(report)
    return element(
        "header",
        element("p", "GPU usage and savings", class_="eyebrow"),
        element("h1", headline(report)),
        facts(shown),
        None if cost is None else element("p", cost),
        class_="card",
    )


def _described(one: Table) -> list[Markup]:
    if not one.rows:
        return [element("p", "None.")]
    return [text_table(one.head, one.rows, one.about[:1].upper() + one.about[1:])]


def _regrets(report: UsageReport) -> list[Markup]:
    rows = [(one.path, one.owner, one.rule, f"{one.how} after {in_words(one.after)}") for one in report.savings.regrets]
    return [text_table(("workload", "owner", "rule", "what happened"), rows, "Steps that were undone")] if rows else []


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> Markup:
    """Of plain cells; columns that hold only numbers are aligned as such."""
    lines = [[row[0], *(cell.strip() for cell in row[1:])] for row in rows]
    numbers = [all(_is_number(row[i]) for row in lines) for i in range(len(head))]
    return table([name.strip() for name in head], lines, caption, numbers=numbers)


def _is_number(cell: str) -> bool:
    return cell.strip()[:1].isdecimal() or cell.strip() in ("", "-")


def _figure(*children: Child) -> Markup:
    return element("figure", *children)


def _wide(picture: Markup) -> Markup:
    return element("div", picture, class_="wide", tabindex="0", role="region", aria_label="Picture, can be scrolled")
