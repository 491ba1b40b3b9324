"""Tables of measurements (CSV and what is like it), by a mapping file: which column is what, in which unit, and what
one row covers (docs/reference/traces.md). A row that cannot be used is counted and named. What is not text becomes
rows of text elsewhere (parquet.py).

A minute without a row is not measured. A row whose value says so ("N/A", empty) is not measured either, and not bad.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo

import msgspec

from gpukeeper.config import document, problems
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.reading import EPOCH
from gpukeeper.model.series import MINUTE, NOT_MEASURED, Signal
from gpukeeper.model.words import plain
from gpukeeper.traces.spool import BadRows, Column, Spool, SpooledTrace, Stamp, Workload

PAGE = "Keys and examples: docs/reference/traces.md, examples/traces."
EVERY_MAX = timedelta(hours=1)
_LARGEST = 1024 * 1024
_UNITS: Mapping[Signal, frozenset[str]] = {
    Signal.GPU: frozenset({"percent", "ratio"}),
    Signal.CPU: frozenset({"percent", "ratio"}),
    Signal.NETWORK: frozenset({"bytes", "bytes/s"}),
    Signal.DISK: frozenset({"bytes", "bytes/s"}),
    Signal.TERMINAL: frozenset({"flag"}),
}
Columns: TypeAlias = str | tuple[str, ...]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TimeColumn(_Strict, frozen=True, kw_only=True):
    """`format`: iso, epoch (seconds), epoch-ms, or as strptime has it. `stamp`: a row is of the time after it, or of
    the time before it."""

    column: str
    format: str = "iso"
    zone: str = ""
    stamp: Literal["begin", "end"] = "begin"


class ValueColumn(_Strict, frozen=True, kw_only=True):
    """`when`: only rows whose `signal` column has this text."""

    column: str
    unit: Literal["percent", "ratio", "bytes", "bytes/s", "flag"]
    when: str = ""
    slice: bool = False


class Accounting(_Strict, frozen=True, kw_only=True):
    """What `sacct` wrote. `file` is relative to the mapping file."""

    file: str
    zone: str = ""


class TableMapping(_Strict, frozen=True, kw_only=True):
    time: TimeColumn
    workload: Columns
    values: Mapping[Signal, ValueColumn]
    owner: str = ""
    class_: str = msgspec.field(name="class", default="")
    namespace: str = ""
    device: Columns = ()
    start: str = ""
    end: str = ""
    signal: str = ""
    labels: Mapping[str, str] = {}
    every: str = "1m"
    new_run_after: str = "1d"
    since: str = ""
    until: str = ""
    not_measured: tuple[str, ...] = ("", "NA", "N/A", "[N/A]", "NaN", "nan", "null", "None", "-")
    shape: Literal["csv", "dcgmi-dmon"] = "csv"
    separator: str = ","
    header: tuple[str, ...] = ()
    comment: str = ""
    sacct: Accounting | None = None
    platform: str = "docker"
    kind: str = "container"
    place: str = "trace"

    @property
    def zone(self) -> tzinfo | None:
        """None: a time must have its own."""
        return zone_of(self.time.zone)

    @property
    def minutes(self) -> int:
        return reading.span(self.every) // MINUTE

    def columns(self) -> dict[str, str]:
        """Every column that it names, by the key that names it."""
        one = {
            "time.column": self.time.column,
            **{key: name for key in ("owner", "namespace", "start", "end", "signal") if (name := getattr(self, key))},
            **({"class": self.class_} if self.class_ else {}),
            **{f"values.{signal}.column": value.column for signal, value in self.values.items()},
            **{f"labels.{label}": name for label, name in self.labels.items()},
        }
        for key, names in (("workload", names_of(self.workload)), ("device", names_of(self.device))):
            one |= {f"{key}[{number}]" if len(names) > 1 else key: name for number, name in enumerate(names)}
        return one


def zone_of(name: str) -> tzinfo | None:
    return None if not name else UTC if name == "UTC" else ZoneInfo(name)


def names_of(columns: Columns) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else columns


def read_mapping(path: Path) -> TableMapping:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        return parse_mapping(content.decode(), str(path))
    except UnicodeDecodeError:
        raise UsageError(f"The mapping file {path} is not UTF-8 text. Nothing was read. {PAGE}") from None
    except OSError as error:
        raise UsageError(
            f"The mapping file {path} cannot be read: {error.strerror or error}. Nothing was read. Check its path."
        ) from error


def parse_mapping(text: str, name: str) -> TableMapping:
    """UsageError with every problem of the file's syntax, or the first of its values."""
    found = document.read(text)
    if found.problems:
        raise UsageError("\n".join(problems.messages_in_order(found.problems, name, found.lines)))
    try:
        mapping = msgspec.convert(_short(found.tree), TableMapping)
    except msgspec.ValidationError as error:
        raise _unusable(name, _in_words(str(error))) from None
    for key, why in _mistakes(mapping):
        raise _unusable(name, f"`{key}` {why}")
    return mapping


def check_columns(mapping: TableMapping, existing: Collection[str], what: str) -> None:
    """UsageError if the table does not have what the mapping names."""
    missing = {key: name for key, name in mapping.columns().items() if name not in existing}
    if missing:
        named = ", ".join(f"`{key}` names {name!r}" for key, name in missing.items())
        raise UsageError(
            f"{what} does not have every column of its mapping: {named}. Nothing was read. "
            f"It has: {', '.join(existing)[:1000]}. Name one of these in the mapping."
        )


def _short(tree: Any) -> Any:
    """`time: COLUMN` is short for `time: {column: COLUMN}`."""
    if isinstance(tree, dict) and isinstance(tree.get("time"), str):
        return {**tree, "time": {"column": tree["time"]}}
    return tree


def _in_words(message: str) -> str:
    """`Object missing required field `unit` - at `$.values[...]`` without the dollar sign."""
    return message.replace("`$.", "`").replace(" - at `$`", "").replace("[...]", ".SIGNAL")


def _unusable(name: str, why: str) -> UsageError:
    return UsageError(f"The mapping file {name} cannot be used: {why}. Nothing was read. {PAGE}")


def _mistakes(mapping: TableMapping) -> Iterable[tuple[str, str]]:
    for key in ("every", "new_run_after"):
        try:
            reading.span(getattr(mapping, key))
        except ValueError as problem:
            yield key, f"{problem}; write it like 5m"
    for key in ("since", "until"):
        try:
            if getattr(mapping, key):
                reading.moment(getattr(mapping, key))
        except ValueError as problem:
            yield key, f"{problem}; write it like 2026-01-05T00:00:00Z"
    yield from _mistakes_of_time(mapping)
    if not names_of(mapping.workload) or not all(names_of(mapping.workload)):
        yield "workload", "names no column"
    if Signal.GPU not in mapping.values:
        yield "values", "has no `gpu`: without it nothing can be decided"
    for signal, value in mapping.values.items():
        if value.unit not in _UNITS[signal]:
            yield f"values.{signal}.unit", f"must be {' or '.join(sorted(_UNITS[signal]))}, not {value.unit}"
        if bool(value.when) != bool(mapping.signal):
            yield f"values.{signal}.when", "and `signal` must both be there (one row for each signal), or none of them"
    if mapping.separator not in {"spaces", "tab"} and len(mapping.separator) != 1:
        yield "separator", "must be one character, `tab` or `spaces`"


def _mistakes_of_time(mapping: TableMapping) -> Iterable[tuple[str, str]]:
    every = reading.span(mapping.every)
    if every % MINUTE or not MINUTE <= every <= EVERY_MAX:
        yield "every", "must be whole minutes, from 1m to 1h"
    if reading.span(mapping.new_run_after) < max(every, MINUTE):
        yield "new_run_after", "must not be shorter than `every`"
    for key, name in (("time.zone", mapping.time.zone), ("sacct.zone", mapping.sacct.zone if mapping.sacct else "")):
        try:
            zone_of(name)
        except (OSError, ValueError, LookupError):
            yield key, f"{name!r} is not known on this machine; write it like Europe/Berlin or UTC"
    form = mapping.time.format
    if "%" in form and not _round_trip(form):
        yield "time.format", f"{form!r} is not a format of strptime with a date and a time; like %Y-%m-%d %H:%M:%S"
    elif "%" not in form and form not in {"iso", "epoch", "epoch-ms"}:
        yield "time.format", "must be iso, epoch, epoch-ms, or a format of strptime such as %Y-%m-%d %H:%M:%S"
    if "%" in form and "%z" not in form and not mapping.time.zone:
        yield "time.zone", "is missing, and `time.format` has no %z; write it like Europe/Berlin or UTC"


def _round_trip(form: str) -> bool:
    """Whether it has a date and the minutes of a time."""
    at = datetime(2026, 2, 13, 14, 35, tzinfo=UTC)
    try:
        return reading.local(at.strftime(form), form, UTC) == at
    except (ValueError, UnicodeError):
        return False


LINE_MAX: Final = 256 * 1024  # characters
NAME_MAX: Final = 1000
LONGEST: Final = timedelta(days=3660)
_LATEST = (datetime(2100, 1, 1, tzinfo=UTC) - EPOCH) // MINUTE
_KNOWN_MAX, _MEMO_MAX = 100_000, 10_000
_ROUNDING = 0.01  # percent above 100 that a conversion may leave
_SEPARATORS = {"tab": "\t"}

Row: TypeAlias = Sequence[str]
NumberedRow: TypeAlias = tuple[int, Row]  # the line, counted from 1


class Table(NamedTuple):
    """`times`: columns that have ISO 8601 whatever `time.format` says. `unit`: what the number of a row counts."""

    columns: tuple[str, ...]
    rows: Iterable[NumberedRow]
    times: frozenset[str] = frozenset()
    unit: str = "line"


def open_table(path: Path, mapping: TableMapping, spool: Spool | None = None) -> SpooledTrace:
    """Reads all of it. With `spool`: what is known of the workloads already, from another file."""
    spool = Spool() if spool is None else spool
    try:
        with _text(path) as file:
            table = _READERS[mapping.shape](_lines(file, spool.bad), mapping, spool.bad)
            fill(spool, mapping, table, str(path))
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror or error if isinstance(error, OSError) else "it is not complete, or not gzip"
        raise UsageError(f"The trace {path} cannot be read: {why}. Nothing was replayed. Check the file.") from error
    return SpooledTrace(spool, stamp(mapping, str(path)))


def stamp(mapping: TableMapping, source: str) -> Stamp:
    limit = reading.span(mapping.new_run_after)
    return Stamp(source, mapping.platform, mapping.kind, mapping.place, limit)


def fill(spool: Spool, mapping: TableMapping, table: Table, what: str) -> None:
    """UsageError if there is no usable row at all."""
    if not table.columns:
        raise UsageError(f"{what} is empty. Nothing was replayed. Check the file.")
    check_columns(mapping, table.columns, what)
    reader = RowReader(mapping, table.columns, table.times)
    spool.bad.unit = table.unit
    for line, row in table.rows:
        spool.rows += 1
        try:
            reader.read(row, spool)
        except ValueError as problem:
            spool.bad.add(line, str(problem))
    if spool.last is None or spool.first is None:
        first = f" The first bad one: {spool.bad.kept[0].words}." if spool.bad.kept else ""
        raise UsageError(f"{what} has no row that can be used ({spool.rows} rows).{first} Nothing was replayed. {PAGE}")
    if (spool.last - spool.first) * MINUTE > LONGEST:
        begin, end = (EPOCH + minute * MINUTE for minute in (spool.first, spool.last))
        raise UsageError(
            f"The rows of {what} are from {begin:%Y-%m-%d} to {end:%Y-%m-%d}; some have a wrong time. Nothing was "
            "replayed. Set `since` and `until` in the mapping: then rows outside of them are counted as bad."
        )


class RowReader:
    """ValueError, a sentence about one column, for a row that cannot be used. Then nothing of it was added."""

    def __init__(self, mapping: TableMapping, columns: Sequence[str], times: Collection[str] = ()) -> None:
        at = {name: position for position, name in enumerate(columns)}
        self._mapping, self._width = mapping, len(columns)
        self._at = {key: at[name] for key, name in mapping.columns().items()}
        self._workload = [at[name] for name in names_of(mapping.workload)]
        self._device = [at[name] for name in names_of(mapping.device)]
        self._labels = {label: at[name] for label, name in mapping.labels.items()}
        self._values: list[tuple[Signal, ValueColumn, int, dict[str, float]]] = [
            (signal, value, at[value.column], {}) for signal, value in mapping.values.items()
        ]
        self._blank = frozenset(mapping.not_measured)
        self._minutes = mapping.minutes
        self._when = {
            key: _when(mapping, "iso" if name in times else mapping.time.format)
            for key, name in mapping.columns().items()
            if key in {"time.column", "start", "end"}
        }
        self._last: tuple[str, int] = ("", 0)
        of_time_or_value = {"time.column", "signal", *(f"values.{signal}.column" for signal in mapping.values)}
        self._naming = sorted({position for key, position in self._at.items() if key not in of_time_or_value})
        self._known: dict[tuple[str, ...], tuple[Column, ...]] = {}
        self._reached = -1
        self._since = reading.moment(mapping.since) if mapping.since else None
        self._until = reading.moment(mapping.until) if mapping.until else None

    def read(self, row: Row, spool: Spool) -> None:
        if len(row) != self._width:
            raise ValueError(f"it has {len(row)} fields, the header has {self._width}")
        minute = self._minute(row)
        found = self._measured(row)
        columns = self._named(row, spool)
        if minute != self._reached:
            spool.reach(minute, minute + self._minutes - 1)
            self._reached = minute
        for number, value in found:
            for passed in range(self._minutes):
                spool.add(columns[number], minute + passed, value)

    def _named(self, row: Row, spool: Spool) -> tuple[Column, ...]:
        """Where its values belong. Most rows name what an earlier row named with the same words."""
        words = tuple([row[position] for position in self._naming])
        known = self._known.get(words)
        if known is None:
            name = _joined(row, self._workload, "workload")
            device = _joined(row, self._device, "device") if self._device else f"{name}/0"
            workload = self._who(row, spool, name)
            known = tuple(
                spool.column(workload, signal, device if signal is Signal.GPU else "", part=column.slice)
                for signal, column, _position, _memo in self._values
            )
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[words] = known
        return known

    def _minute(self, row: Row) -> int:
        text = row[self._at["time.column"]]
        if text == self._last[0]:  # rows of many workloads have the same time
            return self._last[1]
        at = _moment(self._when["time.column"], text, self._mapping.time.column)
        if (self._since and at < self._since) or (self._until and at >= self._until):
            raise ValueError(f"{text[:40]!r} is outside of `since` and `until` of the mapping")
        minute = (at - EPOCH) // MINUTE - (self._minutes if self._mapping.time.stamp == "end" else 0)
        if not 0 <= minute < _LATEST:
            raise ValueError(f"{text[:40]!r} in column {self._mapping.time.column} is not between 1970 and 2100")
        self._last = (text, minute)
        return minute

    def _measured(self, row: Row) -> list[tuple[int, float]]:
        """The values of this row, by the number of their column."""
        kind = row[self._at["signal"]] if self._mapping.signal else ""
        found = []
        for number, (signal, column, position, memo) in enumerate(self._values):
            if column.when != kind:
                continue
            text = row[position]
            value = memo.get(text)
            if value is None:
                value = NOT_MEASURED if text in self._blank else self._value(text, signal, column)
                if len(memo) < _MEMO_MAX:
                    memo[text] = value
            found.append((number, value))
        return found

    def _value(self, text: str, signal: Signal, column: ValueColumn) -> float:
        try:
            return value_of(text, signal, column, self._minutes)
        except ValueError as problem:
            raise ValueError(f"{text[:40]!r} in column {column.column} {problem}") from None

    def _who(self, row: Row, spool: Spool, name: str) -> Workload:
        span = tuple(self._edge(row, key) for key in ("start", "end"))
        new = name not in spool.workloads
        if long := next((label for label, at in self._labels.items() if len(row[at]) > NAME_MAX), None):
            raise ValueError(f"its label {long} has more than {NAME_MAX} characters")
        owner, class_, namespace = (self._cell(row, key) for key in ("owner", "class", "namespace"))
        if not new:
            known = spool.workloads[name]
            if owner and known.owner and owner != known.owner:
                raise ValueError(
                    f"{name[:80]!r} is of {owner[:40]!r} here and of {known.owner[:40]!r} in an earlier row; "
                    "add a column to `workload` that tells them apart"
                )
        workload = spool.workload(name)
        workload.owner = workload.owner or owner or None
        workload.class_ = workload.class_ or class_
        workload.namespace = workload.namespace or namespace
        if new and self._labels:
            workload.labels = {label: plain(row[position]) for label, position in self._labels.items()}
        if span != (None, None):
            workload.spans[span[0], span[1]] = None
        return workload

    def _cell(self, row: Row, key: str) -> str:
        if key not in self._at:
            return ""
        text = row[self._at[key]]
        if text in self._blank:
            return ""
        return _name(text, key)

    def _edge(self, row: Row, key: str) -> datetime | None:
        if key not in self._at or row[self._at[key]] in self._blank:
            return None
        return _moment(self._when[key], row[self._at[key]], getattr(self._mapping, key))


def value_of(text: str, signal: Signal, column: ValueColumn, minutes: int) -> float:
    """In the unit of the signal. ValueError, the end of a sentence."""
    number = reading.number(text.removesuffix("%").rstrip() if column.unit == "percent" else text)
    if number < 0:
        raise ValueError("is negative")
    if column.unit == "flag":
        return 1.0 if number > 0 else 0.0
    if column.unit == "bytes":
        return _small(number / (60 * minutes))
    if column.unit == "ratio":
        number *= 100
    if signal is Signal.GPU and number > 100 + _ROUNDING:
        raise ValueError("is above 100 percent")
    return min(number, 100.0) if signal is Signal.GPU else _small(number)


def _small(number: float) -> float:
    if number > 1e15:
        raise ValueError("is impossibly large")
    return number


def _when(mapping: TableMapping, form: str) -> Callable[[str], datetime]:
    zone = mapping.zone
    if form == "epoch":
        return lambda text: reading.instant(reading.number(text))
    if form == "epoch-ms":
        return lambda text: reading.instant(reading.number(text) / 1000)
    if form == "iso":
        return reading.moment if zone is None else lambda text: reading.local(text, "", zone)
    return lambda text: reading.local(text, form, zone or UTC)


def _moment(read: Callable[[str], datetime], text: str, column: str) -> datetime:
    try:
        return read(text)
    except ValueError as problem:
        raise ValueError(f"{text[:40]!r} in column {column} {problem}") from None


def _joined(row: Row, positions: Sequence[int], key: str) -> str:
    return "/".join(_name(row[position], key) for position in positions)


def _name(text: str, key: str) -> str:
    if not text:
        raise ValueError(f"it has no {key}")
    if len(text) > NAME_MAX:
        raise ValueError(f"its {key} has more than {NAME_MAX} characters")
    return text if text.isascii() and text.isprintable() else plain(text)


# Lines and fields


@contextmanager
def _text(path: Path) -> Iterator[IO[str]]:
    """Bytes that are not UTF-8 stay visible, as \\xNN."""
    with path.open("rb") as file:
        raw = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        yield TextIOWrapper(raw, encoding="utf-8-sig", errors="backslashreplace", newline="\n")


def _lines(file: IO[str], bad: BadRows) -> Iterator[tuple[int, str]]:
    """Numbered. One that is too long is bad, and is never in memory as a whole."""
    number = 0
    while line := file.readline(LINE_MAX):
        number += 1
        if len(line) == LINE_MAX and not line.endswith("\n"):
            while (more := file.readline(LINE_MAX)) and not more.endswith("\n"):
                pass
            bad.add(number, f"it has more than {LINE_MAX} characters")
            continue
        yield number, line.rstrip("\r\n")


def read_csv(lines: Iterator[tuple[int, str]], mapping: TableMapping, bad: BadRows) -> Table:
    """A row is one line: a quote that is not closed costs no more than its line."""
    separator = None if mapping.separator == "spaces" else _SEPARATORS.get(mapping.separator, mapping.separator)

    def rows() -> Iterator[NumberedRow]:
        for number, line in lines:
            if not line or (mapping.comment and line.startswith(mapping.comment)):
                continue
            if '"' not in line:
                fields = line.split(separator)
                yield number, [field.strip() for field in fields] if " " in line else fields
                continue
            try:
                fields = next(csv.reader((line,), delimiter=separator or " ", strict=True, skipinitialspace=True))
            except csv.Error as error:
                bad.add(number, f"its quotes cannot be read: {error}")
            else:
                yield number, [field.strip() for field in fields]

    found = rows()
    columns = tuple(mapping.header) or tuple(next(found, (0, ()))[1])
    # A second start of a program that appends to its file writes the header again.
    return Table(columns, ((number, row) for number, row in found if tuple(row) != columns))


def read_dcgmi(lines: Iterator[tuple[int, str]], mapping: TableMapping, bad: BadRows) -> Table:
    """`dcgmi dmon`, each line with its time in front: `dcgmi dmon … | ts '%Y-%m-%dT%H:%M:%S%z'`. Columns: time, entity
    ("GPU 0"), and the names in its header."""
    del mapping

    def header() -> Iterator[str]:
        for number, line in lines:
            _time, _space, rest = line.partition(" ")
            if rest.lstrip().startswith("#"):
                yield from rest.replace("#", " ").split()[1:]
                return
            bad.add(number, "it is before the header, which begins with #Entity")

    columns = ("time", "entity", *header())

    def rows() -> Iterator[NumberedRow]:
        for number, line in lines:
            at, *words = line.split() or [""]
            if not words or words[0].startswith("#") or [word.lower() for word in words] == ["id"]:
                continue  # a repeated header, in two lines
            yield number, [at, " ".join(words[:2]), *words[2:]]

    return Table(columns, rows())


_READERS: Mapping[str, Callable[[Iterator[tuple[int, str]], TableMapping, BadRows], Table]] = {
    "csv": read_csv,
    "dcgmi-dmon": read_dcgmi,
}
