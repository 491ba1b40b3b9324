"""The tables of a usage report: rows of words that terminal and page print. Each fits into 60 columns as long as names
are short."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpukeeper.model.durations import size_in_words
from gpukeeper.views.savings import SavingsRow
from gpukeeper.views.usage import GpuHours, UsageRow
from gpukeeper.views.usage_report import UsageReport

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
