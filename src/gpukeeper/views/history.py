"""The ledger for readers: its lines, and what came back in sum. Behind `ledger list`, `show` and `totals`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

import msgspec

from gpukeeper.ledger.tables import Reclaimed, Totals
from gpukeeper.model.event import (
    Event,
    Held,
    NodeMarked,
    Noticed,
    Passed,
    Paused,
    PolicyChange,
    PolicyChanged,
    Released,
    Resumed,
    WarningSent,
)


class LinesView(msgspec.Struct, frozen=True):
    """Lines of the journal as documents, each with its number `seq`; oldest first."""

    lines: tuple[dict[str, object], ...]


class LineView(msgspec.Struct, frozen=True):
    line: dict[str, object]


class TotalsView(msgspec.Struct, frozen=True):
    since: datetime
    totals: Totals


class LineRow(msgspec.Struct, frozen=True, kw_only=True):
    """`result`: how it came out, what was done, or the verdict. `where`: the path it is about, or a place."""

    seq: int
    at: datetime
    type: str
    result: str
    where: str
    words: str


class TotalsRow(msgspec.Struct, frozen=True, kw_only=True):
    """`by`: all, owner, rule or platform. `unmeasured`: figures that are in no sum."""

    by: str
    name: str
    steps: int
    gpus: int
    gpu_hours: float
    bytes: int
    unmeasured: int


def lines_view(lines: Iterable[tuple[int, Event]]) -> LinesView:
    return LinesView(tuple(line_document(seq, line) for seq, line in lines))


def line_document(seq: int, line: Event) -> dict[str, object]:
    return {"seq": seq, **line_body(line)}


def line_body(line: Event) -> dict[str, object]:
    body: dict[str, object] = msgspec.to_builtins(line)
    return body


def line_row(seq: int, line: Event) -> LineRow:
    return LineRow(
        seq=seq,
        at=line.at,
        type=str(line.__struct_config__.tag),
        result=str(getattr(line, "result", "") or getattr(line, "action", "") or getattr(line, "verdict", "")),
        where=line.ref.path if line.ref else getattr(line, "place", ""),
        words=_words(line),
    )


def _words(line: Event) -> str:
    """By whom and why, as far as the line contains it."""
    match line:
        case Noticed():
            how = f" with {line.ended_with}" if line.ended_with else ""
            return f"{line.state}, {line.outcome}{how}" if line.outcome is not None else str(line.state)
        case Held():
            reason = f": {line.hold.reason}" if line.hold.reason else ""
            return f"by {line.by} until {line.hold.until:%Y-%m-%d %H:%M} UTC{reason}"
        case Paused() | Resumed() | Released():
            return f"by {line.by}" + (f": {line.reason}" if isinstance(line, Paused) and line.reason else "")
        case WarningSent():
            return ("delivered: " if line.delivered else "not delivered: ") + line.message
        case Passed():
            counts = f"{line.seen} seen, {line.due} due, {line.reclaimed} reclaimed, {line.deferred} deferred"
            return "; ".join([counts, *([line.breaker] if line.breaker else []), *line.unseen])
        case NodeMarked():
            return f"{line.action} by {line.by}" + (f": {line.reason}" if line.reason else "")
        case PolicyChanged():
            return "; ".join(change_in_words(one) for one in line.changes) or "members of Unix groups changed"
        case _:
            return str(getattr(line, "reason", "") or getattr(line, "what", "") or getattr(line, "note", ""))


def change_in_words(one: PolicyChange) -> str:
    if one.before is None:
        return f"{one.setting} added: {one.after}"
    return f"{one.setting} removed" if one.after is None else f"{one.setting}: {one.before} -> {one.after}"


def totals_rows(found: Totals) -> Iterator[TotalsRow]:
    """All, then each owner, rule and platform by name. An owner without a name: unknown."""
    yield _totals("all", "", found.whole)
    for by, group in (("owner", found.owners), ("rule", found.rules), ("platform", found.platforms)):
        for name, sums in sorted(group.items()):
            yield _totals(by, name or "unknown", sums)


def _totals(by: str, name: str, sums: Reclaimed) -> TotalsRow:
    return TotalsRow(
        by=by,
        name=name,
        steps=sums.steps,
        gpus=sums.gpus,
        gpu_hours=sums.gpu_hours,
        bytes=sums.bytes,
        unmeasured=sums.unmeasured_gpus + sums.unmeasured_gpu_hours + sums.unmeasured_bytes,
    )
